# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention with sinks, for blocks of queries: one product over gathered keys.

    key      0 1 2 3 4 5 6 7 8 9     # queries at positions 7 to 9, recent=3, one sink
    query 7  |         # # #         # "|" the sinks: gathered, after the band
    query 8  |           # # #       # "#" the band: one slice for the whole block of queries
    query 9  |             # # #

They equal masked attention under `utio_jax.attention.history.visible_history`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.history import History
from utio_jax.attention.mixing import Mixer
from utio_jax.attention.products import visible_keys
from utio_jax.core.pytrees import pytree, static


@pytree
class SparseQueries:
    """Tokens that attend to a history alone: the `sparse` ones."""

    sparse: Bool[Array, "*lead batch token"]
    history: History = static()


def slice_width(history: History, span: int, tokens: int) -> int:
    """Returns the number of keys, sinks apart, of a block of queries over `span` positions.

    >>> slice_width(History(recent=96), 128, 512)
    223
    """
    return min(history.recent + span - 1, tokens)


def attend_band(  # noqa: PLR0913 (arrays of one product)
    mix: Mixer,
    queries: Float[Array, "query head head_dim"],
    positions: Int[Array, " query"],
    keys: Float[Array, "batch token kv_head head_dim"],
    prepared: Float[Array, "batch token kv_head prepared"],
    shown: Bool[Array, "batch token"],
    *,
    row: Int[Array, ""],
    width: int,
    history: History,
) -> Float[Array, "query head head_dim"]:
    """Returns the attention of one block of one row's queries over sinks and recent keys.

    One softmax over the gathered keys: two products merged by log-sum-exp are no faster. Queries
    are in text order; `prepared` are values through `mix.prepare`; `width` is of `slice_width`.
    """
    sinks, tokens = min(history.sinks, keys.shape[1]), keys.shape[1]
    start = jnp.clip(positions[0] - (history.recent - 1), 0, tokens - width)

    def gather(leaf: jax.Array) -> jax.Array:
        zero, tail = jnp.zeros_like(row), leaf.shape[2:]
        first, band = (
            jax.lax.dynamic_slice(leaf, (row, begin, *[zero] * len(tail)), (1, size, *tail))[0]
            for begin, size in ((zero, sinks), (start, width))
        )
        return jnp.concatenate([first, band])

    visible = _visible(mix, history, positions, sinks, start, width) & gather(shown)[None, :]
    return mix.mix_prepared(queries, gather(keys), gather(prepared), visible)


def _visible(
    mix: Mixer,
    history: History,
    positions: Int[Array, " query"],
    sinks: int,
    start: Int[Array, ""],
    width: int,
) -> Bool[Array, "query key"]:
    """Returns the mask of queries over the gathered keys: the band, and the sinks after it."""
    first = jnp.arange(sinks, dtype=jnp.int32)
    behind = visible_keys(positions - history.recent, first) & mix.visible(positions, first)
    band = start + jnp.arange(width, dtype=jnp.int32)
    near = mix.visible(positions, band) & visible_keys(positions, band, jnp.int32(history.recent))
    return jnp.concatenate([behind, near], axis=-1)
