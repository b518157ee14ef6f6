# SPDX-License-Identifier: Apache-2.0
"""Whether a depth per token pays for an engine: blocks of its own programs, timed, and a plan.

Rows that all stop at the first of a policy's depths, and rows of which none stops, differ by layers
alone: their times give the seconds of a layer, on all rows and on as many as are packed.

Of rows whose tokens stop independently of each other, with shares `p[i]` at depths `d[i]`, so many
need the layers from `d[i - 1]` to `d[i]`:

    n[i] ~ Binomial(rows, 1 - (p[0] + ... + p[i - 1]))

Together a step runs all rows through them wherever `n[i] > 0`. Packed it runs `n[i]` rows, in the
smallest width that holds them. Behind them, at all depths but the last, a boundary asks the rows
that have come so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.requests import Request
from utio_jax.engine.slots import Served, Slots
from utio_jax.policies.depth import Thresholded

_BLOCKS, _TRIES = 5, 3
"""Timed blocks, of which the median counts; and measurements, until they make sense."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRates:
    """What a step of decoding takes, measured on one device for one model and number of slots.

    Attributes:
      seconds: of what runs whatever the depth: embedding, boundaries, head, sampling.
      seconds_per_layer: of a layer on so many rows, by number of rows: the widths that rows are
        packed into, and all rows.
      plain_seconds: of the plain model's step.
    """

    seconds: float
    seconds_per_layer: Mapping[int, float]
    plain_seconds: float

    @property
    def nonsense(self) -> str | None:
        """What no machine left alone would have measured; None where nothing is wrong.

        That is layers or plain steps of nothing and below, or a layer that takes half as long again
        on fewer rows. What is beside layers is little, and extrapolated: below zero by more than a
        quarter of a plain step.
        """
        layers, most = dict(sorted(self.seconds_per_layer.items())), self.plain_seconds / 4
        for what, seconds, least in (
            ("a plain step", self.plain_seconds, 0.0),
            ("a step without its layers", self.seconds, -most),
            *((f"a layer on {width} rows", each, 0.0) for width, each in layers.items()),
        ):
            if not least < seconds < math.inf:
                return f"{what} takes {1e3 * seconds:.3g} ms"
        for fewer, more in itertools.pairwise(layers):
            if layers[fewer] > 1.5 * layers[more]:
                return f"a layer on {fewer} rows takes longer than on {more}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns the rates in milliseconds, JSON-ready."""
        return {
            "ms": round(1e3 * self.seconds, 4),
            "ms_per_layer": {
                str(width): round(1e3 * each, 4) for width, each in self.seconds_per_layer.items()
            },
            "plain_ms": round(1e3 * self.plain_seconds, 4),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebatchingPlan:
    """What is foretold to be fastest.

    Attributes:
      choice: `"pack"`, `"together"` or `"plain"`.
      seconds: of a step of each of them, foretold; plain: measured.
      rates: that it was foretold from.
    """

    choice: str
    seconds: Mapping[str, float]
    rates: RowRates

    @property
    def speed_up(self) -> float:
        """Plain decoding's seconds over those of the choice."""
        return self.seconds["plain"] / self.seconds[self.choice]


def plan_rebatching(
    rates: RowRates, histogram: Mapping[int, float], *, rows: int, widths: tuple[int, ...]
) -> RebatchingPlan:
    """Returns whether packing, stepping together or plain decoding takes the fewest seconds.

    Args:
      rates: measured at all of `widths`, and at `rows`.
      histogram: share of tokens that stop at each depth, in layers.
      rows: that run at once.
      widths: into which they may be packed, ascending; those of `rows` and more count for nothing.

    Raises:
      ValueError: shares below 0 or that do not sum to 1, or a width without a rate.

    >>> slow = {4: 0.002, 8: 0.003, 16: 0.004}
    >>> rates = RowRates(seconds=0.001, seconds_per_layer=slow, plain_seconds=0.06)
    >>> plan_rebatching(rates, {6: 0.8, 16: 0.2}, rows=16, widths=(4, 8)).choice
    'pack'
    >>> plan_rebatching(rates, {16: 1.0}, rows=16, widths=(4, 8)).choice
    'plain'
    """
    packs = [width for width in widths if width < rows]
    missing = [width for width in (*packs, rows) if width not in rates.seconds_per_layer]
    if missing:
        raise ValueError(
            f"Wanted seconds_per_layer for all widths {(*packs, rows)}. Got those of "
            f"{sorted(rates.seconds_per_layer)}. Measure {missing}, too."
        )
    shares = np.asarray([histogram[depth] for depth in sorted(histogram)])
    if not shares.size or shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    stopped = np.cumsum([0.0, *shares[:-1]]) / shares.sum()
    packed = together = rates.seconds
    layer = [_layer_seconds(rates, needed, packs, rows) for needed in range(rows + 1)]
    for (start, stop), q in zip(
        itertools.pairwise((0, *sorted(histogram))), 1.0 - stopped, strict=True
    ):
        chances = binom.pmf(np.arange(rows + 1), rows, min(1.0, max(0.0, q)))
        anybody = float(1.0 - chances[0])
        packed += (stop - start) * float(chances @ layer)
        together += (stop - start) * anybody * rates.seconds_per_layer[rows]
    # Of equals the plainest.
    seconds = {"plain": rates.plain_seconds, "together": together}
    if packs:
        seconds["pack"] = packed
    return RebatchingPlan(
        choice=min(seconds, key=seconds.__getitem__), seconds=seconds, rates=rates
    )


def _layer_seconds(rates: RowRates, needed: int, packs: list[int], rows: int) -> float:
    if not needed:
        return 0.0
    width = next((width for width in packs if width >= needed), rows)
    return rates.seconds_per_layer[width]


def plan_mode(served: Served, histogram: Mapping[int, float]) -> RebatchingPlan:
    """Returns what is fastest where all slots run: the mode packed, its rows together, or `Plain`.

    Times blocks in which all rows stop early, and in which none does. Compiles, and takes seconds.

    Args:
      served: what runs, in an adaptive mode with a policy of thresholds at two depths or more.
      histogram: share of new tokens that stop at each of the policy's depths.

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
    rates = _sane(lambda: _rates(served, mode))
    full = {depth: histogram.get(depth, 0.0) for depth in depths}
    return plan_rebatching(rates, full, rows=served.slots, widths=_widths(served, mode)[:-1])


def _sane(measured: Callable[[], RowRates]) -> RowRates:
    """Returns rates that may be true, of three tries.

    Raises:
      ValueError: there are none.
    """
    seen = list[str]()
    while len(seen) < _TRIES:
        rates = measured()
        if rates.nonsense is None:
            return rates
        seen.append(rates.nonsense)
    raise ValueError(
        f"Wanted seconds of layers that a plan can be made of. Got, in {_TRIES} tries, what no "
        f"machine left alone takes: {seen[-1]}. A plan made while other programs run is worth "
        "nothing: measure again while none do."
    )


def _widths(served: Served, mode: Adaptive) -> tuple[int, ...]:
    """Returns the numbers of rows that a segment may run, ascending."""
    return (*(width for width in mode.pack or () if width < served.slots), served.slots)


def _rates(served: Served, mode: Adaptive) -> RowRates:
    """Returns what a step takes, boundaries included: where all rows stop at once, and nowhere."""
    depths, rows, slots = mode.policy.depths, served.slots, Slots(served)
    plain, per_layer, shallow = dataclasses.replace(served, mode=Plain()), {}, 0.0
    for width in _widths(served, mode):
        shallow = _seconds(slots, served, _stopping(mode, jnp.inf), width)
        deep = _seconds(slots, served, _stopping(mode, -jnp.inf), width)
        per_layer[width] = (deep - shallow) / (depths[-1] - depths[0])
    return RowRates(
        seconds=shallow - depths[0] * per_layer[rows],
        seconds_per_layer=per_layer,
        plain_seconds=_seconds(Slots(plain), plain, Plain(), rows),
    )


def _stopping(mode: Adaptive, threshold: float) -> Adaptive:
    """Returns the mode with all tokens stopping where they first may, or none."""
    policy = mode.policy
    assert isinstance(policy, Thresholded)
    thresholds = jnp.full_like(policy.thresholds, threshold)
    return dataclasses.replace(mode, policy=dataclasses.replace(policy, thresholds=thresholds))


def _seconds(slots: Slots, served: Served, mode: Mode, rows: int) -> float:
    """Returns the seconds of a step of so many running rows, half of each slot filled."""
    blocks, steps = _BLOCKS + 2, served.steps
    new = blocks * steps * mode.block + 1
    room = min(served.capacity - mode.block, served.decoder.config.context_length)
    size = min(served.capacity // 2, room - new, slots.longest(whole=False))
    if size < 1:
        raise ValueError(
            f"Wanted slots that hold {blocks} blocks of {steps} steps, which are timed. Got a "
            f"capacity of {served.capacity}. Take fewer steps."
        )
    slots.mode = mode
    vocab = served.decoder.config.vocab_size
    for slot in range(rows):
        request = Request(
            number=slot,
            prompt=np.full(size, slot % vocab, np.int32),
            max_new_tokens=new,
            seed=slot,
            thresholds=own_thresholds(mode),
        )
        reading = slots.reading_of(request)
        if reading.chunked:
            slots.open(slots.fresh([request], rows=1, width=slots.capacity))
            while not slots.read_chunk(slot, chunk=reading.width):
                pass
        else:
            group = slots.groups_of(reading)[0]
            fresh = slots.fresh([request], rows=group, width=reading.width)
            slots.read(fresh, [slot], reading=reading)
    seconds = []
    for _ in range(blocks):
        began = time.perf_counter()
        slots.run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    slots.release(range(rows))
    return float(np.median(seconds[2:])) / steps
