# SPDX-License-Identifier: Apache-2.0
"""Forward pass: runs a range of layers on a subset of tokens.

    forward(decoder, params, x, places, cache, slots=slots, attention=attention, start=4, stop=8)

Scoring, prefill, decode steps, drafting and verification all call it. Three arguments differ:

- `TokenLayout`: where the tokens that run lie: packed in blocks, a static prefix, or in place.
- `KVAccess`: storage and visibility of keys and values.
- `others`: K/V of tokens that do not run; by default projected from their states.

K/V shared by layers, `kv_source=((0,), (1,), (2,), (3,), (2, 3), (2, 3))`. A token has produced all
that others ever read after `kv_complete` layers:

    layer      0  1  2  3 | 4  5
    makes      #  #  #  # | .  .      `kv_own` = 4: layers that read their own
    reads      0  1  2  3 | 2,3 2,3   heads of layers 2 and 3, side by side
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read, write_prompt
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import (
    Decoder,
    DecoderConfig,
    LayerParams,
    Params,
    PositionEncoding,
    checked,
    finish_layer,
)
from utio_jax.core.layer import Depth, keys_values_of, layer_at, layer_reader
from utio_jax.staircase.base import KVAccess, Sources, TokenLayout

Others = Callable[[LayerParams, Any, Any], tuple[jax.Array, jax.Array]]
"""Maps a layer, its index and the cache to the K/V `[token, ...]` of tokens that do not run."""


@dataclasses.dataclass(frozen=True)
class InPlace:
    """`TokenLayout` in place: all tokens, masked; tokens that do not run keep their states.

    Attributes:
      runs: mask of the tokens that run, flattened.
    """

    runs: Bool[Array, " token"]
    blocked: ClassVar[bool] = False

    def pack(self, leaf: jax.Array) -> jax.Array:
        return leaf

    def put(self, leaf: jax.Array, new: jax.Array, start: Any, size: Any) -> jax.Array:
        del start, size
        return jnp.where(self.runs.reshape(-1, *(1,) * (leaf.ndim - 1)), new, leaf)

    def by_blocks(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        return step(None, None, carry)

    def empty(self, *shape: int, dtype: Any) -> None:
        del shape, dtype


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Base class of `KVAccess` over the K/V of all tokens in the pass's rows.

    An optional cache receives these K/V as well. Models that share K/V between layers need a cache.

    Attributes:
      decoder: the model.
      shown: tokens whose K/V are visible.
    """

    decoder: Decoder
    shown: Bool[Array, "batch token"]

    def write(
        self, cache: KVCache | None, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache | None, tuple[jax.Array, jax.Array]]:
        """Writes a layer's K/V to the cache; returns the cache, and the K/V by row."""
        keys, values = (y.reshape(*self.shown.shape, *y.shape[1:]) for y in (keys, values))
        if cache is not None:
            cache = write_prompt(cache, index, keys, values)
        return cache, (keys, values)

    def read(self, cache: KVCache, sources: Sources) -> tuple[jax.Array, jax.Array]:
        """Reads the K/V of some layers, concatenated along the head axis."""
        return read(cache, sources, width=self.shown.shape[1])


Carry = TypeVar("Carry")


def forward(  # noqa: PLR0913 (arrays of one pass, then its options)
    decoder: Decoder,
    params: Params,
    x: Float[Array, "batch token dim"],
    places: PositionEncoding,
    cache: Any,
    *,
    slots: TokenLayout,
    attention: KVAccess,
    start: Depth,
    stop: Depth,
    others: Others | None = None,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
    unroll: bool = False,
) -> tuple[Float[Array, "batch token dim"], Any]:
    """Runs layers `[start, stop)`; returns the states, and the cache with the K/V of these layers.

    Each layer is queries, keys and values, attention, output projection and MLP. A traced `stop`
    equal to `start` runs nothing and copies nothing. (`lax.cond` would copy the whole cache.)

    Args:
      decoder: the model.
      params: its parameters.
      x: states at depth `start`.
      places: position encoding of the tokens.
      cache: carried as a whole; donate it. None if `attention` needs no cache.
      slots: layout of the tokens that run.
      attention: storage and visibility of K/V.
      start: first layer.
      stop: layer to stop before.
      others: K/V of tokens that do not run; None: projected from their states.
      layers: parameters per layer instead of a stack, see `split_layers`.
      bounds: static bounds of traced depths, for `layers`.
      unroll: True to unroll static layers instead of using a loop.
    """
    config, first = decoder.config, decoder.config.kv_own
    states, places = flat(x), flat(places)
    slot_places = jax.tree.map(slots.pack, places)
    packed = slots.pack(states) if slots.blocked else None
    # One buffer for all layers: queries, then the attention output in place.
    queries = slots.empty(config.num_heads, config.head_dim, dtype=x.dtype)
    run = partial(_run_layer, decoder, slots, attention, places, slot_places)

    def own(index: Any, layer: LayerParams, carry: Any) -> Any:
        *carry, cache = carry
        return run(index, layer, carry, cache, others=others)

    def above(index: Any, layer: LayerParams, carry: Any) -> Any:
        if len({*sources}) == 1:
            return run(index, layer, carry, seen=same)[:-1]
        layers_read = jnp.asarray(sources, jnp.int32)[index - first]
        return run(index, layer, carry, seen=attention.read(cache, tuple(layers_read)))[:-1]

    over = partial(over_layers, decoder, params, layers=layers, bounds=bounds, unroll=unroll)
    carry: Any = (states, packed, queries, cache)
    with jax.named_scope("layers"):
        carry = over(own, carry, start=at_most(start, first), stop=at_most(stop, first))
        *carry, cache = carry
        if first < config.num_layers:
            cache = _make_once(
                decoder, params, cache, carry[0], places, attention.write, start=start, stop=stop
            )
            sources = config.kv_source[first:]
            # Read once if all layers read the same K/V: there are no writes from here on.
            same = attention.read(cache, sources[0]) if len({*sources}) == 1 else None
            carry = over(above, (*carry,), start=at_least(start, first), stop=at_least(stop, first))
    return carry[0].reshape(x.shape), cache


def over_layers(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    body: Callable[[Any, LayerParams, Carry], Carry],
    carry: Carry,
    *,
    start: Depth,
    stop: Depth,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
    unroll: bool = False,
) -> Carry:
    """Returns a carry after layers [start, stop), in order.

    A loop over the stack, or over `layers` where a traced index picks among these. Otherwise the
    program is unrolled. If `start` or `stop` are traced, each layer is then a loop of at most one
    turn: a conditional would copy the carry. Of a looped model the layers of one turn are unrolled.

    Args:
      decoder: the model.
      params: its parameters.
      body: maps a layer's index, its parameters and the carry to the carry.
      carry: any pytree.
      start: first layer.
      stop: layer to stop before.
      layers: see `split_layers`.
      bounds: between which traced `start` and `stop` lie; by default anywhere. Static.
      unroll: where `start` and `stop` are static, no loop over the stack.
    """
    size, (low, high) = decoder.config.turn_layers, bounds or (0, len(layers or ()))
    low, high = (y if isinstance(y, int) else z for y, z in ((start, low), (stop, high)))
    at, any_index = layer_reader(decoder, params, layers, low, high)

    def several(index: Any, carry: Carry) -> Carry:  # A whole turn of a looped model.
        for part in range(size):
            carry = body(index * size + part, at(part), carry)
        return carry

    if any_index and not unroll:
        return jax.lax.fori_loop(start, stop, lambda i, carry: body(i, at(i), carry), carry)
    if decoder.config.turns > 1 and (unroll or layers is not None):
        return jax.lax.fori_loop(start // size, stop // size, several, carry)
    traced: Any = int if layers is None else jnp.int32
    for index in range(low, high):
        one = lambda _, carry, i=index: body(traced(i), at(i), carry)  # noqa: E731
        if isinstance(start, int) and isinstance(stop, int):
            carry = one(0, carry)
            continue
        runs = jnp.asarray((start <= index) & (index < stop), jnp.int32)
        carry = jax.lax.fori_loop(0, runs, one, carry)
    return carry


def _run_layer(  # noqa: PLR0913 (arrays of one layer)
    decoder: Decoder,
    slots: TokenLayout,
    attention: KVAccess,
    places: Any,
    slot_places: Any,
    index: Any,
    layer: LayerParams,
    carry: Any,
    cache: Any = None,
    *,
    others: Others | None = None,
    seen: Any = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Any]:
    """Returns states, packed states, attended queries and the cache after one layer.

    Without `seen` the layer projects the K/V that it reads, those of `others` apart. There are
    three loops over blocks, as attention has its own block sizes.
    """
    states, packed, queries = carry
    source = slots.pack(states) if packed is None else packed
    heads = decoder.config.num_heads, decoder.config.head_dim
    keys_values: Any = ()
    if others is not None:
        keys_values = others(layer, index, cache)
    elif seen is None:
        keys_values = keys_values_of(decoder, layer, states, places)

    def project(start: Any, size: Any, carry: Any) -> Any:
        queries, *keys_values = carry
        block, at = _block(source, start, size), _block(slot_places, start, size)
        asked = checked(decoder, "queries", decoder.queries(layer, block, at), *heads)
        queries = _put_block(queries, asked, start)
        if others is not None:
            made = keys_values_of(decoder, layer, block, at)
            keys_values = [
                slots.put(leaf, new, start, size)
                for leaf, new in zip(keys_values, made, strict=True)
            ]
        return queries, *keys_values

    queries, *keys_values = slots.by_blocks(project, (queries, *keys_values))
    if seen is None:
        cache, seen = attention.write(cache, index, *keys_values)
        seen = attention.read(cache, (index,)) if seen is None else seen
    attended = attention.attend(index, queries, seen)

    def finish(start: Any, size: Any, carry: Any) -> Any:
        states, packed = carry
        block = source if packed is None else packed
        block, mixed = _block(block, start, size), _block(attended, start, size)
        new = finish_layer(decoder, layer, block, mixed)
        states = slots.put(states, new, start, size)
        return states, None if packed is None else _put_block(packed, new, start)

    states, packed = slots.by_blocks(finish, (states, packed))
    return states, packed, attended if slots.blocked else None, cache


def _block(leaves: Any, start: Any, size: Any) -> Any:
    """Returns `size` slots from `start` on; all slots if `start` is None."""
    if start is None:
        return leaves
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), leaves)


def _put_block(leaf: jax.Array | None, new: jax.Array, start: Any) -> jax.Array:
    """Replaces the slots from `start` on; all slots if `start` is None."""
    if leaf is None or start is None:
        return new
    return jax.lax.dynamic_update_slice_in_dim(leaf, new, start, 0)


def _make_once(
    decoder: Decoder,
    params: Params,
    cache: Any,
    states: Float[Array, "token dim"],
    places: PositionEncoding,
    put: Callable[..., tuple[Any, Any]],
    *,
    start: Depth,
    stop: Depth,
) -> Any:
    """Writes the K/V that layers from `kv_own` on project from the states at depth `kv_own`.

    Only if layers [start, stop) include that depth; otherwise the cache is unchanged.
    """
    first = decoder.config.kv_own
    made = decoder.config.kv_made(first, first + 1)

    def make(_: Any, cache: Any) -> Any:
        for row in made:
            layer = layer_at(decoder, params, row)
            cache, _ = put(cache, row, *keys_values_of(decoder, layer, states, places))
        return cache

    if not made or first == decoder.config.num_layers:
        return cache
    if isinstance(start, int) and isinstance(stop, int):
        return make(0, cache) if start <= first < stop else cache
    passes = jnp.asarray((start <= first) & (first < stop), jnp.int32)
    return jax.lax.fori_loop(0, passes, make, cache)


def project_states(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    places: PositionEncoding,
    put: Callable[..., tuple[KVCache, Any]],
    *,
    start: Depth,
    stop: int,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
) -> tuple[KVCache, int | Int[Array, ""]]:
    """Projects frozen states to the K/V of layers [start, stop) in a cache.

    Returns the cache, and the number of layers whose K/V were projected.

    Args:
      decoder: the model.
      params: its parameters.
      cache: K/V cache of all rows.
      x: frozen hidden states.
      places: position encoding of the tokens.
      put: writes a layer's K/V: `KVAccess.write`, for instance of `write_at`.
      start: first layer.
      stop: layer to stop before.
      layers: parameters per layer instead of a stack, see `split_layers`.
      bounds: static bounds of a traced `start`.
    """
    config = decoder.config

    def body(index: jax.Array, layer: LayerParams, cache: KVCache) -> KVCache:
        return put(cache, index, *keys_values_of(decoder, layer, flat(x), flat(places)))[0]

    own = {"start": at_most(start, config.kv_own), "stop": min(stop, config.kv_own)}
    cache = over_layers(decoder, params, body, cache, layers=layers, bounds=bounds, **own)
    cache = _make_once(decoder, params, cache, flat(x), flat(places), put, start=start, stop=stop)
    if not config.shares_kv:
        return cache, stop - start
    counts = [len(config.kv_made(depth, stop)) for depth in range(config.num_layers + 1)]
    return cache, jnp.asarray(counts, jnp.int32)[start]


def write_at(at: dict[str, Any]) -> Callable[..., tuple[KVCache, None]]:
    """Returns an `KVAccess.write` for given positions and rows of a cache."""
    batch, width = at["positions"].shape

    def put(cache: KVCache, index: Any, keys: jax.Array, values: jax.Array) -> tuple[KVCache, None]:
        made = (y.reshape(batch, width, *y.shape[1:]) for y in (keys, values))
        return cache.write(index, *made, **at), None

    return put


def shows_from(config: DecoderConfig, index: Any) -> jax.Array:
    """Returns the depth that a token must exceed to be visible in a layer, under `kv="drop"`."""
    return jnp.minimum(index, config.kv_complete)


def at_most(depth: Depth, bound: int) -> Depth:
    """Returns the minimum of a depth and a bound; static if the depth is."""
    return min(depth, bound) if isinstance(depth, int) else jnp.minimum(depth, bound)


def at_least(depth: Depth, bound: int) -> Depth:
    """Returns the maximum of a depth and a bound; static if the depth is."""
    return max(depth, bound) if isinstance(depth, int) else jnp.maximum(depth, bound)
