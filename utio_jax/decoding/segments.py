# SPDX-License-Identifier: Apache-2.0
"""`run_segment`, of which all decoding is made: layers on given states, writing their K/V."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read
from utio_jax.attention.mixing import mix_apart, mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, LayerParams, Params, PositionEncoding
from utio_jax.core.layer import Depth
from utio_jax.core.pytrees import pytree
from utio_jax.staircase.forward import InPlace, Sources, forward, shows_from, write_at

Layers = tuple[LayerParams, ...] | None
"""Each layer's parameters apart, see `utio_jax.core.layer.split_layers`; None: the stack's."""

Attend = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps a layer's index and its queries, by row, to what they attended to."""

Attention = Callable[[KVCache, Sources], Attend]
"""Maps the cache and the layers whose keys and values are read to an `Attend`."""


class Span(TypedDict):
    """The layers `[start, stop)` of a pass, as `utio_jax.core.layer.over_layers` takes them.

    A traced `stop` equal to `start` runs nothing, and copies nothing; `bounds` are static depths
    between which traced ones lie, for `layers`.
    """

    start: Depth
    stop: Depth
    layers: NotRequired[Layers]
    bounds: NotRequired[tuple[int, int] | None]


@pytree
class Block:
    """Where the tokens of a pass are, computed once for all its layers.

    Attributes:
      positions: in their rows; each is also the token's slot in the cache.
      valid: tokens that exist. The others are padding: computed, never written or seen.
      places: what the decoder made of the positions.
      rows: of the cache that the block's rows are, each once; None: all, in order. One that only
        fills the block up may be any, if none of its tokens is valid. The cache stays whole.
    """

    positions: Int[Array, "batch token"]
    valid: Bool[Array, "batch token"]
    places: PositionEncoding
    rows: Int[Array, " batch"] | None = None

    @property
    def at(self) -> dict[str, Any]:
        """Where the cache takes their keys and values, see `utio_jax.attention.cache.write`."""
        return {"positions": self.positions, "valid": self.valid, "rows": self.rows}


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


def run_segment(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    block: Block,
    *,
    width: int,
    runs: Bool[Array, "batch token"] | None = None,
    shown: Int[Array, "row slot"] | None = None,
    **span: Unpack[Span],
) -> tuple[Float[Array, "batch token dim"], KVCache]:
    """Returns the states after some layers, and the cache with these layers' K/V.

    All K/V of earlier positions must be valid in these layers. A segment is skipped on the device
    by a traced `stop` equal to `start`. (A cache that goes through `lax.cond` is copied whole.)

    Args:
      decoder: the model.
      params: its parameters.
      cache: carried whole; donate it.
      x: states at depth `start`, of the block's rows.
      block: the tokens' places.
      width: slots to attend over; more than every valid position. Static.
      runs: valid tokens whose state changes; K/V of the others are projected from it. None: all.
      shown: layers at which each slot of each row of the cache may be seen, for `kv="drop"`, those
        of `x` included. None: all.
      **span: the layers.
    """
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (x.shape[0], width))
    if shown is not None and block.rows is not None:
        shown = shown.at[block.rows].get(mode="clip")

    def attention(cache: KVCache, sources: Sources) -> Attend:
        seen = [read(cache, (each,), width=width, rows=block.rows) for each in sources]

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix = mixer_at(decoder, index)
            visible = mix.visible(block.positions, slots)
            if shown is not None:
                visible &= (shown[:, :width] > shows_from(decoder.config, index))[:, None, :]
            return mix_apart(mix, queries, seen, visible)

        return attend

    return run_layers(decoder, params, cache, x, block, attention, runs=runs, **span)


def run_layers(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    block: Block,
    attention: Attention,
    *,
    runs: Bool[Array, "batch token"] | None = None,
    **span: Unpack[Span],
) -> tuple[Float[Array, "batch token dim"], KVCache]:
    """Returns the states after some layers, and the cache with the K/V made there."""
    runs = block.valid if runs is None else runs & block.valid
    return forward(
        decoder,
        params,
        x,
        block.places,
        cache,
        slots=InPlace(flat(runs)),
        attention=_Cached(block, attention),
        **span,
    )


@dataclasses.dataclass(frozen=True)
class _Cached:
    """Keys and values in a cache, which new tokens' join before they are read, for `forward`."""

    block: Block
    attention: Attention

    def write(
        self, cache: KVCache, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache, None]:
        return write_at(self.block.at)(cache, index, keys, values)

    def read(self, cache: KVCache, sources: Sources) -> Attend:
        return self.attention(cache, sources)

    def attend(self, index: Any, queries: jax.Array, seen: Attend) -> jax.Array:
        rows = queries.reshape(*self.block.positions.shape, *queries.shape[1:])
        return flat(seen(index, rows))


def prefill(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Returns the logits after right-padded prompts, and the cache filled with them, at full depth.

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
    return decoder.unembed(params, last).astype(jnp.float32), cache


def decode_step(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, " batch"],
    cache: KVCache,
    positions: Int[Array, " batch"],
    *,
    active: Bool[Array, " batch"] | None = None,
    width: int | None = None,
    layers: Layers = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Returns the logits after one more token per active row, and the cache, at full depth.

    A step attends over `width` slots, static; None: all.
    """
    active = jnp.ones(token_ids.shape, jnp.bool_) if active is None else active
    block = block_at(decoder, positions[:, None], active[:, None])
    x = decoder.embed(params, token_ids[:, None], positions[:, None])
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
    return decoder.unembed(params, x[:, 0]).astype(jnp.float32), cache
