# SPDX-License-Identifier: Apache-2.0
"""Vertical-Slash attention: a band of recent keys, and a few gathered ones before it.

    key      0 1 2 3 4 5 6 7 8 9     # queries at positions 7 to 9, recent=3, one sink, one heavy
    query 7  |     |   # # #         # "|" verticals: gathered, behind the band
    query 8  |     |     # # #       # "#" the band: one slice for the whole block of queries
    query 9  |     |       # # #

MInference's pattern (arXiv 2407.02490), made of dense products of static shapes over
`[verticals | slice]`; it equals `attend` under `utio_jax.history.visible_history`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention import attend_counted, visible_keys, with_count
from utio_jax.history import History, visible_history

Implementation = Literal["xla", "cudnn"]
"""How products are run: by XLA, everywhere; by cuDNN's fused kernels, on NVIDIA GPUs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseQueries:
    """Who sees a history alone, and which verticals belong to it.

    Attributes:
      sparse: the tokens that do.
      verticals: positions of sinks and heavy hitters as the queries of each chunk of positions have
        them, each once; beyond the row where there is none.
      history: how much they see. Static.
      chunk: positions that share a set of verticals. Static.
    """

    sparse: Bool[Array, "*lead batch token"]
    verticals: Int[Array, "*lead batch chunk vertical"]
    history: History = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})

    def visible(
        self,
        positions: Int[Array, "batch token"],
        key_positions: Int[Array, "batch token"],
        window: Int[Array, ""] | None,
    ) -> Bool[Array, "batch token token"]:
        """Returns what every token would see if it were sparse: the defining mask, for oracles."""
        mine = jnp.repeat(self.verticals, self.chunk, axis=1)[:, : positions.shape[1]]
        heavy = jnp.any(mine[:, :, None, :] == positions[:, None, :, None], axis=-1)
        return visible_history(self.history, positions, key_positions, heavy, window)


def slice_width(history: History, span: int, tokens: int) -> int:
    """Returns the keys that a block of queries over `span` positions needs besides verticals.

    >>> slice_width(History(recent=96), 128, 512)
    223
    """
    return min(history.recent + span - 1, tokens)


def slice_start(
    history: History, first: Int[Array, "*lead"], *, width: int, tokens: int
) -> Int[Array, "*lead"]:
    """Returns where the slice of keys begins, for a block whose first query is at `first`."""
    return jnp.clip(first - (history.recent - 1), 0, tokens - width)


def gather_keys(
    leaf: Float[Array, "batch token *rest"] | Bool[Array, "batch token"],
    row: Int[Array, ""],
    verticals: Int[Array, " vertical"],
    start: Int[Array, ""],
    width: int,
) -> jax.Array:
    """Returns a row's entries at the verticals, then those of the slice: `[key, *rest]`."""
    tail = leaf.shape[2:]
    band = jax.lax.dynamic_slice(leaf, (row, start, *(0,) * len(tail)), (1, width, *tail))[0]
    return jnp.concatenate([leaf.at[row, verticals].get(mode="clip"), band])


def visible_gathered(
    history: History,
    positions: Int[Array, " query"],
    verticals: Int[Array, " vertical"],
    start: Int[Array, ""],
    width: int,
    window: Int[Array, ""] | None,
) -> Bool[Array, "query key"]:
    """Returns what queries see of `gather_keys`: the band, and verticals behind it."""
    behind = visible_keys(positions - history.recent, verticals)
    if window is not None:
        behind &= visible_keys(positions, verticals, window)
    band = start + jnp.arange(width, dtype=jnp.int32)
    near = visible_keys(positions, band, window) & visible_keys(
        positions, band, jnp.int32(history.recent)
    )
    return jnp.concatenate([behind, near], axis=-1)


def attend_history(
    queries: Float[Array, "query head head_dim"],
    positions: Int[Array, " query"],
    keys: Float[Array, "batch token kv_head head_dim"],
    counted: Float[Array, "batch token kv_head counted"],
    shown: Bool[Array, "batch token"],
    *,
    row: Int[Array, ""],
    verticals: Int[Array, " vertical"],
    start: Int[Array, ""],
    width: int,
    history: History,
    window: Int[Array, ""] | None = None,
    softcap: float | None = None,
) -> Float[Array, "query head head_dim"]:
    """Returns the attention of one block of one row's queries over their history.

    One softmax over the gathered keys. Two products merged by log-sum-exp spare the copy of the
    slice and are no faster: 34.7 ms in one, 36.7 in two, 64.5 by `jax.nn.dot_product_attention`
    (4,096 tokens, 8 heads of 64, 2 K/V heads, 256 recent and 64 verticals, two CPU cores).

    Args:
      queries: scaled, of one row.
      positions: of the queries; `start` and `width` hold their bands.
      keys: of all rows, rotated.
      counted: values, through `with_count`.
      shown: keys that anybody may see.
      row: of the queries.
      verticals: one set of `SparseQueries`.
      start: of the slice, from `slice_start`.
      width: of the slice, from `slice_width`. Static.
      history: how much the queries see. Static.
      window: the layer's own sliding window.
      softcap: of the scores.
    """
    gather = partial(gather_keys, row=row, verticals=verticals, start=start, width=width)
    visible = visible_gathered(history, positions, verticals, start, width, window)
    visible &= gather(shown)[None, :]
    return attend_counted(queries, gather(keys), gather(counted), visible, softcap=softcap)


def attend_vertical_slash(
    queries: Float[Array, "batch token head head_dim"],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    verticals: Int[Array, "batch chunk vertical"],
    shown: Bool[Array, "batch token"],
    *,
    history: History,
    chunk: int,
    window: Int[Array, ""] | None = None,
    softcap: float | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "batch token head head_dim"]:
    """Returns causal attention in which every token sees its history alone.

    Equals `attend(..., visible_history(...))`, at the cost of `chunk + recent - 1 + vertical` keys
    per query instead of all. Queries that see no key get zeros.

    Args:
      queries: scaled.
      keys: rotated.
      values: of the same tokens.
      verticals: see `SparseQueries`.
      shown: keys that anybody may see; padding is not.
      history: how much a token sees. Static.
      chunk: queries per block, and per set of verticals. Static.
      window: the layer's own sliding window.
      softcap: of the scores.
      implementation: `"cudnn"` makes two calls of `jax.nn.dot_product_attention`, merged by
        log-sum-exp; it fails where there is no cuDNN, or for shapes that it does not have. Static.

    Raises:
      ValueError: unknown implementation, a wrong number of chunks, or a softcap with cuDNN.
    """
    batch, tokens = queries.shape[:2]
    chunks = -(-tokens // chunk)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"Wanted implementation 'xla' or 'cudnn'. Got implementation={implementation!r}."
        )
    if verticals.shape[:2] != (batch, chunks):
        raise ValueError(
            f"Wanted verticals for {batch} rows of {chunks} chunks of {chunk} tokens. "
            f"Got shape {verticals.shape}."
        )
    if implementation == "cudnn" and softcap is not None:
        raise ValueError(
            "Wanted no softcap with implementation='cudnn', which has none. "
            f"Got softcap={softcap}. Use implementation='xla'."
        )
    if implementation == "cudnn":
        attend_block = partial(attend_history_in_two, implementation=implementation)
    else:
        attend_block = partial(attend_history, softcap=softcap)
    counted = with_count(values) if implementation == "xla" else values
    width = slice_width(history, chunk, tokens)
    padding = ((0, 0), (0, chunks * chunk - tokens), (0, 0), (0, 0))
    blocks = jnp.pad(queries, padding).reshape(batch * chunks, chunk, *queries.shape[2:])

    def one(index: jax.Array, block: jax.Array, verticals: jax.Array) -> jax.Array:
        first = index % chunks * chunk
        return attend_block(
            block,
            first + jnp.arange(chunk, dtype=jnp.int32),
            keys,
            counted,
            shown,
            row=index // chunks,
            verticals=verticals,
            start=slice_start(history, first, width=width, tokens=tokens),
            width=width,
            history=history,
            window=window,
        )

    index = jnp.arange(batch * chunks, dtype=jnp.int32)
    sets = verticals.reshape(batch * chunks, -1)
    attended = jax.lax.map(lambda xs: one(*xs), (index, blocks, sets))
    return attended.reshape(batch, chunks * chunk, *queries.shape[2:])[:, :tokens]


def attend_history_in_two(
    queries: Float[Array, "query head head_dim"],
    positions: Int[Array, " query"],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    shown: Bool[Array, "batch token"],
    *,
    row: Int[Array, ""],
    verticals: Int[Array, " vertical"],
    start: Int[Array, ""],
    width: int,
    history: History,
    window: Int[Array, ""] | None,
    implementation: Implementation,
) -> Float[Array, "query head head_dim"]:
    """Returns what `attend_history` does, of plain values: verticals and slice in a call each."""
    gather = partial(gather_keys, row=row, verticals=verticals, start=start, width=width)
    visible = visible_gathered(history, positions, verticals, start, width, window)
    visible &= gather(shown)[None, :]
    cut = verticals.shape[0]
    parts, sums = [], []
    for part in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        part_visible = visible[:, part]
        mixed, log_sum = jax.nn.dot_product_attention(
            queries[None],
            gather(keys)[None, part],
            gather(values)[None, part],
            mask=part_visible[None, None],
            scale=1.0,
            implementation=implementation,
            return_residual=True,
        )
        seen = jnp.any(part_visible, axis=-1)[:, None]
        parts.append(mixed[0].astype(jnp.float32))
        sums.append(jnp.where(seen, log_sum[0].astype(jnp.float32), -jnp.inf))
    peak = jnp.maximum(jnp.max(jnp.stack(sums), axis=0), jnp.finfo(jnp.float32).min)
    weights = [jnp.exp(log_sum - peak)[..., None] for log_sum in sums]
    total = sum(weights)
    mixed = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return (mixed / jnp.where(total > 0, total, 1.0)).astype(values.dtype)
