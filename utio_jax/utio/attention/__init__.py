# SPDX-License-Identifier: Apache-2.0
"""Techniques of UTIO that follow the score into attention: V-Slash, K/V throttling, the cascade.

They lose more than they save (`docs/utio.md`); the forward pass does without them.
"""

from utio_jax.utio.attention.cascade import Cascade
from utio_jax.utio.attention.kv_throttle import Throttled
from utio_jax.utio.attention.vertical_slash import History, SparseQueries, VerticalSlash

__all__ = ["Cascade", "History", "SparseQueries", "Throttled", "VerticalSlash"]
