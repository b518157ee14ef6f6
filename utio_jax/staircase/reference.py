# SPDX-License-Identifier: Apache-2.0
"""Full-width programs: the dense baseline, and the reference for the early-exit pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import side_by_side
from utio_jax.attention.mixing import NOWHERE, Mixer, mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import (
    Decoder,
    HasKVMaps,
    Inputs,
    LayerParams,
    Params,
    PositionEncoding,
    apply_exit_lens,
    check_own_kv,
    finish_layer,
    has_exit_lens,
)
from utio_jax.core.layer import contain_overflow, keys_values_of, layer_at

FrozenKV = Literal["propagate", "drop", "full", "mapped"]
"""K/V of a token in layers deeper than its exit: projected from its frozen state, none, K/V of its
full-depth states, or mapped from its frozen state by an affine map per layer
(`utio_jax.prompts.maps`). Of a looped model `"propagate"` shows in later turns the K/V of the last
turn that the token ran."""

Sees = Callable[[int, Mixer, jax.Array, jax.Array], jax.Array]
"""Maps a layer, its mixer, and the positions of queries and keys to the mask of visible keys."""


def everything(
    index: int,
    mix: Mixer,
    positions: Int[Array, "batch token"],
    key_positions: Int[Array, "batch token"],
) -> Bool[Array, "batch token token"]:
    """Returns the mask of dense attention: all that a layer shows."""
    return mix.visible(positions, key_positions)


def check_kv(
    kv: str, allowed: tuple[str, ...] = get_args(FrozenKV), *, decoder: Decoder | None = None
) -> str:
    """Returns `kv`; raises ValueError if it is not `allowed` or the decoder does not support it."""
    if kv not in allowed:
        raise ValueError(f"Wanted kv to be one of {', '.join(map(repr, allowed))}. Got kv={kv!r}.")
    if kv == "mapped" and decoder is not None and decoder.config.shares_kv:
        raise ValueError(
            'Wanted a decoder whose layers all have keys and values of their own for kv="mapped". '
            "Got one whose upper layers read those made below: of tokens that stop there nothing "
            'is missing. Use kv="propagate".'
        )
    if kv == "mapped" and decoder is not None and not isinstance(decoder, HasKVMaps):
        raise ValueError(
            'Wanted a decoder with KV maps for kv="mapped". Got one without. Fit some: utio-jax '
            "fit-prompt; and load them: model.with_kv_maps(FILE), or with_kv_maps(decoder, params, "
            "maps)."
        )
    return kv


def positions_of(
    token_ids: Inputs, lengths: Int[Array, " batch"]
) -> tuple[Int[Array, "batch token"], Bool[Array, "batch token"]]:
    """Returns positions 0, 1, ... of right-padded rows, and a mask of the real tokens."""
    batch, width = token_ids.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    return positions, positions < lengths[:, None]


def dense_keys_values(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "batch token dim"],
    places: PositionEncoding,
) -> tuple[jax.Array, jax.Array]:
    """Projects one layer's keys and values of every token, `[batch, token, kv_head, head_dim]`."""
    made = keys_values_of(decoder, layer, flat(x), flat(places))
    keys, values = (y.reshape(*x.shape[:2], *y.shape[1:]) for y in made)
    return keys, values


def apply_layer(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "batch token dim"],
    places: PositionEncoding,
    mix: Mixer,
    visible: Bool[Array, "#batch token token"],
    keys_values: tuple[jax.Array, jax.Array] | None = None,
) -> Float[Array, "batch token dim"]:
    """Returns one dense layer's output for every token.

    `keys_values` are the K/V to attend to; None: the layer projects them from `x`.
    """
    keys, values = keys_values or dense_keys_values(decoder, layer, x, places)
    queries = decoder.queries(layer, flat(x), flat(places))
    attended = mix(queries.reshape(*x.shape[:2], *queries.shape[1:]), keys, values, visible)
    return finish_layer(decoder, layer, flat(x), flat(attended)).reshape(x.shape)


def read_side_by_side(rows: Iterable[tuple[jax.Array, ...]]) -> tuple[jax.Array, jax.Array]:
    """Concatenates the keys and values of some layers along the head axis."""
    keys, values = (side_by_side(arrays) for arrays in zip(*rows, strict=True))
    return keys, values


def dense_states(
    decoder: Decoder,
    params: Params,
    token_ids: Inputs,
    lengths: Int[Array, " batch"],
    *,
    depths: tuple[int, ...],
    start: tuple[int, Float[Array, "batch token dim"]] | None = None,
) -> tuple[Float[Array, "batch token dim"], ...]:
    """Returns every token's state after each of `depths`, by the plain full-width program.

    `start` holds a number of layers and the states after them; None: the embeddings.

    Raises:
      ValueError: a depth is not one of the model's, or below that of `start`; or `start` is given
        for a decoder that shares K/V between layers (`kv_source`).
    """
    if start is not None:
        check_own_kv(decoder, what="a pass that begins at later states")
    config, least = decoder.config, (start or (0,))[0]
    most = config.num_layers
    if wrong := [depth for depth in depths if not least <= depth <= most]:
        raise ValueError(f"Wanted depths from {least} to {most} layers. Got {wrong}.")
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    key_positions = jnp.where(valid, positions, NOWHERE)
    made: dict[int, tuple[jax.Array, ...]] = {}  # Keys and values, of layers that share them.

    def run_one(index: Any, x: jax.Array) -> jax.Array:
        read = None
        if config.shares_kv:
            for row in config.kv_made(index, index + 1):
                made[row] = dense_keys_values(decoder, layer_at(decoder, params, row), x, places)
            read = read_side_by_side(made[row] for row in config.kv_read(index))
        mix, layer = mixer_at(decoder, index), layer_at(decoder, params, index)
        visible = mix.visible(positions, key_positions)
        return apply_layer(decoder, layer, x, places, mix, visible, read)

    done, x = start or (0, decoder.embed(params, token_ids, positions))
    states, branches = {0: x}, [depth for depth in depths if depth in config.branch_depths]
    if config.shares_kv:
        for index in range(max(config.kv_own if d in branches else d for d in depths)):
            states[index + 1] = run_one(index, states[index])
    else:
        for depth in sorted({*depths}):
            states[depth] = x = jax.lax.fori_loop(done, depth, run_one, x)
            done = depth
    for depth in branches:
        x = states[config.kv_own]
        for index in range(*config.upper_layers(depth)):
            x = run_one(index, x)
        states[depth] = x
    return tuple(states[depth] for depth in depths)


def reference_states(
    decoder: Decoder,
    params: Params,
    token_ids: Inputs,
    lengths: Int[Array, " batch"],
    depths: Int[Array, "batch token"],
    *,
    kv: FrozenKV = "propagate",
    sees: Sees = everything,
) -> Float[Array, "batch token dim"]:
    """Returns the LM head's input of tokens with given depths; slow reference implementation.

    The result is each token's state at its own depth, mapped if the decoder `HasExitLens`. All
    layers run on all tokens under masks. Token `i` changes only while `layer < depths[i]`. `kv`
    decides its K/V in deeper layers; those of later turns of a looped model are under
    `"propagate"` those of its last turn. Under `"drop"` a recurrent state
    (`utio_jax.core.decoder.Mixes`) skips the token. A token with a branch's depth
    (`DecoderConfig.branches`) runs that branch's layers above `kv_own`. Differentiable.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row; all others are padding and masked.
      depths: each token's decided depth, in layers; 0 is the embedding.
      kv: `"propagate"`, `"drop"`, `"full"`, or `"mapped"` for a decoder that `HasKVMaps`.
      sees: maps a layer, its mixer and the positions of queries and keys to the mask
        `[batch, query, key]`; by default dense attention, which full-depth states of `kv="full"`
        always use.
    """
    check_kv(kv, decoder=decoder)
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    made: dict[int, tuple[jax.Array, ...]] = {}
    config = decoder.config
    source = x  # Input of the K/V projections; differs from x only under "full".
    in_branch = jnp.isin(depths, jnp.asarray(config.branch_depths, jnp.int32))
    for index in range(config.num_layers + sum(config.branches)):
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        for row in config.kv_made(index, index + 1):
            own = layer_at(decoder, params, row)
            made[row] = dense_keys_values(decoder, own, source, places)
            if kv == "propagate" and row >= config.turn_layers:
                ran, before = (row < depths)[..., None, None], made[row - config.turn_layers]
                pairs = zip(made[row], before, strict=True)
                made[row] = tuple(jnp.where(ran, *pair) for pair in pairs)
            if kv == "mapped":  # Each token by the maps of its own exit.
                assert isinstance(decoder, HasKVMaps)
                for stop in [stop for stop in decoder.stops if stop <= row]:
                    shown = decoder.map_keys_values(params, x, stop)[:, :, row - stop]
                    keys = decoder.rotate_keys(own, shown[:, :, 0], places)
                    mapped = contain_overflow(keys, shown[:, :, 1])
                    pairs, there = zip(mapped, made[row], strict=True), depths == stop
                    made[row] = tuple(jnp.where(there[..., None, None], *pair) for pair in pairs)
        read = read_side_by_side(made[row] for row in config.kv_read(index))
        if index < config.num_layers:
            runs = valid & (index < depths) & ~(in_branch & (index >= config.kv_own))
        else:
            runs = valid & (depths == config.depth_of_branch_layer(index))
        # A token that has exited shows only the K/V made before.
        there = valid & (min(index, config.kv_complete) < depths)
        key_positions = jnp.where(there if kv == "drop" else valid, positions, NOWHERE)
        seen = sees(index, mix, positions, key_positions)
        new = apply_layer(decoder, layer, x, places, mix, seen, read)
        if kv == "full":
            visible = mix.visible(positions, key_positions)
            source = apply_layer(decoder, layer, source, places, mix, visible, read)
        x = jnp.where(runs[..., None], new, x)
        source = source if kv == "full" else x
    read = x
    for depth in decoder.config.exits:
        if has_exit_lens(decoder, depth):
            at_exit = (depths == depth)[..., None]
            read = jnp.where(at_exit, apply_exit_lens(decoder, params, x, depth), read)
    return read
