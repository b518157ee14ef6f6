# SPDX-License-Identifier: Apache-2.0
"""Speed-up prediction for early-exit decoding in an engine, from timed blocks of its programs.

Blocks in which all rows exit at the first of a policy's depths, and blocks without exits, differ
only by their layers. The difference in time gives the seconds of a layer, for all rows and for each
packed width. Let tokens exit independently of each other, with shares `p[i]` at depths `d[i]`. Then
`n[i]` rows run the layers from `d[i - 1]` to `d[i]`, in the smallest width that holds them:

    n[i] ~ Binomial(rows, 1 - (p[0] + ... + p[i - 1]))
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from utio_jax.core.decoder import DecoderConfig
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.cached import quarters
from utio_jax.decoding.requests import Request
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.slots import Served, Slots
from utio_jax.policies.depth import Thresholded
from utio_jax.staircase.segments import segments_of

_BLOCKS, _TRIES = 5, 3
"""Number of timed blocks, whose median is used; and number of attempts at plausible rates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRates:
    """Measured times of a decode step, for one device, model and number of slots.

    Attributes:
      seconds: seconds of the parts that do not depend on depth: embedding, boundaries, head and
        sampling. Extrapolated, so it may be negative; a prediction uses at least 0.
      seconds_per_layer: seconds of a layer, by number of rows: packed widths, and all rows.
      plain_seconds: seconds of a step of plain decoding.
    """

    seconds: float
    seconds_per_layer: Mapping[int, float]
    plain_seconds: float

    @property
    def is_plausible(self) -> bool:
        """True if an idle machine may have measured these rates.

        Layers and plain steps take more than 0 seconds. All other parts are small and extrapolated:
        their seconds may be negative, down to minus a quarter of a plain step.
        """
        per_layer, plain = [*self.seconds_per_layer.values()], self.plain_seconds
        return bool(np.min([*per_layer, plain]) > 0) and -plain / 4 < self.seconds < math.inf

    def to_json(self) -> dict[str, Any]:
        """Returns the rates in milliseconds, JSON-ready; negative values become 0."""
        return {
            "ms": round(1e3 * max(0.0, self.seconds), 4),
            "ms_per_layer": {
                str(width): round(1e3 * value, 4) for width, value in self.seconds_per_layer.items()
            },
            "plain_ms": round(1e3 * self.plain_seconds, 4),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """Predicted time of an early-exit step if all slots run.

    Attributes:
      seconds: predicted seconds of a step.
      rates: measured rates, which include the seconds of a plain step.
    """

    seconds: float
    rates: RowRates

    @property
    def speedup(self) -> float:
        """Ratio of plain decoding seconds to early-exit seconds; above 1, early exit is faster."""
        return self.rates.plain_seconds / self.seconds


def predict_seconds(
    rates: RowRates,
    histogram: Mapping[int, float],
    *,
    rows: int,
    config: DecoderConfig | None = None,
) -> float:
    """Returns the mean seconds of a step of rows whose tokens exit independently of each other.

    Args:
      rates: rates measured at `rows`, and at smaller packed widths if rows are packed.
      histogram: share of tokens that exit at each depth, in layers.
      rows: number of rows that run at once.
      config: configuration of a model with branches, whose segments are not nested. None: nested.

    Raises:
      ValueError: shares are negative or do not sum to 1.

    >>> rates = RowRates(seconds=0.001, seconds_per_layer={8: 0.002}, plain_seconds=0.04)
    >>> round(predict_seconds(rates, {6: 0.9, 16: 0.1}, rows=8), 4)
    0.0244
    """
    from scipy.stats import binom  # A second to import.

    depths = sorted(histogram)
    shares = np.asarray([histogram[depth] for depth in depths])
    if not shares.size or shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    widths = sorted(rates.seconds_per_layer)
    needed = [next(width for width in widths if width >= n) for n in range(1, rows + 1)]
    layer = np.asarray([0.0, *(rates.seconds_per_layer[width] for width in needed)])
    goes_on = np.clip(1.0 - np.cumsum([0.0, *shares[:-1]]) / shares.sum(), 0.0, 1.0)
    seconds = max(0.0, rates.seconds)
    runs: Any = zip(itertools.pairwise((0, *depths)), goes_on, strict=True)
    if config is not None and config.branches:
        segments, below = segments_of(config, tuple(depths)), np.searchsorted(depths, config.kv_own)
        runs = (
            (part.layers, goes_on[min(at, below)] if part.branch is None else shares[part.branch])
            for at, part in enumerate(segments)
        )
    for (start, stop), share in runs:
        seconds += (stop - start) * float(binom.pmf(np.arange(rows + 1), rows, share) @ layer)
    return seconds


def plan_mode(
    served: Served,
    histogram: Mapping[int, float],
    *,
    progress: Callable[[int, int], None] = lambda done, blocks: None,
) -> DepthPlan:
    """Predicts the speed-up of early-exit over plain decoding if all slots run.

    Times blocks in which all rows exit early and blocks without exits, at most three times until
    the rates are plausible. Compiles programs and takes seconds.

    Args:
      served: options of the engine, whose mode is `Adaptive` with thresholds at two or more depths.
      histogram: share of new tokens that exit at each of the policy's depths.
      progress: called with the number of kinds of blocks that are timed, and their total.

    Raises:
      ValueError: another mode or policy, shares at other depths, a capacity too small to time, or
        implausible times.
    """
    mode, policy = served.mode, getattr(served.mode, "policy", None)
    depths = policy.depths if isinstance(policy, Thresholded) else ()
    if not isinstance(mode, Adaptive) or len(depths) < 2 or {*histogram} - {*depths}:
        raise ValueError(
            "Wanted Adaptive with thresholds at two depths or more, and shares of tokens at these. "
            f"Got {type(mode).__name__}, depths={depths} and a histogram of {sorted(histogram)}."
        )
    full = {depth: histogram.get(depth, 0.0) for depth in depths}
    rates = None
    for _ in range(_TRIES):
        rates = _rates(served, mode, progress)
        if rates.is_plausible:
            config = served.decoder.config
            seconds = predict_seconds(rates, full, rows=served.slots, config=config)
            return DepthPlan(seconds=seconds, rates=rates)
    raise ValueError(
        f"Wanted seconds of layers that a plan can be made of. Got, in {_TRIES} tries, what no "
        f"machine left alone takes: {rates}. A plan made while other programs run is worth "
        "nothing: measure again while none do."
    )


def _rates(served: Served, mode: Adaptive, progress: Callable[[int, int], None]) -> RowRates:
    """Measures rates from blocks in which all rows exit at the first depth, or none does."""
    served = dataclasses.replace(served, prefix_cache=0)
    depths, rows, slots = mode.depth_policy.depths, served.slots, Slots(served)
    plain, per_layer, shallow = dataclasses.replace(served, mode=Plain()), {}, 0.0
    widths = (*(quarters(rows) if mode.packs(served.decoder) else ()), rows)
    for done, width in enumerate(widths):
        progress(done, len(widths) + 1)
        shallow = _seconds(slots, served, width, threshold=np.inf)
        deep = _seconds(slots, served, width, threshold=-np.inf)
        per_layer[width] = (deep - shallow) / (depths[-1] - depths[0])
    progress(len(widths), len(widths) + 1)
    del slots  # The device may have no room for the K/V of both modes.
    return RowRates(
        seconds=shallow - depths[0] * per_layer[rows],
        seconds_per_layer=per_layer,
        plain_seconds=_seconds(Slots(plain), plain, rows),
    )


def _seconds(slots: Slots, served: Served, rows: int, threshold: float = 0.0) -> float:
    """Returns the seconds of a step with a number of running rows and half-filled slots.

    All tokens have one threshold: with +inf all exit at the first depth, with -inf none does.
    A mode without thresholds ignores it.
    """
    blocks, steps, mode = _BLOCKS + 2, served.steps, served.mode
    new = blocks * steps * mode.block + 1
    room = min(served.capacity - mode.block, served.decoder.config.context_length)
    size = min(served.capacity // 2, room - new, slots.longest(whole=False))
    if size < 1:
        raise ValueError(
            f"Wanted slots that hold {blocks} blocks of {steps} steps, which are timed. Got a "
            f"capacity of {served.capacity}. Take fewer steps."
        )
    vocab, own = served.decoder.config.vocab_size, own_thresholds(mode)
    slots.read_all(
        Request(
            number=slot,
            prompt=np.full(size, slot % vocab, np.int32),
            max_new_tokens=new,
            seed=slot,
            thresholds=None if own is None else np.full_like(own, threshold),
        )
        for slot in range(rows)
    )
    seconds = []
    for _ in range(blocks):
        began = time.perf_counter()
        slots.run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    slots.release(rows=range(rows))
    return float(np.median(seconds[2:])) / steps
