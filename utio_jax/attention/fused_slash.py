# SPDX-License-Identifier: Apache-2.0
"""Vertical-Slash attention of whole rows, by XLA or by kernels of JAX's own libraries.

Fused kernels are closed: they take no union of a band and gathered keys. So they run the parts, and
the parts are merged by their log-sum-exps. Neither was at hand here: the merges are tested with XLA
in cuDNN's place, and with the TPU's kernel interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.history import History
from utio_jax.attention.products import visible_keys, with_count
from utio_jax.attention.vertical_slash import (
    attend_history,
    gather_keys,
    slice_start,
    slice_width,
    visible_gathered,
)

Implementation = Literal["xla", "cudnn", "splash"]
"""Who runs the products: XLA, everywhere; cuDNN, on NVIDIA GPUs; splash attention, on TPUs."""

_LANES = 128  # Tokens of the smallest block that the TPU's kernel takes.


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
        log-sum-exp; it fails where there is no cuDNN, or for shapes that it does not have.
        `"splash"` runs the bands by JAX's splash attention and merges the verticals in the same
        way; where there is no TPU its kernel is interpreted, which is for tests. Static.

    Raises:
      ValueError: unknown implementation, a wrong number of chunks, a softcap with a fused kernel,
        or a window with splash attention, whose masks are static.
    """
    batch, tokens = queries.shape[:2]
    chunks = -(-tokens // chunk)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"Wanted implementation as one of {get_args(Implementation)}. "
            f"Got implementation={implementation!r}."
        )
    if verticals.shape[:2] != (batch, chunks):
        raise ValueError(
            f"Wanted verticals for {batch} rows of {chunks} chunks of {chunk} tokens. "
            f"Got shape {verticals.shape}."
        )
    if implementation != "xla" and softcap is not None:
        raise ValueError(
            f"Wanted no softcap with implementation={implementation!r}, which has none. "
            f"Got softcap={softcap}. Use implementation='xla'."
        )
    if implementation == "splash" and window is not None:
        raise ValueError(
            "Wanted no window with implementation='splash', whose masks are static. Got one of the "
            "layer's own. Use implementation='xla'."
        )
    if implementation == "splash":
        return attend_by_splash(
            queries, keys, values, verticals, shown, history=history, chunk=chunk
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
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "query head head_dim"]:
    """Returns what `attend_history` does, of plain values: verticals and slice in a call each."""
    gather = partial(gather_keys, row=row, verticals=verticals, start=start, width=width)
    visible = visible_gathered(history, positions, verticals, start, width, window)
    visible &= gather(shown)[None, :]
    cut = verticals.shape[0]
    parts, sums = [], []
    for part in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        mixed, log_sum = _attend_part(
            queries[None],
            gather(keys)[None, part],
            gather(values)[None, part],
            visible[None, :, part],
            implementation=implementation,
        )
        parts.append(mixed[0])
        sums.append(log_sum[0])
    return _merge(parts, sums).astype(values.dtype)


def attend_by_splash(
    queries: Float[Array, "batch token head head_dim"],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    verticals: Int[Array, "batch chunk vertical"],
    shown: Bool[Array, "batch token"],
    *,
    history: History,
    chunk: int,
) -> Float[Array, "batch token head head_dim"]:
    """Returns the same: bands of whole rows by JAX's kernel for TPUs, verticals by XLA."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, tokens, heads, _ = queries.shape
    chunks, cut = verticals.shape[1:]
    width = -(-tokens // _LANES) * _LANES
    band = splash.LocalMask((width, width), (history.recent - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([band] * heads),
        block_sizes=splash.BlockSizes(block_q=_LANES, block_kv=_LANES, block_kv_compute=_LANES),
        save_residuals=True,
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() != "tpu",
    )

    def pad(leaf: jax.Array, length: int) -> jax.Array:
        return jnp.pad(leaf, ((0, 0), (0, length - tokens)) + ((0, 0),) * (leaf.ndim - 2))

    def row(
        queries: jax.Array, keys: jax.Array, values: jax.Array, shown: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Queries see keys of their own segment: hidden ones are in another.
        segments = splash.SegmentIds(
            q=jnp.zeros((width,), jnp.int32), kv=1 - shown.astype(jnp.int32)
        )
        mixed, (log_sum,) = kernel(
            *(jnp.swapaxes(y, 0, 1) for y in (queries, keys, values)), segments
        )
        return jnp.swapaxes(mixed, 0, 1), log_sum.T

    tensors = (pad(y, width) for y in (queries, keys, values, shown))
    near, near_sum = (y[:, :tokens].astype(jnp.float32) for y in jax.vmap(row)(*tensors))
    counts = jnp.cumsum(shown, axis=1)
    before = jnp.pad(counts, ((0, 0), (history.recent, 0)))[:, :tokens]
    near_sum = jnp.where((counts > before)[:, :, None], near_sum, -jnp.inf)
    if not cut:
        return _merge([near], [near_sum]).astype(values.dtype)

    blocks = pad(queries, chunks * chunk).reshape(batch * chunks, chunk, *queries.shape[2:])
    gather = jax.vmap(lambda row, chosen: row.at[chosen].get(mode="clip"))
    mine = [gather(y, verticals.reshape(batch, -1)) for y in (keys, values, shown)]
    keys, values, shown = (y.reshape(batch * chunks, cut, *y.shape[2:]) for y in mine)
    positions = jnp.arange(chunks * chunk, dtype=jnp.int32).reshape(chunks, chunk)
    positions = jnp.broadcast_to(positions, (batch, chunks, chunk))
    behind = visible_keys(positions - history.recent, verticals)
    visible = behind.reshape(batch * chunks, chunk, cut) & shown[:, None, :]
    far, far_sum = _attend_part(blocks, keys, values, visible, implementation="xla")
    far, far_sum = (
        y.reshape(batch, chunks * chunk, *y.shape[2:])[:, :tokens] for y in (far, far_sum)
    )
    return _merge([far, near], [far_sum, near_sum]).astype(values.dtype)


def _attend_part(
    queries: Float[Array, "block query head head_dim"],
    keys: Float[Array, "block key kv_head head_dim"],
    values: Float[Array, "block key kv_head head_dim"],
    visible: Bool[Array, "block query key"],
    *,
    implementation: Literal["xla", "cudnn"],
) -> tuple[Float[Array, "block query head head_dim"], Float[Array, "block query head"]]:
    """Returns attention over some of the keys, and its log-sum-exp, -inf where none is visible."""
    mixed, log_sum = jax.nn.dot_product_attention(
        queries,
        keys,
        values,
        mask=visible[:, None],
        scale=1.0,
        implementation=implementation,
        return_residual=True,
    )
    seen = jnp.any(visible, axis=-1)[..., None]
    return mixed.astype(jnp.float32), jnp.where(seen, log_sum.astype(jnp.float32), -jnp.inf)


def _merge(parts: Sequence[jax.Array], sums: Sequence[jax.Array]) -> jax.Array:
    """Returns attention over all keys from that over parts of them, and their log-sum-exps."""
    peak = jnp.maximum(jnp.max(jnp.stack(sums), axis=0), jnp.finfo(jnp.float32).min)
    weights = [jnp.exp(log_sum - peak)[..., None] for log_sum in sums]
    total = sum(weights)
    mixed = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return mixed / jnp.where(total > 0, total, 1.0)
