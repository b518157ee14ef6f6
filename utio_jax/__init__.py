# SPDX-License-Identifier: Apache-2.0
"""Adaptive depth for transformers in JAX: tokens that are easy stop early, in static-shape blocks.

    from utio_jax import score, uniform                 # one pass with a depth per token
    from utio_jax import bucket_tokens, run_buckets     # independent items
    from utio_jax.models import load                    # the shipped model

Axes, everywhere: `batch` rows; `token` along a row, in text order; `slot` a place in a packed
block; `layer` of the stack; `head` and `kv_head`; `head_dim`; `dim` of the residual stream;
`vocab`.
Index arrays name their frame: `token_of_slot[slot]` is a token, `bucket_of_token[token]` a bucket.
Depths count layers; scores and thresholds are in nats unless they say otherwise.
"""

from utio_jax.accounting.ledger import Ledger
from utio_jax.attention.band import SparseQueries
from utio_jax.attention.history import History
from utio_jax.calibration.online import adapt
from utio_jax.core.decoder import Decoder, DecoderConfig
from utio_jax.core.documents import check_tokens
from utio_jax.policies.base import Boundary, Policy, Signal
from utio_jax.policies.depth import Thresholded, given_depths, random_depths, uniform
from utio_jax.policies.importance import (
    attention_heat,
    embedding_outlier,
    predictive_entropy,
    surrogate_importance,
)
from utio_jax.policies.learned import Hazard, Learned, PromptRouter, StateGate
from utio_jax.policies.signals import (
    Chance,
    Entropy,
    MaxProbability,
    Patience,
    Position,
    SoftmaxGap,
    StateSimilarity,
    TokenSurrogate,
    UtioSurrogate,
    surrogate_table,
)
from utio_jax.policies.wrappers import DepthFloor, KeepFirst, PositionDecay
from utio_jax.staircase.buckets import (
    BucketPlan,
    Buckets,
    assign_buckets,
    bucket_tokens,
    run_buckets,
)
from utio_jax.staircase.capacity import CapacityPrefix, fit_capacities
from utio_jax.staircase.loop import StaircaseResult, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import dense_states, reference_states
from utio_jax.staircase.score import Scores, exit_nll, full_depth, score
from utio_jax.staircase.sparse import SparseAttention

__all__ = [
    "Boundary",
    "BucketPlan",
    "Buckets",
    "CapacityPrefix",
    "Chance",
    "Decoder",
    "DecoderConfig",
    "DepthFloor",
    "Entropy",
    "Hazard",
    "History",
    "KeepFirst",
    "Learned",
    "Ledger",
    "MaxProbability",
    "MicroBatches",
    "Patience",
    "Policy",
    "Position",
    "PositionDecay",
    "PromptRouter",
    "Scores",
    "Signal",
    "SoftmaxGap",
    "SparseAttention",
    "SparseQueries",
    "StaircaseResult",
    "StateGate",
    "StateSimilarity",
    "Thresholded",
    "TokenSurrogate",
    "UtioSurrogate",
    "adapt",
    "assign_buckets",
    "attention_heat",
    "bucket_tokens",
    "check_tokens",
    "dense_states",
    "embedding_outlier",
    "exit_nll",
    "fit_capacities",
    "full_depth",
    "given_depths",
    "predictive_entropy",
    "random_depths",
    "reference_states",
    "run_buckets",
    "score",
    "staircase",
    "surrogate_importance",
    "surrogate_table",
    "uniform",
]
