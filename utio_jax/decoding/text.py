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

    readers = [TextReader(tokenizer, prompt) for prompt in prompts]
    tails, seen, longest = [""] * len(readers), [0] * len(readers), max(map(len, stops))

    def stop_when(row: int, new: np.ndarray) -> bool:
        text = tails[row] + "".join(readers[row].add(int(i)) for i in new[seen[row] :])
        seen[row], tails[row] = len(new), text[-longest:]
        return any(stop in text for stop in stops)

    found = generate(decoder, params, prompts, stop_when=stop_when, **options)
    counts, reasons = [], []
    for prompt, new, reason in zip(prompts, found.token_ids, found.finish_reasons, strict=True):
        pieces = pieces_of(tokenizer, prompt, new)
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
        completed = [text.find(stop) + len(stop) for stop in stops if stop in text]
        counts.append(int(np.searchsorted(ends, min(completed))) + 1 if completed else new.size)
        reasons.append("stop" if completed else reason)
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
    return "".join(pieces_of(tokenizer, prompt, new))


def pieces_of(tokenizer: Tokenizer, prompt: Ids, new: Ids) -> list[str]:
    """Returns what each new token adds to the text; joined, they are the text."""
    reader = TextReader(tokenizer, prompt)
    pieces = [reader.add(int(token_id)) for token_id in new]
    if pieces:
        pieces[-1] += reader.rest()
    return pieces


class TextReader:
    """Decodes tokens one after the other: each is decoded behind a few of its predecessors.

    So the time is that of the tokens, not of their square. A character of several tokens is handed
    out with the last of them, also where the prompt ends within it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Ids):
        self._decode = tokenizer.decode
        before, size = [int(token_id) for token_id in prompt], 8
        self._ids, self._since = before[-size:], 0
        while not self._begins(self._ids) and size < len(before):
            size *= 2
            self._ids = before[-size:]
        # What goes before new text: all of it, or all but a character that it begins.
        ends = range(len(self._ids), max(-1, len(self._ids) - 4), -1)
        self._known = tuple(self._decode(self._ids[:end]) for end in ends)

    def _begins(self, token_ids: list[int]) -> bool:
        """Returns whether tokens may be the first that are decoded.

        Behind nothing, some tokenizers drop a space, and some read no byte of a row of which the
        first belongs to another character.
        """
        text = self._decode(token_ids)
        return bool(text) and not text.startswith(_UNFINISHED)

    def add(self, token_id: int) -> str:
        """Returns what is known of the text with one more token, and was not before."""
        self._ids.append(token_id)
        self._since += 1
        text = self._decode(self._ids)
        fresh = text[self._shared(text) :]
        done = fresh.rstrip(_UNFINISHED)
        if not done:  # Maybe the rest of a character is yet to come.
            return ""
        self._known = (text[: len(text) - len(fresh) + len(done)],)
        recent = self._ids[-self._since :]
        if done == fresh and self._begins(recent):
            self._ids, self._known, self._since = recent, (self._decode(recent),), 0
        return done

    def rest(self) -> str:
        """Returns what stands for a character that the last tokens begin and do not end."""
        text = self._decode(self._ids)
        return text[self._shared(text) :]

    def _shared(self, text: str) -> int:
        """Returns how much of a text was known before its last tokens."""
        known = (known for known in self._known if text.startswith(known))
        return len(next(known, self._known[-1]))
