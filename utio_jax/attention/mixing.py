# SPDX-License-Identifier: Apache-2.0
"""Mixing of a layer's tokens: causal or not, in a window, by softmax or otherwise.

One object per layer, so that executors, caches and decoding need not know of windows, caps or
other kinds of mixing. A `Decoder` mixes by softmax attention; one that has a method `mix` (see
`utio_jax.core.decoder.Mixes`) by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.products import attend, attend_counted, visible_keys, with_count
from utio_jax.core.decoder import Decoder, Mixes, own_mixing
from utio_jax.core.platform import here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer:
    """Mixing of keys and values by one layer's queries.

    Attributes:
      window: keys that a token may attend to, its own included; None: all.
      causal: whether a token sees itself and earlier tokens alone.
      softcap: of softmax attention, whose scores become `softcap * tanh(score / softcap)`.
      own: the decoder that mixes in its own way; None: softmax attention.
    """

    window: Int[Array, ""] | None
    causal: bool
    softcap: float | None = None
    own: Mixes | None = None

    def visible(
        self, query_positions: Int[Array, "*lead query"], key_positions: Int[Array, "*lead key"]
    ) -> Bool[Array, "*lead query key"]:
        """Returns the mask of keys for each query; a key at `NOWHERE` is hidden from all."""
        return visible_keys(query_positions, key_positions, self.window, causal=self.causal)

    def prepare(self, values: Float[Array, "*lead kv_head head_dim"]) -> jax.Array:
        """Returns values prepared once for many calls of `mix_prepared`."""
        return with_count(values) if self.own is None else values

    def mix_prepared(
        self, queries: jax.Array, keys: jax.Array, prepared: jax.Array, visible: jax.Array
    ) -> jax.Array:
        """Returns the result of `__call__` for values from `prepare`."""
        if self.own is not None:
            return self.own.mix(queries, keys, prepared, visible)
        return attend_counted(queries, keys, prepared, visible, softcap=self.softcap)

    def __call__(
        self,
        queries: Float[Array, "*lead query head head_dim"],
        keys: Float[Array, "*lead key kv_head head_dim"],
        values: Float[Array, "*lead key kv_head head_dim"],
        visible: Bool[Array, "*#lead query key"],
    ) -> Float[Array, "*lead query head head_dim"]:
        """Returns the mixed values over the visible keys of each query."""
        if self.own is not None:
            return self.own.mix(queries, keys, values, visible)
        return attend(queries, keys, values, visible, softcap=self.softcap)


def mix_apart(
    mix: Mixer, queries: jax.Array, keys_values: Sequence[Sequence[jax.Array]], visible: jax.Array
) -> Float[Array, "*lead query head head_dim"]:
    """Returns mixed values for queries whose heads read K/V of several layers.

    The same as `mix` on these side by side, which would copy them: each layer's heads are a
    product. `queries` have as many heads for each of the layers that are read, in order.
    """
    heads = jnp.split(queries, len(keys_values), axis=-2)
    mixed = [
        mix(queries_of_layer, keys, values, visible)
        for queries_of_layer, (keys, values) in zip(heads, keys_values, strict=True)
    ]
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=-2)


def causal_blocks(width: int) -> list[tuple[int, int]]:
    """Returns the blocks [start, stop) of a row's queries that attend together, at most 16.

    >>> from utio_jax.core.platform import compiling_for
    >>> with compiling_for("cpu", query_block=128):
    ...     causal_blocks(300)
    [(0, 128), (128, 256), (256, 300)]
    """
    block = max(here().query_block, -(-width // 16))
    return [(start, min(start + block, width)) for start in range(0, width, block)]


def mix_whole_rows(
    mix: Mixer, queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
) -> Float[Array, "*lead token head head_dim"]:
    """Returns the result of `mix` when queries and keys are all tokens of rows, in order.

    A causal block of queries needs the keys up to its end alone: half of all products.
    """
    blocks = causal_blocks(queries.shape[-3])
    if not mix.causal or len(blocks) == 1:
        return mix(queries, keys, values, visible)
    prepared = mix.prepare(values)
    mixed = [
        mix.mix_prepared(
            queries[..., start:stop, :, :],
            keys[..., :stop, :, :],
            prepared[..., :stop, :, :],
            visible[..., start:stop, :stop],
        )
        for start, stop in blocks
    ]
    return jnp.concatenate(mixed, axis=-3)


def mixer_at(decoder: Decoder, index: int | jax.Array) -> Mixer:
    """Returns the mixer of a layer, whose index is static or traced."""
    config = decoder.config
    return Mixer(
        window=config.window_at(index),
        causal=config.causal,
        softcap=config.attention_softcap,
        own=own_mixing(decoder),
    )
