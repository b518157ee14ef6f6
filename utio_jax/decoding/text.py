# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: prompts as strings, stop strings, and each new token's piece of the text.

    found = generate_text(model, ["def mean(values):"], stop_strings=["class "])
    found.texts[0], found.pieces[0], found.generated.decided[0]

A stop string may begin and end inside tokens, and has many spellings in tokens: so text is
searched, on the host. Special pieces that it spells are searched with the text, and not shown.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from utio_jax.core.decoder import Params
from utio_jax.core.html import depth_html
from utio_jax.decoding.generate import Generated, check_options, generate, stream
from utio_jax.decoding.loop import Prompts

StopStrings = Sequence[str] | Sequence[Sequence[str]]
"""What ends texts, or a list of what ends each."""

_UNFINISHED = "\ufffd"
"""What byte-level tokenizers decode an unfinished character to."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of the `tokenizers` library have it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        ...


@runtime_checkable
class TextModel(Protocol):
    """What reads and writes text with a decoder: `utio_jax.models.Model`, or your own."""

    @property
    def decoder(self) -> Any:
        """The model, a `Decoder`."""
        ...

    @property
    def params(self) -> Params:
        """Its parameters."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Decodes what was generated: a `Tokenizer`."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's token ids `[token]`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GeneratedText:
    """What `generate_text` returns; entry `i` of each belongs to prompt `i`.

    Attributes:
      texts: new text, without the stop string that ended it.
      pieces: what each new token adds to it; a character of several tokens belongs to the last.
      generated: the tokens, up to the one that completed a stop string, and what they cost.
    """

    texts: tuple[str, ...]
    pieces: tuple[tuple[str, ...], ...]
    generated: Generated

    @property
    def text(self) -> str:
        """The new text of the only prompt. Raises ValueError where there were several."""
        if len(self.texts) != 1:
            raise ValueError(f"Wanted the text of one prompt. Got {len(self.texts)}: see texts.")
        return self.texts[0]

    @property
    def message(self) -> dict[str, str]:
        """That text as a message of the model's, for a chat to go on from; raises as `text`."""
        return {"role": "assistant", "content": self.text}

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        rows = zip(self.pieces, self.generated.decided, strict=True)
        layers = self.generated.num_layers
        return "".join(depth_html(p, d.tolist(), num_layers=layers) for p, d in rows)

    def summary(self) -> str:
        """Returns the texts, and below each how deep its tokens ran and what that took."""
        found, layers = self.generated, self.generated.num_layers
        blocks = []
        for row, text in enumerate(self.texts):
            depths = found.decided[row]
            if not depths.size:
                blocks.append(f"{text}\n[no new token]")
                continue
            said = f"{depths.size} tokens ({found.finish_reasons[row]}), mode {found.mode}: "
            said += f"{depths.mean():.1f} of {layers} layers each"
            if depths.min() < layers:
                counts = sorted(Counter(depths.tolist()).items())
                shares = (f"{count / depths.size:.0%} at {depth}" for depth, count in counts)
                said += f"; {', '.join(shares)}"
            blocks.append(f"{text}\n[{said}]")
        # Of all rows: those that step together run as deep as the deepest of them.
        steps = sum(max(0, depths.size - 1) for depths in found.decided) * layers
        if steps:
            run = float(found.token_layers.sum()) / steps
            blocks.append(f"Layers run per new token after the first, over full depth: {run:.2f}")
        if found.acceptance is not None:
            drafts, rounds = int(found.drafts.sum()), int(found.steps.sum())
            right = f"{found.acceptance:.0%} of {drafts}, in {rounds} rounds"
            blocks.append(f"Drafts that were right: {right}")
        return "\n".join(blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextChunk:
    """What `stream_text` yields: the text since the last chunk; entry `i` belongs to prompt `i`.

    Attributes:
      texts: what is new; empty for rows that have ended.
      decided: layers behind each token that it is made of, `[new]`.
      running: which rows go on.
    """

    texts: tuple[str, ...]
    decided: tuple[np.ndarray, ...]
    running: np.ndarray


def generate_text(
    model: TextModel,
    prompts: Sequence[str] | Prompts,
    *,
    stop_strings: StopStrings = (),
    **options: Any,
) -> GeneratedText:
    """Returns new text for each prompt; `utio_jax.models.Model.generate` takes modes by name.

    Each row is cut after the token that completes a stop string, or at which the caller's
    `stop_when` first returns True of all its new tokens. The host looks for these once per
    `chunk` tokens: up to so many that were decoded beyond one are dropped, but charged.

    Args:
      model: a `utio_jax.models.Model`, or anything else with a decoder and a tokenizer.
      prompts: texts, or the token ids of each; none of them empty.
      stop_strings: a text ends before the first of these in new text; or a list for each prompt.
      **options: other keyword arguments of `generate`.

    Raises:
      ValueError: an empty prompt or stop string, or see `generate`.
    """
    check_options(options)
    ids, rows = _begun(model, prompts, stop_strings)
    also: Callable[[int, np.ndarray], bool] | None = options.pop("stop_when", None)

    def stop_when(row: int, new: np.ndarray) -> bool:
        text = rows[row]
        for end in range(text.seen + 1, len(new) + 1):
            text.add(new[text.seen : end], running=True)
            if not text.stopped and also is not None and also(row, new[:end]):
                text.add((), running=False)  # Ends it with what was held back.
            if text.ended:
                return True
        return False

    stops = also is not None or any(row.stops for row in rows)
    options["stop_when"] = stop_when if stops else None
    found = generate(model.decoder, model.params, ids, **options)
    for row, new in zip(rows, found.token_ids, strict=True):
        row.add(new[row.seen :], running=False)
    reasons = zip(rows, found.finish_reasons, strict=True)
    generated = found.first(
        [row.seen for row in rows],
        finish_reasons=["stop" if row.stopped else reason for row, reason in reasons],
    )
    texts, pieces = zip(*((row.text, tuple(row.pieces)) for row in rows), strict=True)
    return GeneratedText(texts=texts, pieces=pieces, generated=generated)


def stream_pieces(
    model: TextModel, prompt: str | Sequence[int] | np.ndarray, **options: Any
) -> Iterator[tuple[str, int]]:
    """Yields what each new token adds to the text of one prompt, and the layers behind that token.

    Arguments and errors are those of `generate_text`, without stop strings. What stands for a
    character that the last tokens begin and do not end comes after them.
    """
    check_options(options)
    ids = _encoded(model, [prompt])
    reader, depth = TextReader(model.tokenizer, ids[0]), 0
    for chunk in stream(model.decoder, model.params, ids, **options):
        for token, depth in zip(chunk.token_ids[0], chunk.decided[0], strict=True):
            yield reader.add(int(token)), int(depth)
    if rest := reader.rest():
        yield rest, int(depth)


def stream_text(
    model: TextModel,
    prompts: Sequence[str] | Prompts,
    *,
    stop_strings: StopStrings = (),
    **options: Any,
) -> Iterator[TextChunk]:
    """Yields the texts of `generate_text` piece by piece; arguments and errors are those of it.

    What may be the beginning of a stop string, or of a character, is held back until it is known.
    """
    check_options(options)
    ids, rows = _begun(model, prompts, stop_strings)
    for chunk in stream(model.decoder, model.params, ids, **options):
        texts = tuple(
            "".join(piece for piece, _ in row.add(new, running=bool(running)))
            for row, new, running in zip(rows, chunk.token_ids, chunk.running, strict=True)
        )
        running = np.asarray([not row.ended for row in rows])
        yield TextChunk(
            texts=texts,
            decided=tuple(
                depths[: row.used] for row, depths in zip(rows, chunk.decided, strict=True)
            ),
            running=running,
        )
        if not running.any():
            return


class StreamedRow:
    """A text that grows by tokens up to a stop string: what it has shown, what it holds back.

    Attributes:
      text: what it has shown.
      pieces: what each token adds to that; joined, they are it.
      ended: whether it has.
      stopped: whether that was before a stop string.
      used: tokens of the last chunk, up to the one that completed a stop string.
      seen: the same of all chunks.
      stops: what ends it.
    """

    def __init__(self, reader: TextReader, stops: tuple[str, ...]):
        self._reader, self.stops, self._held = reader, stops, ""
        self._special = reader.special_in(stops)
        # Pieces of what is held back, the number of their token, and whether they are text.
        self._waiting = deque[tuple[str, int, bool]]()
        self.text, self.pieces, self.ended, self.stopped = "", list[str](), False, False
        self.used = self.seen = 0

    def add(self, token_ids: Sequence[int] | np.ndarray, *, running: bool) -> list[tuple[str, int]]:
        """Returns what is known of the text with these tokens, and was not before.

        In pieces, each with the number of its token, from 0; joined, they are it.
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
        self._hold(self._reader.rest(), self.seen - 1)
        self._stopped()
        return self._show(len(self._held))

    def _hold(self, piece: str, number: int, *, is_text: bool = True) -> None:
        self._held += piece
        self._waiting.append((piece, number, is_text))

    def _stopped(self) -> bool:
        """Cuts what is held before a stop string; returns whether there was one."""
        ends = [self._held.find(stop) for stop in self.stops if stop in self._held]
        if ends:
            self._held, self.ended = self._held[: min(ends)], True
            self.stopped = True
        return bool(ends)

    def _doubtful(self) -> int:
        """Returns how many of the last characters may belong to a stop string."""
        sizes = [
            size
            for stop in self.stops
            for size in range(1, len(stop))
            if self._held.endswith(stop[:size])
        ]
        return max(sizes, default=0)

    def _show(self, size: int) -> list[tuple[str, int]]:
        """Shows the first characters of what is held back, a piece of each of their tokens."""
        self._held = self._held[size:]
        shown = []
        while size:
            piece, number, is_text = self._waiting.popleft()
            if len(piece) > size:  # The rest may belong to a stop string, or does.
                self._waiting.appendleft((piece[size:], number, is_text))
                piece = piece[:size]
            size -= len(piece)
            if is_text:
                self.pieces[number] += piece
                shown.append((piece, number))
        self.text += "".join(piece for piece, _ in shown)
        return shown


def _begun(
    model: TextModel, prompts: Any, stop_strings: StopStrings
) -> tuple[Prompts, list[StreamedRow]]:
    """Returns the token ids of prompts, and the texts that go on behind them."""
    ids = _encoded(model, prompts)
    pairs = zip(ids, _by_row(stop_strings, len(ids)), strict=True)
    return ids, [StreamedRow(TextReader(model.tokenizer, prompt), mine) for prompt, mine in pairs]


def _encoded(model: TextModel, prompts: Any) -> Prompts:
    """Returns the token ids of prompts; those that are texts are encoded."""
    kinds: Any = list | tuple | np.ndarray
    rows = isinstance(prompts, kinds) and len(prompts) > 0 and isinstance(prompts[0], kinds)
    return prompts if rows else model.encode(listed(prompts))


def listed(texts: Sequence[str]) -> list[str]:
    """Returns texts as a list. Raises ValueError for one text, or something else."""
    several = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes))
    found = list(texts) if several else [None]
    if not all(isinstance(text, str) for text in found):
        remedy = "Wrap it: [...]." if isinstance(texts, str) else "For example: ['Once upon a']."
        raise ValueError(f"Wanted a list of texts. Got {texts!r:.60}. {remedy}")
    return found  # type: ignore[return-value]


def _by_row(stop_strings: StopStrings, rows: int) -> list[tuple[str, ...]]:
    """Returns each row's stop strings."""
    if isinstance(stop_strings, str) or all(isinstance(each, str) for each in stop_strings):
        return [checked_stops(stop_strings)] * rows  # type: ignore[arg-type]
    if len(stop_strings) != rows:
        raise ValueError(
            f"Wanted stop strings for all prompts, or a list of them for each of the {rows}. Got "
            f"{len(stop_strings)} lists."
        )
    return [checked_stops(each) for each in stop_strings]


def checked_stops(stop_strings: Sequence[str]) -> tuple[str, ...]:
    """Returns what ends a text. Raises ValueError for an empty string, or one instead of a list."""
    stops = tuple(stop_strings)
    if isinstance(stop_strings, str) or not all(stops):
        raise ValueError(
            f"Wanted a list of stop strings of at least one character. Got {stop_strings!r}."
        )
    return stops


class TextReader:
    """Decodes tokens one after the other, each behind a few of its predecessors.

    A character of several tokens is handed out with the last of them, also where the prompt ends
    within it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray):
        self._tokenizer, self._decode = tokenizer, tokenizer.decode
        before, size = [int(token_id) for token_id in prompt], 8
        self._ids, self._since = before[-size:], 0
        while not self._begins(self._ids) and size < len(before):
            size *= 2
            self._ids = before[-size:]
        # What goes before new text: all of it, or all but a character that it begins.
        ends = range(len(self._ids), max(-1, len(self._ids) - 4), -1)
        self._known = tuple(self._decode(self._ids[:end]) for end in ends)

    def special_in(self, stops: Sequence[str]) -> dict[int, str]:
        """Returns the special pieces that stop strings spell, by id: decoded text lacks them."""
        if not stops:
            return {}
        added: Any = getattr(self._tokenizer, "get_added_tokens_decoder", dict)()
        return {
            token_id: piece.content
            for token_id, piece in added.items()
            if piece.special and any(piece.content in stop for stop in stops)
        }

    def _begins(self, token_ids: list[int]) -> bool:
        """Returns whether tokens may be the first that are decoded."""
        # Behind nothing, some tokenizers drop a space, and some read no byte of a row of which the
        # first belongs to another character.
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
