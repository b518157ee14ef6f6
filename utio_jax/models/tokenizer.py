# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the `tokenizers` library, and documents as the token ids that models read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from utio_jax.core.documents import check_text


def load_tokenizer(file: str | Path, *, special_in_text: bool = False) -> Tokenizer:
    """Reads a `tokenizer.json`. Truncation and padding that it may have stored are turned off.

    With `special_in_text`, text that spells a special piece becomes that piece, as chat templates
    want. Else it encodes as any other text, and no text can open a document. Raises ValueError if
    the file is missing or is not a tokenizer.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(
            f"Wanted a tokenizer at {path}. There is none. Pass token ids instead of text, or add "
            "the model's tokenizer.json to its folder."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # A bare Exception, or a panic of its Rust code, which is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"Wanted a tokenizer.json of the `tokenizers` library at {path}. {error}"
        ) from error
    tokenizer.encode_special_tokens = not special_in_text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], *, bos_id: int | None
) -> list[np.ndarray]:
    """Returns each text's token ids, `[token]` int32, opened by `bos_id` where there is one.

    An empty text has no tokens; others also have what the tokenizer itself puts around a text. A
    text that spells what opens it, as a rendered chat does, is opened once. Raises ValueError, see
    `check_text`.
    """
    names = [f"text {index}" if len(texts) > 1 else "text" for index in range(len(texts))]
    checked = [check_text(text, name) for text, name in zip(texts, names, strict=True)]
    opening = [] if bos_id is None else [bos_id]
    return [
        np.asarray(opening + _opened_once(item) if text else [], np.int32)
        for text, item in zip(texts, tokenizer.encode_batch(checked), strict=True)
    ]


def _opened_once(encoded: Any) -> list[int]:
    """Returns the ids of a text, without a second copy of the tokenizer's opening tokens."""
    # The mask is 1 for what the tokenizer added, and 0 for a special piece that the text spells.
    added, ids = [*encoded.special_tokens_mask, 0].index(0), encoded.ids
    is_double = added > 0 and ids[added : 2 * added] == ids[:added]
    return ids[added:] if is_double else ids


def _byte_letters() -> dict[str, int]:
    """Returns the byte of each of GPT-2's letters: printable ones their own, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()
"""The byte that each letter of a byte-level vocabulary stands for."""
