# SPDX-License-Identifier: Apache-2.0
"""A small model on disk, with a tokenizer of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from helpers.models import live_params
from helpers.texts import SOURCES, source
from utio_jax.models import TINY, Transformer, save


def save_small_model(folder: Path, model: Any = None, *, dtype: Any = jax.numpy.bfloat16) -> None:
    """Writes a model of 300 tokens, by default a tiny one with a context of 64, and a tokenizer."""
    from bpe import train_tokenizer  # Programs of tests, which need none, do not find it.

    text = [source(name).read_text() for name in SOURCES]
    train_tokenizer(text, vocab_size=300).save(str(folder / "tokenizer.json"))
    if model is None:
        decoder = Transformer(dataclasses.replace(TINY, vocab_size=300, context_length=64))
        save(folder, decoder, live_params(decoder), dtype=dtype)
    else:
        save(folder, model.decoder, model.params, dtype=dtype)
