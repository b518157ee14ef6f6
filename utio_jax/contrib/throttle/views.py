# SPDX-License-Identifier: Apache-2.0
"""A compact view of the K/V cache, which low-importance tokens read.

    position   0 1 2 3 4 5 6 7 8 9        # a row of ten tokens, recent=4, sinks=2
    places     0 1 | 8 9 6 7              # sinks | ring: position p lies at p mod 4

The cache keeps every token; a view holds copies. A new token takes the ring's oldest place; one
that its layer skipped (kv="drop") leaves an older token there, which `visible_history` hides.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.products import NOWHERE
from utio_jax.core.pytrees import pytree, static
from utio_jax.utio.vertical_slash import History


@pytree
class View:
    """Keys and values of sinks and recent tokens, in the first layers of a cache.

    Attributes:
      keys: copies of the cache's.
      values: of the same shape.
      positions: of the tokens at each place; `NOWHERE` where there is none.
      history: number of sinks and recent places. Static.
    """

    keys: Float[Array, "layer batch place kv_head head_dim"]
    values: Float[Array, "layer batch place kv_head head_dim"]
    positions: Int[Array, "layer batch place"]
    history: History = static()

    def remember(
        self,
        layer: int | Int[Array, ""],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        *,
        positions: Int[Array, "batch token"],
        valid: Bool[Array, "batch token"],
        rows: Int[Array, " batch"],
    ) -> View:
        """Returns the view with one layer's K/V of new tokens; layers beyond it are ignored.

        No more tokens at a time than the ring has places. `rows` are the view's that they belong
        to.
        """
        places = jnp.where(valid, place_of(self.history, positions), self.history.size)

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            return leaf.at[layer, rows[:, None], places].set(new.astype(leaf.dtype), mode="drop")

        return dataclasses.replace(
            self,
            keys=put(self.keys, keys),
            values=put(self.values, values),
            positions=put(self.positions, positions),
        )


def place_of(history: History, positions: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
    """Returns the places of new tokens: sinks have places of their own, others share the ring."""
    ring = history.sinks + positions % history.recent
    return jnp.where(positions < history.sinks, positions, ring)


def places_at(history: History, lengths: Int[Array, " batch"]) -> Int[Array, "batch place"]:
    """Returns the positions at each place after `lengths` tokens."""
    places = jnp.arange(history.size, dtype=jnp.int32)[None, :]
    last = lengths[:, None] - 1
    ring = last - (last - (places - history.sinks)) % history.recent
    ring = jnp.where(ring >= history.sinks, ring, NOWHERE)
    sinks = jnp.where(places <= last, places, NOWHERE)
    return jnp.where(places < history.sinks, sinks, ring)
