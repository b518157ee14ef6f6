# SPDX-License-Identifier: Apache-2.0
"""Segments in which some rows read all their slots and the others a compact view of them.

One batched call lets every row attend to its view; then a loop with a traced trip count goes over
the dense rows alone, and reads each one's slots. A mask over all slots would read them all for
everybody, and so would `vmap` of a conditional.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.attention.cache import KVCache, write
from utio_jax.attention.history import History
from utio_jax.attention.products import attend, attend_weighed, visible_keys
from utio_jax.attention.views import NOWHERE, View, places_at, visible_places
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.segments import Block, Depth, block_at, run_layers

HEAT_KEPT = 15 / 16
"""What is left of a slot's heat when the next query that sees it adds its own attention.

In a probe on the shipped model, a view of 64 recent, 4 sinks and 34 heavy tokens held 74.1 % of the
attention with heat that fades so, 71.5 % if all queries count alike, 68.3 % if the 34 are drawn by
chance, and 77.2 % with hindsight.
"""

Attended = tuple[Float[Array, "batch query head head_dim"], Float[Array, "layer batch slot"] | None]
"""Attended values by row, and the heat of the cache's slots; None where nobody asks for it."""


def open_view(
    cache: KVCache,
    history: History,
    lengths: Int[Array, " batch"],
    *,
    layers: int,
    heat: Float[Array, "layer batch slot"] | None,
) -> KVCache:
    """Returns the cache with a view of its sinks and recent tokens; heavy places are still empty.

    Args:
      cache: with the prompts in it.
      history: what the view holds.
      lengths: tokens of each row.
      layers: that get a view: the first ones.
      heat: that the prompts' tokens have already got; None where no heavy ones are sought.
    """
    positions = places_at(history, lengths)
    batch = positions.shape[0]
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(batch, dtype=jnp.int32)[None, :, None]
    view = View(
        keys=cache.keys.at[layer, row, positions[None]].get(mode="clip"),
        values=cache.values.at[layer, row, positions[None]].get(mode="clip"),
        positions=jnp.broadcast_to(positions[None], (layers, batch, history.size)),
        heat=heat,
        history=history,
    )
    return dataclasses.replace(cache, view=view)


def run_throttled(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch 1 dim"],
    block: Block,
    *,
    start: Depth,
    stop: Depth,
    width: int,
    runs: Bool[Array, "batch 1"],
    dense: Bool[Array, "batch 1"],
    shown: Int[Array, "batch slot"] | None = None,
) -> tuple[Float[Array, "batch 1 dim"], KVCache]:
    """Returns what `run_segment` does, where only dense rows see everything before them.

    Args:
      decoder: the model.
      params: its parameters.
      cache: with a view of these layers; carried whole; donate it.
      x: states at depth `start`, one token per row.
      block: the tokens' places.
      start: first layer.
      stop: layer to stop before.
      width: slots that dense rows attend over; more than every valid position. Static.
      runs: tokens whose state changes; no others' attention counts.
      dense: of these, the ones that read all their slots.
      shown: as in `run_segment`.
    """
    runs &= block.valid
    dense &= runs
    low = runs & ~dense
    order, count = _first(dense[:, 0])
    some = jnp.any(low).astype(jnp.int32)
    cap = decoder.config.attention_softcap

    def attention(
        cache: KVCache, index: jax.Array, keys: jax.Array, values: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        cache = write(cache, index, keys, values, positions=block.positions, valid=block.valid)
        view, window = cache.view, decoder.config.window_at(index)
        assert view is not None

        def at_layer(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

        def by_view(_: jax.Array, carry: Attended) -> Attended:
            positions = at_layer(view.positions)
            visible = visible_places(view.history, block.positions, positions, window)
            if shown is not None:
                visible &= _shown_at(shown, positions, index)[:, None, :]
            keys, values = at_layer(view.keys), at_layer(view.values)
            if carry[1] is None:
                return attend(queries, keys, values, visible, softcap=cap), None
            attended, got = attend_weighed(queries, keys, values, visible, softcap=cap)
            kept = jnp.where((visible & low[:, :, None])[:, 0], positions, NOWHERE)
            rows = jnp.arange(kept.shape[0], dtype=jnp.int32)[:, None]
            got += HEAT_KEPT * carry[1].at[index, rows, kept].get(mode="clip")
            return attended, carry[1].at[index, rows, kept].set(got, mode="drop")

        # A loop of no or one turn: where all rows are dense no view is read. (A conditional would
        # copy what it passes on.)
        carry = jnp.zeros(queries.shape, view.values.dtype), view.heat
        carry = jax.lax.fori_loop(0, some, by_view, carry)
        attended, heat = _attend_rows(
            cache,
            carry,
            index,
            queries,
            block.positions,
            order,
            count,
            width=width,
            window=window,
            softcap=cap,
            shown=shown,
        )
        return attended, dataclasses.replace(cache, view=dataclasses.replace(view, heat=heat))

    return run_layers(
        decoder, params, cache, x, block, attention, start=start, stop=stop, runs=runs
    )


def observe(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    token_ids: Int[Array, "batch slot"],
    lengths: Int[Array, " batch"],
    *,
    queries: int,
    layers: int,
    width: int,
) -> Float[Array, "layer batch slot"]:
    """Returns the heat of each slot: the attention that the prompts' last tokens pay to it.

    These tokens run once more, over the K/V that the cache already has (SnapKV's observation
    window, arXiv 2404.14469): prefill stays as it is, and need not hand out its weights.

    Args:
      decoder: the model.
      params: its parameters.
      cache: with the prompts in it.
      token_ids: the prompts, at least `width` slots.
      lengths: of the prompts.
      queries: how many of their last tokens; shorter prompts have fewer. Static.
      layers: to observe: the first ones.
      width: slots to attend over: no prompt is longer. Static.
    """
    batch = token_ids.shape[0]
    behind = jnp.arange(queries, dtype=jnp.int32)[None, :] - queries
    positions = lengths[:, None] + behind
    valid = positions >= 0
    block = block_at(decoder, jnp.maximum(positions, 0), valid)
    seen_from = jnp.where(valid, positions, -1)  # From nowhere nothing is seen.
    rows = jnp.arange(batch, dtype=jnp.int32)
    ids = token_ids[rows[:, None], block.positions]
    x = decoder.embed(params, ids, block.positions)

    def attention(
        heat: jax.Array, index: jax.Array, keys: jax.Array, values: jax.Array, asked: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        attended, found = _attend_rows(
            cache,
            (jnp.zeros(asked.shape, cache.values.dtype), heat),
            index,
            asked,
            seen_from,
            rows,
            jnp.int32(batch),
            width=width,
            window=decoder.config.window_at(index),
            softcap=decoder.config.attention_softcap,
            shown=None,
        )
        assert found is not None
        return attended, found

    heat = jnp.zeros((layers, batch, cache.num_slots), jnp.float32)
    return run_layers(decoder, params, heat, x, block, attention, start=0, stop=layers)[1]


def refresh(
    cache: KVCache,
    positions: Int[Array, " batch"],
    due: Bool[Array, " batch"],
    *,
    width: int,
    shown: Int[Array, "batch slot"] | None = None,
    chance: PRNGKeyArray | None = None,
) -> KVCache:
    """Returns the cache with the heavy places of some rows chosen anew, in every layer of the view.

    Chosen are the slots of most heat among those that are neither sinks nor in the ring once the
    next token is.

    Args:
      cache: with a view.
      positions: of each row's next token.
      due: rows to refresh; the others cost nothing.
      width: slots to choose among; more than every position. Static.
      shown: as in `run_segment`.
      chance: chooses by chance instead: the control.
    """
    view = cache.view
    assert view is not None
    history, layers = view.history, view.num_layers
    slots = jnp.arange(width, dtype=jnp.int32)
    order, count = _first(due)

    def one(number: jax.Array, view: View) -> View:
        row, layer = order[number // layers], number % layers
        if chance is None:
            assert view.heat is not None
            score = jax.lax.dynamic_slice(view.heat, (layer, row, 0), (1, 1, width))[0, 0]
        else:  # A row's choice depends on its own position alone.
            key = jax.random.fold_in(jax.random.fold_in(chance, positions[row]), layer)
            score = jax.random.uniform(key, (width,))
        older = (slots >= history.sinks) & (slots <= positions[row] - history.recent)
        if shown is not None:
            older &= shown[row, :width] > layer
        best, chosen = jax.lax.top_k(jnp.where(older, score, -1.0), min(history.heavy, width))
        at = (layer, row, history.sinks)

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            start = at + (0,) * (leaf.ndim - 3)
            return jax.lax.dynamic_update_slice(leaf, new[None, None].astype(leaf.dtype), start)

        return dataclasses.replace(
            view,
            keys=put(view.keys, cache.keys[layer, row, chosen]),
            values=put(view.values, cache.values[layer, row, chosen]),
            positions=put(view.positions, jnp.where(best >= 0, chosen, NOWHERE)),
        )

    view = jax.lax.fori_loop(0, count * layers, one, view)
    return dataclasses.replace(cache, view=view)


def _attend_rows(
    cache: KVCache,
    carry: Attended,
    layer: Int[Array, ""],
    queries: Float[Array, "batch query head head_dim"],
    positions: Int[Array, "batch query"],
    order: Int[Array, " batch"],
    count: Int[Array, ""],
    *,
    width: int,
    window: Int[Array, ""] | None,
    softcap: float | None,
    shown: Int[Array, "batch slot"] | None,
) -> Attended:
    """Returns the carry after rows `order[:count]` have attended to all their slots.

    One row at a time: its keys stay in a core's cache while they are scored, and no row is read
    that is not asked for.
    """
    slots = jnp.arange(width, dtype=jnp.int32)

    def one(number: jax.Array, carry: Attended) -> Attended:
        attended, heat = carry
        row = order[number]

        def of_row(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)

        size = (1, 1, width, *cache.keys.shape[3:])
        keys, values = (
            jax.lax.dynamic_slice(leaf, (layer, row, 0, 0, 0), size)[0, 0]
            for leaf in (cache.keys, cache.values)
        )
        visible = visible_keys(of_row(positions), slots, window)
        if shown is not None:
            visible &= (of_row(shown)[:width] > layer)[None, :]
        if heat is None:
            new = attend(of_row(queries), keys, values, visible, softcap=softcap)
        else:
            new, got = attend_weighed(of_row(queries), keys, values, visible, softcap=softcap)
            place = (layer, row, 0)
            old = jax.lax.dynamic_slice(heat, place, (1, 1, width))
            heat = jax.lax.dynamic_update_slice(heat, HEAT_KEPT * old + got[None, None], place)
        attended = jax.lax.dynamic_update_index_in_dim(attended, new.astype(attended.dtype), row, 0)
        return attended, heat

    return jax.lax.fori_loop(0, count, one, carry)


def _shown_at(
    shown: Int[Array, "batch slot"], positions: Int[Array, "batch place"], layer: Int[Array, ""]
) -> Bool[Array, "batch place"]:
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    return shown.at[rows, positions].get(mode="clip") > layer


def _first(chosen: Bool[Array, " batch"]) -> tuple[Int[Array, " batch"], Int[Array, ""]]:
    """Returns rows in an order in which the chosen ones come first, and how many these are."""
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    return order, jnp.sum(chosen, dtype=jnp.int32)
