# SPDX-License-Identifier: Apache-2.0
"""A compact view of the K/V cache: what low-importance tokens see of the past, side by side.

    position   0 1 2 3 4 5 6 7 8 9        # a row of ten tokens, recent=4, sinks=2
    places     0 1 | 8 9 6 7              # sinks | ring: position p lies at p mod 4

The cache keeps every token; a view holds copies. A new token takes the ring's oldest place. Rows
that read more than their view are read where they are, one after the other (`attend_rows`): a
gather would copy their keys and values, a mask read those of all rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.history import History
from utio_jax.attention.mixing import Mixer, mix_apart
from utio_jax.attention.products import NOWHERE, visible_keys
from utio_jax.core.pytrees import pytree, static


@pytree
class View:
    """Keys and values of sinks and recent tokens, in the first layers of a cache.

    Attributes:
      keys: copies of the cache's.
      values: of the same shape.
      positions: of the tokens at each place; `NOWHERE` where there is none.
      history: how many places are for what. Static.
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
        """Returns the view with one layer's K/V of new tokens; layers beyond it leave no trace.

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
    """Returns where new tokens go: each sink to a place of its own, all others into the ring."""
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


def visible_places(
    history: History,
    query_positions: Int[Array, "batch query"],
    positions: Int[Array, "batch place"],
    window: Int[Array, ""] | None = None,
) -> Bool[Array, "batch query place"]:
    """Returns which places of one layer a query sees: `visible_history` in the view's own frame."""
    # A place of the ring that its layer skipped (kv="drop") still holds an older token.
    recent = query_positions[:, :, None] - positions[:, None, :] < history.recent
    kept = jnp.arange(history.size) < history.sinks
    return visible_keys(query_positions, positions, window) & (recent | kept[None, None, :])


def attend_rows(  # noqa: PLR0913 (arrays of one product)
    mix: Mixer,
    cache: KVCache,
    attended: Float[Array, "batch query head head_dim"],
    queries: Float[Array, "batch query head head_dim"],
    positions: Int[Array, "batch query"],
    *,
    layers: tuple[int | Int[Array, ""], ...],
    seen_from: int | Int[Array, ""],
    rows: tuple[Int[Array, " batch"], Int[Array, ""]],
    width: int,
    shown: Int[Array, "row slot"] | None = None,
) -> Float[Array, "batch query head head_dim"]:
    """Returns `attended` with the results of the chosen rows put in.

    Args:
      mix: of the layer.
      cache: keys and values.
      attended: what stays of the other rows.
      queries: of all rows of the arrays, scaled.
      positions: of the queries.
      layers: of the cache, whose heads are read side by side.
      seen_from: depth that a slot's `shown` must exceed.
      rows: an order of rows, and how many of the first ones are meant, see `chosen_first`.
      width: slots to attend over; more than every position. Static.
      shown: layers at which each slot of each row may be seen; None: all.
    """
    slots = jnp.arange(width, dtype=jnp.int32)
    order, count = rows

    def one(number: jax.Array, attended: jax.Array) -> jax.Array:
        row = order[number]

        def of_row(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)

        size = (1, 1, *cache.size(width))

        def of_layer(leaf: jax.Array, layer: int | jax.Array) -> jax.Array:
            start = tuple(map(jnp.int32, (layer, row, 0, 0, 0)))
            return cache.by_slot(jax.lax.dynamic_slice(leaf, start, size)[0, 0])

        seen = [[of_layer(leaf, layer) for leaf in cache.arrays] for layer in layers]
        visible = mix.visible(of_row(positions), slots)
        if shown is not None:
            visible &= (of_row(shown)[:width] > seen_from)[None, :]
        new = mix_apart(mix, of_row(queries), seen, visible)
        return jax.lax.dynamic_update_index_in_dim(attended, new.astype(attended.dtype), row, 0)

    return jax.lax.fori_loop(0, count, one, attended)
