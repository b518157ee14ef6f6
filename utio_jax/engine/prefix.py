# SPDX-License-Identifier: Apache-2.0
"""Prefix cache: K/V blocks shared by requests with a common prefix.

    engine = Engine(decoder, params, slots=16, capacity=2048, prefix_cache="256MiB")

A pool on the device holds K/V in blocks of `PrefixCache.block` tokens. If a prompt shares a prefix
with an earlier text, its blocks are copied into the request's row, and only the remaining tokens
are read. A block's key is the SHA-256 of the request's salt, all tokens before the block, and its
tokens, as in vLLM's automatic prefix caching. Requests with different salts share nothing. The
least recently used blocks are evicted first.

A pool belongs to one engine and therefore to one model. It holds only exact K/V: those of a
full-depth prefill of the same text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from utio_jax.attention.cache import KVCache

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


Pool = tuple[jax.Array, jax.Array]
"""Keys and values in blocks, `[block, layer, ...]`, in the layout of the K/V cache."""


class PrefixCache:
    """Index of the K/V blocks in a pool, by hashed token prefix.

    Attributes:
      block: number of tokens of a block.
      pool: blocks on the device.
      evictions: number of evicted blocks.
    """

    block: ClassVar[int] = 8

    def __init__(self, cache: KVCache, *, num_bytes: int) -> None:
        """Makes an empty pool of at most `num_bytes`, for blocks of a cache's rows.

        Raises:
          ValueError: `num_bytes` is too small for one block.
        """
        layers = cache.keys.shape[0]
        shape = (layers, *cache.size(self.block))
        block_bytes = 2 * math.prod(shape) * cache.keys.dtype.itemsize
        self._count = num_bytes // block_bytes
        if not self._count:
            raise ValueError(
                f"prefix_cache must hold at least one block of {block_bytes} bytes "
                f"({self.block} tokens in {layers} layers). Got {num_bytes} bytes; 0 switches the "
                "prefix cache off."
            )
        self._shape, self._dtype = shape, cache.keys.dtype
        self.pool: Pool = (jnp.zeros(0), jnp.zeros(0))
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Removes all blocks, and makes a new pool: the old one may have been deleted."""
        self._places: OrderedDict[bytes, int] = OrderedDict()  # The least recently used first.
        self._free = [*range(self._count)]
        # The old pool is deleted first: the device may have no room for two.
        for leaf in self.pool:
            leaf.delete()
        empty = jnp.zeros((self._count, *self._shape), self._dtype)
        self.pool = (empty, jnp.zeros_like(empty))

    @property
    def num_blocks(self) -> int:
        """Number of blocks in use."""
        return len(self._places)

    def keys_of(self, token_ids: Int[np.ndarray, " token"], salt: str) -> list[bytes]:
        """Returns the keys of a text's whole blocks; a key depends on all tokens up to its end."""
        key, keys = hashlib.sha256(salt.encode()).digest(), []
        ids = np.ascontiguousarray(token_ids, np.int32)
        for start in range(0, len(ids) - self.block + 1, self.block):
            key = hashlib.sha256(key + ids[start : start + self.block].tobytes()).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pool indices of the longest cached prefix of a chain of blocks."""
        places = []
        for key in keys:
            if key not in self._places:
                break
            places.append(self._places[key])
        self._touch(keys[: len(places)])
        return places

    def load(self, cache: KVCache, row: int, places: Sequence[int]) -> KVCache:
        """Copies blocks to the beginning of a row; returns the cache, donated."""
        where = self._padded(places, cache), np.int32(len(places))
        return _load(cache, self.pool, np.int32(row), *where)

    def store(self, cache: KVCache, row: int, keys: Sequence[bytes]) -> None:
        """Stores the first blocks of a row in the pool, except for those that it already holds."""
        keys = keys[: self._count]
        places = self.find(keys)
        known, fresh = len(places), keys[len(places) :]
        if not fresh:
            return
        for _ in fresh[len(self._free) :]:  # Blocks found above are evicted last.
            self._free.append(self._places.popitem(last=False)[1])
            self.evictions += 1
        free = len(self._free) - len(fresh)
        places += self._free[free:]
        where = self._padded(places, cache)
        at = np.int32(row), where, np.int32(known), np.int32(len(keys))
        self.pool = _store(self.pool, cache, *at)
        del self._free[free:]  # Not before: an interrupted compilation keeps them free.
        self._places |= zip(fresh, places[known:], strict=True)
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Marks blocks as recently used: a block is evicted before its predecessors."""
        for key in reversed(keys):
            self._places.move_to_end(key)

    def _padded(self, places: Sequence[int], cache: KVCache) -> Int[np.ndarray, " block"]:
        padded = np.zeros(cache.num_slots // self.block, np.int32)
        padded[: len(places)] = places
        return padded


def bytes_of(size: int | str) -> int:
    """Returns a number of bytes, also for a text such as `"256MiB"`.

    Raises:
      ValueError: `size` is neither an integer of at least 0 nor such a text.
    """
    text = str(size).strip()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit).strip()
    if isinstance(size, bool) or not number.isdecimal():
        raise ValueError(
            f"prefix_cache must be bytes, as 0 or '256MiB' ({', '.join(_UNITS)}). Got {size!r}."
        )
    return int(number) * _UNITS.get(unit, 1)


@partial(jax.jit, donate_argnames="cache")
def _load(
    cache: KVCache,
    pool: Pool,
    row: Int[Any, ""],
    places: Int[Array | np.ndarray, " block"],
    count: Int[Any, ""],
) -> KVCache:
    block, places = PrefixCache.block, jnp.asarray(places)

    def one(index: jax.Array, leaves: Any) -> Any:
        start = cache.start(0, row, index * block)
        return tuple(
            jax.lax.dynamic_update_slice(leaf, blocks[places[index]][:, None], start)
            for leaf, blocks in zip(leaves, pool, strict=True)
        )

    keys, values = jax.lax.fori_loop(0, count, one, cache.arrays)
    return dataclasses.replace(cache, keys=keys, values=values)


@partial(jax.jit, donate_argnames="pool")
def _store(
    pool: Pool,
    cache: KVCache,
    row: Int[Any, ""],
    places: Int[Array | np.ndarray, " block"],
    start: Int[Any, ""],
    stop: Int[Any, ""],
) -> Pool:
    block, places = PrefixCache.block, jnp.asarray(places)
    size = (cache.keys.shape[0], 1, *cache.size(block))

    def one(index: jax.Array, leaves: Any) -> Any:
        stored, start = [], cache.start(0, row, index * block)
        for blocks, leaf in zip(leaves, cache.arrays, strict=True):
            new = jax.lax.dynamic_slice(leaf, start, size)[:, 0]
            stored.append(jax.lax.dynamic_update_index_in_dim(blocks, new, places[index], 0))
        return tuple(stored)

    return jax.lax.fori_loop(start, stop, one, pool)
