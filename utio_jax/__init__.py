# SPDX-License-Identifier: Apache-2.0
"""Adaptive depth for transformers in JAX: tokens that are easy stop early, in static-shape blocks.

    from utio_jax import score, Uniform                 # one pass with a depth per token
    from utio_jax import bucket_tokens, run_buckets     # independent items
    from utio_jax.models import load                    # the shipped model

Axes, everywhere: `batch` rows; `token` along a row, in text order; `slot` a place in a packed
block; `layer` of the stack; `head` and `kv_head`; `head_dim`; `dim` of the residual stream;
`vocab`.
Index arrays name their frame: `token_of_slot[slot]` is a token, `bucket_of_token[token]` a bucket.
Depths count layers; scores and thresholds are in nats unless they say otherwise.
"""

from utio_jax.buckets import Buckets, assign_buckets, bucket_tokens, run_buckets
from utio_jax.capacity import CapacityPrefix, fit_capacities
from utio_jax.decoder import Decoder, DecoderConfig
from utio_jax.documents import check_tokens
from utio_jax.forward import Scores, exit_nll, full_depth, score
from utio_jax.importance import (
    attention_heat,
    embedding_outlier,
    predictive_entropy,
    surrogate_importance,
)
from utio_jax.layers import StaircaseResult, dense_states, oracle, staircase
from utio_jax.ledger import Ledger
from utio_jax.microbatches import MicroBatches
from utio_jax.plan import Boundary, BucketPlan, Policy
from utio_jax.policies import GivenDepths, Learned, Random, StateGate, Uniform, UtioSurrogate

__all__ = [
    "Boundary",
    "BucketPlan",
    "Buckets",
    "CapacityPrefix",
    "Decoder",
    "DecoderConfig",
    "GivenDepths",
    "Learned",
    "Ledger",
    "MicroBatches",
    "Policy",
    "Random",
    "Scores",
    "StaircaseResult",
    "StateGate",
    "Uniform",
    "UtioSurrogate",
    "assign_buckets",
    "attention_heat",
    "bucket_tokens",
    "check_tokens",
    "dense_states",
    "embedding_outlier",
    "exit_nll",
    "fit_capacities",
    "full_depth",
    "oracle",
    "predictive_entropy",
    "run_buckets",
    "score",
    "staircase",
    "surrogate_importance",
]
