# SPDX-License-Identifier: Apache-2.0
"""Whether a depth per token pays for an engine: blocks of its own programs, timed, and a plan.

Rows that all stop at the first of a policy's depths, and rows of which none stops, differ by layers
alone: their times give the seconds of a layer, on all rows and on as many as are packed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from utio_jax.accounting.rebatching import RebatchingPlan, RowRates, plan_rebatching
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.sampling import Greedy
from utio_jax.engine.requests import Request, stop_arrays
from utio_jax.engine.slots import Served, Slots
from utio_jax.policies.depth import Thresholded

_BLOCKS = 5
"""Timed blocks, of which the median counts."""


def plan_mode(served: Served, mode: Mode, histogram: Mapping[int, float]) -> RebatchingPlan:
    """Returns what is fastest where all slots run: `mode` packed, its rows together, or `Plain`.

    Args:
      served: what runs.
      mode: adaptive, with a policy of thresholds at two depths or more.
      histogram: share of new tokens that stop at each of the policy's depths.

    Raises:
      ValueError: another mode or policy, shares of other depths, or too small a capacity to time.
    """
    if not isinstance(mode, Adaptive) or not isinstance(mode.policy, Thresholded):
        raise ValueError(
            "Wanted Adaptive with a policy of thresholds, whose tokens can be made to stop where "
            f"times are taken. Got {type(mode).__name__}. Warm up without a histogram."
        )
    depths = mode.policy.depths
    if len(depths) < 2 or {*histogram} - {*depths}:
        raise ValueError(
            f"Wanted shares of tokens at a policy's depths, two or more. Got depths={depths} and "
            f"a histogram of {sorted(histogram)}."
        )
    rows = served.slots
    widths = (*(width for width in mode.pack if width < rows), rows)
    slots, layers = Slots(served, mode), depths[-1] - depths[0]
    per_layer, shallow = {}, 0.0
    for width in widths:
        shallow = _seconds(slots, served, _stopping(mode, jnp.inf), width)
        deep = _seconds(slots, served, _stopping(mode, -jnp.inf), width)
        per_layer[width] = max(0.0, deep - shallow) / layers
    rates = RowRates(
        seconds=shallow - depths[0] * per_layer[rows],
        seconds_per_layer=per_layer,
        plain_seconds=_seconds(Slots(served, Plain()), served, Plain(), rows),
    )
    full = {depth: histogram.get(depth, 0.0) for depth in depths}
    return plan_rebatching(rates, full, rows=rows, widths=widths[:-1])


def planned(mode: Mode, plan: RebatchingPlan) -> Mode:
    """Returns the mode that a plan has chosen."""
    if plan.choice == "plain":
        return Plain()
    assert isinstance(mode, Adaptive)
    return dataclasses.replace(mode, pack=()) if plan.choice == "together" else mode


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
    size = min(served.capacity // 2, room - new, slots.widths[-1])
    if size < 1:
        raise ValueError(
            f"Wanted slots that hold {blocks} blocks of {steps} steps, which are timed. Got a "
            f"capacity of {served.capacity}. Take fewer steps, or warm up without a histogram."
        )
    slots.mode = mode
    ends, sequences = stop_arrays((), (), vocab_size=1)
    for slot in range(rows):
        request = Request(
            number=slot,
            prompt=np.full(size, slot % served.decoder.config.vocab_size, np.int32),
            max_new_tokens=new,
            sampling=Greedy(),
            seed=slot,
            eos_ids=ends,
            sequences=sequences,
            text=None,
            submitted=0.0,
            expires=np.inf,
            slot=slot,
        )
        slots.admit([request], width=slots.width_of(request), group=slots.groups[0])
    seconds = []
    for _ in range(blocks):
        began = time.perf_counter()
        slots.run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    slots.release(range(rows))
    return float(np.median(seconds[2:])) / steps
