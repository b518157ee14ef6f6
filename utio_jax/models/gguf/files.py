# SPDX-License-Identifier: Apache-2.0
"""Metadata of a GGUF file (config, tokenizer, chat template) as files of a model folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from utio_jax.models.chat import find_template
from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.tokenizer import build_tokenizer
from utio_jax.models.gguf.weights import config_of
from utio_jax.models.tokenizer import load_tokenizer


def tokenizer_of(file: Path) -> Tokenizer:
    """Returns `NAME.tokenizer.json` next to a file, or the tokenizer that its metadata describe.

    Raises:
      ValueError: see `build_tokenizer`.
    """
    beside = file.with_suffix(".tokenizer.json")
    if beside.is_file():
        return load_tokenizer(beside, special_in_text=True)
    return build_tokenizer(read_header(file).keys, source=file)


def files_beside_weights(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the `config.json` of a file's model, and the text files that go next to it, by name.

    These are tokenizer, chat template and settings as transformers has them. What the file lacks,
    or what cannot be had exactly, is not among them.
    """
    header = read_header(file)
    config, texts = config_of(header), dict[str, str]()
    settings: dict[str, Any] = {}
    with suppress(ValueError):
        texts["tokenizer.json"] = tokenizer_of(file).to_str(pretty=True)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    with suppress(ValueError):
        chat = find_template(file, header.keys)
        settings |= chat.special_tokens
        texts["chat_template.jinja"] = chat.template
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ends = {name: config[name] for name in names if config[name] is not None}
    for name, value in {"generation_config": ends, "tokenizer_config": settings}.items():
        if value:
            texts[f"{name}.json"] = json.dumps(value, indent=1) + "\n"
    return config, texts
