# SPDX-License-Identifier: Apache-2.0
"""Masks, K/V caches, and attention over the visible keys."""

from utio_jax.attention.cache import KVCache, init_cache
from utio_jax.attention.mixing import Mixer, attend, visible_keys

__all__ = ["KVCache", "Mixer", "attend", "init_cache", "visible_keys"]
