# SPDX-License-Identifier: Apache-2.0
"""How the live tokens of a segment are run: micro-batches in a traced loop, or a static prefix.

An executor changes cost, never results. It packs the live tokens into slots, applies one layer to
them, and leaves all other tokens' states alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention import attend, attend_counted, with_count
from utio_jax.decoder import Decoder, LayerParams, Places
from utio_jax.plan import check_min_bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What was executed, padding included, one entry per segment.

    Attributes:
      queries: slots that went through queries, output projection and MLP, times layers.
      keys_values: tokens whose K/V were projected, times layers.
      key_slots: query slots times the key slots that each attended over, times layers. A float: it
        outgrows int32.
      decisions: slots that a decision at the segment's end evaluates.
    """

    queries: Int[Array, " segment"]
    keys_values: Int[Array, " segment"]
    key_slots: Float[Array, " segment"]
    decisions: Int[Array, " segment"]


def stack_work(segments: Sequence[Work]) -> Work:
    """Returns the segments' scalar entries as one `Work` of vectors."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *segments)


class Executor(Protocol):
    """What the staircase asks of an executor. `Slots` is whatever `pack` returned."""

    def pack(self, segment: int, live: Bool[Array, "batch token"]) -> Any:
        """Returns the slots of a segment, for the tokens that run in it."""
        ...

    def run_layer(
        self,
        decoder: Decoder,
        layer: LayerParams,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: Any,
        only_live_keys: bool,
    ) -> Float[Array, "batch token dim"]:
        """Returns the states after one layer; those of tokens without a slot are unchanged."""
        ...

    def map_slots(self, slots: Any, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """Returns `function` of the live tokens' `[slot, ...]` blocks, in token order; elsewhere 0."""
        ...

    def work(self, slots: Any, layers: int, only_live_keys: bool) -> Work:
        """Returns what running `layers` layers on the slots executes."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSlots:
    """The live tokens of all rows, row after row and in token order, without gaps.

    Attributes:
      token_of_slot: index into the flattened `[batch * token]` axis; behind the live ones, and in a
        margin that lets blocks overhang, one past its end.
      total: live tokens.
      micro_batches: attention micro-batches in use; their entries below come first.
      row: the row that each micro-batch lies in.
      start: its first slot.
      reach: index into the executor's key widths: how far back it has to look.
      width: tokens per row. Static.
    """

    token_of_slot: Int[Array, " slot"]
    total: Int[Array, ""]
    micro_batches: Int[Array, ""]
    row: Int[Array, " micro_batch"]
    start: Int[Array, " micro_batch"]
    reach: Int[Array, " micro_batch"]
    width: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Blocks of live slots in loops with traced trip counts: one executable for any counts.

    Projections and MLP run on blocks packed across rows; attention on micro-batches of one row, over
    the keys up to the micro-batch's last position. Nothing overflows, nothing syncs with the host,
    and padding stays below `min_bucket` slots per row and segment. Not reverse-differentiable: train
    through `CapacityPrefix`.

    Attributes:
      min_bucket: queries of one attention micro-batch, and the unit of padding.
      block: slots of one projection block; a multiple of `min_bucket`, in which the rest is run.
      key_step: keys come in multiples of this, but in at most 8 different counts.
    """

    min_bucket: int = 128
    block: int = 512
    key_step: int = 128

    def __post_init__(self) -> None:
        check_min_bucket(self.min_bucket)
        if self.block % self.min_bucket or self.block < 1:
            raise ValueError(
                f"Wanted a block that is a multiple of min_bucket={self.min_bucket}, in slots. Got block={self.block}."
            )
        if self.key_step < 1:
            raise ValueError(f"Wanted a key_step of at least 1. Got key_step={self.key_step}.")

    def pack(self, segment: int, live: Bool[Array, "batch token"]) -> PackedSlots:
        batch, width = live.shape
        counts = jnp.sum(live, axis=1, dtype=jnp.int32)
        first_slot = jnp.cumsum(counts) - counts
        packed = live.reshape(-1)
        slot_of_token = jnp.where(packed, jnp.cumsum(packed, dtype=jnp.int32) - 1, packed.size + self.block)
        token_of_slot = jnp.full((packed.size + self.block,), packed.size, jnp.int32)
        token_of_slot = token_of_slot.at[slot_of_token].set(
            jnp.arange(packed.size, dtype=jnp.int32), mode="drop", unique_indices=True
        )
        # Which row, slots and keys each attention micro-batch has: found once, used in every layer.
        blocks = -(-counts // self.min_bucket)
        ends = jnp.cumsum(blocks)
        index = jnp.arange(batch * -(-width // self.min_bucket), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), batch - 1)
        offset = (index - (ends[row] - blocks[row])) * self.min_bucket
        last_slot = first_slot[row] + jnp.minimum(offset + self.min_bucket, counts[row]) - 1
        last_position = token_of_slot[last_slot] - row * width
        widths = jnp.asarray(self.key_widths(width))
        return PackedSlots(
            token_of_slot=token_of_slot,
            total=jnp.sum(counts),
            micro_batches=ends[-1],
            row=row,
            start=first_slot[row] + offset,
            reach=jnp.sum(last_position[:, None] >= widths, axis=1, dtype=jnp.int32),
            width=width,
        )

    def key_widths(self, width: int) -> list[int]:
        """Returns the numbers of keys that micro-batches attend over in rows of `width` tokens."""
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

    def run_layer(
        self,
        decoder: Decoder,
        layer: LayerParams,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: PackedSlots,
        only_live_keys: bool,
    ) -> Float[Array, "batch token dim"]:
        batch, width, dim = x.shape
        config = decoder.config
        states, places = flat(x), flat(places)
        total = slots.total
        margin = slots.token_of_slot.shape[0]
        queries = jnp.zeros((margin, config.num_heads, config.head_dim), x.dtype)

        def take(start: jax.Array, size: int) -> tuple[jax.Array, jax.Array, Places]:
            tokens = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, size)
            gather = lambda leaf: leaf.at[tokens].get(mode="clip")  # noqa: E731
            return tokens, gather(states), jax.tree.map(gather, places)

        def project(start: jax.Array, size: int, carry: Any) -> Any:
            queries, keys, values = carry
            tokens, block, block_places = take(start, size)
            new = decoder.queries(layer, block, block_places)
            queries = jax.lax.dynamic_update_slice_in_dim(queries, new, start, 0)
            if only_live_keys:
                new_keys, new_values = decoder.keys_values(layer, block, block_places)
                keys = keys.at[tokens].set(new_keys, mode="drop")
                values = values.at[tokens].set(new_values, mode="drop")
            return queries, keys, values

        if only_live_keys:
            keys = jnp.zeros((batch * width, config.num_kv_heads, config.head_dim), x.dtype)
            values = keys
        else:
            keys, values = decoder.keys_values(layer, states, places)
        queries, keys, values = self._over_blocks(total, project, (queries, keys, values))
        rows = lambda y: y.reshape(batch, width, *y.shape[1:])  # noqa: E731
        attended = self._attend(queries, rows(keys), rows(values), keys_shown, slots)

        def finish(start: jax.Array, size: int, states: jax.Array) -> jax.Array:
            tokens = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, size)
            block = states.at[tokens].get(mode="clip")
            heads = jax.lax.dynamic_slice_in_dim(attended, start, size)
            # Slots behind the live ones name no token: what they computed is dropped.
            return states.at[tokens].set(decoder.finish_layer(layer, block, heads), mode="drop")

        return self._over_blocks(total, finish, states).reshape(x.shape)

    def _attend(
        self,
        queries: Float[Array, "slot head head_dim"],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        keys_shown: Bool[Array, "batch token"],
        slots: PackedSlots,
    ) -> Float[Array, "slot head head_dim"]:
        size = self.min_bucket
        counted = with_count(values)

        def step(index: jax.Array, attended: jax.Array) -> jax.Array:
            row, start = slots.row[index], slots.start[index]
            mine = jax.lax.dynamic_slice_in_dim(queries, start, size)
            tokens = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, size) - row * slots.width

            def over(stop: int) -> Callable[[], jax.Array]:
                def first(leaf: jax.Array) -> jax.Array:
                    tail = leaf.shape[2:]
                    return jax.lax.dynamic_slice(leaf, (row, 0) + (0,) * len(tail), (1, stop, *tail))[0]

                def on_first() -> jax.Array:
                    visible = (jnp.arange(stop) <= tokens[:, None]) & first(keys_shown)
                    return attend_counted(mine, first(keys), first(counted), visible)

                return on_first

            new = jax.lax.switch(slots.reach[index], [over(stop) for stop in self.key_widths(slots.width)])
            # What a row's last micro-batch writes beyond its end, the next row overwrites.
            return jax.lax.dynamic_update_slice_in_dim(attended, new, start, 0)

        return jax.lax.fori_loop(0, slots.micro_batches, step, jnp.zeros_like(queries))

    def map_slots(self, slots: PackedSlots, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        tokens = [flat(array) for array in arrays]
        block = [jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for a in tokens]
        shape = jax.eval_shape(function, *block)
        results = jnp.zeros((tokens[0].shape[0], *shape.shape[1:]), shape.dtype)

        def step(start: jax.Array, size: int, results: jax.Array) -> jax.Array:
            chosen = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, size)
            new = function(*(a.at[chosen].get(mode="clip") for a in tokens))
            return results.at[chosen].set(new, mode="drop")

        results = self._over_blocks(slots.total, step, results)
        return results.reshape(*arrays[0].shape[:2], *results.shape[1:])

    def work(self, slots: PackedSlots, layers: int, only_live_keys: bool) -> Work:
        padded = -(-slots.total // self.min_bucket) * self.min_bucket
        batch = slots.row.shape[0] // -(-slots.width // self.min_bucket)
        widths = jnp.asarray(self.key_widths(slots.width), jnp.float32)
        in_use = jnp.arange(slots.row.shape[0]) < slots.micro_batches
        return Work(
            queries=padded * layers,
            keys_values=(padded if only_live_keys else jnp.int32(batch * slots.width)) * layers,
            key_slots=jnp.sum(jnp.where(in_use, widths[slots.reach], 0.0)) * self.min_bucket * layers,
            decisions=padded,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSlots:
    """The first `capacity` slots of every row, live tokens first and in token order."""

    token_of_slot: Int[Array, "batch slot"]
    live: Bool[Array, "batch token"]
    capacity: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPrefix:
    """The first `capacities[segment]` slots of all rows at once: static shapes, differentiable.

    A segment whose live tokens do not fit runs at full width instead: more cost, same result.

    Attributes:
      capacities: slots per row and segment, multiples of `min_bucket`; `fit_capacities` finds them.
      min_bucket: the unit of padding.
    """

    capacities: tuple[int, ...]
    min_bucket: int = 64

    def __post_init__(self) -> None:
        check_min_bucket(self.min_bucket)
        if any(capacity < 0 or capacity % self.min_bucket for capacity in self.capacities):
            raise ValueError(
                f"Wanted capacities that are multiples of min_bucket={self.min_bucket}, in slots. "
                f"Got capacities={self.capacities}. `fit_capacities` rounds them up."
            )

    def pack(self, segment: int, live: Bool[Array, "batch token"]) -> PrefixSlots:
        if segment >= len(self.capacities):
            raise ValueError(
                f"Wanted a capacity for each of the policy's depths. Got {len(self.capacities)} capacities."
            )
        batch, width = live.shape
        ahead = jnp.cumsum(live, axis=1, dtype=jnp.int32)
        behind = ahead[:, -1:] + jnp.cumsum(~live, axis=1, dtype=jnp.int32)
        slot_of_token = jnp.where(live, ahead, behind) - 1
        rows = jnp.arange(batch)[:, None]
        tokens = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), live.shape)
        token_of_slot = jnp.zeros_like(tokens).at[rows, slot_of_token].set(tokens, unique_indices=True)
        return PrefixSlots(
            token_of_slot=token_of_slot, live=live, capacity=min(self.capacities[segment], width)
        )

    def _choose(self, slots: PrefixSlots, run: Callable[[int], Callable[[], Any]]) -> Any:
        """Returns `run(capacity)()`, or `run(width)()` where a row's live tokens do not fit."""
        width = slots.live.shape[1]
        if slots.capacity == width:
            return run(width)()
        return jax.lax.cond(self._overflows(slots), run(width), run(slots.capacity))

    def _overflows(self, slots: PrefixSlots) -> Bool[Array, ""]:
        return jnp.max(jnp.sum(slots.live, axis=1)) > slots.capacity

    def run_layer(
        self,
        decoder: Decoder,
        layer: LayerParams,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: PrefixSlots,
        only_live_keys: bool,
    ) -> Float[Array, "batch token dim"]:
        del only_live_keys  # K/V of hidden keys cost little here; `keys_shown` hides them.
        batch, width, _ = x.shape
        rows = lambda y, n: y.reshape(batch, n, *y.shape[1:])  # noqa: E731
        keys, values = (rows(y, width) for y in decoder.keys_values(layer, flat(x), flat(places)))

        def run(size: int) -> Callable[[], jax.Array]:
            def on_prefix() -> jax.Array:
                tokens = slots.token_of_slot[:, :size]
                gather = jax.vmap(lambda leaf, order: leaf[order])
                block = gather(x, tokens)
                block_places = jax.tree.map(lambda leaf: gather(leaf, tokens), places)
                queries = rows(decoder.queries(layer, flat(block), flat(block_places)), size)
                visible = (jnp.arange(width) <= tokens[..., None]) & keys_shown[:, None, :]
                attended = attend(queries, keys, values, visible)
                new = rows(decoder.finish_layer(layer, flat(block), flat(attended)), size)
                new = jnp.where(gather(slots.live, tokens)[..., None], new, block)
                return jax.vmap(lambda row, order, new: row.at[order].set(new))(x, tokens, new)

            return on_prefix

        return self._choose(slots, run)

    def map_slots(self, slots: PrefixSlots, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        batch, width = slots.live.shape

        def run(size: int) -> Callable[[], jax.Array]:
            def on_prefix() -> jax.Array:
                tokens = slots.token_of_slot[:, :size]
                new = function(*(flat(jax.vmap(lambda row, order: row[order])(a, tokens)) for a in arrays))
                results = jnp.zeros((batch, width, *new.shape[1:]), new.dtype)
                new = new.reshape(batch, size, *new.shape[1:])
                return jax.vmap(lambda row, order, new: row.at[order].set(new))(results, tokens, new)

            return on_prefix

        return self._choose(slots, run)

    def work(self, slots: PrefixSlots, layers: int, only_live_keys: bool) -> Work:
        batch, width = slots.live.shape
        used = jnp.where(self._overflows(slots), width, slots.capacity).astype(jnp.int32) * batch
        return Work(
            queries=used * layers,
            keys_values=jnp.int32(batch * width * layers),
            key_slots=used.astype(jnp.float32) * width * layers,
            decisions=used,
        )


def flat(tree: Any) -> Any:
    """Returns a pytree with its two leading axes merged: one 2D GEMM beats a batched 3D one."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
