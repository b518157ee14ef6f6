# SPDX-License-Identifier: Apache-2.0
"""Whether a depth per token pays in decoding, from the times of decoding by chance.

The rows of a batch step together: a layer is skipped only where no row needs it. Of rows that stop
independently of each other, with shares `p[i]` at depths `d[i]`, a step is expected to run

    sum over i of (d[i] - d[i - 1]) * (1 - (p[0] + ... + p[i - 1]) ** batch)

layers. Its seconds are linear in them. A benchmark measures a line per batch, on one device for one
model, of policies that stop tokens by chance: boundaries take their time there as in any policy.
What it has to beat is the plain model's step, which has no boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRates:
    """What a step of decoding takes at one batch.

    Attributes:
      batch: rows that step together.
      seconds: of what runs whatever the depth: embedding, head, sampling, a share of prefill. The
        line's, so it may lie below 0.
      seconds_per_layer: of every layer.
      plain_seconds: of the plain model's step.
    """

    batch: int
    seconds: float
    seconds_per_layer: float
    plain_seconds: float


def expected_step_depth(histogram: Mapping[int, float], batch: int) -> float:
    """Returns the layers that a step is expected to run: as many as its deepest row.

    Args:
      histogram: share of tokens that stop at each depth.
      batch: rows that step together.

    Raises:
      ValueError: shares below 0, or that do not sum to 1.

    >>> expected_step_depth({4: 0.5, 16: 0.5}, 1)
    10.0
    >>> expected_step_depth({4: 0.5, 16: 0.5}, 2)
    13.0
    """
    shares = [histogram[depth] for depth in sorted(histogram)]
    if not shares or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    stopped = np.cumsum([0.0, *shares[:-1]]) / sum(shares)
    return float(np.diff([0, *sorted(histogram)]) @ (1.0 - stopped**batch))


def predict_step(
    rates: Sequence[StepRates], histogram: Mapping[int, float], batch: int
) -> tuple[float, float]:
    """Returns the predicted seconds of a routed step and of the plain model's.

    Between measured batches they are interpolated.

    Args:
      rates: measured.
      histogram: share of tokens that stop at each depth.
      batch: rows that step together.

    Raises:
      ValueError: a batch outside of the measured ones, or shares that do not sum to 1.
    """
    known = sorted(rates, key=lambda each: each.batch)
    batches = [each.batch for each in known]
    if not known or not batches[0] <= batch <= batches[-1]:
        wanted = " ".join(map(str, sorted({*batches, batch})))
        raise ValueError(
            f"Wanted a batch between those whose steps were measured, {batches}. Got {batch}. "
            "Measure all of them in one run, with policies at two budgets or more: utio-jax bench "
            f"--suite cpu --parts decode profit --batch-sizes {wanted} --out FOLDER."
        )
    at = lambda values: float(np.interp(batch, batches, values))  # noqa: E731
    base, slope = at([r.seconds for r in known]), at([r.seconds_per_layer for r in known])
    routed = base + slope * expected_step_depth(histogram, batch)
    return routed, at([r.plain_seconds for r in known])


def fit_steps(
    points: Sequence[tuple[int, float, float]], plain: Mapping[int, float]
) -> tuple[StepRates, ...]:
    """Returns a line for each batch with two depths or more, of least squared *relative* error.

    Args:
      points: of routed decoding: batch, expected layers of a step, and its seconds.
      plain: seconds of the plain model's step, by batch; batches without it get no line.
    """
    found = []
    for batch in sorted({batch for batch, _, _ in points} & {*plain}):
        layers, seconds = np.asarray([point[1:] for point in points if point[0] == batch]).T
        if len(set(layers)) < 2:
            continue
        table = np.stack([np.ones_like(layers), layers], axis=1) / seconds[:, None]
        base, slope = np.linalg.lstsq(table, np.ones(len(seconds)), rcond=None)[0]
        found.append(
            StepRates(
                batch=batch,
                seconds=float(base),
                seconds_per_layer=float(slope),
                plain_seconds=plain[batch],
            )
        )
    return tuple(found)
