# SPDX-License-Identifier: Apache-2.0
"""Segments of layers over hidden states, with K/V written to the cache: prefill, decode step."""

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
"""Parameters of each layer, see `utio_jax.core.layer.split_layers`; None: those of the stack."""

Attend = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps a layer's index and its queries, by row, to their attention output."""

Attention = Callable[[KVCache, Sources], Attend]
"""Maps the cache, and the layers whose K/V are read, to an `Attend`."""


class Span(TypedDict):
    """Layers `[start, stop)` of a pass, as `utio_jax.core.layer.over_layers` takes them.

    A traced `stop` equal to `start` runs nothing, and copies nothing. `bounds` are static limits of
    traced depths, needed with `layers`.
    """

    start: Depth
    stop: Depth
    layers: NotRequired[Layers]
    bounds: NotRequired[tuple[int, int] | None]


@pytree
class Block:
    """Positions of the tokens of a pass, computed once for all its layers.

    Attributes:
      positions: token positions within each row, which are also slots in the cache.
      valid: mask of real tokens. All others are padding: computed, never written or attended to.
      places: the decoder's encoding of the positions.
      rows: rows of the cache that the block's rows map to, each once; None: all, in order. A
        padding row, without valid tokens, may map to any row. The cache is passed whole.
    """

    positions: Int[Array, "batch token"]
    valid: Bool[Array, "batch token"]
    places: PositionEncoding
    rows: Int[Array, " batch"] | None = None

    @property
    def at(self) -> dict[str, Any]:
        """Target of the block's K/V, as arguments of `utio_jax.attention.cache.write`."""
        return {"positions": self.positions, "valid": self.valid, "rows": self.rows}


def block_at(
    decoder: Decoder,
    positions: Int[Array, "batch token"],
    valid: Bool[Array, "batch token"],
    *,
    rows: Int[Array, " batch"] | None = None,
) -> Block:
    """Returns the block of tokens at `positions`, in some `rows` of the cache or in all."""
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
    """Runs some layers; returns hidden states, and the cache with the K/V of these layers.

    K/V of all earlier positions must be valid in these layers. A traced `stop` equal to `start`
    skips a segment on the device. (`lax.cond` would copy the whole cache.)

    Args:
      decoder: the model.
      params: model parameters.
      cache: K/V cache, passed whole; donate it.
      x: hidden states at depth `start`, of the block's rows.
      block: positions of the tokens.
      width: slots to attend over; more than every valid position. Static.
      runs: valid tokens that run the layers; K/V of all others are projected from their hidden
        states. None: all.
      shown: number of layers in which each slot of the cache is visible, for `kv="drop"`, tokens
        of `x` included. None: all.
      **span: the layers.
    """
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (x.shape[0], width))
    if shown is not None and block.rows is not None:
        shown = shown.at[block.rows].get(mode="clip")

    def attention(cache: KVCache, sources: Sources) -> Attend:
        seen = [read(cache, (source,), width=width, rows=block.rows) for source in sources]

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
    """Runs some layers with given attention; returns hidden states and the cache."""
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
    """K/V source for `forward`: new K/V are written to the cache before attention reads it."""

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
    """Dense prefill at full depth: returns the logits after right-padded prompts, and the cache.

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
    """Runs one token per active row at full depth; returns logits and the cache.

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
