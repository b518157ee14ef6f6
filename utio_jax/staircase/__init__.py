# SPDX-License-Identifier: Apache-2.0
"""Early-exit forward pass over whole rows."""

from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.loop import StaircaseResult, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE, AttentionPattern
from utio_jax.staircase.prompts import PromptImportance, Recency
from utio_jax.staircase.reference import dense_states, reference_states
from utio_jax.staircase.score import Comparison, Scores, exit_nll, full_depth, score, score_dense

__all__ = [
    "DENSE",
    "AttentionPattern",
    "CapacityPrefix",
    "Comparison",
    "Executor",
    "MicroBatches",
    "PromptImportance",
    "Readout",
    "Recency",
    "Scores",
    "StaircaseResult",
    "Tokens",
    "dense_states",
    "exit_nll",
    "full_depth",
    "reference_states",
    "score",
    "score_dense",
    "staircase",
]
