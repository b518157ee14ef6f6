# SPDX-License-Identifier: Apache-2.0
"""The K/V cache: one array per kind for all layers, carried whole and written before it is read.

    slot       0  1  2  3  4  5  6  7      # row 1 of two rows, segments [0,4) [4,8) [8,16)
    [8,16)     #  #  #  #  .  .  .  .      # filled[2, 1] = 4
    [4, 8)     #  #  #  #  .  .  .  .      # filled[1, 1] = 4
    [0, 4)     #  #  #  #  #  #  .  .      # filled[0, 1] = 6: two tokens stopped at layer 4

A token's slot is its position. Slots at or beyond a row's watermark hold nothing that counts:
padding of a ragged batch, rejected drafts, zeros. They are never cleared, since a slot is always
written before a query that could see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.views import View, remember
from utio_jax.core.decoder import DecoderConfig
from utio_jax.core.pytrees import pytree


@pytree
class KVCache:
    """Keys and values of all layers that have their own, and how far each row has them.

    Attributes:
      keys: rotated, as `Decoder.keys_values` returns them. A head's slots lie side by side, as
        products want them: heads within slots would be copied, all of them, in every step.
      values: of the same shape.
      filled: watermarks: positions below `filled[segment, row]` are valid in the segment's layers.
        Never increasing with the segment: deeper K/V are made from shallower states.
      view: a compact copy of what low-importance tokens see of it; None where there are none.
    """

    keys: Float[Array, "layer batch kv_head slot head_dim"] = dataclasses.field(
        metadata={"row_axis": 1}
    )
    values: Float[Array, "layer batch kv_head slot head_dim"] = dataclasses.field(
        metadata={"row_axis": 1}
    )
    filled: Int[Array, "segment batch"] = dataclasses.field(metadata={"row_axis": 1})
    view: View | None = dataclasses.field(default=None, metadata={"row_axis": 1})

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values."""
        return self.keys, self.values

    @property
    def num_slots(self) -> int:
        """Tokens that a row can hold."""
        return self.keys.shape[3]

    @property
    def lengths(self) -> Int[Array, " batch"]:
        """Tokens per row that have run the first segment."""
        return self.filled[0]


def init_cache(
    config: DecoderConfig,
    *,
    batch: int,
    slots: int,
    segments: int = 1,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
    """Returns an empty cache.

    Args:
      config: the model's sizes.
      batch: rows.
      slots: tokens per row, prompt and new ones together.
      segments: watermarks per row: how many parts of the stack advance apart from each other.
      dtype: of keys and values.

    Raises:
      ValueError: a size below 1.
    """
    if min(batch, slots, segments) < 1:
        raise ValueError(
            "Wanted at least one row, slot and segment. "
            f"Got batch={batch}, slots={slots}, segments={segments}."
        )
    shape = (config.kv_layers, batch, config.num_kv_heads, slots, config.head_dim)
    return KVCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        filled=jnp.zeros((segments, batch), jnp.int32),
    )


def write(
    cache: KVCache,
    layer: int | Int[Array, ""],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
    *,
    positions: Int[Array, "batch token"],
    valid: Bool[Array, "batch token"],
    rows: Int[Array, " batch"] | None = None,
) -> KVCache:
    """Returns the cache with one layer's K/V at the tokens' positions; invalid ones leave no trace.

    Nor do they in its view, if it has one. Watermarks are the caller's: only it knows when a whole
    segment is done.

    Args:
      cache: of all rows.
      layer: of the cache.
      keys: of new tokens, by packed row.
      values: of the same shape.
      positions: of the tokens in their rows.
      valid: tokens that exist.
      rows: of the cache that the packed rows are, see `packed_rows`; None: all, in order.
    """
    rows = packed_rows(rows, positions.shape[0])
    view = cache.view
    if view is not None:
        view = remember(view, layer, keys, values, positions=positions, valid=valid, rows=rows)
    rows = rows[:, None]
    slots = jnp.where(valid, positions, cache.num_slots)  # One past the end: dropped.
    return dataclasses.replace(
        cache,
        keys=cache.keys.at[layer, rows, :, slots].set(keys.astype(cache.keys.dtype), mode="drop"),
        values=cache.values.at[layer, rows, :, slots].set(
            values.astype(cache.values.dtype), mode="drop"
        ),
        view=view,
    )


def write_prompt(
    cache: KVCache,
    layer: int | Int[Array, ""],
    keys: Float[Array, "batch token kv_head head_dim"],
    values: Float[Array, "batch token kv_head head_dim"],
) -> KVCache:
    """Returns the cache with one layer's K/V of each row's first tokens.

    One contiguous copy. Those of padding land beyond the watermarks, where they do not count.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        start = tuple(map(jnp.int32, (layer, 0, 0, 0, 0)))  # Of one type, in 64-bit mode, too.
        new = jnp.moveaxis(new, -2, -3)[None].astype(old.dtype)
        return jax.lax.dynamic_update_slice(old, new, start)

    return dataclasses.replace(cache, keys=put(cache.keys, keys), values=put(cache.values, values))


def packed_rows(rows: Int[Array, " packed"] | None, count: int) -> Int[Array, " packed"]:
    """Returns which rows of a cache packed rows are; None: its first `count`, all there are.

    A packed row that only fills up may name any row, if none of its tokens is valid.
    """
    return jnp.arange(count, dtype=jnp.int32) if rows is None else rows


def read(
    cache: KVCache,
    layers: tuple[int | Int[Array, ""], ...],
    *,
    width: int,
    rows: Int[Array, " packed"] | None = None,
) -> tuple[Float[Array, "row key kv_head head_dim"], Float[Array, "row key kv_head head_dim"]]:
    """Returns layers' K/V of the first `width` slots, heads side by side.

    Masked slots cost as much as any. Of some `rows` alone, copied side by side; None: of all.
    """

    def one(leaf: jax.Array, layer: int | jax.Array) -> jax.Array:
        if rows is not None:
            found = leaf.at[layer, rows, :, :width].get(mode="clip")
        else:
            size = (1, *leaf.shape[1:3], width, leaf.shape[4])
            start = tuple(map(jnp.int32, (layer, 0, 0, 0, 0)))
            found = jax.lax.dynamic_slice(leaf, start, size)[0]
        return jnp.moveaxis(found, -3, -2)  # Products turn it back: nothing moves.

    keys, values = (side_by_side([one(leaf, each) for each in layers]) for leaf in cache.arrays)
    return keys, values


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns keys or values of some layers as those of one: heads one after the other."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)


def fill(
    cache: KVCache, lengths: Int[Array, " batch"], *, segment: int | slice = slice(None)
) -> KVCache:
    """Returns the cache with the watermarks of one segment, or of all, set to `lengths`.

    Rejected drafts are rolled back in the same way: a lower watermark is all it takes.
    """
    shape = cache.filled[segment].shape
    filled = cache.filled.at[segment].set(jnp.broadcast_to(lengths.astype(jnp.int32), shape))
    return dataclasses.replace(cache, filled=filled)


def key_widths(slots: int, *, key_step: int, at_most: int = 4) -> tuple[int, ...]:
    """Returns the numbers of slots that attention may read, ascending and ending at `slots`.

    Multiples of `key_step`, which is itself doubled until there are no more than `at_most` of them:
    every width is a loop body to compile.

    >>> key_widths(512, key_step=128)
    (128, 256, 384, 512)
    >>> key_widths(600, key_step=128)
    (256, 512, 600)
    """
    while -(-slots // key_step) > at_most:
        key_step *= 2
    return tuple(min(width, slots) for width in range(key_step, slots + key_step, key_step))


def bytes_per_slot(cache: KVCache) -> int:
    """Returns the bytes that keys and values of one token take in one layer."""
    _, _, heads, _, width = cache.keys.shape
    return 2 * heads * width * cache.keys.dtype.itemsize
