# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file holds beside weights, and how it becomes a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.tokenizer import build_tokenizer
from utio_jax.models.gguf.weights import config_of
from utio_jax.models.tokenizer import load_tokenizer


def keys_of(file: Path) -> dict[str, Any]:
    """Returns a file's metadata. Raises ValueError, see `read_header`."""
    return read_header(file).keys


def tokenizer_of(file: Path) -> Tokenizer:
    """Returns `NAME.tokenizer.json` beside a file, or the tokenizer that its metadata describe.

    Raises:
      ValueError: see `build_tokenizer`.
    """
    beside = file.with_suffix(".tokenizer.json")
    if beside.is_file():
        return load_tokenizer(beside, special_in_text=True)
    return build_tokenizer(keys_of(file), source=file)


def write_beside_weights(file: Path, folder: Path) -> dict[str, Any]:
    """Writes a file's tokenizer and chat template into a folder, as transformers has them.

    What the file lacks, or what cannot be had exactly, the folder lacks too.

    Returns:
      The `config.json` that goes with them.
    """
    from utio_jax.models.chat import find_template

    header = read_header(file)
    config = config_of(header)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    try:
        tokenizer_of(file).save(str(folder / "tokenizer.json"))
    except ValueError:
        settings = {}
    try:
        chat = find_template(file, header.keys)
        settings |= chat.special_tokens
        (folder / "chat_template.jinja").write_text(chat.template)
    except ValueError:
        pass
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    ends = {
        name: config[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if config[name] is not None
    }
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")
    return config
