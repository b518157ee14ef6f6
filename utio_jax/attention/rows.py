# SPDX-License-Identifier: Apache-2.0
"""Attention of some rows of a batch to their slots of the K/V cache, a row at a time.

A gather would copy their keys and values, a mask read those of all rows: a loop with a traced trip
count reads the chosen rows where they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.mixing import Mixer, mix_apart


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


def chosen_first(chosen: Bool[Array, " batch"]) -> tuple[Int[Array, " batch"], Int[Array, ""]]:
    """Returns rows in an order in which the chosen ones come first, and how many these are."""
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    return order, jnp.sum(chosen, dtype=jnp.int32)
