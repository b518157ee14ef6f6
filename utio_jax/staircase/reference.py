# SPDX-License-Identifier: Apache-2.0
"""Full-width programs: the plain model, and the oracle that says what a staircase must compute."""

from __future__ import annotations

from operator import itemgetter
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.products import attend, visible_keys
from utio_jax.attention.vertical_slash import SparseQueries
from utio_jax.core.arrays import flat, keys_values_of, layer_at
from utio_jax.core.decoder import Decoder, LayerParams, Params, Places, read_exit, reads_exits

FrozenKV = Literal["propagate", "drop", "full"]
"""What others see of a token at layers beyond its depth: K/V projected from its frozen state,
nothing, or the K/V of its own full-depth states."""

# Above every position: a key there is visible to no query.
_NOWHERE = jnp.iinfo(jnp.int32).max


def check_kv(kv: str, allowed: tuple[str, ...] = get_args(FrozenKV)) -> str:
    """Returns `kv`, once it is known to be one of `allowed`.

    Raises:
      ValueError: it is not.
    """
    if kv not in allowed:
        raise ValueError(f"Wanted kv to be one of {', '.join(map(repr, allowed))}. Got kv={kv!r}.")
    return kv


def apply_layer(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "batch token dim"],
    places: Places,
    visible: Bool[Array, "#batch token token"],
) -> Float[Array, "batch token dim"]:
    """Returns one dense layer's output for every token."""
    # One 2D product [batch * token, dim] beats a batched 3D one 1.4 times on CPU.
    packed, packed_places = flat(x), flat(places)
    rows = lambda y: y.reshape(*x.shape[:2], *y.shape[1:])  # noqa: E731
    keys, values = keys_values_of(decoder, layer, packed, packed_places)
    queries = decoder.queries(layer, packed, packed_places)
    cap = decoder.config.attention_softcap
    attended = attend(rows(queries), rows(keys), rows(values), visible, softcap=cap)
    return rows(decoder.finish_layer(layer, packed, flat(attended)))


def dense_states(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    *,
    depths: tuple[int, ...],
) -> tuple[Float[Array, "batch token dim"], ...]:
    """Returns every token's state after each of `depths`, by the plain full-width program."""
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    key_positions = jnp.where(valid, positions, _NOWHERE)

    def run_layer(index: jax.Array, x: jax.Array) -> jax.Array:
        visible = visible_keys(positions, key_positions, decoder.config.window_at(index))
        return apply_layer(decoder, layer_at(decoder, params, index), x, places, visible)

    x = decoder.embed(params, token_ids, positions)
    states, done = [], 0
    for depth in depths:
        x = jax.lax.fori_loop(done, depth, run_layer, x)
        states.append(x)
        done = depth
    return tuple(states)


def positions_of(
    token_ids: Int[Array, "batch token"], lengths: Int[Array, " batch"]
) -> tuple[Int[Array, "batch token"], Bool[Array, "batch token"]]:
    """Returns positions 0, 1, ... of right-padded rows, and which tokens are real."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
    return positions, positions < lengths[:, None]


def oracle(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    depths: Int[Array, "batch token"],
    *,
    kv: FrozenKV = "propagate",
    sparse: SparseQueries | None = None,
) -> Float[Array, "batch token dim"]:
    """Returns what the head reads of each token. Slow and obvious: this defines the semantics.

    That is the token's state at its own depth, mapped where the decoder `ReadsExits`. All layers
    run on all tokens under masks. Token `i` changes only while `layer < depths[i]`; at the layers
    beyond, the others see of it what `kv` says. Differentiable.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row; the rest is padding, seen by nobody.
      depths: each token's decided depth, in layers; 0 is the embedding.
      kv: `"propagate"`, `"drop"` or `"full"`.
      sparse: who sees only a history in which layer: leaves lead with `[layer]`. None: nobody. K/V
        of full-depth states (`kv="full"`) are made densely all the same.
    """
    check_kv(kv)
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    source = x  # What K/V are projected from; differs from x only under "full".
    for index in range(decoder.config.num_layers):
        layer = layer_at(decoder, params, index)
        runs = valid & (index < depths)
        shown = runs if kv == "drop" else valid
        window, cap = decoder.config.window_at(index), decoder.config.attention_softcap
        key_positions = jnp.where(shown, positions, _NOWHERE)
        visible = seen = visible_keys(positions, key_positions, window)
        if sparse is not None:
            here = jax.tree.map(itemgetter(index), sparse)
            history = here.visible(positions, key_positions, window)
            seen = jnp.where(here.sparse[..., None], history, visible)
        keys, values = keys_values_of(decoder, layer, source, places)
        attended = attend(decoder.queries(layer, x, places), keys, values, seen, softcap=cap)
        x = jnp.where(runs[..., None], decoder.finish_layer(layer, x, attended), x)
        source = apply_layer(decoder, layer, source, places, visible) if kv == "full" else x
    read = x
    for depth in decoder.config.exits:
        if reads_exits(decoder, depth):
            at_exit = (depths == depth)[..., None]
            read = jnp.where(at_exit, read_exit(decoder, params, x, depth), read)
    return read
