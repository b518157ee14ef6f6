# SPDX-License-Identifier: Apache-2.0
"""`run_segment`, of which all decoding is made: layers [start, stop) on given states, writing K/V.

`prefill` and `decode_step` are its two plainest uses: every layer, on the prompt or on one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, fill, read, write
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, LayerParams, Params, Places
from utio_jax.core.layer import Depth, keys_values_of, over_layers, run_layer
from utio_jax.core.pytrees import pytree

Layers = tuple[LayerParams, ...] | None
"""Each layer's parameters apart, see `utio_jax.core.layer.split_layers`; None: the stack's."""

Bounds = tuple[int, int] | None
"""Static depths between which the traced ones of a pass lie; None: anywhere."""

Memory = TypeVar("Memory")


@pytree
class Block:
    """Where the tokens of a pass are, computed once for all its layers.

    A pass may be of some rows alone, packed: states, keys and values then lead with these, and the
    cache stays whole.

    Attributes:
      positions: in their rows; each is also the token's slot in the cache.
      valid: tokens that exist. The others are padding: computed, never written, seen by nobody.
      places: what the decoder made of the positions.
      rows: of the cache that the block's rows are, each once; None: all, in order. One that only
        fills the block up may be any, if none of its tokens is valid.
    """

    positions: Int[Array, "batch token"]
    valid: Bool[Array, "batch token"]
    places: Places
    rows: Int[Array, " batch"] | None = None


def block_at(
    decoder: Decoder,
    positions: Int[Array, "batch token"],
    valid: Bool[Array, "batch token"],
    *,
    rows: Int[Array, " batch"] | None = None,
) -> Block:
    """Returns the block of tokens at `positions`, of some `rows` of the cache or of all."""
    places = decoder.encode_positions(positions)
    return Block(positions=positions, valid=valid, places=places, rows=rows)


def run_segment(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    block: Block,
    *,
    start: Depth,
    stop: Depth,
    width: int,
    runs: Bool[Array, "batch token"] | None = None,
    shown: Int[Array, "row slot"] | None = None,
    layers: Layers = None,
    bounds: Bounds = None,
) -> tuple[Float[Array, "batch token dim"], KVCache]:
    """Returns the states after layers [start, stop), and the cache with these layers' K/V.

    All K/V of earlier positions must be valid in these layers. With a traced `stop` equal to
    `start` nothing runs and nothing is copied: that is how a segment is skipped on the device. (A
    cache that goes through `lax.cond` is copied whole.)

    Args:
      decoder: the model.
      params: its parameters.
      cache: carried whole; donate it.
      x: states at depth `start`, of the block's rows.
      block: the tokens' places, and rows, where they are not all.
      start: first layer.
      stop: layer to stop before.
      width: slots to attend over; more than every valid position. Static.
      runs: valid tokens whose state changes; the others are frozen, and their K/V projected from
        the frozen state. None means all.
      shown: layers at which each slot of each row of the cache may be seen, for `kv="drop"`; the
        tokens in `x` themselves included. None means all.
      layers: each one's parameters apart, where they are.
      bounds: of traced `start` and `stop`, for `layers`.
    """
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (x.shape[0], width))
    if shown is not None and block.rows is not None:
        shown = shown.at[block.rows].get(mode="clip")

    def attend_cached(
        cache: KVCache, index: jax.Array, keys: jax.Array, values: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        cache = _written(cache, index, keys, values, block)
        mix = mixer_at(decoder, index)
        visible = mix.visible(block.positions, slots)
        if shown is not None:
            visible &= (shown[:, :width] > index)[:, None, :]
        keys, values = read(cache, index, width=width, rows=block.rows)
        return mix(queries, keys, values, visible), cache

    return run_layers(
        decoder,
        params,
        cache,
        x,
        block,
        attend_cached,
        start=start,
        stop=stop,
        runs=runs,
        layers=layers,
        bounds=bounds,
    )


def run_layers(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    memory: Memory,
    x: Float[Array, "batch token dim"],
    block: Block,
    attention: Callable[..., tuple[jax.Array, Memory]],
    *,
    start: Depth,
    stop: Depth,
    runs: Bool[Array, "batch token"] | None = None,
    layers: Layers = None,
    bounds: Bounds = None,
) -> tuple[Float[Array, "batch token dim"], Memory]:
    """Returns the states after layers [start, stop), and what attention made of its memory.

    Args:
      decoder: the model.
      params: its parameters.
      memory: of attention: a cache, or anything else.
      x: states at depth `start`.
      block: the tokens' places.
      attention: maps the memory, a layer's index, and its keys, values and queries, each by row, to
        the attended values and the memory.
      start: first layer.
      stop: layer to stop before.
      runs: valid tokens whose state changes. None means all.
      layers: each one's parameters apart, where they are.
      bounds: of traced `start` and `stop`, for `layers`.
    """
    runs = block.valid if runs is None else runs & block.valid

    def rows(y: jax.Array) -> jax.Array:
        return y.reshape(*x.shape[:2], *y.shape[1:])

    def run_one(
        index: jax.Array, layer: LayerParams, carry: tuple[jax.Array, Memory]
    ) -> tuple[jax.Array, Memory]:
        x, memory = carry
        states, places = flat(x), flat(block.places)
        keys, values = (rows(y) for y in keys_values_of(decoder, layer, states, places))

        def attend(queries: jax.Array) -> jax.Array:
            nonlocal memory
            attended, memory = attention(memory, index, keys, values, rows(queries))
            return flat(attended)

        new = rows(run_layer(decoder, layer, states, places, attend))
        return jnp.where(runs[:, :, None], new, x), memory

    return over_layers(
        decoder,
        params,
        run_one,
        (x, memory),
        start=start,
        stop=stop,
        layers=layers,
        bounds=bounds,
    )


def _written(
    cache: KVCache, layer: jax.Array, keys: jax.Array, values: jax.Array, block: Block
) -> KVCache:
    positions, valid, rows = block.positions, block.valid, block.rows
    return write(cache, layer, keys, values, positions=positions, valid=valid, rows=rows)


def prefill(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Returns the logits after each prompt, and the cache filled with the prompts at full depth.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded prompts, no wider than the cache.
      lengths: tokens of each, at least 1.
      cache: an empty cache; donate it.

    Raises:
      ValueError: the prompts are wider than the cache.
    """
    batch, width = token_ids.shape
    if width > cache.num_slots:
        raise ValueError(
            f"Wanted prompts within the cache's {cache.num_slots} slots. Got prompts of {width} "
            "tokens. Make a longer cache, or cut the prompts."
        )
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], (batch, width))
    block = block_at(decoder, positions, positions < lengths[:, None])
    x = decoder.embed(params, token_ids, positions)
    with jax.named_scope("prefill"):
        x, cache = run_segment(
            decoder, params, cache, x, block, start=0, stop=decoder.config.num_layers, width=width
        )
    last = jax.vmap(lambda row, length: row[length - 1])(x, lengths)
    return decoder.unembed(params, last).astype(jnp.float32), fill(cache, lengths)


def decode_step(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, " batch"],
    cache: KVCache,
    *,
    active: Bool[Array, " batch"] | None = None,
    width: int | None = None,
    layers: Layers = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Returns the logits after one more token per row, at full depth.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: each row's next token; its position is `cache.lengths`.
      cache: what came before; donate it.
      active: rows that take part; the others' logits mean nothing. None means all.
      width: slots to attend over, more than every active row's length; None means all slots.
        Static.
      layers: each one's parameters apart, where they are.
    """
    active = jnp.ones(token_ids.shape, jnp.bool_) if active is None else active
    positions = cache.lengths[:, None]
    block = block_at(decoder, positions, active[:, None])
    x = decoder.embed(params, token_ids[:, None], positions)
    x, cache = run_segment(
        decoder,
        params,
        cache,
        x,
        block,
        start=0,
        stop=decoder.config.num_layers,
        width=width or cache.num_slots,
        layers=layers,
    )
    logits = decoder.unembed(params, x[:, 0]).astype(jnp.float32)
    return logits, fill(cache, cache.lengths + active)
