# SPDX-License-Identifier: Apache-2.0
"""Early-exit forward pass over whole rows; depth buckets for independent items."""

from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.buckets import Buckets, bucket_tokens, run_buckets
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.heat import AttentionHeat
from utio_jax.staircase.loop import StaircaseResult, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.prompts import PromptImportance, Recency
from utio_jax.staircase.reference import dense_states, reference_states
from utio_jax.staircase.score import Comparison, Scores, exit_nll, full_depth, score, score_dense
from utio_jax.staircase.sparse import SparseAttention

__all__ = [
    "AttentionHeat",
    "Buckets",
    "CapacityPrefix",
    "Comparison",
    "Executor",
    "MicroBatches",
    "PromptImportance",
    "Readout",
    "Recency",
    "Scores",
    "SparseAttention",
    "StaircaseResult",
    "Tokens",
    "bucket_tokens",
    "dense_states",
    "exit_nll",
    "full_depth",
    "reference_states",
    "run_buckets",
    "score",
    "score_dense",
    "staircase",
]
