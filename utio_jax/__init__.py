# SPDX-License-Identifier: Apache-2.0
"""Adaptive depth for transformers in JAX: tokens that are easy stop early, in static-shape blocks.

    import utio_jax

    model = utio_jax.load("shared-16")                # a model folder, a GGUF file, a hub name
    model.calibrate(files, budget=0.6)                # fits depth policies to your text
    print(model.generate("def mean(values):", mode="adaptive").summary())

The functions below it take a decoder and its parameters, whatever made them, and compose with
`jit`, `grad` and meshes:

    utio_jax.score(decoder, params, token_ids, lengths, policy)      # one pass, a depth per token
    utio_jax.generate(decoder, params, prompts, mode=Adaptive(policy=policy))
    utio_jax.bucket_tokens, utio_jax.run_buckets                     # independent items

Axes, everywhere: `batch` rows; `token` along a row, in text order; `slot` a place in a packed
block; `layer` of the stack; `head` and `kv_head`; `head_dim`; `dim` of the residual stream;
`vocab`.
Index arrays name their frame: `token_of_slot[slot]` is a token, `bucket_of_token[token]` a bucket.
Depths count layers; scores and thresholds are in nats unless they say otherwise.

What is listed here, and in the `__init__` of each room, is public and covered by the changelog.
"""

from importlib import metadata as _metadata
from typing import TYPE_CHECKING, Any

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.history import History
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import compare
from utio_jax.core.decoder import Decoder, DecoderConfig
from utio_jax.core.documents import check_tokens
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate, stream
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.throttle import Throttle
from utio_jax.evaluation.evaluate import evaluate, score_documents
from utio_jax.evaluation.ledger import Ledger
from utio_jax.policies.base import Boundary, Policy, Signal
from utio_jax.policies.depth import Thresholded, given_depths, random_depths, uniform
from utio_jax.policies.importance import (
    attention_heat,
    embedding_outlier,
    predictive_entropy,
    surrogate_importance,
)
from utio_jax.policies.learned import CandidateGates, Hazard, Learned, PromptRouter, StateGate
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
from utio_jax.staircase.buckets import (
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

if TYPE_CHECKING:
    from utio_jax.models import Model, load

__version__ = _metadata.version("utio-jax")

__all__ = [
    "Adaptive",
    "Boundary",
    "Buckets",
    "CandidateGates",
    "CapacityPrefix",
    "Chance",
    "Decoder",
    "DecoderConfig",
    "Entropy",
    "Hazard",
    "History",
    "Learned",
    "Ledger",
    "Lossless",
    "MaxProbability",
    "MicroBatches",
    "Mode",
    "Model",
    "Patience",
    "Plain",
    "Policy",
    "Position",
    "Prefill",
    "PromptRouter",
    "SamplingParams",
    "Scores",
    "Signal",
    "SoftmaxGap",
    "SparseAttention",
    "SparseQueries",
    "StaircaseResult",
    "StateGate",
    "StateSimilarity",
    "Thresholded",
    "Throttle",
    "TokenSurrogate",
    "UtioSurrogate",
    "__version__",
    "assign_buckets",
    "attention_heat",
    "bucket_tokens",
    "calibrate",
    "check_tokens",
    "compare",
    "dense_states",
    "embedding_outlier",
    "evaluate",
    "exit_nll",
    "fit_capacities",
    "full_depth",
    "generate",
    "given_depths",
    "load",
    "predictive_entropy",
    "random_depths",
    "reference_states",
    "run_buckets",
    "score",
    "score_documents",
    "staircase",
    "stream",
    "surrogate_importance",
    "surrogate_table",
    "uniform",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "Any"})


def __getattr__(name: str) -> Any:
    # What needs Flax and a tokenizer is imported when it is asked for.
    if name not in ("Model", "load"):
        raise AttributeError(f"module 'utio_jax' has no attribute {name!r}")
    from utio_jax import models

    return getattr(models, name)
