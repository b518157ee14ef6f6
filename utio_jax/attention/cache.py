# SPDX-License-Identifier: Apache-2.0
"""The K/V cache: one array per kind for all layers, carried whole and written before it is read.

A token's slot is its position. What lies after a row's last token does not count: padding of a
ragged batch, rejected drafts, zeros. It is never cleared, since a slot is always written before a
query that could see it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import DecoderConfig
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static

Spans = tuple[tuple[int | Int[Array, ""], int], ...]
"""Slots of a row that are read side by side: the first one and the number of each span."""


@pytree
class KVCache:
    """Keys and values of all layers that have their own.

    Attributes:
      keys: rotated, as `Decoder.keys_values` returns them.
      values: of the same shape.
      heads_first: whether a head's slots lie side by side, `kv_head slot`, else a slot's heads, see
        `Platform.heads_first`. Static.
    """

    keys: Float[Array, "layer batch *slot_and_kv_head head_dim"] = dataclasses.field(
        metadata={"row_axis": 1}
    )
    values: Float[Array, "layer batch *slot_and_kv_head head_dim"] = dataclasses.field(
        metadata={"row_axis": 1}
    )
    heads_first: bool = static(default=False)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values."""
        return self.keys, self.values

    @property
    def num_slots(self) -> int:
        """Number of tokens that a row can hold."""
        return self.keys.shape[3 if self.heads_first else 2]

    def at(self, slots: Any) -> tuple[Any, ...]:
        """Returns the index of some slots, all heads, after those of layers and rows."""
        return (slice(None), slots) if self.heads_first else (slots,)

    def size(self, width: int) -> tuple[int, ...]:
        """Returns the shape of a number of slots of a row of a layer."""
        heads = self.keys.shape[2 if self.heads_first else 3]
        sizes = (heads, width) if self.heads_first else (width, heads)
        return (*sizes, self.keys.shape[-1])

    def by_slot(self, array: jax.Array) -> Float[Array, "*lead slot kv_head head_dim"]:
        """Returns keys or values by slot; products transpose them back, so nothing is copied."""
        return jnp.moveaxis(array, -3, -2) if self.heads_first else array

    def start(self, layer: Any, row: Any, slot: Any = 0) -> tuple[jax.Array, ...]:
        """Returns the index at which a row's slots of a layer begin, from `slot` on."""
        place = (0, slot) if self.heads_first else (slot, 0)
        return tuple(map(jnp.int32, (layer, row, *place, 0)))  # Of one type, in 64-bit mode, too.

    def row(
        self, layer: int | Int[Array, ""], row: Int[Array, ""], spans: Spans
    ) -> list[Float[Array, "slot kv_head head_dim"]]:
        """Returns keys and values of some slots of one row of a layer."""

        def one(leaf: jax.Array, slot: int | jax.Array, width: int) -> jax.Array:
            start, size = self.start(layer, row, slot), (1, 1, *self.size(width))
            return self.by_slot(jax.lax.dynamic_slice(leaf, start, size)[0, 0])

        leaves = [[one(leaf, *span) for span in spans] for leaf in self.arrays]
        return [parts[0] if len(parts) == 1 else jnp.concatenate(parts) for parts in leaves]

    def write(
        self,
        layer: int | Int[Array, ""] | Int[Array, "batch token"],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        *,
        positions: Int[Array, "batch token"],
        valid: Bool[Array, "batch token"],
        rows: Int[Array, " batch"] | None = None,
    ) -> KVCache:
        """Returns the cache with one layer's K/V at the tokens' positions in their rows.

        `layer` may be one for each token. Tokens that are not `valid` are dropped. `rows` are
        those of the cache, any for a row without valid tokens; None: the first ones, in order.
        """
        rows = jnp.arange(positions.shape[0], dtype=jnp.int32) if rows is None else rows
        slots = jnp.where(valid, positions, self.num_slots)  # One past the end: dropped.
        at = (layer, rows[:, None], *self.at(slots))
        return dataclasses.replace(
            self,
            keys=self.keys.at[at].set(keys.astype(self.keys.dtype), mode="drop"),
            values=self.values.at[at].set(values.astype(self.values.dtype), mode="drop"),
        )

    def repeat(
        self,
        layer: int | Int[Array, ""],
        count: int,
        *,
        positions: Int[Array, "batch token"],
        valid: Bool[Array, "batch token"],
    ) -> KVCache:
        """Returns the cache with some tokens' K/V of the `count` layers before `layer` repeated.

        They are written to as many layers from `layer` on: the next turn of a looped model.
        Tokens that are not `valid` are dropped. Rows are the first ones, in order.
        """
        to = layer + jnp.arange(count, dtype=jnp.int32)[:, None, None]
        rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[None, :, None]
        slots = jnp.where(valid, positions, self.num_slots)[None]

        def put(leaf: jax.Array) -> jax.Array:
            old = leaf.at[(to - count, rows, *self.at(slots))].get(mode="clip")
            return leaf.at[(to, rows, *self.at(slots))].set(old, mode="drop")

        return dataclasses.replace(self, keys=put(self.keys), values=put(self.values))


def init_cache(
    config: DecoderConfig, *, batch: int, slots: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> KVCache:
    """Returns an empty cache of `slots` tokens per row, prompt and new ones together.

    Raises:
      ValueError: a size below 1.
    """
    if min(batch, slots) < 1:
        raise ValueError(f"Wanted at least one row and slot. Got batch={batch}, slots={slots}.")
    sizes, heads_first = (slots, config.num_kv_heads), here().heads_first
    shape = (config.kv_layers, batch, *(sizes[::-1] if heads_first else sizes), config.head_dim)
    return KVCache(
        keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype), heads_first=heads_first
    )


def write_prompt(
    cache: KVCache,
    layer: int | Int[Array, ""],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
) -> KVCache:
    """Returns the cache with one layer's K/V of each row's first tokens.

    One contiguous copy. Those of padding land after the rows' last tokens, and do not count.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = cache.by_slot(new)[None].astype(old.dtype)  # Its own inverse.
        return jax.lax.dynamic_update_slice(old, new, cache.start(layer, 0))

    return dataclasses.replace(cache, keys=put(cache.keys, keys), values=put(cache.values, values))


def read(
    cache: KVCache,
    layers: tuple[int | Int[Array, "*row"], ...],
    *,
    width: int,
    rows: Int[Array, " packed"] | None = None,
    count: int | None = None,
) -> tuple[Float[Array, "row key kv_head head_dim"], Float[Array, "row key kv_head head_dim"]]:
    """Returns layers' K/V of the first `width` slots, heads side by side.

    Masked slots cost as much as any. Of some `rows` alone, copied side by side, each of a layer of
    its own if `layers` are arrays; None: of the first `count` rows, or of all.
    """

    def one(leaf: jax.Array, layer: int | jax.Array) -> jax.Array:
        if rows is not None:
            return cache.by_slot(leaf.at[layer, rows, *cache.at(slice(width))].get(mode="clip"))
        size = (1, count or leaf.shape[1], *cache.size(width))
        return cache.by_slot(jax.lax.dynamic_slice(leaf, cache.start(layer, 0), size)[0])

    keys, values = (side_by_side([one(leaf, layer) for layer in layers]) for leaf in cache.arrays)
    return keys, values


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns keys or values of some layers as those of one: heads one after the other."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)


def key_widths(slots: int, *, key_step: int, most: int = 4) -> tuple[int, ...]:
    """Returns the key widths that attention may read, ascending and ending at `slots`.

    Multiples of `key_step`, which is itself doubled until there are no more than `most` of them:
    every width is a loop body to compile.

    >>> key_widths(512, key_step=128)
    (128, 256, 384, 512)
    >>> key_widths(600, key_step=128)
    (256, 512, 600)
    >>> key_widths(600, key_step=128, most=8)
    (128, 256, 384, 512, 600)
    """
    while -(-slots // key_step) > most:
        key_step *= 2
    return tuple(min(width, slots) for width in range(key_step, slots + key_step, key_step))


def bytes_per_slot(cache: KVCache) -> int:
    """Returns the bytes that keys and values of one token take in one layer."""
    return 2 * math.prod(cache.size(1)) * cache.keys.dtype.itemsize
