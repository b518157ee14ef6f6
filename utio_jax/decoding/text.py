# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: prompts as strings, stop strings, and each new token's piece of the text.

    found = generate_text(model, ["def mean(values):"], stop_strings=["class "])
    found.texts[0], found.pieces[0], found.generated.decided[0]

Token boundaries do not align with strings: a stop string may begin and end inside tokens, and the
same string has many spellings in tokens. So text is searched, not tokens, on the host.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Prompts

Ids = Sequence[int] | np.ndarray

# What byte-level tokenizers decode an unfinished character to.
_UNFINISHED = "\ufffd"

# Tokens before a new one that may change what it adds: a character has up to four bytes.
_CONTEXT = 8


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of the `tokenizers` library have it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """What `generate_text` returns; entry `i` of each belongs to prompt `i`.

    Attributes:
      texts: new text, without the stop string that ended it.
      pieces: what each new token adds to it; a character of several tokens belongs to the last.
      generated: the tokens and what they cost. The token that completed a stop string is the last.
    """

    texts: tuple[str, ...]
    pieces: tuple[tuple[str, ...], ...]
    generated: Generated


def generate_text(
    model: Any, prompts: Sequence[str], *, stop_strings: Sequence[str] = (), **options: Any
) -> GeneratedText:
    """Returns new text for each prompt.

    Args:
      model: has `decoder`, `params`, `tokenizer` and `encode(texts)`: a `utio_jax.models.Model`.
      prompts: none of them empty.
      stop_strings: a text ends before the first occurrence of any of these in new text.
      **options: other keyword arguments of `generate`.

    Raises:
      ValueError: an empty prompt or stop string, or see `generate`.
    """
    ids = model.encode(list(prompts))
    generated = generate_until(
        model.tokenizer, model.decoder, model.params, ids, stop_strings=stop_strings, **options
    )
    return read_text(model.tokenizer, ids, generated, stop_strings=stop_strings)


def generate_until(
    tokenizer: Tokenizer,
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    *,
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> Generated:
    """Returns what `generate` does, each row cut after the token that completes a stop string.

    The host looks for stop strings once per `chunk` tokens. Up to `chunk` tokens that were decoded
    beyond one are dropped, but charged. Where rows end does not depend on `chunk`.

    Raises:
      ValueError: an empty stop string, or see `generate`.
    """
    stops = tuple(stop_strings)
    if isinstance(stop_strings, str) or not all(stops):
        raise ValueError(
            f"Wanted a list of stop strings of at least one character. Got {stop_strings!r}."
        )
    if not stops:
        return generate(decoder, params, prompts, **options)

    def stop_when(row: int, new: np.ndarray) -> bool:
        text = new_text(tokenizer, prompts[row], new)
        return any(stop in text for stop in stops)

    found = generate(decoder, params, prompts, stop_when=stop_when, **options)
    counts, reasons = [], []
    for prompt, new, reason in zip(prompts, found.token_ids, found.finish_reasons, strict=True):
        pieces, count = pieces_of(tokenizer, prompt, new), 0
        text = ""
        while count < new.size and not any(stop in text for stop in stops):
            text += pieces[count]
            count += 1
        counts.append(count)
        reasons.append("stop" if any(stop in text for stop in stops) else reason)
    return found.first(counts, finish_reasons=reasons)


def read_text(
    tokenizer: Tokenizer,
    prompts: Prompts,
    generated: Generated,
    *,
    stop_strings: Sequence[str] = (),
) -> GeneratedText:
    """Returns the new tokens as text, cut before the first occurrence of a stop string."""
    texts, pieces = [], []
    for prompt, new in zip(prompts, generated.token_ids, strict=True):
        mine = pieces_of(tokenizer, prompt, new)
        text = "".join(mine)
        ends = [text.find(stop) for stop in stop_strings if stop in text]
        text = text[: min(ends, default=len(text))]
        starts = np.cumsum([0, *map(len, mine)])
        texts.append(text)
        pieces.append(tuple(text[start:end] for start, end in itertools.pairwise(starts)))
    return GeneratedText(texts=tuple(texts), pieces=tuple(pieces), generated=generated)


def new_text(tokenizer: Tokenizer, prompt: Ids, new: Ids) -> str:
    """Returns the text of new tokens, decoded behind their prompt.

    Some tokenizers drop a space that opens a text, and what is new does not open it.
    """
    known = [int(i) for i in prompt]
    start = len(tokenizer.decode(known))
    return tokenizer.decode(known + [int(i) for i in new])[start:]


def pieces_of(tokenizer: Tokenizer, prompt: Ids, new: Ids) -> list[str]:
    """Returns what each new token adds to the text; joined, they are the text."""
    pieces, done = [], 0
    for end in range(1, len(new) + 1):
        text = new_text(tokenizer, prompt, new[:end])
        if end < len(new):
            text = text.rstrip(_UNFINISHED)
        pieces.append(text[done:])
        done = max(done, len(text))
    return pieces


class PieceReader:
    """Reads new tokens one at a time; each piece costs the same, however long the text.

    The pieces are those of `pieces_of`, joined to the same text. Only the tokens since the last
    whole character are decoded again, with a few before them: what a token adds depends on those.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Ids):
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prompt][-_CONTEXT:]
        self._shown = len(tokenizer.decode(self._ids))

    def add(self, token: int) -> str:
        """Returns what the token adds; nothing while a character is unfinished."""
        self._ids.append(int(token))
        text = self._tokenizer.decode(self._ids)
        piece = text[self._shown :].rstrip(_UNFINISHED)
        self._shown += len(piece)
        if self._shown == len(text) and len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._shown = len(self._tokenizer.decode(self._ids))
        return piece

    def rest(self) -> str:
        """Returns what is left at the end of a text: characters that were never finished."""
        return self._tokenizer.decode(self._ids)[self._shown :]
