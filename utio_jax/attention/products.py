# SPDX-License-Identifier: Apache-2.0
"""Softmax attention for grouped queries, written so that XLA sees plain matrix products."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.platform import here

_HIDDEN = -1e30

# From so many queries on, a column of ones in the values is cheaper than a sum over the weights.
_MANY_QUERIES = 64


NOWHERE = jnp.iinfo(jnp.int32).max
"""The position of a key that is hidden from all: beyond every query's."""


def visible_keys(
    query_positions: Int[Array, "*lead query"],
    key_positions: Int[Array, "*lead key"],
    window: Int[Array, ""] | None = None,
    *,
    causal: bool = True,
) -> Bool[Array, "*lead query key"]:
    """Returns the causal mask: keys at or before each query's position, the last `window` of them.

    A key hidden from all lies at `NOWHERE`. With `causal` False a query sees keys on both sides, at
    a distance below `window`.
    """
    queries, keys = query_positions[..., :, None], key_positions[..., None, :]
    if not causal:
        visible = jnp.broadcast_to(keys < NOWHERE, jnp.broadcast_shapes(queries.shape, keys.shape))
        return visible if window is None else visible & (jnp.abs(queries - keys) < window)
    visible = keys <= queries
    return visible if window is None else visible & (queries - keys < window)


def attend(
    queries: Float[Array, "*lead query head head_dim"],
    keys: Float[Array, "*lead key kv_head head_dim"],
    values: Float[Array, "*lead key kv_head head_dim"],
    visible: Bool[Array, "*#lead query key"],
    *,
    softcap: float | None = None,
) -> Float[Array, "*lead query head head_dim"]:
    """Returns softmax(queries . keys) values over the visible keys of each query.

    Queries are already scaled. A query that sees no key at all gets zeros. With a `softcap`, scores
    become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118).
    """
    if queries.shape[-3] >= _MANY_QUERIES:
        return attend_counted(queries, keys, with_count(values), visible, softcap=softcap)
    # Decoding: preparing the values would cost more than it saves (7.8 ms against 6.9 a step of 32
    # rows and 128 keys, all 16 layers of the shipped model).
    weights = _weights(queries, keys, visible, softcap).astype(values.dtype)
    total = jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    return _unfold(_product(weights, values), total, queries, values.dtype)


def with_count(values: Float[Array, "*lead head_dim"]) -> Float[Array, "*lead counted"]:
    """Returns values with a column of ones, which `attend_counted` turns into the denominator."""
    return jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)


def attend_counted(
    queries: Float[Array, "*lead query head head_dim"],
    keys: Float[Array, "*lead key kv_head head_dim"],
    counted: Float[Array, "*lead key kv_head counted"],
    visible: Bool[Array, "*#lead query key"],
    *,
    softcap: float | None = None,
) -> Float[Array, "*lead query head head_dim"]:
    """Returns the result of `attend` for values that `with_count` prepared once for many calls.

    Scores and sums are float32. Heads that share a K/V head are folded into the query axis, so that
    one K/V head means one GEMM per leading index; the softmax's denominator is one more column of
    the second GEMM, since XLA's CPU reduction along the last axis is not vectorised (474 us
    without, 356 with: 256 queries, 4 heads, 512 keys, two cores, jax 0.10.2).
    """
    head_dim = queries.shape[-1]
    weights = _weights(queries, keys, visible, softcap).astype(counted.dtype)
    mixed = _product(weights, counted)
    return _unfold(mixed[..., :head_dim], mixed[..., head_dim:], queries, counted.dtype)


def attention_received(
    queries: Float[Array, "*lead query head head_dim"],
    keys: Float[Array, "*lead key kv_head head_dim"],
    visible: Bool[Array, "*#lead query key"],
    *,
    softcap: float | None = None,
) -> Float[Array, "*lead key"]:
    """Returns the attention that each key receives, summed over queries and heads."""
    weights = _weights(queries, keys, visible, softcap)
    weights = weights.reshape(*queries.shape[:-3], -1, keys.shape[-3])
    total = jnp.sum(weights, axis=-1)
    return jnp.einsum("...q,...qk->...k", 1.0 / jnp.where(total > 0, total, 1.0), weights)


def _weights(
    queries: Float[Array, "*lead query head head_dim"],
    keys: Float[Array, "*lead key kv_head head_dim"],
    visible: Bool[Array, "*#lead query key"],
    softcap: float | None,
) -> jax.Array:
    """Returns the softmax's numerators `[*lead, kv_head, group, query, key]`, of grouped heads.

    Where queries are many, `group, query` is one axis on CPU, which is faster (two thirds of the
    time of a dense pass of 16 rows). XLA:TPU would then write a mask for each head (60 % of the
    shipped model's pass, as it predicts).
    """
    *lead, num_queries, num_heads, head_dim = queries.shape
    num_keys, num_kv_heads = keys.shape[-3:-1]
    many = num_queries >= _MANY_QUERIES
    apart = num_heads // num_kv_heads, num_queries
    rows = (math.prod(apart),) if many and here().folds_heads else apart
    queries = jnp.moveaxis(queries, -2, -3).reshape(*lead, num_kv_heads, *rows, head_dim)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    if not many and here().scores_turned:
        scores = jnp.moveaxis(product("...khd,...hgqd->...hkgq", keys, queries), -3, -1)
    elif rows == apart:
        scores = product("...hgqd,...khd->...hgqk", queries, keys)
    else:
        scores = product("...hqd,...khd->...hqk", queries, keys)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # Chosen, not added to: what is hidden may be NaN, see `keys_values_of`.
    scores = scores.reshape(*lead, num_kv_heads, *apart, num_keys)
    scores = jnp.where(visible[..., None, None, :, :], scores, _HIDDEN)
    scores = scores.reshape(*lead, num_kv_heads, *rows, num_keys)
    # The floor keeps exp(scores - peak) at zero where every key is hidden.
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _HIDDEN / 2)
    return jnp.exp(scores - jax.lax.stop_gradient(peak))


def _product(weights: jax.Array, values: jax.Array) -> jax.Array:
    q = "hq" if weights.ndim == values.ndim else "hgq"
    return jnp.einsum(
        f"...{q}k,...khd->...{q}d", weights, values, preferred_element_type=jnp.float32
    )


def _unfold(
    mixed: jax.Array, total: jax.Array, queries: jax.Array, dtype: jnp.dtype
) -> Float[Array, "*lead query head head_dim"]:
    """Returns the mixed values over their weights' totals, by query and head."""
    *lead, num_queries, num_heads, head_dim = queries.shape
    mixed = (mixed / jnp.where(total > 0, total, 1.0)).astype(dtype)
    mixed = mixed.reshape(*lead, num_heads, num_queries, head_dim)
    return jnp.moveaxis(mixed, -3, -2)
