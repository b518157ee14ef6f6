# SPDX-License-Identifier: Apache-2.0
"""Keys and values in a cache: which layers make them, and which read those of others.

    kv_source = ((0,), (1,), (2,), (3,), (2, 3), (2, 3))     # a model of six layers

    layer      0  1  2  3 | 4  5
    makes      #  #  #  # | .  .      `kv_own` = 4: layers that read their own
    reads      0  1  2  3 | 2,3 2,3   heads of layers 2 and 3, side by side

A token that has run `kv_complete` layers has left all keys and values that others ever read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache, read, write, write_prompt
from utio_jax.core.decoder import Decoder, DecoderConfig, LayerParams, Params, Places
from utio_jax.core.layer import Depth, layer_at, over_layers
from utio_jax.staircase.reference import dense_keys_values

At = Mapping[str, Any]
"""Where keys and values go: `positions`, `valid` and `rows` of `utio_jax.attention.cache.write`."""


def spans(config: DecoderConfig, start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Returns layers [start, stop) as those that read their own K/V, and those that do not."""
    own = config.kv_own
    parts = [(start, min(stop, own), False), (max(start, own), stop, True)]
    return [part for part in parts if part[0] < part[1]]


def make_shared(
    decoder: Decoder, params: Params, cache: KVCache, x: jax.Array, places: Places
) -> KVCache:
    """Returns the cache with K/V made once, of all tokens' states after `kv_own` layers."""
    first = decoder.config.kv_own
    for row in decoder.config.kv_made(first, first + 1):
        layer = layer_at(decoder, params, row)
        cache = write_prompt(cache, row, *dense_keys_values(decoder, layer, x, places))
    return cache


def shared_at(
    config: DecoderConfig, cache: KVCache, width: int
) -> Callable[[Int[Array, ""]], tuple[jax.Array, jax.Array]]:
    """Returns what maps a layer's index to the K/V that it reads, `[batch, token, ...]`.

    Where all layers from `kv_own` on read the same, that is read here, once.
    """
    sources = config.kv_source[config.kv_own :]
    if len({*sources}) == 1:
        same = read(cache, sources[0], width=width)
        return lambda index: same
    table = jnp.asarray(sources, jnp.int32)
    return lambda index: read(cache, tuple(table[index - config.kv_own]), width=width)


def project(
    decoder: Decoder,
    layer: LayerParams,
    cache: KVCache,
    index: int | Int[Array, ""],
    x: Float[Array, "batch token dim"],
    places: Places,
    at: At,
) -> KVCache:
    """Returns the cache with the keys and values that a layer makes of some states."""
    keys, values = dense_keys_values(decoder, layer, x, places)
    return write(cache, index, keys, values, **at)


def project_once(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    places: Places,
    at: At,
    *,
    start: Depth,
    stop: Depth,
) -> KVCache:
    """Returns the cache with K/V that layers from `kv_own` on make of the states before them all.

    Where layers [start, stop) lie across that depth; elsewhere the cache stays as it is.
    """
    first = decoder.config.kv_own
    made = decoder.config.kv_made(first, first + 1)
    if first == decoder.config.num_layers or not made:
        return cache

    def make(_: jax.Array, cache: KVCache) -> KVCache:
        for row in made:
            cache = project(decoder, layer_at(decoder, params, row), cache, row, x, places, at)
        return cache

    passes = jnp.asarray((start <= first) & (first < stop), jnp.int32)
    return jax.lax.fori_loop(0, passes, make, cache)


def project_layers(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    places: Places,
    at: At,
    *,
    start: Depth,
    stop: int,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
) -> tuple[KVCache, int | Int[Array, ""]]:
    """Returns the cache with K/V of frozen states in layers [start, stop), and in how many.

    `layers`: each layer's parameters apart, where they are. `bounds`: static, between which a
    traced `start` lies.
    """
    config = decoder.config

    def body(index: jax.Array, layer: LayerParams, cache: KVCache) -> KVCache:
        return project(decoder, layer, cache, index, x, places, at)

    own = {"start": at_most(start, config.kv_own), "stop": min(stop, config.kv_own)}
    cache = over_layers(decoder, params, body, cache, layers=layers, bounds=bounds, **own)
    cache = project_once(decoder, params, cache, x, places, at, start=start, stop=stop)
    if not config.kv_source:
        return cache, stop - start
    counts = [len(config.kv_made(depth, stop)) for depth in range(config.num_layers + 1)]
    return cache, jnp.asarray(counts, jnp.int32)[start]


def at_most(depth: Depth, bound: int) -> Depth:
    """Returns the smaller of a depth and a bound, static if both are."""
    return min(depth, bound) if isinstance(depth, int) else jnp.minimum(depth, bound)


def at_least(depth: Depth, bound: int) -> Depth:
    """Returns the larger of a depth and a bound, static if both are."""
    return max(depth, bound) if isinstance(depth, int) else jnp.maximum(depth, bound)
