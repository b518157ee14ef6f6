# SPDX-License-Identifier: Apache-2.0
"""Attention: a `Mixer` per layer (causal or not, windows, caps), and its matrix products.

Executors, caches and decoding need not know of windows, caps or other kinds of mixing. A `Decoder`
mixes by softmax attention; one that has a method `mix` (see `utio_jax.core.decoder.Mixes`) by that.

- Few queries, or once: `mix(queries, keys, values, visible)`.
- K/V of several layers side by side: `mix_apart`.
- Whole rows: `mix_whole_rows`.
- Many blocks over the same values: `mix.prepare` once, then `mix.mix_prepared`.

Softmax attention is written so that XLA sees plain matrix products (`attend`, `attend_counted`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Mixes, own_mixing
from utio_jax.core.platform import here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer:
    """Mixing of keys and values by one layer's queries.

    Attributes:
      window: keys that a token may attend to, its own included; None: all.
      causal: whether a token sees itself and earlier tokens alone.
      softcap: of softmax attention, whose scores become `softcap * tanh(score / softcap)`.
      own: the decoder that mixes in its own way; None: softmax attention.
    """

    window: Int[Array, ""] | None
    causal: bool
    softcap: float | None = None
    own: Mixes | None = None

    def visible(
        self, query_positions: Int[Array, "*lead query"], key_positions: Int[Array, "*lead key"]
    ) -> Bool[Array, "*lead query key"]:
        """Returns the mask of keys for each query; a key at `NOWHERE` is hidden from all."""
        return visible_keys(query_positions, key_positions, self.window, causal=self.causal)

    def prepare(self, values: Float[Array, "*lead kv_head head_dim"]) -> jax.Array:
        """Returns values prepared once for many calls of `mix_prepared`."""
        return with_count(values) if self.own is None else values

    def mix_prepared(
        self, queries: jax.Array, keys: jax.Array, prepared: jax.Array, visible: jax.Array
    ) -> jax.Array:
        """Returns the result of `__call__` for values from `prepare`."""
        if self.own is not None:
            return self.own.mix(queries, keys, prepared, visible)
        return attend_counted(queries, keys, prepared, visible, softcap=self.softcap)

    def __call__(
        self,
        queries: Float[Array, "*lead query head head_dim"],
        keys: Float[Array, "*lead key kv_head head_dim"],
        values: Float[Array, "*lead key kv_head head_dim"],
        visible: Bool[Array, "*#lead query key"],
    ) -> Float[Array, "*lead query head head_dim"]:
        """Returns the mixed values over the visible keys of each query."""
        if self.own is not None:
            return self.own.mix(queries, keys, values, visible)
        return attend(queries, keys, values, visible, softcap=self.softcap)


def mix_apart(
    mix: Mixer, queries: jax.Array, keys_values: Sequence[Sequence[jax.Array]], visible: jax.Array
) -> Float[Array, "*lead query head head_dim"]:
    """Returns mixed values for queries whose heads read K/V of several layers.

    The same as `mix` on these side by side, which would copy them: each layer's heads are a
    product. `queries` have as many heads for each of the layers that are read, in order.
    """
    heads = jnp.split(queries, len(keys_values), axis=-2)
    mixed = [
        mix(queries_of_layer, keys, values, visible)
        for queries_of_layer, (keys, values) in zip(heads, keys_values, strict=True)
    ]
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=-2)


def causal_blocks(width: int) -> list[tuple[int, int]]:
    """Returns the blocks [start, stop) of a row's queries that attend together, at most 16.

    >>> from utio_jax.core.platform import compiling_for
    >>> with compiling_for("cpu", query_block=128):
    ...     causal_blocks(300)
    [(0, 128), (128, 256), (256, 300)]
    """
    block = max(here().query_block, -(-width // 16))
    return [(start, min(start + block, width)) for start in range(0, width, block)]


def mix_whole_rows(
    mix: Mixer, queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
) -> Float[Array, "*lead token head head_dim"]:
    """Returns the result of `mix` when queries and keys are all tokens of rows, in order.

    A causal block of queries needs the keys up to its end alone: half of all products.
    """
    blocks = causal_blocks(queries.shape[-3])
    if not mix.causal or len(blocks) == 1:
        return mix(queries, keys, values, visible)
    prepared = mix.prepare(values)
    # XLA:CPU schedules independent blocks breadth-first, and so holds the scores of all of them. A
    # conditional branch runs as a whole. The barrier hides that the predicate is constant: XLA
    # would inline the branch.
    always = jax.lax.optimization_barrier(jnp.asarray(True))

    def mixed(start: int, stop: int) -> jax.Array:
        def over(count: int) -> jax.Array:
            return mix.mix_prepared(
                queries[..., start:stop, :, :],
                keys[..., :count, :, :],
                prepared[..., :count, :, :],
                visible[..., start:stop, :count],
            )

        if len(blocks) <= _FEW_BLOCKS:
            return over(stop)
        # The other branch must have the same type, axes of `shard_map` included. It never runs.
        return jax.lax.cond(always, lambda: over(stop), lambda: over(blocks[0][1]))

    return jnp.concatenate([mixed(start, stop) for start, stop in blocks], axis=-3)


def mixer_at(decoder: Decoder, index: int | jax.Array) -> Mixer:
    """Returns the mixer of a layer, whose index is static or traced."""
    config = decoder.config
    return Mixer(
        window=config.window_at(index),
        causal=config.causal,
        softcap=config.attention_softcap,
        own=own_mixing(decoder),
    )


_FEW_BLOCKS = 4
"""Number of blocks in a row up to which scheduling them together is as fast: 512 tokens."""

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
