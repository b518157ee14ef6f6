# SPDX-License-Identifier: Apache-2.0
"""Token generation: decoding modes (plain, adaptive, lossless), sampling, prefill and text."""

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import DecodeContext, LogitsProcessor, Mode, Plain
from utio_jax.decoding.generate import Generated, generate, generate_text
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import Lossless, lossless_for
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams

__all__ = [
    "Adaptive",
    "DecodeContext",
    "Generated",
    "Lengths",
    "LogitsProcessor",
    "Lossless",
    "Mode",
    "Plain",
    "Prefill",
    "SamplingParams",
    "generate",
    "generate_text",
    "lossless_for",
]
