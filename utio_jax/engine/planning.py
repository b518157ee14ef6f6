# SPDX-License-Identifier: Apache-2.0
"""Whether a depth per token pays for an engine: blocks of its own programs, timed, and a plan.

Rows that all stop at the first of a policy's depths, and rows of which none stops, differ by layers
alone: their times give the seconds of a layer, on all rows and on as many as are packed. Of rows
whose tokens stop independently of each other, with shares `p[i]` at depths `d[i]`, so many need the
layers from `d[i - 1]` to `d[i]`, in the smallest width that holds them:

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
from scipy.stats import binom

from utio_jax.core.decoder import DecoderConfig
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.rows import quarters
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.requests import Request
from utio_jax.engine.slots import Served, Slots
from utio_jax.policies.depth import Thresholded
from utio_jax.staircase.loop import segments_of

_BLOCKS, _TRIES = 5, 3
"""Timed blocks, of which the median counts; and measurements, until they make sense."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRates:
    """What a step of decoding takes, measured on one device for one model and number of slots.

    Attributes:
      seconds: of what runs whatever the depth: embedding, boundaries, head, sampling. Extrapolated,
        and so at times below 0, which a prediction takes as 0.
      seconds_per_layer: of a layer on so many rows, by number of rows: the widths that rows are
        packed into, and all rows.
      plain_seconds: of the plain model's step.
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
        """Returns the rates in milliseconds, JSON-ready; none is negative."""
        return {
            "ms": round(1e3 * max(0.0, self.seconds), 4),
            "ms_per_layer": {
                str(width): round(1e3 * each, 4) for width, each in self.seconds_per_layer.items()
            },
            "plain_ms": round(1e3 * self.plain_seconds, 4),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """What is predicted to be faster where all slots run.

    Attributes:
      seconds: of a step, predicted.
      rates: that it was predicted from; a plain step was measured.
    """

    seconds: float
    rates: RowRates

    @property
    def speedup(self) -> float:
        """Plain decoding's seconds over those of a depth per token; it pays above 1."""
        return self.rates.plain_seconds / self.seconds


def predict_seconds(
    rates: RowRates,
    histogram: Mapping[int, float],
    *,
    rows: int,
    config: DecoderConfig | None = None,
) -> float:
    """Returns the mean seconds of a step of rows whose tokens stop independently of each other.

    Args:
      rates: measured at `rows`, and at the widths below that rows are packed into, if they are.
      histogram: share of tokens that stop at each depth, in layers.
      rows: that run at once.
      config: of a model with branches, whose segments are not nested. None: they are.

    Raises:
      ValueError: shares below 0 or that do not sum to 1.

    >>> rates = RowRates(seconds=0.001, seconds_per_layer={8: 0.002}, plain_seconds=0.04)
    >>> round(predict_seconds(rates, {6: 0.9, 16: 0.1}, rows=8), 4)
    0.0244
    """
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
            (each.layers, goes_on[min(at, below)] if each.branch is None else shares[each.branch])
            for at, each in enumerate(segments)
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
    """Returns whether a depth per token is faster than plain decoding where all slots run.

    Times blocks in which all rows stop early, and in which none does, up to three times until the
    times make sense. Compiles, and takes seconds.

    Args:
      served: what runs, in an adaptive mode with a policy of thresholds at two depths or more.
      histogram: share of new tokens that stop at each of the policy's depths.
      progress: called with how many kinds of blocks have been compiled and timed, of how many.

    Raises:
      ValueError: another mode or policy, shares of other depths, too small a capacity to time, or
        times that cannot be.
    """
    mode = served.mode
    if not isinstance(mode, Adaptive) or not isinstance(mode.policy, Thresholded):
        raise ValueError(
            "Wanted Adaptive with a policy of thresholds, whose tokens can be made to stop where "
            f"times are taken. Got {type(mode).__name__}."
        )
    depths = mode.policy.depths
    if len(depths) < 2 or {*histogram} - {*depths}:
        raise ValueError(
            f"Wanted shares of tokens at a policy's depths, two or more. Got depths={depths} and "
            f"a histogram of {sorted(histogram)}."
        )
    full = {depth: histogram.get(depth, 0.0) for depth in depths}
    rates, tries = _rates(served, mode, progress), 1
    while not rates.is_plausible and tries < _TRIES:
        rates, tries = _rates(served, mode, progress), tries + 1
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
    """Returns what a step takes, boundaries included: where all rows stop at once, and nowhere."""
    depths, rows, slots = mode.depth_policy.depths, served.slots, Slots(served)
    plain, per_layer, shallow = dataclasses.replace(served, mode=Plain()), {}, 0.0
    widths = (*(quarters(rows) if mode.packs(served.decoder) else ()), rows)
    for done, width in enumerate(widths):
        progress(done, len(widths) + 1)
        shallow = _seconds(slots, served, width, threshold=np.inf)
        deep = _seconds(slots, served, width, threshold=-np.inf)
        per_layer[width] = (deep - shallow) / (depths[-1] - depths[0])
    progress(len(widths), len(widths) + 1)
    return RowRates(
        seconds=shallow - depths[0] * per_layer[rows],
        seconds_per_layer=per_layer,
        plain_seconds=_seconds(Slots(plain), plain, rows),
    )


def _seconds(slots: Slots, served: Served, rows: int, threshold: float = 0.0) -> float:
    """Returns the seconds of a step of so many running rows, half of each slot filled.

    Tokens stop by one threshold: at +inf all where they first may, at -inf none before the end. A
    mode without thresholds has no use for it.
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
