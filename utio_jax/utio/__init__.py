# SPDX-License-Identifier: Apache-2.0
"""UTIO: score tokens, sort them into depth buckets, run each bucket to its own depth."""

from utio_jax.utio.attention import Cascade, History, SparseQueries, Throttled, VerticalSlash
from utio_jax.utio.buckets import Buckets, bucket_tokens, run_buckets
from utio_jax.utio.forward import UtioPlan, UtioResult, floor_states, utio_forward
from utio_jax.utio.importance import attention_heat, embedding_outlier, surrogate_importance
from utio_jax.utio.signals import (
    AttentionHeat,
    TokenSurrogate,
    UtioSurrogate,
    surrogate_table,
)

__all__ = [
    "AttentionHeat",
    "Buckets",
    "Cascade",
    "History",
    "SparseQueries",
    "Throttled",
    "TokenSurrogate",
    "UtioPlan",
    "UtioResult",
    "UtioSurrogate",
    "VerticalSlash",
    "attention_heat",
    "bucket_tokens",
    "embedding_outlier",
    "floor_states",
    "run_buckets",
    "surrogate_importance",
    "surrogate_table",
    "utio_forward",
]
