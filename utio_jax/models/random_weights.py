# SPDX-License-Identifier: Apache-2.0
"""Models of known shapes with random weights, for speed alone: as many layers as fit."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.models.transformer import Transformer

# Of free memory, for parameters and the largest cache; the rest is the programs'.
_MEMORY_SHARE = 0.6


def fit_layers(config: Any, *, dtype: str, memory: float, cache_tokens: int) -> int:
    """Returns the number of layers that fit in free bytes with embeddings and cache.

    Raises ValueError if not even two do, the least that can be split.
    """
    size = jnp.dtype(dtype).itemsize
    one = dataclasses.replace(config, num_layers=1, exits=(1,))
    shapes = jax.eval_shape(Transformer(one).init, jax.random.key(0))
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    per_layer = size * count(shapes["layers"])
    per_layer += 2 * size * config.num_kv_heads * config.head_dim * cache_tokens
    other_bytes = size * (count(shapes) - count(shapes["layers"]))
    fitting = int((_MEMORY_SHARE * memory - other_bytes) // per_layer)
    if fitting < 2:
        raise ValueError(
            f"Wanted memory for at least two layers of {per_layer / 1e9:.2g} GB each, cache "
            f"included, and {other_bytes / 1e9:.2g} GB for others. Got {memory / 1e9:.2g} GB free; "
            f"{_MEMORY_SHARE:.0%} of it may be used. Name a smaller model, or fewer --parts."
        )
    return min(fitting, config.num_layers)


def free_memory() -> float:
    """Returns the first device's free bytes: its own, or on a CPU the host's."""
    known = jax.local_devices()[0].memory_stats()
    if known and "bytes_limit" in known:
        return float(known["bytes_limit"] - known.get("bytes_in_use", 0))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def random_params(decoder: Any, *, dtype: str) -> Any:
    """Returns random parameters of a `Transformer`, made one at a time: no more than fits."""

    def make(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.endswith("scale"):
            return jnp.ones(leaf.shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, dtype)
        nonlocal key
        key, subkey = jax.random.split(key)
        scale = 0.02 if name.endswith("embedding") else leaf.shape[-2] ** -0.5
        # Jitted, the float32 draws never exist as an array.
        draw = jax.jit(lambda key: (scale * jax.random.normal(key, leaf.shape)).astype(dtype))
        return draw(subkey)

    key = jax.random.key(0)
    return jax.tree_util.tree_map_with_path(make, jax.eval_shape(decoder.init, key))
