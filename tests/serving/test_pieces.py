# SPDX-License-Identifier: Apache-2.0
"""Names and bytes of single tokens, in both ways in which vocabularies write bytes."""

from __future__ import annotations

import pytest
from bpe import BOS, train_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from utio_jax.serving.pieces import PieceReader

TEXT = "a na\u00efve caf\u00e9: \u65e5\u672c\u8a9e \U0001f642\n\tdef f(x):"


def byte_level() -> Tokenizer:
    return train_tokenizer([TEXT], vocab_size=262)


def sentence_piece() -> Tokenizer:
    """Spaces begin pieces, and are dropped where a text begins; other bytes are `<0xE3>`."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581anef(:x)\u00ef"]
    pieces += ["\u2581a", "\u2581n"]
    merges = [("\u2581", "a"), ("\u2581", "n")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(BOS, special=True)])
    return tokenizer


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_bytes_of_tokens_joined_are_those_of_the_text(kind: type) -> None:
    tokenizer = kind()
    read = PieceReader(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    data = b"".join(read(token).data for token in ids)
    assert data.decode().removeprefix(" ") == TEXT
    parts = [read(token) for token in ids if not read(token).is_text]
    assert len(parts) > 8
    for piece in parts:
        assert piece.name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.data)
    whole = [read(token) for token in ids if read(token).is_text]
    assert all(piece.name.encode() == piece.data for piece in whole)
    assert len({piece.name for piece in map(read, ids)}) == len({*ids})


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_special_and_missing_pieces_have_names_and_add_nothing(kind: type) -> None:
    tokenizer = kind()
    read, size = PieceReader(tokenizer), tokenizer.get_vocab_size()
    special = read(tokenizer.token_to_id(BOS))
    assert (special.name, special.data, special.is_text) == (BOS, b"", False)
    missing = read(size + 3)
    assert (missing.name, missing.data) == (f"token_id:{size + 3}", b"")
