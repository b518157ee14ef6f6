# SPDX-License-Identifier: Apache-2.0
"""Block attention of packed slots: blocks of one row's queries over that row's visible keys.

Blocks are lists of traced length: whole blocks, then one or two small ones; a larger remainder is a
whole block with padding. A block attends over the row's keys up to its last position, in one of a
few static widths. Subclasses of `QueryBlocks` and `Cover` attend over others
(`utio_jax.utio.attention.vertical_slash`).

Few large blocks are faster than many small ones: 32, 64, 128 and 256 queries of 4 heads over 512
keys take 0.30, 0.39, 0.56 and 0.72 ms (two threads of an AMD EPYC with AVX-512).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import Spans
from utio_jax.attention.mixing import Mixer
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static

MOST_SMALL = 2
"""Largest number of small blocks in a group; one whole block costs less than three of them."""


@pytree
class QueryBlocks:
    """Attention micro-batches of one size and kind; blocks in use come first.

    Attributes:
      count: number of blocks in use.
      row: row of each block.
      start: first slot of each block.
      end: end slot of each block, exclusive; later slots of the block belong to others.
      reach: index into `widths` of the number of keys.
      size: slots per block. Static.
      widths: numbers of keys. Static.
    """

    count: Int[Array, ""]
    row: Int[Array, " block"]
    start: Int[Array, " block"]
    end: Int[Array, " block"]
    reach: Int[Array, " block"]
    size: int = static()
    widths: tuple[int, ...] = static()

    def key_slots(self, tokens: int) -> Float[Array, ""]:
        """Returns the number of query-key pairs of all blocks, in rows of `tokens`."""
        keys = jnp.asarray(self.widths, jnp.float32)[self.reach]
        in_use = jnp.arange(self.row.shape[0]) < self.count
        return self.size * jnp.sum(jnp.where(in_use, keys, 0.0))

    def sees(
        self, mix: Mixer, positions: Int[Array, " query"], width: int, tokens: int
    ) -> tuple[Spans, Bool[Array, "query key"]]:
        """Returns spans of a row's keys (first, number), and the mask over them side by side.

        `width` is one of `widths`, `tokens` those of the row.
        """
        return ((0, width),), mix.visible(positions, jnp.arange(width, dtype=jnp.int32))

    def attend(
        self,
        mix: Mixer,
        queries: Float[Array, "query head head_dim"],
        positions: Int[Array, " query"],
        keys: Float[Array, "batch token kv_head head_dim"],
        prepared: Float[Array, "batch token kv_head prepared"],
        shown: Bool[Array, "batch token"],
        /,
        *,
        row: Int[Array, ""],
        width: int,
    ) -> Float[Array, "query head head_dim"]:
        """Returns the attention of one block of one row's queries over the keys that it `sees`.

        Queries are in text order; `prepared` are values through `mix.prepare`.
        """
        spans, visible = self.sees(mix, positions, width, keys.shape[1])

        def gather(leaf: jax.Array) -> jax.Array:
            others = [jnp.zeros_like(row)] * (leaf.ndim - 2)
            parts = [
                jax.lax.dynamic_slice(
                    leaf,
                    (row, jnp.asarray(start, row.dtype), *others),
                    (1, size, *leaf.shape[2:]),
                )[0]
                for start, size in spans
            ]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

        visible &= gather(shown)[None, :]
        return mix.mix_prepared(queries, gather(keys), gather(prepared), visible)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cover:
    """Partition of groups of consecutive slots into blocks. All fields are static.

    Attributes:
      width: tokens per row.
      sizes: slots of a whole block, and of a block for remainders.
      key_widths: numbers of keys, ascending.
      causal: True if queries attend to earlier keys only; False: to all keys of the row.
    """

    width: int
    sizes: tuple[int, int]
    key_widths: tuple[int, ...] = ()
    causal: bool = True

    @property
    def span(self) -> int:
        """Number of positions that a group of slots spans: a row, or a part of it."""
        return self.width

    def keys(
        self, size: int, ends: tuple[jax.Array, jax.Array], row: jax.Array
    ) -> tuple[tuple[int, ...], Int[Array, " block"]]:
        """Returns the static numbers of keys of blocks of one size, and the keys that each needs.

        `ends` are the first and the last token of each block, `row` its row.
        """
        if self.causal:  # A larger block needs no fine steps.
            *widths, most = self.key_widths
            widths = [keys for keys in widths if not keys % size]
            return (*widths, most), ends[1] - row * self.width + 1
        return (self.width,), ends[1] * 0

    def make(self, **fields: Any) -> QueryBlocks:
        """Returns the blocks with these fields."""
        return QueryBlocks(**fields)

    def blocks(
        self,
        token_of_slot: Int[Array, " slot"],
        first_slot: Int[Array, " group"],
        counts: Int[Array, " group"],
    ) -> tuple[QueryBlocks, ...]:
        """Returns blocks for all groups: whole blocks, then small ones if their size differs.

        `counts` holds the number of slots of each group.
        """
        partition = []
        done = jnp.zeros_like(counts)  # Slots of each group that larger blocks cover.
        longest = min(self.span, self.width)
        groups_per_row = max(1, -(-self.width // max(1, self.span)))
        for size in dict.fromkeys(self.sizes):
            left = jnp.maximum(counts - done, 0)
            padded = left % size > (MOST_SMALL * self.sizes[1] if size != self.sizes[1] else 0)
            blocks = left // size + padded
            ends = jnp.cumsum(blocks)
            index = jnp.arange(counts.shape[0] * -(-longest // size), dtype=jnp.int32)
            group = jnp.searchsorted(ends, index, side="right", method=here().search)
            group = jnp.minimum(group.astype(jnp.int32), counts.shape[0] - 1)
            offset = done[group] + (index - (ends[group] - blocks[group])) * size
            row, start = group // groups_per_row, first_slot[group] + offset
            end = first_slot[group] + jnp.minimum(offset + size, counts[group])
            widths, keys = self.keys(size, (token_of_slot[start], token_of_slot[end - 1]), row)
            reach = jnp.sum(keys[:, None] > jnp.asarray(widths[:-1], jnp.int32)[None, :], axis=1)
            made = self.make(
                count=ends[-1],
                row=row,
                start=start,
                end=end,
                reach=reach.astype(jnp.int32),
                size=size,
                widths=widths,
            )
            partition.append(made)
            done += blocks * size
        return tuple(partition)
