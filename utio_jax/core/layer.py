# SPDX-License-Identifier: Apache-2.0
"""One transformer layer on any tokens: query, mix, output projection and MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from utio_jax.core.decoder import Decoder, LayerParams, Params, Places


def layer_at(decoder: Decoder, params: Params, index: int | jax.Array) -> LayerParams:
    """Returns one layer's parameters.

    Loops index the stack rather than scan over `layers[:depth]`: the slice copies the weights on
    every call (28 ms against 4 for 6 of 12 layers), indexing reads one layer where it is.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
        decoder.layers(params),
    )


def keys_values_of(
    decoder: Decoder, layer: LayerParams, x: Float[Array, "*lead dim"], places: Places
) -> tuple[Float[Array, "*lead kv_head head_dim"], Float[Array, "*lead kv_head head_dim"]]:
    """Returns a layer's keys and values; a state that overflowed spoils nobody who cannot see it.

    A weight of zero times an infinite value is NaN: padding or a later token, whose states overflow
    in float16, would reach the tokens before it through a mask that hides it. So values that are
    not finite become 0, and their keys NaN: what sees the token gets NaN, as it should be.
    """
    keys, values = decoder.keys_values(layer, x, places)
    finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)


def run_layer(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "slot dim"],
    places: Places,
    mix: Callable[[jax.Array], jax.Array],
) -> Float[Array, "slot dim"]:
    """Returns one layer's output for some tokens, which need not be those that they look at.

    What a layer is, everywhere in this library: tokens ask (`Decoder.queries`), something answers
    (`mix`: attention over keys and values that the caller has, see `utio_jax.attention.mixing`),
    and the answer is worked in (`Decoder.finish_layer`).

    Args:
      decoder: the model.
      layer: one layer's parameters.
      x: the tokens' states, packed: one 2D product beats a batched 3D one 1.4 times on CPU.
      places: what the decoder made of their positions.
      mix: maps their queries `[slot, head, head_dim]` to what they attended to, of that shape.
    """
    return decoder.finish_layer(layer, x, mix(decoder.queries(layer, x, places)))
