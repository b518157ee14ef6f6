# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a layer see each other: causal or not, in a window, by softmax or otherwise.

One object per layer, so that executors, caches and decoding need not know of windows, caps or
other kinds of mixing. A `Decoder` mixes by softmax attention; one that has a method `mix` (see
`utio_jax.core.decoder.Mixes`) by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.products import attend, attend_counted, visible_keys, with_count
from utio_jax.core.decoder import Decoder, Mixes, own_mixing


@runtime_checkable
class Mixer(Protocol):
    """What one layer's queries make of keys and values."""

    @property
    def window(self) -> Int[Array, ""] | None:
        """Keys that a token may attend to, its own included; None: all."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token sees itself and earlier tokens alone."""
        ...

    def visible(
        self, query_positions: Int[Array, "*lead query"], key_positions: Int[Array, "*lead key"]
    ) -> Bool[Array, "*lead query key"]:
        """Returns which keys each query may see; one hidden from all lies at `NOWHERE`."""
        ...

    def prepare(self, values: Float[Array, "*lead kv_head head_dim"]) -> jax.Array:
        """Returns values made ready once for many calls of `mix_prepared`."""
        ...

    def mix_prepared(
        self, queries: jax.Array, keys: jax.Array, prepared: jax.Array, visible: jax.Array
    ) -> jax.Array:
        """Returns what `__call__` does, of values that went through `prepare`."""
        ...

    def __call__(
        self,
        queries: Float[Array, "*lead query head head_dim"],
        keys: Float[Array, "*lead key kv_head head_dim"],
        values: Float[Array, "*lead key kv_head head_dim"],
        visible: Bool[Array, "*#lead query key"],
    ) -> Float[Array, "*lead query head head_dim"]:
        """Returns what the queries attend to, over the visible keys of each."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Visibility:
    window: Int[Array, ""] | None
    causal: bool

    def visible(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        return visible_keys(query_positions, key_positions, self.window, causal=self.causal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxMixer(_Visibility):
    """Softmax attention; with a `softcap`, of scores `softcap * tanh(score / softcap)`."""

    softcap: float | None

    def prepare(self, values: jax.Array) -> jax.Array:
        return with_count(values)

    def mix_prepared(
        self, queries: jax.Array, keys: jax.Array, prepared: jax.Array, visible: jax.Array
    ) -> jax.Array:
        return attend_counted(queries, keys, prepared, visible, softcap=self.softcap)

    def __call__(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
    ) -> jax.Array:
        return attend(queries, keys, values, visible, softcap=self.softcap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMixer(_Visibility):
    """The decoder's own `mix`."""

    decoder: Mixes

    def prepare(self, values: jax.Array) -> jax.Array:
        return values

    def mix_prepared(
        self, queries: jax.Array, keys: jax.Array, prepared: jax.Array, visible: jax.Array
    ) -> jax.Array:
        return self.decoder.mix(queries, keys, prepared, visible)

    def __call__(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
    ) -> jax.Array:
        return self.decoder.mix(queries, keys, values, visible)


def mix_apart(
    mix: Mixer, queries: jax.Array, keys_values: Sequence[Sequence[jax.Array]], visible: jax.Array
) -> Float[Array, "*lead query head head_dim"]:
    """Returns what queries attend to where their heads read keys and values of several layers.

    The same as `mix` on these side by side, which would copy them: heads of one layer after the
    other are a product each.

    Args:
      mix: of the layer whose queries these are.
      queries: as many heads for each of the layers that are read, in order.
      keys_values: of each of these layers, `[..., key, kv_head, head_dim]`.
      visible: which keys each query may see.
    """
    heads = jnp.split(queries, len(keys_values), axis=-2)
    found = [
        mix(mine, keys, values, visible)
        for mine, (keys, values) in zip(heads, keys_values, strict=True)
    ]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-2)


def mixer_at(decoder: Decoder, index: int | jax.Array) -> Mixer:
    """Returns how the tokens of a layer see each other.

    Args:
      decoder: the model.
      index: of the layer, static or traced.
    """
    config = decoder.config
    window = config.window_at(index)
    mixing = own_mixing(decoder)
    if mixing is not None:
        return OwnMixer(window=window, causal=config.causal, decoder=mixing)
    return SoftmaxMixer(window=window, causal=config.causal, softcap=config.attention_softcap)
