# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in a GGUF file's metadata, as one of the `tokenizers` library.

Byte-level BPE (`tokenizer.ggml.model` is `gpt2`) by its named pre-tokenizer, SentencePiece's BPE
(`llama`), whose scores are the order of merges, and Gemma 4's (`gemma4`), with merges. What the
library cannot do exactly is refused: use the model's own `tokenizer.json` instead, as
`NAME.tokenizer.json` next to `NAME.gguf`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from utio_jax.core.decoder import is_integer
from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.special import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    special_pieces,
    stored_id,
)
from utio_jax.models.tokenizer import BYTE_LETTERS, load_tokenizer

_SPACE = "\u2581"  # How SentencePiece writes a space.

# Keys of `tokenizer.ggml` that are read here, or say nothing of how text becomes ids.
_KNOWN = (
    *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
    *("remove_extra_whitespaces", "precompiled_charsmap"),
)
_PREFIX = "tokenizer.ggml."
# Real ones have at most some 250 characters; what follows takes the square of that.
_LONGEST_PIECE = 512

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """Rules for splitting text before bytes are merged."""

    patterns: tuple[str, ...]  # Each cuts what the one before left, at its matches.
    composed: bool = False  # Text is normalised to NFC first.
    whole_words: bool = False  # A piece of the vocabulary is taken as it is, merges or not.
    opens: bool = False  # Texts begin with the BOS token unless the file says otherwise.


_LLAMA3_SPLIT = _Split(patterns=(_LLAMA3,), whole_words=True, opens=True)
_SPLITS = {
    "default": _Split(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split(patterns=(_GPT2,)),
    "smollm": _Split(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _Split(patterns=(_QWEN2,), composed=True),
}
"""By `tokenizer.ggml.pre`."""


def tokenizer_of(file: Path) -> Tokenizer:
    """Returns `NAME.tokenizer.json` next to a file, or the tokenizer of `build_tokenizer`.

    A file with the key `add_bos_token` says for both what `encode` puts around a text, as in
    llama.cpp.

    Raises:
      ValueError: see `build_tokenizer`, or the file names no BOS token where texts shall have one.
    """
    keys, replacement = read_header(file).keys, file.with_suffix(".tokenizer.json")
    if not replacement.is_file():
        return build_tokenizer(keys, source=file)
    tokenizer = load_tokenizer(replacement, special_in_text=True)
    says = keys.get(f"{_PREFIX}add_bos_token") is not None
    if says and keys.get(f"{_PREFIX}model") != "gemma4":  # See `build_tokenizer`.
        try:
            _put_around(tokenizer, keys, opens=False)
        except ValueError as error:
            raise ValueError(
                f"Wanted tokens of {replacement.name} that {file} puts around a text. Got {error}. "
                "Correct that key in the file, or its add_bos_token and add_eos_token."
            ) from error
    return tokenizer


def build_tokenizer(keys: Mapping[str, Any], *, source: str | Path) -> Tokenizer:
    """Returns the tokenizer that a file's metadata describe.

    Text that spells a special piece encodes as that piece, and `encode` puts around a text what the
    file says. `source` is the file, for errors.

    Raises:
      ValueError: there is none, it is broken, or it is of a kind that cannot be had exactly.
    """
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
    kind = keys.get("tokenizer.ggml.model")
    try:
        if not isinstance(kind, str) or kind not in builders:
            raise ValueError(f"tokenizer.ggml.model={kind!r}, not {', '.join(builders)}")
        _check_known(keys)
        pieces, kinds = _vocabulary(keys)
        if kind == "gemma4":  # Files that say otherwise are wrong: the model knows no other texts.
            keys = {**keys, f"{_PREFIX}add_bos_token": True}
        tokenizer, opens = builders[kind](keys, pieces, kinds)
        added = [
            AddedToken(piece, special=kind != USER_DEFINED, normalized=False)
            for piece, kind in zip(pieces, kinds.tolist(), strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        if tokenizer.get_vocab_size() != len(pieces):
            raise ValueError(
                f"{tokenizer.get_vocab_size()} pieces where tokenizer.ggml.tokens has {len(pieces)}"
            )
        _put_around(tokenizer, keys, opens=opens)
    except ValueError as error:
        name = Path(source).with_suffix(".tokenizer.json").name
        raise ValueError(
            f"Wanted a tokenizer in {source} that can be had exactly. Got {error}. Put the model's "
            f"own tokenizer.json next to it, as {name}."
        ) from error
    return tokenizer


def _check_known(keys: Mapping[str, Any]) -> None:
    """Rejects unknown keys that could change how text becomes ids."""
    ours = [name.removeprefix(_PREFIX) for name in keys if name.startswith(_PREFIX)]
    strange = [name for name in ours if name not in _KNOWN and not name.endswith("_token_id")]
    if strange:
        named = ", ".join(f"{_PREFIX}{name}" for name in strange[:8])
        raise ValueError(f"{named}, not understood")
    if keys.get(f"{_PREFIX}add_sep_token"):
        raise ValueError(f"{_PREFIX}add_sep_token, which ends texts with another token")


def _vocabulary(keys: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    pieces = keys.get(f"{_PREFIX}tokens")
    if not isinstance(pieces, list) or not pieces:
        raise ValueError(f"no {_PREFIX}tokens")
    if max(map(len, pieces)) > _LONGEST_PIECE:
        raise ValueError(f"a piece of {max(map(len, pieces))} characters")
    if len(set(pieces)) != len(pieces):
        raise ValueError("tokenizer.ggml.tokens with the same piece twice")
    return [*pieces], _per_piece(special_pieces(keys)[1], pieces, "token_type")


def _per_piece(values: Any, pieces: list[str], name: str) -> np.ndarray:
    if not isinstance(values, np.ndarray) or len(values) != len(pieces):
        raise ValueError(f"no tokenizer.ggml.{name} for each of the {len(pieces)} pieces")
    return values


def _byte_level(
    keys: Mapping[str, Any], pieces: list[str], kinds: np.ndarray
) -> tuple[Tokenizer, bool]:
    name = keys.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r}, which says how text is cut, not {', '.join(_SPLITS)}"
        )
    if keys.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError("tokenizer.ggml.add_space_prefix of byte-level BPE")
    split = _SPLITS[name]
    tokenizer = _bpe(pieces, _merges(keys), ignore_merges=split.whole_words)
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # A piece of the user is text, even one whose letters could all stand for bytes.
    texts = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED]
    whole = [text for text in texts if not text.isascii() and {*text} <= BYTE_LETTERS.keys()]
    tokenizer.decoder = decoders.Sequence(
        [
            *(
                decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), _in_byte_letters(text))
                for text in whole
            ),
            decoders.ByteLevel(),
        ]
    )
    return tokenizer, split.opens


def _in_byte_letters(text: str) -> str:
    letters = {byte: letter for letter, byte in BYTE_LETTERS.items()}
    return "".join(letters[byte] for byte in text.encode())


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = keys.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or any(merge.count(" ") != 1 for merge in merges):
        raise ValueError("no tokenizer.ggml.merges of two pieces each")
    return [(first, second) for first, second in (merge.split(" ") for merge in merges)]


def _sentencepiece(
    keys: Mapping[str, Any], pieces: list[str], kinds: np.ndarray
) -> tuple[Tokenizer, bool]:
    """Merges of the pair whose piece has the highest score, bytes for what has no piece."""
    for index in np.flatnonzero(kinds == USER_DEFINED).tolist():
        pieces[index] = pieces[index].replace(_SPACE, " ")  # It is cut out of a text as it is.
    if len(set(pieces)) != len(pieces):
        raise ValueError("pieces of the user that differ in how spaces are written alone")
    scores = _per_piece(keys.get("tokenizer.ggml.scores"), pieces, "scores")
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if np.any(keys.get(f"tokenizer.ggml.{name}", False)):
            raise ValueError(f"tokenizer.ggml.{name}, which changes text before it is cut")
    ids = {piece: index for index, piece in enumerate(pieces)}
    if any(f"<0x{byte:02X}>" not in ids for byte in range(256)):
        raise ValueError("SentencePiece without a piece for each byte")
    special = np.isin(kinds, (UNKNOWN, CONTROL, USER_DEFINED, BYTE))
    long = [i for i, piece in enumerate(pieces) if not special[i] and len(piece) > 1]
    if len(set(scores[long].tolist())) != len(long) or not np.all(np.isfinite(scores[long])):
        raise ValueError("scores that do not order the pieces, so not those of merges")
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (pieces[i] for i in sorted(long, key=lambda i: -scores[i]))
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    opened = keys.get("tokenizer.ggml.add_space_prefix", True)
    return _with_spaces(pieces, kinds, merges, opened=opened), True


def _gemma4(
    keys: Mapping[str, Any], pieces: list[str], kinds: np.ndarray
) -> tuple[Tokenizer, bool]:
    """Merges of letters within lines and within runs of line ends; a known run is one piece."""
    if keys.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError("tokenizer.ggml.add_space_prefix of gemma4")
    known = {*pieces}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in known]
    if 0 < len(missing) < 256:
        raise ValueError(f"pieces of some bytes, not of {len(missing)} others")
    tokenizer = _with_spaces(pieces, kinds * (kinds != UNKNOWN), _merges(keys), opened=False)
    splits = [pre_tokenizers.Split(Regex(r"\n+"), "isolated")]
    if missing:  # A letter without a piece has no token, and parts its neighbours.
        letters = re.escape("".join(piece for piece in known if len(piece) == 1))
        unknown = f"[^{letters}]" if letters else r"[\s\S]"
        splits.append(pre_tokenizers.Split(Regex(unknown), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    for index, piece in enumerate(pieces):
        is_run = bool(piece) and not piece.strip("\n") and kinds[index] != USER_DEFINED
        if is_run and tokenizer.encode(piece).ids != [index]:
            raise ValueError(f"a piece of {len(piece)} line ends that merges do not make")
    return tokenizer, False


def _with_spaces(
    pieces: list[str], kinds: np.ndarray, merges: list[tuple[str, str]], *, opened: bool
) -> Tokenizer:
    """Returns BPE over letters with `_SPACE` for spaces, one before a text if it is `opened`."""
    unknown = next((pieces[i] for i, kind in enumerate(kinds.tolist()) if kind == UNKNOWN), None)
    tokenizer = _bpe(pieces, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [normalizers.Prepend(_SPACE), spaces] if opened else [spaces]
    tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if opened else []
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    return tokenizer


def _bpe(pieces: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"merges that do not fit the pieces: {error}") from error


def _put_around(tokenizer: Tokenizer, keys: Mapping[str, Any], *, opens: bool) -> None:
    """Sets the BOS and EOS tokens that the file asks for in `encode`, and no others."""
    template, used = ["$A"], []
    for name, default in (("bos", opens), ("eos", False)):
        if not keys.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        index = stored_id(keys, f"{name}_token_id")
        piece = tokenizer.id_to_token(index) if is_integer(index, 0) else None
        if piece is None:
            raise ValueError(f"tokenizer.ggml.{name}_token_id={index!r}, which texts shall have")
        used.append({"id": name, "ids": [index], "tokens": [piece]})
        template = [name, *template] if name == "bos" else [*template, name]
    post = processors.TemplateProcessing(single=template, special_tokens=used)
    tokenizer.post_processor = post if used else None
