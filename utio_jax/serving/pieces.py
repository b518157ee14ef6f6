# SPDX-License-Identifier: Apache-2.0
"""Names and bytes of single tokens, for lists of log-probabilities."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from utio_jax.models.tokenizer import BYTE_LETTERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    r"""A token by itself.

    Attributes:
      name: its text; `bytes:\xe3` for parts of characters, as OpenAI writes them; of a special
        token its piece, and `token_id:300` of an id without one.
      data: the bytes that it adds to a text; none of a special token.
      is_text: whether these are whole characters, and the name is they.
    """

    name: str
    data: bytes
    is_text: bool


def token_name(token: int) -> str:
    """Returns the name of a token without text, as vLLM writes it."""
    return f"token_id:{token}"


class PieceReader:
    """Reads tokens one by one, independent of a tokenizer's decoder."""

    def __init__(self, tokenizer: Any) -> None:
        """Takes a tokenizer of the `tokenizers` library."""
        self._tokenizer = tokenizer
        # After nothing, some decoders drop a space.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids
        self._known = len(tokenizer.decode(self._before))

    def __call__(self, token: int) -> Piece:
        """Returns the piece of a token id."""
        text = self._tokenizer.decode([*self._before, token])[self._known :]
        piece = self._tokenizer.id_to_token(token) or token_name(token)
        if not text:
            return Piece(name=piece, data=b"", is_text=False)
        data = _bytes_of(piece) if _UNFINISHED in text else text.encode()
        try:
            return Piece(name=data.decode(), data=data, is_text=True)
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            return Piece(name=name, data=data, is_text=False)


_UNFINISHED = "\ufffd"
"""What parts of characters are decoded to."""


def _bytes_of(piece: str) -> bytes:
    """Returns the bytes that a vocabulary writes as `<0xE3>`, or in GPT-2's letters for bytes."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    known = [BYTE_LETTERS.get(letter) for letter in piece]
    return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
