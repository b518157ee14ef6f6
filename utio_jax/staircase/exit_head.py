# SPDX-License-Identifier: Apache-2.0
"""What a pass reads off its tokens' predictions, and how a decision shares the head with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from utio_jax.core.arrays import map_head
from utio_jax.core.decoder import Decoder, Params
from utio_jax.staircase.base import Executor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readout:
    """What a pass wants to know of every token's prediction at its decided depth.

    Attributes:
      function: maps logits `[slot, vocab]` in float32, and blocks of `arrays`, to an array or a
        pytree of arrays `[slot, ...]`.
      arrays: `[batch, token, ...]`, for example labels.
    """

    function: Callable[..., Any]
    arrays: tuple[Array, ...] = ()


def map_logits(
    decoder: Decoder,
    params: Params,
    executor: Executor,
    slots: Any,
    x: Float[Array, "batch token dim"],
    readout: Readout | None,
    looks: list[Any],
    function: Callable[..., jax.Array],
    *arrays: jax.Array,
) -> jax.Array:
    """Is `Boundary.map_logits`; what the readout makes of the same logits is added to `looks`."""
    kept = () if readout is None else readout.arrays

    def look(logits: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, Any]:
        decision = function(jax.lax.stop_gradient(logits), *blocks[len(kept) :])
        return decision, None if readout is None else readout.function(logits, *blocks[: len(kept)])

    decision, found = executor.map_slots(
        slots, partial(map_head, decoder, params, look), x, *kept, *arrays
    )
    looks.append(found)
    return decision


def where_read(chosen: Bool[Array, "batch token"], new: Any, old: Any) -> Any:
    """Returns what was read of the chosen tokens from `new`, of the others from `old`."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 2)), new, old)

    return jax.tree.map(pick, new, old)
