# SPDX-License-Identifier: Apache-2.0
"""Text of new tokens: detokenizers, stop strings, and the text of each token.

A stop string may begin and end inside tokens, and has many tokenizations. Therefore, the host
searches the decoded text. Special tokens that a stop string contains are searched, but not shown.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from utio_jax.core.decoder import Params

StopStrings = str | Sequence[str] | Sequence[Sequence[str]]
"""Stop string or strings of all texts, or a list of stop strings for each."""

_UNFINISHED = "\ufffd"
"""Replacement character, to which byte-level tokenizers decode an unfinished character."""


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers; those of the `tokenizers` library implement it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        ...


@runtime_checkable
class TokenModel(Protocol):
    """Decoder with parameters: `utio_jax.models.Model`, or your own class.

    Its `tokenizer` decodes new tokens. Without one, or if `has_tokenizer` is False, it has no text.
    """

    @property
    def decoder(self) -> Any:
        """The model, a `Decoder`."""
        ...

    @property
    def params(self) -> Params:
        """Model parameters."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's token ids `[token]`."""
        ...


@runtime_checkable
class TextModel(TokenModel, Protocol):
    """Decoder with a tokenizer."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer that decodes new tokens, a `Tokenizer`."""
        ...


def optional_tokenizer(model: TokenModel) -> Tokenizer | None:
    """Returns a model's tokenizer, or None if it has none, see `TokenModel`."""
    return getattr(model, "tokenizer", None) if getattr(model, "has_tokenizer", True) else None


def check_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Returns a tokenizer or None. Raises TypeError for an object without `decode`."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    raise TypeError(f"Wanted a tokenizer, which has decode(ids). Got {tokenizer!r:.60}.")


def depth_summary(depths: Int[np.ndarray, " token"], *, num_layers: int) -> str:
    """Returns the mean depth of tokens and, if one stopped early, the share of each depth.

    >>> depth_summary(np.asarray([8, 16]), num_layers=16)
    '12.0 of 16 layers each; 50% at 8, 50% at 16'
    """
    line = f"{depths.mean():.1f} of {num_layers} layers each"
    if depths.min() == num_layers:
        return line
    counts = sorted(Counter(depths.tolist()).items())
    shares = (f"{count / depths.size:.0%} at {depth}" for depth, count in counts)
    return f"{line}; {', '.join(shares)}"


def streamed(
    tokenizer: Tokenizer | None,
    decoder: Any,
    prompt: Sequence[int] | np.ndarray,
    stops: tuple[str, ...],
) -> StreamedRow | None:
    """Returns the streamed text of a row before its first new token; None without a tokenizer."""
    tokenizer = check_tokenizer(tokenizer)
    if tokenizer is not None:
        return StreamedRow(TextReader(tokenizer, continued(decoder, prompt)), stops)
    if not stops:
        return None
    raise ValueError(
        f"Wanted a tokenizer for stop_strings={[*stops]}. Got none. Pass tokenizer=..., to an "
        "engine as it is made."
    )


def continued(decoder: Any, prompt: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
    """Returns the part of a prompt that new text continues: all, or what a target begins with.

    Models whose config has `source_tokens` read a source and the token that opens a target first.
    """
    source = getattr(decoder.config, "source_tokens", None)
    return prompt if source is None else prompt[source + 1 :]


class StreamedRow:
    """Streamed text of one row, which ends before a stop string.

    Attributes:
      text: text that has been shown.
      pieces: text that each token adds; joined, they are `text`.
      ended: True once the text has ended.
      stopped: True if a stop string ended it.
      used: number of tokens of the last chunk, up to the one that completed a stop string.
      seen: number of such tokens of all chunks.
      stops: stop strings.
    """

    def __init__(self, reader: TextReader, stops: tuple[str, ...]):
        self._reader, self.stops, self._held = reader, stops, ""
        self._special = reader.special_in(stops)
        # Pieces that are held back, the index of their token, and True if they are text.
        self._waiting = deque[tuple[str, int, bool]]()
        self.text, self.pieces, self.ended, self.stopped = "", list[str](), False, False
        self.used = self.seen = 0

    def add(self, token_ids: Sequence[int] | np.ndarray, *, running: bool) -> list[tuple[str, int]]:
        """Adds tokens, and returns the new text that is now decided.

        The text comes in pieces, each with the index of its token, from 0.
        """
        self.used = 0
        if self.ended:
            return []
        for token_id in token_ids:
            self._hold(self._reader.add(int(token_id)), self.seen)
            self._hold(self._special.get(int(token_id), ""), self.seen, is_text=False)
            self.pieces.append("")
            self.used, self.seen = self.used + 1, self.seen + 1
            if self._stopped():
                return self._show(len(self._held))
        if running:
            return self._show(len(self._held) - self._doubtful())
        self.ended = True
        self._hold(self._reader.flush(), self.seen - 1)
        self._stopped()
        return self._show(len(self._held))

    def _hold(self, piece: str, number: int, *, is_text: bool = True) -> None:
        self._held += piece
        self._waiting.append((piece, number, is_text))

    def _stopped(self) -> bool:
        """Cuts held text before a stop string; returns True if it contained one."""
        ends = [self._held.find(stop) for stop in self.stops if stop in self._held]
        if ends:
            self._held, self.ended = self._held[: min(ends)], True
            self.stopped = True
        return bool(ends)

    def _doubtful(self) -> int:
        """Returns the number of last characters that may belong to a stop string."""
        sizes = [
            size
            for stop in self.stops
            for size in range(1, len(stop))
            if self._held.endswith(stop[:size])
        ]
        return max(sizes, default=0)

    def _show(self, size: int) -> list[tuple[str, int]]:
        """Shows the first characters of the held text, as one piece per token."""
        self._held = self._held[size:]
        shown = []
        while size:
            piece, number, is_text = self._waiting.popleft()
            if len(piece) > size:  # All further characters may belong to a stop string.
                self._waiting.appendleft((piece[size:], number, is_text))
                piece = piece[:size]
            size -= len(piece)
            if is_text:
                self.pieces[number] += piece
                shown.append((piece, number))
        self.text += "".join(piece for piece, _ in shown)
        return shown


def listed(texts: Sequence[str]) -> list[str]:
    """Returns texts as a list. Raises ValueError for a single text or another type."""
    several = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes))
    result = list(texts) if several else [None]
    if not all(isinstance(text, str) for text in result):
        remedy = "Wrap it: [...]." if isinstance(texts, str) else "For example: ['Once upon a']."
        raise ValueError(f"Wanted a list of texts. Got {texts!r:.60}. {remedy}")
    return result  # type: ignore[return-value]


def stops_of_texts(stop_strings: StopStrings, rows: int) -> list[tuple[str, ...]]:
    """Returns each text's stop strings. Raises ValueError, see `generate_text`."""
    lists = not isinstance(stop_strings, str) and isinstance(stop_strings, Sequence)
    if not lists or not any(isinstance(stops, list | tuple) for stops in stop_strings):
        return [checked_stops(stop_strings)] * rows  # type: ignore[arg-type]
    if len(stop_strings) != rows:
        raise ValueError(
            f"Wanted stop strings for all prompts, or a list of them for each of the {rows}. Got "
            f"{len(stop_strings)} lists."
        )
    return [checked_stops(strings) for strings in stop_strings]


def checked_stops(stop_strings: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as a tuple; a single string is one of them.

    Raises:
      ValueError: one of them is empty, or no string.
    """
    single = not isinstance(stop_strings, Iterable) or isinstance(stop_strings, str)
    stops: tuple[Any, ...] = (stop_strings,) if single else tuple(stop_strings)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(
            "Wanted a list of stop strings of at least one character. Got "
            f"{stop_strings!r:.60}. For example: ['\\n\\n', 'class ']."
        )
    return stops


class TextReader:
    """Incremental detokenizer: decodes each token with a few of its predecessors.

    A character of several tokens is returned with the last of them, also if the prompt ends within
    it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray):
        self._tokenizer, self._decode = tokenizer, tokenizer.decode
        before, size = [int(token_id) for token_id in prompt], 8
        self._ids, self._since = before[-size:], 0
        while not self._begins(self._ids) and size < len(before):
            size *= 2
            self._ids = before[-size:]
        # Text before new tokens: with or without an unfinished character at its end.
        ends = range(len(self._ids), max(-1, len(self._ids) - 4), -1)
        self._known = tuple(self._decode(self._ids[:end]) for end in ends)

    def special_in(self, stops: Sequence[str]) -> dict[int, str]:
        """Returns special tokens that stop strings contain, by id: decoded text lacks them."""
        if not stops:
            return {}
        added: Any = getattr(self._tokenizer, "get_added_tokens_decoder", dict)()
        return {
            token_id: piece.content
            for token_id, piece in added.items()
            if piece.special and any(piece.content in stop for stop in stops)
        }

    def _begins(self, token_ids: list[int]) -> bool:
        """Returns True if decoding may start with these tokens."""
        # At the start of a text, some tokenizers drop a space. Some decode no byte of a sequence
        # that starts within a character.
        text = self._decode(token_ids)
        return bool(text) and not text.startswith(_UNFINISHED)

    def add(self, token_id: int) -> str:
        """Adds a token, and returns the text that it completes."""
        self._ids.append(token_id)
        self._since += 1
        text = self._decode(self._ids)
        fresh = text[self._shared(text) :]
        done = fresh.rstrip(_UNFINISHED)
        if not done:  # The character may be unfinished.
            return ""
        self._known = (text[: len(text) - len(fresh) + len(done)],)
        recent = self._ids[-self._since :]
        if done == fresh and self._begins(recent):
            self._ids, self._known, self._since = recent, (self._decode(recent),), 0
        return done

    def flush(self) -> str:
        """Returns the replacement of a character that the last tokens leave unfinished."""
        text = self._decode(self._ids)
        return text[self._shared(text) :]

    def _shared(self, text: str) -> int:
        """Returns the length of the text that was known before its last tokens."""
        known = (known for known in self._known if text.startswith(known))
        return len(next(known, self._known[-1]))
