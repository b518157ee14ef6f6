# SPDX-License-Identifier: Apache-2.0
"""The definition of layer skipping: a full-width program under masks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import NOWHERE, mixer_at
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import layer_at
from utio_jax.staircase.reference import FrozenKV, apply_layer, positions_of


def reference_layer_sets(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    runs: Bool[Array, "layer batch token"],
    *,
    kv: FrozenKV = "propagate",
) -> Float[Array, "batch token dim"]:
    """Returns every token's last state where each runs a set of layers. Slow and obvious.

    Where a token does not run a layer, its state passes by unchanged, and others see in that layer
    the K/V of this state (`"propagate"`), or nothing of it (`"drop"`).
    """
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    for index in range(decoder.config.num_layers):
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        runs_here = valid & runs[index]
        key_positions = jnp.where(runs_here if kv == "drop" else valid, positions, NOWHERE)
        new = apply_layer(decoder, layer, x, places, mix, mix.visible(positions, key_positions))
        x = jnp.where(runs_here[..., None], new, x)
    return x
