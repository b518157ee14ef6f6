# SPDX-License-Identifier: Apache-2.0
"""Adaptive depth for transformers in JAX: tokens that are easy stop early, in static-shape blocks.

    import utio_jax

    model = utio_jax.load("shared-16")                # a model folder, a GGUF file, a hub name
    model.calibrate(texts, budget=0.6)                # fits depth policies to your text
    print(model.generate("def mean(values):", mode="adaptive").summary())

The functions below it take a decoder and its parameters, whatever made them. Passes compose with
`jit`, `vmap`, meshes, and `grad` with `executor=CapacityPrefix(...)`. `generate`, `calibrate` and
`compare` are loops on the host over compiled steps:

    utio_jax.score(decoder, params, token_ids, lengths, policy)      # one pass, a depth per token
    utio_jax.generate(decoder, params, prompts, mode=Adaptive(policy=policy))
    utio_jax.bucket_tokens, utio_jax.run_buckets                     # independent items

The rest lies in its package: signals and depth policies in `utio_jax.policies`, passes and
executors in `utio_jax.staircase`, UTIO's own system in `utio_jax.utio`, quality and cost on text in
`utio_jax.evaluation`.

Axes, everywhere: `batch` rows; `token` along a row, in text order; `slot` a place in a packed
block; `layer` of the stack; `head` and `kv_head`; `head_dim`; `dim` of the residual stream;
`vocab`.
Index arrays name their frame: `token_of_slot[slot]` is a token, `bucket_of_token[token]` a bucket.
Depths count layers; scores and thresholds are in nats unless they say otherwise.

What is listed here, and in the `__init__` of each package, is public and covered by the changelog.
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING, Any

from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import compare
from utio_jax.core.decoder import Decoder, DecoderConfig
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine.engine import Engine
from utio_jax.policies.base import Policy, Signal
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.staircase.reference import reference_states
from utio_jax.staircase.score import score
from utio_jax.utio.buckets import bucket_tokens, run_buckets
from utio_jax.utio.importance import surrogate_importance

if TYPE_CHECKING:
    from utio_jax.models import Model, load

__version__ = _metadata.version("utio-jax")

__all__ = [
    "Adaptive",
    "Decoder",
    "DecoderConfig",
    "Engine",
    "Lossless",
    "Model",
    "Plain",
    "Policy",
    "SamplingParams",
    "Signal",
    "Thresholded",
    "__version__",
    "bucket_tokens",
    "calibrate",
    "compare",
    "generate",
    "load",
    "reference_states",
    "run_buckets",
    "score",
    "surrogate_importance",
    "uniform",
]

_PACKAGES = (
    *("policies", "staircase", "decoding", "utio"),
    *("evaluation", "attention", "calibration", "core"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "Any"})


def __getattr__(name: str) -> Any:
    # What needs Flax and a tokenizer is imported when it is asked for.
    if name in ("Model", "load"):
        return getattr(_import_module("utio_jax.models"), name)
    if name in ("bench", "contrib", "models", "prompts"):
        return _import_module(f"utio_jax.{name}")
    for package in _PACKAGES:
        if name in getattr(globals().get(package), "__all__", ()):
            raise AttributeError(f"{name} is not at the front: use utio_jax.{package}.{name}")
    raise AttributeError(f"module 'utio_jax' has no attribute {name!r}")
