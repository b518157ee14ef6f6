# SPDX-License-Identifier: Apache-2.0
"""The current token of every row on its way through the layers, and what policies see there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, Params, read_exit, reads_exits
from utio_jax.decoding.segments import Block
from utio_jax.policies.base import Boundary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent:
    """The current tokens on their way down, and what the way has cost each row.

    Attributes:
      x: their states.
      cache: keys and values.
      memory: what the mode remembers.
      deepest: layers that the batch has run so far.
      token_layers: token slots that ran a layer, per row.
      key_slots: key slots read, summed over layers: of every row, or by row.
      attended: query-key pairs, the rows' mean.
      watch: of a throttle, who reads how much; None without one.
    """

    x: Float[Array, "batch 1 dim"]
    cache: KVCache
    memory: Any
    deepest: Int[Array, ""]
    token_layers: Int[Array, ""]
    key_slots: Float[Array, "*row"]
    attended: Float[Array, ""]
    watch: Any = None

    def after(
        self,
        *,
        x: jax.Array,
        cache: KVCache,
        memory: Any,
        deepest: jax.Array,
        layers: jax.Array,
        tokens: int,
        slots: float | jax.Array,
        watch: Any = None,
    ) -> Descent:
        """Returns the way after `layers` more layers of `tokens` tokens per row.

        Args:
          x: states.
          cache: keys and values.
          memory: what the mode remembers.
          deepest: layers that the batch has run by now.
          layers: that it has run since, repeated ones included.
          tokens: per row.
          slots: key slots that every row, or each, has read per layer.
          watch: of a throttle.
        """
        mean = slots if isinstance(slots, float) else jnp.mean(slots)
        return Descent(
            x=x,
            cache=cache,
            memory=memory,
            deepest=jnp.maximum(self.deepest, deepest * (layers > 0)),
            token_layers=self.token_layers + layers * tokens,
            key_slots=self.key_slots + layers * slots,
            attended=self.attended + layers * (tokens * mean),
            watch=watch,
        )


def logits_of(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "batch 1 dim"],
    *,
    where: Bool[Array, "batch 1"] | None = None,
    depth: int | None = None,
) -> Float[Array, "batch vocab"]:
    """Returns the rows' logits; those of no row, and at no cost, if none is asked for.

    With a `depth`, states are an exit's and are mapped for the head where the decoder does that;
    without, they are as the head reads them.
    """

    def head() -> jax.Array:
        seen = x[:, 0] if depth is None else read_exit(decoder, params, x[:, 0], depth)
        return decoder.unembed(params, seen).astype(jnp.float32)

    if where is None:
        return head()
    nothing = jax.eval_shape(head)
    return jax.lax.cond(jnp.any(where), head, lambda: jnp.zeros(nothing.shape, nothing.dtype))


def read_exits(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "batch 1 dim"],
    depth_of_row: Int[Array, "batch 1"],
    *,
    depths: tuple[int, ...],
) -> tuple[Float[Array, "batch 1 dim"], Int[Array, ""]]:
    """Returns what the head reads of rows that stopped at different depths, and the maps run."""
    seen, maps = x, jnp.int32(0)
    for depth in depths:
        if reads_exits(decoder, depth):
            here = depth_of_row == depth
            mapped = jax.lax.cond(
                jnp.any(here),
                partial(read_exit, decoder, params, x, depth),
                lambda: x,
            )
            seen = jnp.where(here[:, :, None], mapped, seen)
            maps += jnp.any(here)
    return seen, maps


def boundary_of(
    decoder: Decoder,
    params: Params,
    x: jax.Array,
    block: Block,
    live: jax.Array,
    depth: int,
    looks: list[jax.Array],
) -> Boundary:
    """Returns what a policy may look at here; if it looks at logits, they are added to `looks`.

    Whoever looks again sees the same ones: a boundary runs one head at most.
    """

    def map_live(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        new = function(*(array[:, 0] for array in arrays))[:, None]
        shape = live.shape + (1,) * (new.ndim - 2)
        return jnp.where(live.reshape(shape), new, jnp.zeros((), new.dtype))

    def map_logits(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        if not looks:
            looks.append(logits_of(decoder, params, x, where=live, depth=depth))
        return map_live(lambda *blocks: function(looks[-1], *blocks), *arrays)

    return Boundary(
        x=x,
        positions=block.positions,
        live=live,
        params=params,
        depth=depth,
        decoder=decoder,
        map_live=map_live,
        map_logits=map_logits,
    )


def store(memory: jax.Array, index: int, states: jax.Array, block: Block) -> jax.Array:
    """Returns the memory with the states of depth number `index` at the tokens' positions."""
    rows = jnp.arange(states.shape[0], dtype=jnp.int32)[:, None]
    slots = jnp.where(block.valid, block.positions, memory.shape[2])
    return memory.at[index, rows, slots].set(states, mode="drop")
