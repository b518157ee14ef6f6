# SPDX-License-Identifier: Apache-2.0
"""Decoding segments in which some rows read a compact view of the cache, and the others all of it.

One batched call lets every row attend to its view; then a loop with a traced trip count goes over
the dense rows alone, and reads each one's slots. A mask over all slots would read them all for
every row, and so would `vmap` of a conditional.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from utio_jax.attention.cache import KVCache, side_by_side
from utio_jax.attention.history import History
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.products import NOWHERE
from utio_jax.attention.rows import attend_rows, chosen_first
from utio_jax.attention.views import View, places_at, visible_places
from utio_jax.core.decoder import Decoder
from utio_jax.decoding.segments import Attend, Attention, Block, Sources, depth_of_kv


def open_view(
    cache: KVCache, history: History, lengths: Int[Array, " batch"], *, layers: int
) -> KVCache:
    """Returns the cache with a view of its sinks and recent tokens.

    Args:
      cache: with the prompts in it.
      history: what the view holds.
      lengths: tokens of each row.
      layers: that get a view: the first ones.
    """
    positions = places_at(history, lengths)
    batch = positions.shape[0]
    layers = min(layers, cache.keys.shape[0])
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(batch, dtype=jnp.int32)[None, :, None]
    view = View(
        keys=cache.keys.at[layer, row, positions[None]].get(mode="clip"),
        values=cache.values.at[layer, row, positions[None]].get(mode="clip"),
        positions=jnp.broadcast_to(positions[None], (layers, batch, history.size)),
        history=history,
    )
    return dataclasses.replace(cache, view=view)


def view_attention(
    decoder: Decoder,
    block: Block,
    *,
    width: int,
    runs: Bool[Array, "batch 1"],
    dense: Bool[Array, "batch 1"],
    shown: Int[Array, "batch slot"] | None = None,
) -> Attention:
    """Returns attention of which only dense rows see everything before them, for `run_layers`.

    Args:
      decoder: the model.
      block: the tokens' places, one token per row.
      width: slots that dense rows attend over; more than every valid position. Static.
      runs: tokens whose state changes; no other's attention counts.
      dense: of these, the ones that read all their slots; the others read the cache's view.
      shown: as in `run_segment`.

    Raises:
      ValueError: a block of some rows alone.
    """
    if block.rows is not None:
        raise ValueError(
            "Wanted a block of all rows: views are read side by side. Got one of "
            f"{block.rows.shape[0]} packed rows. Leave out its rows, or the throttle."
        )
    runs &= block.valid
    dense &= runs
    order = chosen_first(dense[:, 0])
    some = jnp.any(runs & ~dense).astype(jnp.int32)

    def attention(cache: KVCache, sources: Sources) -> Attend:
        view = cache.view
        assert view is not None

        def at_layers(leaf: jax.Array) -> list[jax.Array]:
            return [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for i in sources]

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix, seen_from = mixer_at(decoder, index), depth_of_kv(decoder, index)

            def by_view(_: jax.Array, attended: jax.Array) -> jax.Array:
                positions, *others = at_layers(view.positions)
                for each in others:  # Under "drop" layers may have taken in different tokens.
                    positions = jnp.where(each == positions, positions, NOWHERE)
                visible = visible_places(view.history, block.positions, positions, mix.window)
                if shown is not None:
                    visible &= _shown_at(shown, positions, seen_from)[:, None, :]
                kept = (view.keys, view.values)
                keys, values = (side_by_side(at_layers(leaf)) for leaf in kept)
                return mix(queries, keys, values, visible)

            # A loop of no or one turn: where all rows are dense no view is read. (A conditional
            # would copy what it passes on.)
            attended = jnp.zeros(queries.shape, view.values.dtype)
            attended = jax.lax.fori_loop(0, some, by_view, attended)
            return attend_rows(
                mix,
                cache,
                attended,
                queries,
                block.positions,
                layers=sources,
                seen_from=seen_from,
                rows=order,
                width=width,
                shown=shown,
            )

        return attend

    return attention


def _shown_at(
    shown: Int[Array, "batch slot"], positions: Int[Array, "batch place"], layer: Int[Array, ""]
) -> Bool[Array, "batch place"]:
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    return shown.at[rows, positions].get(mode="clip") > layer
