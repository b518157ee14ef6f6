# SPDX-License-Identifier: Apache-2.0
"""Special pieces of a GGUF file: which end a text, which are hidden, and ids of keys left out.

Converters write neither all ends nor always the right type of a piece. llama.cpp therefore knows
some pieces by their spelling, and so does this module; its exceptions are in `_corrected`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from utio_jax.core.decoder import is_integer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of pieces, by the format's numbers."""

# Each ends a text wherever a vocabulary has it.
_SPELLED = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
ENDS = frozenset(_SPELLED.split())
# Pieces of code infilling, by the key that names one: the first that a vocabulary has, else.
_INFILLING = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> "
    "\u2581<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> "
    "\u2581<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> "
    "\u2581<MID> <|code_middle|> <|middle|>",
}
_INFILLING_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# Parts of a message's frame, which texts show.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# SentencePiece's own. llama.cpp's id for byte-level files, 11, is Falcon's alone: not used.
_DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def stored_id(keys: Mapping[str, Any], name: str) -> Any:
    """Returns what `tokenizer.ggml.NAME` holds, or SentencePiece's id where it is left out."""
    value = keys.get(f"tokenizer.ggml.{name}")
    pieces = keys.get("tokenizer.ggml.tokens")
    if value is None and keys.get("tokenizer.ggml.model") == "llama" and isinstance(pieces, list):
        default = _DEFAULT_IDS.get(name)
        return default if default is not None and default < len(pieces) else None
    return value


def special_pieces(keys: Mapping[str, Any]) -> tuple[set[int], np.ndarray | None]:
    """Returns the ids that end a text, and each piece's type, as llama.cpp corrects it.

    Ids are those that keys name and those of pieces spelled as `ENDS`. Types are None in a file
    without pieces, or with types for another number of pieces.
    """
    named = (stored_id(keys, f"{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {index for index in named if is_integer(index, 0)}
    pieces = keys.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list):
        return ends, None
    id_of = {piece: index for index, piece in enumerate(pieces)}
    hidden = set[int]()
    for name, spellings in _INFILLING.items():
        index = keys.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            index = next((id_of[text] for text in spellings.split() if text in id_of), None)
            hidden |= set() if index is None else {index}
        if name in _INFILLING_ENDS and is_integer(index, 0):
            ends.add(index)
    spelled = {index for index, text in enumerate(pieces) if text in ENDS}
    ends, kinds = ends | spelled, keys.get("tokenizer.ggml.token_type")
    kinds = np.full(len(pieces), NORMAL) if kinds is None else kinds
    if not isinstance(kinds, np.ndarray) or kinds.shape != (len(pieces),):
        return _corrected(ends, None, id_of), None
    kinds = kinds.copy()
    kinds[[*spelled, *hidden]] = CONTROL
    kinds[[id_of[text] for text in _SHOWN if text in id_of]] = USER_DEFINED
    return _corrected(ends, kinds, id_of), kinds


def _corrected(ends: set[int], kinds: np.ndarray | None, id_of: Mapping[str, int]) -> set[int]:
    """Returns ends without two spelled as one that are none, and sets the types of these two."""
    calls = "<|call|>" in id_of or "<|calls|>" in id_of
    no_ends = {}
    if calls and ("<|return|>" in id_of or "<|flush|>" in id_of):
        no_ends["<|end|>"] = USER_DEFINED  # It ends a message, of several in a turn.
    if "<|tool_response>" in id_of:
        no_ends["</s>"] = NORMAL  # HTML, in Gemma 4.
    for text in no_ends.keys() & id_of.keys():
        ends = ends - {id_of[text]}
        if kinds is not None:
            kinds[id_of[text]] = no_ends[text]
    return ends
