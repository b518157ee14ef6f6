# SPDX-License-Identifier: Apache-2.0
"""Attention of packed slots: blocks of one row's queries, over the keys that the block can see.

Blocks are lists of traced length, whole ones first, then the rests in units of `min_bucket`. Dense
queries of a row attend over its keys up to the block's last position, in one of a few static
widths. Sparse ones (`SparseQueries`) attend over verticals and a slice; since a set of verticals
belongs to a chunk of positions, their blocks stay within one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.products import attend_counted, visible_keys, with_count
from utio_jax.attention.vertical_slash import (
    SparseQueries,
    attend_history,
    slice_start,
    slice_width,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """The attention micro-batches of one size and kind, those in use first.

    Attributes:
      count: how many are in use.
      row: the row that each lies in.
      start: its first slot.
      end: the slot behind its last one; what lies further belongs to others.
      reach: index into `widths`: how many keys it attends over.
      chunk: of sparse queries: the chunk of positions that it lies in; None for dense ones.
      size: slots. Static.
      widths: numbers of keys, verticals apart. Static.
      overhangs: whether blocks may reach beyond `end`. Static.
    """

    count: Int[Array, ""]
    row: Int[Array, " block"]
    start: Int[Array, " block"]
    end: Int[Array, " block"]
    reach: Int[Array, " block"]
    chunk: Int[Array, " block"] | None
    size: int = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    overhangs: bool = dataclasses.field(metadata={"static": True})

    def key_slots(self, verticals: int) -> Float[Array, ""]:
        """Returns query slots times the key slots that each attends over."""
        keys = jnp.asarray(self.widths, jnp.float32)[self.reach]
        keys += 0 if self.chunk is None else verticals
        in_use = jnp.arange(self.row.shape[0]) < self.count
        return self.size * jnp.sum(jnp.where(in_use, keys, 0.0))


def cover(
    token_of_slot: Int[Array, " slot"],
    first_slot: Int[Array, " group"],
    counts: Int[Array, " group"],
    *,
    width: int,
    sizes: tuple[int, int],
    key_widths: Sequence[int],
    sparse: SparseQueries | None = None,
) -> tuple[QueryBlocks, QueryBlocks]:
    """Returns blocks that cover groups of consecutive slots, each group in token order.

    Args:
      token_of_slot: index into the flattened `[batch * token]` axis.
      first_slot: of each group: of each row, or of each row and chunk.
      counts: slots of each group.
      width: tokens per row.
      sizes: slots of a whole block, and of those that take a group's rest.
      key_widths: numbers of keys that dense blocks may attend over, ascending.
      sparse: whose groups these are, if they are sparse.
    """
    whole = counts // sizes[0]
    rest = -(-(counts - whole * sizes[0]) // sizes[1])
    chunks = 1 if sparse is None else -(-width // sparse.chunk)
    longest = width if sparse is None else min(sparse.chunk, width)
    found = []
    for size, done, blocks in (
        (sizes[0], jnp.zeros_like(whole), whole),
        (sizes[1], whole * sizes[0], rest),
    ):
        ends = jnp.cumsum(blocks)
        index = jnp.arange(counts.shape[0] * -(-longest // size), dtype=jnp.int32)
        group = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        group = jnp.minimum(group, counts.shape[0] - 1)
        offset = done[group] + (index - (ends[group] - blocks[group])) * size
        row, start = group // chunks, first_slot[group] + offset
        end = first_slot[group] + jnp.minimum(offset + size, counts[group])
        last_position = token_of_slot[end - 1] - row * width
        if sparse is None:
            widths, keys = tuple(key_widths), last_position + 1
        else:  # Blocks of few tokens span few positions, or few tokens of many.
            spans = [min(size, longest)]
            while spans[-1] < longest:
                spans.append(min(2 * spans[-1], longest))
            slices = [slice_width(sparse.history, span, width) for span in spans]
            widths = tuple(dict.fromkeys(slices))
            keys = last_position + row * width - token_of_slot[start] + sparse.history.recent
        reach = jnp.sum(keys[:, None] > jnp.asarray(widths[:-1], jnp.int32)[None, :], axis=1)
        found.append(
            QueryBlocks(
                count=ends[-1],
                row=row,
                start=start,
                end=end,
                reach=reach.astype(jnp.int32),
                chunk=None if sparse is None else group % chunks,
                size=size,
                widths=widths,
                overhangs=size == sizes[1],
            )
        )
    return found[0], found[1]


def attend_blocks(
    queries: Float[Array, "slot head head_dim"],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    token_of_slot: Int[Array, " slot"],
    query_blocks: Sequence[QueryBlocks],
    keys_shown: Bool[Array, "batch token"],
    *,
    sparse: SparseQueries | None,
    window: Int[Array, ""] | None,
    softcap: float | None,
) -> Float[Array, "slot head head_dim"]:
    """Returns the attention of all blocks' queries."""
    counted = with_count(values)
    attended = jnp.zeros_like(queries)
    tokens_per_row = keys.shape[1]
    for blocks in query_blocks:

        def step(index: jax.Array, attended: jax.Array, blocks: QueryBlocks = blocks) -> jax.Array:
            row, start = blocks.row[index], blocks.start[index]
            mine = jax.lax.dynamic_slice_in_dim(queries, start, blocks.size)
            tokens = jax.lax.dynamic_slice_in_dim(token_of_slot, start, blocks.size)
            positions = tokens - row * tokens_per_row

            def dense(width: int) -> Callable[[], jax.Array]:
                def first(leaf: jax.Array) -> jax.Array:
                    tail = leaf.shape[2:]
                    return jax.lax.dynamic_slice(
                        leaf, (row, 0) + (0,) * len(tail), (1, width, *tail)
                    )[0]

                def on_first() -> jax.Array:
                    visible = visible_keys(positions, jnp.arange(width), window)
                    visible &= first(keys_shown)[None, :]
                    return attend_counted(
                        mine, first(keys), first(counted), visible, softcap=softcap
                    )

                return on_first

            if sparse is None or blocks.chunk is None:
                branches = [dense(width) for width in blocks.widths]
            else:
                branches = [
                    partial(
                        attend_history,
                        mine,
                        positions,
                        keys,
                        counted,
                        keys_shown,
                        row=row,
                        verticals=sparse.verticals[row, blocks.chunk[index]],
                        start=slice_start(
                            sparse.history, positions[0], width=width, tokens=tokens_per_row
                        ),
                        width=width,
                        history=sparse.history,
                        window=window,
                        softcap=softcap,
                    )
                    for width in blocks.widths
                ]
            new = jax.lax.switch(blocks.reach[index], branches)
            if blocks.overhangs:
                old = jax.lax.dynamic_slice_in_dim(attended, start, blocks.size)
                slot = start + jnp.arange(blocks.size, dtype=jnp.int32)
                new = jnp.where((slot < blocks.end[index])[:, None, None], new, old)
            return jax.lax.dynamic_update_slice_in_dim(attended, new, start, 0)

        attended = jax.lax.fori_loop(0, blocks.count, step, attended)
    return attended
