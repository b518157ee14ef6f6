# SPDX-License-Identifier: Apache-2.0
"""Default executor: micro-batches of live slots in loops with traced trip counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, key_widths
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import executed_heads, flat
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import Depth
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.base import Tokens, check_min_bucket, over_blocks
from utio_jax.staircase.forward import WholeRows, forward
from utio_jax.staircase.query_blocks import Cover, QueryBlocks


@pytree
class PackedSlots:
    """The live tokens of all rows, packed row by row without gaps.

    A row's tokens are in token order, unless `MicroBatches.packed` is given another.

    Attributes:
      token_of_slot: index into the flattened `[batch * token]` axis. Unused slots, and a margin for
        blocks that extend past the last slot, hold the index one past its end.
      total: number of live tokens.
      query_blocks: attention blocks: whole blocks first, then smaller blocks for the remainders.
      batch: number of rows. Static.
      width: tokens per row. Static.
    """

    token_of_slot: Int[Array, " slot"]
    total: Int[Array, ""]
    query_blocks: tuple[QueryBlocks, ...]
    batch: int = static()
    width: int = static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Executor with traced loops over blocks of live slots: one executable for all counts.

    Projections and MLP run on blocks packed across rows. Attention runs on blocks of one row, over
    the keys up to the block's last position. Padding of projections is less than `min_bucket` slots
    per segment, by default that or a 32nd of the batch. Padding of attention is less than
    `query_block` slots per row and segment. Not reverse-differentiable: use `CapacityPrefix` for
    training.

    Attributes:
      min_bucket: padding unit, in slots. None: the platform's defaults for attention and for
        projections, see `utio_jax.core.platform`.
      block: slots of a whole projection block, a multiple of `min_bucket`; small batches have
        smaller ones.
      query_block: slots of a whole attention block, a multiple of `min_bucket`; short rows have
        shorter ones.
      key_step: key counts are multiples of this, or all keys of the row. It is doubled until there
        are at most 8 counts.
    """

    min_bucket: int | None = None
    block: int = 1024
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
        return self.min_bucket or math.gcd(here().projection_bucket, self.block)

    def sizes(self, tokens: int) -> tuple[int, int]:
        """Returns the slots of a whole projection block, and of a small one, for so many tokens.

        Without a `min_bucket`, small blocks grow with the batch, up to an eighth of a whole one.
        """
        small = self.unit
        block = min(self.block, -(-tokens // small) * small)
        if self.min_bucket is None:
            while 8 * small < block and 64 * small <= tokens and block % (2 * small) == 0:
                small *= 2
        return block, small

    def pack(
        self, segment: int, live: Bool[Array, "batch token"], *, causal: bool = True
    ) -> PackedSlots:
        counts = jnp.sum(live, axis=1, dtype=jnp.int32)
        in_order = jnp.cumsum(live.reshape(-1), dtype=jnp.int32) - 1
        rows = self.cover(live.shape[1], causal=causal), jnp.cumsum(counts) - counts, counts
        return self.packed(live, in_order, rows)

    def packed(
        self,
        live: Bool[Array, "batch token"],
        slot_of_token: Int[Array, " place"],
        *groups: tuple[Cover, Array, Array],
    ) -> PackedSlots:
        """Returns live tokens in given slots, `[batch * token]`, and their attention blocks.

        The slots of each row are consecutive. `groups` are a partition of the slots, each with the
        first slot and the number of slots of its groups.
        """
        batch, width = live.shape
        margin = max(self.sizes(live.size)[0], self.query_block)
        slots = jnp.where(live.reshape(-1), slot_of_token, live.size + margin)
        token_of_slot = jnp.full((live.size + margin,), live.size, jnp.int32)
        token_of_slot = token_of_slot.at[slots].set(
            jnp.arange(live.size, dtype=jnp.int32), mode="drop", unique_indices=True
        )
        blocks = [cover.blocks(token_of_slot, *slots_of) for cover, *slots_of in groups]
        return PackedSlots(
            token_of_slot=token_of_slot,
            total=sum((jnp.sum(c, dtype=jnp.int32) for _, _, c in groups), jnp.int32(0)),
            query_blocks=sum(blocks, ()),
            batch=batch,
            width=width,
        )

    def cover(self, width: int, *, causal: bool = True) -> Cover:
        """Returns the partition of rows of `width` tokens into attention blocks."""
        least = self.min_bucket or math.gcd(here().min_bucket, self.query_block)
        if self.min_bucket is None and width >= 4 * self.query_block:
            least = self.query_block  # Of long rows, small blocks would double what compiles.
        return Cover(
            width=width,
            sizes=(min(self.query_block, -(-width // least) * least), least),
            key_widths=tuple(self.key_widths(width)),
            causal=causal,
        )

    def key_widths(self, width: int) -> list[int]:
        return list(key_widths(width, key_step=self.key_step, most=8))

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: PackedSlots,
        layers: tuple[Depth, Depth],
        cache: KVCache | None = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch token dim"], KVCache | None]:
        start, stop = layers
        return forward(
            decoder,
            params,
            tokens.x,
            tokens.places,
            cache,
            slots=_Blocks(slots.token_of_slot, slots.total, self.sizes(slots.batch * slots.width)),
            attention=_BlockAttention(decoder, tokens.shown, slots),
            start=start,
            # If no live token is left, no token needs the K/V of frozen tokens.
            stop=jnp.where(slots.total > 0, stop, start),
            others=partial(tokens.shown_at, decoder) if only_live_keys else None,
        )

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
            values = function(*(a.at[chosen].get(mode="clip") for a in tokens))
            return jax.tree.map(lambda y, new: y.at[chosen].set(new, mode="drop"), results, values)

        sizes = self.sizes(slots.batch * slots.width)
        results = over_blocks(slots.total, sizes, step, results)
        return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), results)

    def only_if(self, slots: PackedSlots, asked: bool | Bool[Array, ""]) -> PackedSlots:
        return dataclasses.replace(slots, total=jnp.where(asked, slots.total, 0))

    def slots_run(self, slots: PackedSlots) -> Int[Array, ""]:
        _, small = self.sizes(slots.batch * slots.width)
        return -(-slots.total // small) * small

    def heads_run(self, slots: PackedSlots) -> Int[Array, ""]:
        # The head splits a block into smaller blocks of one size, which may be padded again.
        block, small = self.sizes(slots.batch * slots.width)
        whole = slots.total // block
        others = -(-slots.total // small) - whole * (block // small)
        return whole * executed_heads(block) + others * executed_heads(small)

    def work(
        self, slots: PackedSlots, layers: Depth, *, kv_layers: Depth, live_kv_layers: Depth = 0
    ) -> Work:
        run = self.slots_run(slots)
        key_slots = jnp.zeros((), jnp.float32)
        for blocks in slots.query_blocks:
            key_slots += blocks.key_slots(slots.width)
        every = jnp.where(slots.total > 0, slots.batch * slots.width, 0).astype(jnp.int32)
        return Work.of(
            queries=run * layers,
            keys_values=run * live_kv_layers + every * (kv_layers - live_kv_layers),
            key_slots=key_slots * layers,
        )


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """`TokenLayout` of packed slots in blocks of two sizes; drops writes of unused slots."""

    token_of_slot: Int[Array, " slot"]
    total: Int[Array, ""]
    sizes: tuple[int, int]
    blocked: ClassVar[bool] = True

    def pack(self, leaf: jax.Array) -> jax.Array:
        return leaf.at[self.token_of_slot].get(mode="clip")

    def put(self, leaf: jax.Array, new: jax.Array, start: Any, size: Any) -> jax.Array:
        chosen = jax.lax.dynamic_slice_in_dim(self.token_of_slot, start, size)
        return leaf.at[chosen].set(new, mode="drop")

    def by_blocks(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        return over_blocks(self.total, self.sizes, step, carry)

    def empty(self, *shape: int, dtype: Any) -> jax.Array:
        return jnp.zeros((self.token_of_slot.shape[0], *shape), dtype)


@dataclasses.dataclass(frozen=True)
class _BlockAttention(WholeRows):
    """Attention of packed slots, in blocks of one row each."""

    slots: PackedSlots

    def attend(self, index: Any, queries: jax.Array, seen: Any) -> jax.Array:
        """Returns the attention output of all blocks, written in place of the queries."""
        mix, (keys, values), slots = mixer_at(self.decoder, index), seen, self.slots
        prepared = mix.prepare(values)
        for number, blocks in enumerate(slots.query_blocks):

            def step(at: jax.Array, queries: jax.Array, blocks: QueryBlocks = blocks) -> jax.Array:
                row, start = blocks.row[at], blocks.start[at]
                block = jax.lax.dynamic_slice_in_dim(queries, start, blocks.size)
                tokens = jax.lax.dynamic_slice_in_dim(slots.token_of_slot, start, blocks.size)
                positions = tokens - row * slots.width
                arrays = block, positions, keys, prepared, self.shown
                attend = partial(blocks.attend, mix, *arrays, row=row)
                branches = [partial(attend, width=width) for width in blocks.widths]
                new = jax.lax.switch(blocks.reach[at], branches)
                slot = start + jnp.arange(blocks.size, dtype=jnp.int32)
                new = jnp.where((slot < blocks.end[at])[:, None, None], new, block)
                return jax.lax.dynamic_update_slice_in_dim(queries, new, start, 0)

            with jax.named_scope(f"attend_{number}"):
                queries = jax.lax.fori_loop(0, blocks.count, step, queries)
        return queries
