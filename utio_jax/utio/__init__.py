# SPDX-License-Identifier: Apache-2.0
"""UTIO: one importance score per token for depth, attention and K/V."""

from utio_jax.utio.buckets import Buckets, bucket_tokens, run_buckets
from utio_jax.utio.cascade import Cascade
from utio_jax.utio.kv_throttle import Throttled
from utio_jax.utio.surrogate import (
    AttentionHeat,
    TokenSurrogate,
    UtioSurrogate,
    attention_heat,
    embedding_outlier,
    surrogate_importance,
    surrogate_table,
)
from utio_jax.utio.vertical_slash import History, SparseQueries, VerticalSlash

__all__ = [
    "AttentionHeat",
    "Buckets",
    "Cascade",
    "History",
    "SparseQueries",
    "Throttled",
    "TokenSurrogate",
    "UtioSurrogate",
    "VerticalSlash",
    "attention_heat",
    "bucket_tokens",
    "embedding_outlier",
    "run_buckets",
    "surrogate_importance",
    "surrogate_table",
]
