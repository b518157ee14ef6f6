# SPDX-License-Identifier: Apache-2.0
"""Runs layers on some tokens over keys and values: the one forward pass of this library.

    forward(decoder, params, x, places, cache, slots=slots, attention=attention, start=4, stop=8)

Scoring, prefill, chunks of prompts, decoding steps, drafts and their verification call it. Only
here, and in `utio_jax.staircase.reference`, which defines it, layers are run. Three objects say
what differs:

- `Slots`: how the tokens that run lie in memory: packed in blocks, a static prefix, or in place.
- `Attention`: where keys and values go, and what queries see of them.
- `others`: what tokens that do not run show; by default K/V projected from their states.

Some models' layers read keys and values that others have made (`DecoderConfig.kv_source`):

    kv_source = ((0,), (1,), (2,), (3,), (2, 3), (2, 3))     # a model of six layers

    layer      0  1  2  3 | 4  5
    makes      #  #  #  # | .  .      `kv_own` = 4: layers that read their own
    reads      0  1  2  3 | 2,3 2,3   heads of layers 2 and 3, side by side

A token that has run `kv_complete` layers has left all keys and values that others ever read of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read, write, write_prompt
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, DecoderConfig, LayerParams, Params, Places
from utio_jax.core.layer import Depth, keys_values_of, layer_at, over_layers

Sources = tuple[int | Int[Array, ""], ...]
"""Layers whose keys and values are read, their heads side by side."""

Others = Callable[[LayerParams, Any], tuple[jax.Array, jax.Array]]
"""Maps a layer and its index to the keys and values `[token, ...]` of tokens that do not run."""


@runtime_checkable
class Slots(Protocol):
    """Memory layout of the tokens that run: `[token, ...]` in row order to `[slot, ...]`.

    Attributes:
      blocked: True if packed states are carried from layer to layer, and visited block by block.
    """

    blocked: ClassVar[bool]

    def pack(self, leaf: jax.Array) -> jax.Array:
        """Returns the slots' entries `[slot, ...]` of an array `[token, ...]`."""
        ...

    def put(self, leaf: jax.Array, new: jax.Array, start: Any, size: Any) -> jax.Array:
        """Returns `[token, ...]` with those entries replaced that run, by slots from `start` on."""
        ...

    def by_blocks(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Returns what `step(start, size, carry)` makes of a carry, over all slots in use."""
        ...

    def empty(self, *shape: int, dtype: Any) -> jax.Array | None:
        """Returns an array of slots, for results of blocks; None where one block has them all."""
        ...


@runtime_checkable
class Attention(Protocol):
    """Keys and values of a pass, and what its queries see of them."""

    def write(
        self, cache: Any, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[Any, tuple[jax.Array, jax.Array] | None]:
        """Returns the cache with a layer's K/V `[token, ...]`, and these, if they need no read."""
        ...

    def read(self, cache: Any, sources: Sources) -> Any:
        """Returns keys and values of some layers from the cache."""
        ...

    def attend(self, index: Any, queries: jax.Array, seen: Any) -> jax.Array:
        """Returns what queries `[slot, head, head_dim]` attend to, in that shape."""
        ...


@dataclasses.dataclass(frozen=True)
class InPlace:
    """All tokens, where they are; those that do not run keep their states.

    Attributes:
      runs: tokens that run, flattened.
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
    """Keys and values of the pass itself: those of all tokens of its rows; a base class.

    A cache, where there is one, receives them as well. Layers that read others' K/V need one.

    Attributes:
      decoder: the model.
      shown: tokens that are seen.
    """

    decoder: Decoder
    shown: Bool[Array, "batch token"]

    def write(
        self, cache: KVCache | None, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache | None, tuple[jax.Array, jax.Array]]:
        """Returns the cache with a layer's K/V, and these by row."""
        keys, values = (y.reshape(*self.shown.shape, *y.shape[1:]) for y in (keys, values))
        if cache is not None:
            cache = write_prompt(cache, index, keys, values)
        return cache, (keys, values)

    def read(self, cache: KVCache, sources: Sources) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of some layers, heads side by side."""
        return read(cache, sources, width=self.shown.shape[1])


def forward(  # noqa: PLR0913 (arrays of one pass, then its options)
    decoder: Decoder,
    params: Params,
    x: Float[Array, "batch token dim"],
    places: Places,
    cache: Any,
    *,
    slots: Slots,
    attention: Attention,
    start: Depth,
    stop: Depth,
    others: Others | None = None,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
    unroll: bool = False,
) -> tuple[Float[Array, "batch token dim"], Any]:
    """Returns the states after layers `[start, stop)`, and the cache with the K/V made there.

    Each layer is queries, keys and values, attention, output projection and MLP. A traced `stop`
    equal to `start` runs nothing and copies nothing. (A cache that goes through `lax.cond` is
    copied whole.)

    Args:
      decoder: the model.
      params: its parameters.
      x: states at depth `start`.
      places: what the decoder made of their positions.
      cache: carried whole; donate it. None where `attention` needs none.
      slots: the tokens that run.
      attention: where keys and values go, and what is seen of them.
      start: first layer.
      stop: layer to stop before.
      others: K/V of tokens that do not run; None: projected from their states.
      layers: each layer's parameters apart, see `split_layers`.
      bounds: static depths between which traced ones lie, for `layers`.
      unroll: runs static layers one after the other, without a loop.
    """
    config, first = decoder.config, decoder.config.kv_own
    states, places = flat(x), flat(places)
    slot_places = jax.tree.map(slots.pack, places)
    packed = slots.pack(states) if slots.blocked else None
    # Of all layers: what each writes there and attends to in its place, the next overwrites.
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
            # Read once where all layers read the same: nothing is written from here on.
            same = attention.read(cache, sources[0]) if len({*sources}) == 1 else None
            carry = over(above, (*carry,), start=at_least(start, first), stop=at_least(stop, first))
    return carry[0].reshape(x.shape), cache


def _run_layer(  # noqa: PLR0913 (arrays of one layer)
    decoder: Decoder,
    slots: Slots,
    attention: Attention,
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

    Without `seen` the layer makes the keys and values that it reads. Three loops over blocks, since
    attention has blocks of its own.
    """
    states, packed, queries = carry
    source = slots.pack(states) if packed is None else packed
    alone = others is not None and seen is None
    keys_values: Any = ()
    if others is not None and alone:
        keys_values = others(layer, index)
    elif seen is None:
        keys_values = keys_values_of(decoder, layer, states, places)

    def project(start: Any, size: Any, carry: Any) -> Any:
        queries, *keys_values = carry
        block, at = _block(source, start, size), _block(slot_places, start, size)
        queries = _put_block(queries, decoder.queries(layer, block, at), start)
        if alone:
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
        new = decoder.finish_layer(layer, block, mixed)
        states = slots.put(states, new, start, size)
        return states, None if packed is None else _put_block(packed, new, start)

    states, packed = slots.by_blocks(finish, (states, packed))
    return states, packed, attended if slots.blocked else None, cache


def _block(leaves: Any, start: Any, size: Any) -> Any:
    """Returns `size` slots from `start` on; all of them where there is no start."""
    if start is None:
        return leaves
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), leaves)


def _put_block(leaf: jax.Array | None, new: jax.Array, start: Any) -> jax.Array:
    """Returns an array of slots with those from `start` on replaced; all of them without one."""
    if leaf is None or start is None:
        return new
    return jax.lax.dynamic_update_slice_in_dim(leaf, new, start, 0)


def _make_once(
    decoder: Decoder,
    params: Params,
    cache: Any,
    states: Float[Array, "token dim"],
    places: Places,
    put: Callable[..., tuple[Any, Any]],
    *,
    start: Depth,
    stop: Depth,
) -> Any:
    """Returns the cache with K/V that layers from `kv_own` on make of the states before them all.

    Where layers [start, stop) lie across that depth; elsewhere the cache stays as it is.
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
    places: Places,
    put: Callable[..., tuple[KVCache, Any]],
    *,
    start: Depth,
    stop: int,
    layers: tuple[LayerParams, ...] | None = None,
    bounds: tuple[int, int] | None = None,
) -> tuple[KVCache, int | Int[Array, ""]]:
    """Returns the cache with K/V that layers [start, stop) make of frozen states, and how many did.

    Args:
      decoder: the model.
      params: its parameters.
      cache: of all rows.
      x: states that no longer change.
      places: what the decoder made of their positions.
      put: writes a layer's K/V: `Attention.write`, for instance of `write_at`.
      start: first layer.
      stop: layer to stop before.
      layers: each layer's parameters apart, where they are.
      bounds: static, between which a traced `start` lies.
    """
    config = decoder.config

    def body(index: jax.Array, layer: LayerParams, cache: KVCache) -> KVCache:
        return put(cache, index, *keys_values_of(decoder, layer, flat(x), flat(places)))[0]

    own = {"start": at_most(start, config.kv_own), "stop": min(stop, config.kv_own)}
    cache = over_layers(decoder, params, body, cache, layers=layers, bounds=bounds, **own)
    cache = _make_once(decoder, params, cache, flat(x), flat(places), put, start=start, stop=stop)
    if not config.kv_source:
        return cache, stop - start
    counts = [len(config.kv_made(depth, stop)) for depth in range(config.num_layers + 1)]
    return cache, jnp.asarray(counts, jnp.int32)[start]


def write_at(at: dict[str, Any]) -> Callable[..., tuple[KVCache, None]]:
    """Returns `Attention.write` at some positions of some rows of a cache."""
    batch, width = at["positions"].shape

    def put(cache: KVCache, index: Any, keys: jax.Array, values: jax.Array) -> tuple[KVCache, None]:
        made = (y.reshape(batch, width, *y.shape[1:]) for y in (keys, values))
        return write(cache, index, *made, **at), None

    return put


def shows_from(config: DecoderConfig, index: Any) -> jax.Array:
    """Returns the depth that a token must exceed to be seen in a layer, under `kv="drop"`."""
    return jnp.minimum(index, config.kv_complete)


def at_most(depth: Depth, bound: int) -> Depth:
    """Returns the smaller of a depth and a bound, static if both are."""
    return min(depth, bound) if isinstance(depth, int) else jnp.minimum(depth, bound)


def at_least(depth: Depth, bound: int) -> Depth:
    """Returns the larger of a depth and a bound, static if both are."""
    return max(depth, bound) if isinstance(depth, int) else jnp.maximum(depth, bound)
