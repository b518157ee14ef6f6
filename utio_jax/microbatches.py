# SPDX-License-Identifier: Apache-2.0
"""The default executor: micro-batches of live slots in loops with traced trip counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention import attend_counted, visible_keys, with_count
from utio_jax.decoder import Decoder, Params, Places
from utio_jax.executors import Work, flat, layer_at
from utio_jax.plan import check_min_bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """The attention micro-batches of one size, those in use first.

    Attributes:
      count: how many are in use.
      row: the row that each lies in.
      start: its first slot.
      reach: index into the executor's key widths: how many keys it attends over.
      size: slots. Static.
    """

    count: Int[Array, ""]
    row: Int[Array, " block"]
    start: Int[Array, " block"]
    reach: Int[Array, " block"]
    size: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSlots:
    """The live tokens of all rows, row after row and in token order, without gaps.

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
    batch: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Blocks of live slots in loops with traced trip counts: one executable for any counts.

    Projections and MLP run on blocks packed across rows; attention on blocks of one row, over the
    keys up to the block's last position. Both take whole blocks first, the rest in `min_bucket`s;
    padding stays below `min_bucket` slots per row and segment. Nothing overflows, nothing syncs
    with the host. Not reverse-differentiable: train through `CapacityPrefix`.

    Attributes:
      min_bucket: the unit of padding, in slots.
      block: slots of a whole projection block, a multiple of `min_bucket`.
      query_block: slots of a whole attention block, a multiple of `min_bucket`.
      key_step: keys come in multiples of this, but in at most 8 different counts.
    """

    min_bucket: int = 32
    block: int = 512
    query_block: int = 128
    key_step: int = 128

    def __post_init__(self) -> None:
        check_min_bucket(self.min_bucket)
        for name in ("block", "query_block"):
            size = getattr(self, name)
            if size < 1 or size % self.min_bucket:
                raise ValueError(
                    f"Wanted a {name} that is a multiple of min_bucket={self.min_bucket}, in "
                    f"slots. Got {name}={size}."
                )
        if self.key_step < 1:
            raise ValueError(f"Wanted a key_step of at least 1 key. Got key_step={self.key_step}.")

    def pack(self, segment: int, live: Bool[Array, "batch token"]) -> PackedSlots:
        batch, width = live.shape
        counts = jnp.sum(live, axis=1, dtype=jnp.int32)
        packed = live.reshape(-1)
        margin = max(self.block, self.query_block)
        slot_of_token = jnp.where(
            packed, jnp.cumsum(packed, dtype=jnp.int32) - 1, packed.size + margin
        )
        token_of_slot = jnp.full((packed.size + margin,), packed.size, jnp.int32)
        token_of_slot = token_of_slot.at[slot_of_token].set(
            jnp.arange(packed.size, dtype=jnp.int32), mode="drop", unique_indices=True
        )
        whole = counts // self.query_block
        rest = -(-(counts - whole * self.query_block) // self.min_bucket)
        cover = partial(self._query_blocks, token_of_slot, counts, width)
        return PackedSlots(
            token_of_slot=token_of_slot,
            total=jnp.sum(counts),
            query_blocks=(
                cover(self.query_block, jnp.zeros_like(whole), whole),
                cover(self.min_bucket, whole * self.query_block, rest),
            ),
            batch=batch,
            width=width,
        )

    def _query_blocks(
        self,
        token_of_slot: jax.Array,
        counts: jax.Array,
        width: int,
        size: int,
        done: Int[Array, " batch"],
        blocks: Int[Array, " batch"],
    ) -> QueryBlocks:
        """Returns `blocks` of `size` slots per row, from each row's slot `done` on."""
        batch = counts.shape[0]
        ends = jnp.cumsum(blocks)
        index = jnp.arange(batch * -(-width // size), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), batch - 1)
        offset = done[row] + (index - (ends[row] - blocks[row])) * size
        first_slot = (jnp.cumsum(counts) - counts)[row]
        last_slot = first_slot + jnp.minimum(offset + size, counts[row]) - 1
        last_position = token_of_slot[last_slot] - row * width
        widths = jnp.asarray(self.key_widths(width))
        return QueryBlocks(
            count=ends[-1],
            row=row,
            start=first_slot + offset,
            reach=jnp.sum(last_position[:, None] >= widths[None, :], axis=1, dtype=jnp.int32),
            size=size,
        )

    def key_widths(self, width: int) -> list[int]:
        """Returns the numbers of keys that blocks attend over in rows of `width` tokens."""
        step = max(self.key_step, -(-width // 8))
        return [min(stop, width) for stop in range(step, width + step, step)]

    def _over_blocks(
        self, total: jax.Array, step: Callable[[jax.Array, int, Any], Any], carry: Any
    ) -> Any:
        """Runs `step(first slot, size, carry)` on blocks, then on min_buckets for what remains."""
        whole = total // self.block
        carry = jax.lax.fori_loop(0, whole, lambda i, c: step(i * self.block, self.block, c), carry)
        done = whole * self.block
        rest = -(-(total - done) // self.min_bucket)
        return jax.lax.fori_loop(
            0, rest, lambda i, c: step(done + i * self.min_bucket, self.min_bucket, c), carry
        )

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: PackedSlots,
        layers: tuple[int, int],
        only_live_keys: bool,
    ) -> Float[Array, "batch token dim"]:
        batch, width, _ = x.shape
        config = decoder.config
        margin = slots.token_of_slot.shape[0]
        places = flat(places)
        slot = jax.lax.dynamic_slice_in_dim
        put = jax.lax.dynamic_update_slice_in_dim
        pack = lambda leaf: leaf.at[slots.token_of_slot].get(mode="clip")  # noqa: E731
        slot_places = jax.tree.map(pack, places)
        rows = lambda y: y.reshape(batch, width, *y.shape[1:])  # noqa: E731

        # Live states are carried twice: packed, for blocks to read, and in token order, for K/V.
        def run_layer(
            index: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            states, packed = carry
            layer = layer_at(decoder, params, index)

            def project(start: jax.Array, size: int, carry: Any) -> Any:
                queries, keys, values = carry
                block = slot(packed, start, size)
                block_places = jax.tree.map(lambda leaf: slot(leaf, start, size), slot_places)
                queries = put(queries, decoder.queries(layer, block, block_places), start, 0)
                if only_live_keys:
                    tokens = slot(slots.token_of_slot, start, size)
                    new_keys, new_values = decoder.keys_values(layer, block, block_places)
                    keys = keys.at[tokens].set(new_keys, mode="drop")
                    values = values.at[tokens].set(new_values, mode="drop")
                return queries, keys, values

            if only_live_keys:
                keys = jnp.zeros((batch * width, config.num_kv_heads, config.head_dim), x.dtype)
                values = keys
            else:
                keys, values = decoder.keys_values(layer, states, places)
            queries = jnp.zeros((margin, config.num_heads, config.head_dim), x.dtype)
            queries, keys, values = self._over_blocks(slots.total, project, (queries, keys, values))
            seen = keys_shown, config.window_at(index), config.attention_softcap
            attended = self._attend(queries, rows(keys), rows(values), slots, *seen)

            def finish(start: jax.Array, size: int, carry: tuple[jax.Array, jax.Array]) -> Any:
                states, packed = carry
                new = decoder.finish_layer(
                    layer, slot(packed, start, size), slot(attended, start, size)
                )
                # Slots behind the live ones name no token: what they computed is dropped.
                states = states.at[slot(slots.token_of_slot, start, size)].set(new, mode="drop")
                return states, put(packed, new, start, 0)

            return self._over_blocks(slots.total, finish, (states, packed))

        states, (start, stop) = flat(x), layers
        # Where nobody has come this far, nobody needs the K/V of those who stopped.
        stop = jnp.where(slots.total > 0, stop, start)
        carry = jax.lax.fori_loop(start, stop, run_layer, (states, pack(states)))
        return carry[0].reshape(x.shape)

    def _attend(
        self,
        queries: Float[Array, "slot head head_dim"],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        slots: PackedSlots,
        keys_shown: Bool[Array, "batch token"],
        window: Int[Array, ""] | None,
        softcap: float | None,
    ) -> Float[Array, "slot head head_dim"]:
        counted = with_count(values)
        attended = jnp.zeros_like(queries)
        for overhangs, blocks in enumerate(slots.query_blocks):

            def step(
                index: jax.Array,
                attended: jax.Array,
                blocks: QueryBlocks = blocks,
                overhangs: int = overhangs,
            ) -> jax.Array:
                row, start = blocks.row[index], blocks.start[index]
                mine = jax.lax.dynamic_slice_in_dim(queries, start, blocks.size)
                tokens = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, blocks.size)
                positions = tokens - row * slots.width

                def over(stop: int) -> Callable[[], jax.Array]:
                    def first(leaf: jax.Array) -> jax.Array:
                        tail = leaf.shape[2:]
                        return jax.lax.dynamic_slice(
                            leaf, (row, 0) + (0,) * len(tail), (1, stop, *tail)
                        )[0]

                    def on_first() -> jax.Array:
                        visible = visible_keys(positions, jnp.arange(stop), window)
                        visible &= first(keys_shown)[None, :]
                        return attend_counted(
                            mine, first(keys), first(counted), visible, softcap=softcap
                        )

                    return on_first

                new = jax.lax.switch(
                    blocks.reach[index], [over(stop) for stop in self.key_widths(slots.width)]
                )
                # Whole blocks stay within their row. A row's last min_bucket may reach into the
                # next row's slots, and must keep what is there.
                if overhangs:
                    old = jax.lax.dynamic_slice_in_dim(attended, start, blocks.size)
                    mine_to_write = tokens // slots.width == row
                    new = jnp.where(mine_to_write[:, None, None], new, old)
                return jax.lax.dynamic_update_slice_in_dim(attended, new, start, 0)

            attended = jax.lax.fori_loop(0, blocks.count, step, attended)
        return attended

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

        results = self._over_blocks(slots.total, step, results)
        return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), results)

    def only_if(self, slots: PackedSlots, asked: bool | Bool[Array, ""]) -> PackedSlots:
        return dataclasses.replace(slots, total=jnp.where(asked, slots.total, 0))

    def work(
        self,
        slots: PackedSlots,
        layers: int,
        only_live_keys: bool,
        *,
        deciding: PackedSlots | None = None,
        heads: int = 0,
        mapped: Sequence[PackedSlots] = (),
    ) -> Work:
        padded, decided, *maps = (
            -(-each.total // self.min_bucket) * self.min_bucket
            for each in (slots, deciding or slots, *mapped)
        )
        widths = jnp.asarray(self.key_widths(slots.width), jnp.float32)
        key_slots = jnp.zeros((), jnp.float32)
        for blocks in slots.query_blocks:
            in_use = jnp.arange(blocks.row.shape[0]) < blocks.count
            key_slots += blocks.size * jnp.sum(jnp.where(in_use, widths[blocks.reach], 0.0))
        everyone = jnp.where(slots.total > 0, slots.batch * slots.width, 0).astype(jnp.int32)
        return Work(
            queries=padded * layers,
            keys_values=(padded if only_live_keys else everyone) * layers,
            key_slots=key_slots * layers,
            decisions=decided,
            heads=decided * heads,
            exit_maps=sum(maps, start=jnp.int32(0)),
        )
