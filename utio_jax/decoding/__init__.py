# SPDX-License-Identifier: Apache-2.0
"""Token generation: decoding modes (plain, adaptive, lossless), sampling, prefill and text."""

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import DecodeContext, LogitsProcessor, Mode, Plain
from utio_jax.decoding.generate import Chunk, Generated, generate, stream
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import Lossless, lossless_for
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.text import GeneratedText, TextChunk, generate_text, stream_text

__all__ = [
    "Adaptive",
    "Chunk",
    "DecodeContext",
    "Generated",
    "GeneratedText",
    "Lengths",
    "LogitsProcessor",
    "Lossless",
    "Mode",
    "Plain",
    "Prefill",
    "SamplingParams",
    "TextChunk",
    "generate",
    "generate_text",
    "lossless_for",
    "stream",
    "stream_text",
]
