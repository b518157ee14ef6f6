# SPDX-License-Identifier: Apache-2.0
"""The default executor: micro-batches of live slots in loops with traced trip counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, write_prompt
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import executed_heads, flat
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import keys_values_of, layer_at
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.base import Tokens, check_min_bucket, over_blocks
from utio_jax.staircase.keys_values import make_shared, shared_at, spans
from utio_jax.staircase.query_blocks import Cover, QueryBlocks, attend_blocks


@pytree
class PackedSlots:
    """The live tokens of all rows, row after row, without gaps.

    Within a row in token order; with sparse attention its dense tokens first, then its sparse ones.

    Attributes:
      token_of_slot: index into the flattened `[batch * token]` axis; behind the live ones, and in a
        margin that lets blocks overhang, one past its end.
      total: live tokens.
      query_blocks: which slots attend together, whole blocks first, then the rows' rests.
      batch: rows. Static.
      width: tokens per row. Static.
    """

    token_of_slot: Int[Array, " slot"]
    total: Int[Array, ""]
    query_blocks: tuple[QueryBlocks, ...]
    batch: int = static()
    width: int = static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Blocks of live slots in loops with traced trip counts: one executable for any counts.

    Projections and MLP run on blocks packed across rows; attention on blocks of one row, over the
    keys up to the block's last position. Padding stays below `min_bucket` slots per row and
    segment. Not reverse-differentiable: train through `CapacityPrefix`.

    Attributes:
      min_bucket: the unit of padding, in slots. None: the platform's, one for attention and one
        (`rest`) for projections, see `utio_jax.core.platform`.
      block: slots of a whole projection block, a multiple of `min_bucket`.
      query_block: slots of a whole attention block, a multiple of `min_bucket`.
      key_step: keys come in multiples of this, but in at most 8 different counts.
    """

    min_bucket: int | None = None
    block: int = 512
    query_block: int = 128
    key_step: int = 128
    keeps_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        least = 1 if self.min_bucket is None else check_min_bucket(self.min_bucket)
        for name in ("block", "query_block"):
            size = getattr(self, name)
            if size < 1 or size % least:
                raise ValueError(
                    f"Wanted a {name} that is a multiple of min_bucket={least}, in slots. "
                    f"Got {name}={size}."
                )
        if self.key_step < 1:
            raise ValueError(f"Wanted a key_step of at least 1 key. Got key_step={self.key_step}.")

    @property
    def unit(self) -> int:
        own = self.min_bucket
        return math.gcd(here().rest, self.block) if own is None else own

    @property
    def _query_unit(self) -> int:
        own = self.min_bucket
        return math.gcd(here().min_bucket, self.query_block) if own is None else own

    def pack(
        self,
        segment: int,
        live: Bool[Array, "batch token"],
        sparse: SparseQueries | None = None,
        *,
        causal: bool = True,
    ) -> PackedSlots:
        batch, width = live.shape
        counts = jnp.sum(live, axis=1, dtype=jnp.int32)
        first_slot = jnp.cumsum(counts) - counts
        packed = live.reshape(-1)
        margin = max(self.block, self.query_block)
        dense = live if sparse is None else live & ~sparse.sparse
        rest = live & ~dense
        dense_counts = jnp.sum(dense, axis=1, dtype=jnp.int32)
        if sparse is None:
            slot_of_token = jnp.cumsum(packed, dtype=jnp.int32) - 1
        else:
            ranks = [jnp.cumsum(kind, axis=1, dtype=jnp.int32) for kind in (dense, rest)]
            slot_of_token = jnp.where(dense, ranks[0], dense_counts[:, None] + ranks[1]) - 1
            slot_of_token = (first_slot[:, None] + slot_of_token).reshape(-1)
        slot_of_token = jnp.where(packed, slot_of_token, packed.size + margin)
        token_of_slot = jnp.full((packed.size + margin,), packed.size, jnp.int32)
        token_of_slot = token_of_slot.at[slot_of_token].set(
            jnp.arange(packed.size, dtype=jnp.int32), mode="drop", unique_indices=True
        )
        cover = Cover(
            width=width,
            sizes=(self.query_block, self._query_unit),
            key_widths=tuple(self.key_widths(width)),
            causal=causal,
        )
        query_blocks = cover.blocks(token_of_slot, first_slot, dense_counts)
        if sparse is not None:
            chunk = self.query_block
            chunks = -(-width // chunk)
            rest = jnp.pad(rest, ((0, 0), (0, chunks * chunk - width)))
            per_chunk = jnp.sum(rest.reshape(batch, chunks, -1), axis=2, dtype=jnp.int32)
            begin = jnp.cumsum(per_chunk, axis=1) - per_chunk + (first_slot + dense_counts)[:, None]
            cover = dataclasses.replace(cover, history=sparse.history, chunk=chunk)
            query_blocks += cover.blocks(token_of_slot, begin.reshape(-1), per_chunk.reshape(-1))
        return PackedSlots(
            token_of_slot=token_of_slot,
            total=jnp.sum(counts),
            query_blocks=query_blocks,
            batch=batch,
            width=width,
        )

    def key_widths(self, width: int) -> list[int]:
        step = max(self.key_step, -(-width // 8))
        return [min(stop, width) for stop in range(step, width + step, step)]

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: PackedSlots,
        layers: tuple[int, int],
        cache: KVCache | None = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch token dim"], KVCache | None]:
        batch, width, _ = tokens.x.shape
        config, dtype = decoder.config, tokens.x.dtype
        margin = slots.token_of_slot.shape[0]
        places = flat(tokens.places)
        slot = jax.lax.dynamic_slice_in_dim
        put = jax.lax.dynamic_update_slice_in_dim
        by_blocks = partial(over_blocks, slots.total, (self.block, self.unit))
        pack = lambda leaf: leaf.at[slots.token_of_slot].get(mode="clip")  # noqa: E731
        slot_places = jax.tree.map(pack, places)
        rows = lambda y: y.reshape(batch, width, *y.shape[1:])  # noqa: E731

        # `run_layer` of `utio_jax.core.layer` in three loops, since each has blocks of its own:
        # queries of packed slots, attention row by row, outputs of packed slots. Live states are
        # carried twice: packed, for blocks to read, and in token order, for K/V.
        def run_layer(
            index: jax.Array,
            carry: tuple[jax.Array, jax.Array, jax.Array, KVCache | None],
            shared: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
        ) -> tuple[jax.Array, jax.Array, jax.Array, KVCache | None]:
            states, packed, queries, cache = carry
            layer = layer_at(decoder, params, index)
            project_live = only_live_keys and shared is None

            def project(start: jax.Array, size: int, carry: Any) -> Any:
                queries, keys, values = carry
                block = slot(packed, start, size)
                block_places = jax.tree.map(lambda leaf: slot(leaf, start, size), slot_places)
                queries = put(queries, decoder.queries(layer, block, block_places), start, 0)
                if project_live:
                    chosen = slot(slots.token_of_slot, start, size)
                    new_keys, new_values = keys_values_of(decoder, layer, block, block_places)
                    keys = keys.at[chosen].set(new_keys, mode="drop")
                    values = values.at[chosen].set(new_values, mode="drop")
                return queries, keys, values

            if shared is not None:
                keys, values = map(flat, shared(index))
            elif only_live_keys:
                keys, values = tokens.shown_at(decoder, layer, index)
            else:
                keys, values = keys_values_of(decoder, layer, states, places)
            queries, keys, values = by_blocks(project, (queries, keys, values))
            if cache is not None and shared is None:
                cache = write_prompt(cache, index, rows(keys), rows(values))
            attended = attend_blocks(
                mixer_at(decoder, index),
                queries,
                rows(keys),
                rows(values),
                slots.token_of_slot,
                slots.query_blocks,
                tokens.shown,
            )

            def finish(start: jax.Array, size: int, carry: tuple[jax.Array, jax.Array]) -> Any:
                states, packed = carry
                new = decoder.finish_layer(
                    layer, slot(packed, start, size), slot(attended, start, size)
                )
                # Slots behind the live ones name no token: what they computed is dropped.
                states = states.at[slot(slots.token_of_slot, start, size)].set(new, mode="drop")
                return states, put(packed, new, start, 0)

            return *by_blocks(finish, (states, packed)), attended, cache

        states, packed = flat(tokens.x), pack(flat(tokens.x))
        # Of all layers: what each writes there and attends to in its place, the next overwrites.
        queries = jnp.zeros((margin, config.num_heads, config.head_dim), dtype)
        for start, stop, reads_others in spans(config, *layers):
            # Where no token has come this far, none needs the K/V of those that stopped.
            stop = jnp.where(slots.total > 0, stop, start)
            run = run_layer
            if reads_others:
                assert cache is not None
                if start == config.kv_own:
                    at_rest = states.reshape(tokens.x.shape)
                    cache = make_shared(decoder, params, cache, at_rest, tokens.places)
                run = partial(run_layer, shared=shared_at(config, cache, width))
            carry = (states, packed, queries, cache)
            with jax.named_scope("layers"):
                states, packed, queries, cache = jax.lax.fori_loop(start, stop, run, carry)
        return states.reshape(tokens.x.shape), cache

    def map_slots(
        self, slots: PackedSlots, function: Callable[..., Any], *arrays: jax.Array
    ) -> Any:
        tokens = [flat(array) for array in arrays]
        block = [jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for a in tokens]
        results = jax.tree.map(
            lambda one: jnp.zeros((tokens[0].shape[0], *one.shape[1:]), one.dtype),
            jax.eval_shape(function, *block),
        )

        def step(start: jax.Array, size: int, results: Any) -> Any:
            chosen = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, size)
            found = function(*(a.at[chosen].get(mode="clip") for a in tokens))
            return jax.tree.map(lambda y, new: y.at[chosen].set(new, mode="drop"), results, found)

        results = over_blocks(slots.total, (self.block, self.unit), step, results)
        return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), results)

    def only_if(self, slots: PackedSlots, asked: bool | Bool[Array, ""]) -> PackedSlots:
        return dataclasses.replace(slots, total=jnp.where(asked, slots.total, 0))

    def slots_run(self, slots: PackedSlots) -> Int[Array, ""]:
        return -(-slots.total // self.unit) * self.unit

    def heads_run(self, slots: PackedSlots) -> Int[Array, ""]:
        # Each block's logits are made in smaller ones of one size, which may be padded again.
        whole = slots.total // self.block
        rest = -(-slots.total // self.unit) - whole * (self.block // self.unit)
        return whole * executed_heads(self.block) + rest * executed_heads(self.unit)

    def work(
        self, slots: PackedSlots, layers: int, *, kv_layers: int, only_live_keys: bool = False
    ) -> Work:
        run = self.slots_run(slots)
        key_slots = jnp.zeros((), jnp.float32)
        for blocks in slots.query_blocks:
            key_slots += blocks.key_slots(slots.width)
        every = jnp.where(slots.total > 0, slots.batch * slots.width, 0).astype(jnp.int32)
        return Work.of(
            queries=run * layers,
            keys_values=(run if only_live_keys else every) * kv_layers,
            key_slots=key_slots * layers,
        )
