# SPDX-License-Identifier: Apache-2.0
"""One pass over whole rows, a depth per token or per row; buckets of independent items."""

from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.buckets import (
    BucketPlan,
    Buckets,
    assign_buckets,
    bucket_tokens,
    run_buckets,
)
from utio_jax.staircase.capacity import CapacityPrefix, fit_capacities
from utio_jax.staircase.encoding import (
    Encoded,
    Exits,
    RowBlocks,
    encode_rows,
    encode_tokens,
    read_exits,
    score_exits,
)
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.loop import StaircaseResult, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.prompts import AttentionHeat, PromptImportance, Recency
from utio_jax.staircase.reference import dense_states, reference_layer_sets, reference_states
from utio_jax.staircase.score import (
    Comparison,
    Scores,
    compare_states,
    exit_nll,
    full_depth,
    score,
    score_dense,
)
from utio_jax.staircase.sparse import SparseAttention

__all__ = [
    "AttentionHeat",
    "BucketPlan",
    "Buckets",
    "CapacityPrefix",
    "Comparison",
    "Encoded",
    "Executor",
    "Exits",
    "MicroBatches",
    "PromptImportance",
    "Readout",
    "Recency",
    "RowBlocks",
    "Scores",
    "SparseAttention",
    "StaircaseResult",
    "Tokens",
    "assign_buckets",
    "bucket_tokens",
    "compare_states",
    "dense_states",
    "encode_rows",
    "encode_tokens",
    "exit_nll",
    "fit_capacities",
    "full_depth",
    "read_exits",
    "reference_layer_sets",
    "reference_states",
    "run_buckets",
    "score",
    "score_dense",
    "score_exits",
    "staircase",
]
