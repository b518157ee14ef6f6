# SPDX-License-Identifier: Apache-2.0
"""Block attention of packed slots: blocks of one row's queries over that row's visible keys.

Blocks are lists of traced length: whole blocks, then remainders in units of `min_bucket`. Dense
queries attend over the row's keys up to the block's last position, in one of a few static widths.
Sparse queries (`SparseQueries`) attend over sinks and one slice of keys. Their blocks stay within a
chunk of positions, which keeps the slice short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import attend_band, slice_width
from utio_jax.attention.history import History
from utio_jax.attention.mixing import Mixer
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static


@pytree
class QueryBlocks:
    """Attention micro-batches of one size and kind; blocks in use come first.

    Attributes:
      count: number of blocks in use.
      row: row of each block.
      start: first slot of each block.
      end: end slot of each block, exclusive; later slots belong to other rows.
      reach: index into `widths` of the number of keys.
      size: slots per block. Static.
      widths: numbers of keys, without sinks. Static.
      history: visible history of sparse queries; None for dense queries. Static.
      overhangs: True if blocks may extend past `end`. Static.
    """

    count: Int[Array, ""]
    row: Int[Array, " block"]
    start: Int[Array, " block"]
    end: Int[Array, " block"]
    reach: Int[Array, " block"]
    size: int = static()
    widths: tuple[int, ...] = static()
    history: History | None = static()
    overhangs: bool = static()

    def key_slots(self, tokens: int) -> Float[Array, ""]:
        """Returns the number of query-key pairs of all blocks, in rows of `tokens`."""
        keys = jnp.asarray(self.widths, jnp.float32)[self.reach]
        keys += 0 if self.history is None else min(self.history.sinks, tokens)
        in_use = jnp.arange(self.row.shape[0]) < self.count
        return self.size * jnp.sum(jnp.where(in_use, keys, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cover:
    """Partition of groups of consecutive slots into blocks. All fields are static.

    Attributes:
      width: tokens per row.
      sizes: slots of a whole block, and of a block for remainders.
      key_widths: numbers of keys of dense blocks, ascending.
      causal: True if queries attend to earlier keys only; False: to all keys of the row.
      history: visible history of sparse queries; None for dense queries, whose groups are rows.
      chunk: number of positions that a group of sparse queries spans.
    """

    width: int
    sizes: tuple[int, int]
    key_widths: tuple[int, ...]
    causal: bool = True
    history: History | None = None
    chunk: int = 0

    def blocks(
        self,
        token_of_slot: Int[Array, " slot"],
        first_slot: Int[Array, " group"],
        counts: Int[Array, " group"],
    ) -> tuple[QueryBlocks, ...]:
        """Returns blocks for all groups: whole blocks, then remainders if their size differs.

        A group is a row, or one chunk of a row; `counts` holds its number of slots.
        """
        partition, done = [], jnp.zeros_like(counts)
        for size in dict.fromkeys(self.sizes):
            left = counts - done
            blocks = -(-left // size) if size == self.sizes[1] else left // size
            partition.append(self._blocks(size, token_of_slot, first_slot, counts, done, blocks))
            done += blocks * size
        return tuple(partition)

    def _blocks(
        self,
        size: int,
        token_of_slot: jax.Array,
        first_slot: jax.Array,
        counts: jax.Array,
        done: jax.Array,
        blocks: jax.Array,
    ) -> QueryBlocks:
        """Returns `blocks` blocks of one size per group, starting after the first `done` slots."""
        longest = self.width if self.history is None else min(self.chunk, self.width)
        groups_per_row = 1 if self.history is None else -(-self.width // self.chunk)
        ends = jnp.cumsum(blocks)
        index = jnp.arange(counts.shape[0] * -(-longest // size), dtype=jnp.int32)
        group = jnp.searchsorted(ends, index, side="right", method=here().search)
        group = jnp.minimum(group.astype(jnp.int32), counts.shape[0] - 1)
        offset = done[group] + (index - (ends[group] - blocks[group])) * size
        row, start = group // groups_per_row, first_slot[group] + offset
        end = first_slot[group] + jnp.minimum(offset + size, counts[group])
        last_token = token_of_slot[end - 1]
        if self.history is not None:  # A block's tokens may be adjacent or far apart.
            spans = [min(size, longest)]
            while spans[-1] < longest:
                spans.append(min(2 * spans[-1], longest))
            slices = [slice_width(self.history, span, self.width) for span in spans]
            widths = tuple(dict.fromkeys(slices))
            keys = last_token - token_of_slot[start] + self.history.recent
        elif self.causal:
            widths, keys = self.key_widths, last_token - row * self.width + 1
        else:
            widths, keys = (self.width,), last_token * 0
        reach = jnp.sum(keys[:, None] > jnp.asarray(widths[:-1], jnp.int32)[None, :], axis=1)
        return QueryBlocks(
            count=ends[-1],
            row=row,
            start=start,
            end=end,
            reach=reach.astype(jnp.int32),
            size=size,
            widths=widths,
            history=self.history,
            overhangs=size == self.sizes[1],
        )


def attend_blocks(
    mix: Mixer,
    queries: Float[Array, "slot head head_dim"],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    token_of_slot: Int[Array, " slot"],
    query_blocks: Sequence[QueryBlocks],
    keys_shown: Bool[Array, "batch token"],
) -> Float[Array, "slot head head_dim"]:
    """Returns the attention output of all blocks, written in place of the queries."""
    prepared = mix.prepare(values)
    tokens_per_row = keys.shape[1]
    for number, blocks in enumerate(query_blocks):

        def step(index: jax.Array, queries: jax.Array, blocks: QueryBlocks = blocks) -> jax.Array:
            row, start = blocks.row[index], blocks.start[index]
            block = jax.lax.dynamic_slice_in_dim(queries, start, blocks.size)
            tokens = jax.lax.dynamic_slice_in_dim(token_of_slot, start, blocks.size)
            positions = tokens - row * tokens_per_row

            def on_first(width: int) -> jax.Array:
                def first(leaf: jax.Array) -> jax.Array:
                    origin = (row, *[jnp.zeros_like(row)] * (leaf.ndim - 1))
                    return jax.lax.dynamic_slice(leaf, origin, (1, width, *leaf.shape[2:]))[0]

                visible = mix.visible(positions, jnp.arange(width, dtype=jnp.int32))
                visible &= first(keys_shown)[None, :]
                return mix.mix_prepared(block, first(keys), first(prepared), visible)

            def on_band(width: int) -> jax.Array:
                assert blocks.history is not None
                return attend_band(
                    mix,
                    block,
                    positions,
                    keys,
                    prepared,
                    keys_shown,
                    row=row,
                    width=width,
                    history=blocks.history,
                )

            attend = on_first if blocks.history is None else on_band
            branches = [partial(attend, width) for width in blocks.widths]
            new = jax.lax.switch(blocks.reach[index], branches)
            if blocks.overhangs:
                slot = start + jnp.arange(blocks.size, dtype=jnp.int32)
                new = jnp.where((slot < blocks.end[index])[:, None, None], new, block)
            return jax.lax.dynamic_update_slice_in_dim(queries, new, start, 0)

        with jax.named_scope(f"attend_{number}"):
            queries = jax.lax.fori_loop(0, blocks.count, step, queries)
    return queries
