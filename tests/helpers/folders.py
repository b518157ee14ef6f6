# SPDX-License-Identifier: Apache-2.0
"""Small models on disk, and tokenizers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from helpers.models import live_params
from helpers.texts import SOURCES, source
from utio_jax.core.files import save_tensors
from utio_jax.models import TINY, Transformer, save

STOCK = Path(os.environ.get("UTIO_PARITY", Path(__file__).parents[1] / "models/huggingface"))
"""Folders that transformers made: committed ones, or those of `make parity`."""


def edit_json(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def changed_copy(source: Path, folder: Path, tensors: Any = None, **settings: Any) -> Path:
    """Returns a copy of a model's folder, with other settings or tensors."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    edit_json(folder / "config.json", **settings)
    if tensors is not None:
        save_tensors(folder / "model.safetensors", tensors)
    return folder


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


def save_piece_tokenizer(folder: Path, pieces: Iterable[str]) -> None:
    """Writes a tokenizer of single letters, and of the marks at both ends of a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|im_{part}|>") for part in ("start", "end")])
    tokenizer.save(str(folder / "tokenizer.json"))
