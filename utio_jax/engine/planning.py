# SPDX-License-Identifier: Apache-2.0
"""Early exit or plain decoding in an engine: both are timed once, and the faster one is kept.

Tokens of timed steps exit at drawn depths, with the shares of a histogram: each row has thresholds
that all of its tokens pass below its depth, and none at it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.requests import Request
from utio_jax.engine.slots import Served, Slots
from utio_jax.policies.depth import Thresholded

_STEPS, _TRIES = 48, 5
"""Number of timed steps, each with depths of its own; and of tries, whose fastest one counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """Measured time of a decode step if all slots run.

    Attributes:
      seconds: seconds of an early-exit step.
      plain_seconds: seconds of a step of plain decoding.
    """

    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Ratio of plain decoding seconds to early-exit seconds; above 1, early exit is faster."""
        return self.plain_seconds / self.seconds


def plan_mode(
    served: Served,
    histogram: Mapping[int, float],
    *,
    progress: Callable[[int, int], None] = lambda done, kinds: None,
) -> DepthPlan:
    """Times early-exit and plain decode steps of an engine whose slots all run, half filled.

    Compiles programs and takes seconds. Tokens exit independently of each other.

    Args:
      served: options of the engine, whose mode is `Adaptive` with thresholds at two or more depths.
      histogram: share of new tokens that exit at each of the policy's depths.
      progress: called with the number of kinds of steps that have been timed, and their total.

    Raises:
      ValueError: another mode or policy, shares at other depths or that do not sum to 1, or a
        capacity too small to time.
    """
    policy = getattr(served.mode, "policy", None)
    depths = policy.depths if isinstance(policy, Thresholded) else ()
    if not isinstance(served.mode, Adaptive) or len(depths) < 2 or {*histogram} - {*depths}:
        raise ValueError(
            "Wanted Adaptive with thresholds at two depths or more, and shares of tokens at these. "
            f"Got {type(served.mode).__name__}, depths={depths} and a histogram of "
            f"{sorted(histogram)}."
        )
    shares = np.asarray([histogram.get(depth, 0.0) for depth in depths])
    if shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    served = dataclasses.replace(served, prefix_cache=0)
    progress(0, 2)
    seconds = _seconds(served, shares)
    progress(1, 2)
    plain = dataclasses.replace(served, mode=Plain())
    plan = DepthPlan(seconds=seconds, plain_seconds=_seconds(plain, None))
    progress(2, 2)
    return plan


def _seconds(served: Served, shares: Float[np.ndarray, " depth"] | None) -> float:
    """Returns the mean seconds of a step in blocks of `served.steps`, of the fastest tries.

    Tokens exit with `shares` at the depths of the mode's policy; None: the mode has no policy. Each
    timed step has depths and therefore a block of its own. Blocks without steps are timed, too, so
    that a step gets only its share of the seconds of a block.
    """
    new, rows, slots = _STEPS + 3, served.slots, Slots(served)
    config = served.decoder.config
    room = min(served.capacity - served.mode.block, config.context_length) - new
    size = min(served.capacity // 2, room, slots.longest(whole=False))
    if size < 1:
        raise ValueError(
            f"Wanted slots for a prompt and {new} new tokens, which are timed. Got a capacity of "
            f"{served.capacity}. Take a larger one."
        )
    # Places of all tokens in the histogram, evenly spaced: its shares are met to one token.
    count, tries = _STEPS * rows, []
    places = np.random.default_rng(0).permutation(count).reshape(_STEPS, rows, 1) + 0.5
    for _ in range(_TRIES):
        slots.read_all(
            Request(
                number=slot,
                prompt=np.full(size, slot % config.vocab_size, np.int32),
                max_new_tokens=new,
                seed=slot,
            )
            for slot in range(rows)
        )
        tries.append([])
        for steps in (0, 1):
            began = 0.0
            for block in range(-2, _STEPS):  # The first two may compile.
                if block == 0:
                    slots.state.lengths.block_until_ready()
                    began = time.perf_counter()
                if shares is not None:
                    goes_on = places[block] > count * np.cumsum(shares[:-1])
                    slots.set_thresholds(np.where(goes_on, -np.inf, np.inf))
                slots.run(steps=steps)
            slots.state.lengths.block_until_ready()
            tries[-1].append((time.perf_counter() - began) / _STEPS)
        slots.release(rows=range(rows))
    empty, whole = np.min(tries, axis=0)
    # On a busy machine an empty block may have taken longer.
    return float(whole - min(empty, whole) * (1 - 1 / served.steps))
