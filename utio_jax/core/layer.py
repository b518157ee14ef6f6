# SPDX-License-Identifier: Apache-2.0
"""Layers of the stack: their parameters, safe keys and values."""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, LayerParams, Params, PositionEncoding, checked
from utio_jax.core.platform import here

Depth = int | Int[Array, ""]
"""A number of layers, static or traced."""

_SMALL = 2**16
"""Bytes of a layer below which a copy of it costs less than a program that is longer."""

_split: dict[tuple[Any, ...], tuple[LayerParams, ...]] = {}


def layer_at(decoder: Decoder, params: Params, index: int | jax.Array) -> LayerParams:
    """Returns one layer's parameters.

    Loops index the stack rather than scan over `layers[:depth]`: the slice copies the weights on
    every call (28 ms against 4 for 6 of 12 layers), indexing reads one layer where it is.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
        decoder.layers(params),
    )


def check_layers(decoder: Decoder, params: Params) -> None:
    """Raises ValueError if `decoder.layers` returns fewer layers than its config names."""
    stack, count = jax.eval_shape(decoder.layers, params), decoder.config.stack_layers
    # Layers that read the K/V of others have none to project; an index beyond a leaf reads its end.
    stacked = max((leaf.shape[:1] for leaf in jax.tree.leaves(stack)), default=(count,))
    if stacked < (count,):
        raise ValueError(
            f"Wanted {count} layers of {type(decoder).__name__}.layers, stacked along the first "
            f"axis of its leaves. Got {stacked[0] if stacked else 'leaves without axes'}."
        )


def split_layers(decoder: Decoder, params: Params) -> tuple[LayerParams, ...] | None:
    """Returns each layer's parameters as separate arrays, on platforms that decode faster so.

    On CPU and GPU a layer that is indexed out of the stack is copied before its matrix products
    read it: more than half of a decoding step at batch 1. These are a second copy, kept as long as
    the stack is. None if the stack is read in place (TPU), is spread over devices, or is small.
    Also None if the copy would take more than half of the device's free memory.
    """
    stack = decoder.layers(params)
    leaves = [leaf for leaf in jax.tree.leaves(stack) if isinstance(leaf, jax.Array)]
    count = decoder.config.stack_layers
    own = {id(leaf) for leaf in jax.tree.leaves(params)}
    kept = [leaf for leaf in leaves if id(leaf) in own]
    if (
        here().stack_in_place
        or not kept
        or len(leaves) != len(jax.tree.leaves(stack))
        or any(len(leaf.devices()) > 1 for leaf in leaves)
        or sum(leaf.nbytes for leaf in leaves) < count * _SMALL
    ):
        return None
    # The decoder computes everything that is not a parameter at every call.
    key = (count, *map(id, kept), *([] if len(kept) == len(leaves) else [decoder]))
    if key not in _split:
        if sum(leaf.nbytes for leaf in leaves) > _memory_left(leaves[0]) / 2:
            return None
        _split[key] = tuple(
            jax.tree.map(lambda leaf, i=index: leaf[i], stack) for index in range(count)
        )
        for leaf in kept:  # Of any leaf that is gone, another array may get the identity.
            weakref.finalize(leaf, _split.pop, key, None)
    return _split[key]


def _memory_left(array: jax.Array) -> float:
    """Returns the free bytes of an array's device; infinity if unknown (CPU)."""
    stats = array.devices().pop().memory_stats() or {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def keys_values_of(
    decoder: Decoder, layer: LayerParams, x: Float[Array, "*lead dim"], places: PositionEncoding
) -> tuple[Float[Array, "*lead kv_head head_dim"], Float[Array, "*lead kv_head head_dim"]]:
    """Returns a layer's keys and values; overflowed states affect only tokens that attend to them.

    A weight of zero times an infinite value is NaN: padding or a later token, whose states overflow
    in float16, would reach the tokens before it through a mask that hides it. So values that are
    not finite become 0, and their keys NaN: what sees the token gets NaN, as it should be.
    """
    heads = decoder.config.num_kv_heads, decoder.config.head_dim
    keys, values = (
        checked(decoder, "keys_values", part, *heads)
        for part in decoder.keys_values(layer, x, places)
    )
    finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)
