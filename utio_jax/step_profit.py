# SPDX-License-Identifier: Apache-2.0
"""Whether a depth per token pays in decoding, from the times of decoding at single depths.

The rows of a batch step together: a layer is skipped only where no row needs it. Of rows that stop
independently of each other, with shares `p[i]` at depths `d[i]`, a step is expected to run

    sum over i of (d[i] - d[i - 1]) * (1 - (p[0] + ... + p[i - 1]) ** batch)

layers. Its seconds are linear in them, with a line per batch that a benchmark measures on one
device for one model: decoding in full, and truncated at exits.
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
    """

    batch: int
    seconds: float
    seconds_per_layer: float


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


def predict_step(rates: Sequence[StepRates], histogram: Mapping[int, float], batch: int) -> float:
    """Returns the seconds that a step is predicted to take; between measured batches, linearly.

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
        raise ValueError(
            f"Wanted a batch between those whose steps were measured, {batches}. Got {batch}. "
            f"Measure it: utio-jax bench --suite cpu --parts decode profit --batch-sizes {batch}."
        )
    at = lambda values: float(np.interp(batch, batches, values))  # noqa: E731
    base, slope = at([r.seconds for r in known]), at([r.seconds_per_layer for r in known])
    return base + slope * expected_step_depth(histogram, batch)


def fit_steps(points: Sequence[tuple[int, float, float]]) -> tuple[StepRates, ...]:
    """Returns a line for each batch with two depths or more, of least squared *relative* error.

    Args:
      points: batch, layers of every step, and seconds of a step.
    """
    found = []
    for batch in sorted({batch for batch, _, _ in points}):
        layers, seconds = np.asarray([point[1:] for point in points if point[0] == batch]).T
        if len(set(layers)) > 1:
            table = np.stack([np.ones_like(layers), layers], axis=1) / seconds[:, None]
            base, slope = np.linalg.lstsq(table, np.ones(len(seconds)), rcond=None)[0]
            rates = StepRates(batch=batch, seconds=float(base), seconds_per_layer=float(slope))
            found.append(rates)
    return tuple(found)
