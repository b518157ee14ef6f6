# SPDX-License-Identifier: Apache-2.0
"""Requests: prompts with the options of their rows, checked once; their events and results."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from utio_jax.core.decoder import Decoder, DecoderConfig, is_integer
from utio_jax.core.documents import check_ids
from utio_jax.core.html import depth_html
from utio_jax.core.work import Work
from utio_jax.decoding.sampling import SamplingParams, check_sampling, check_seeds
from utio_jax.decoding.state import Columns
from utio_jax.decoding.text import (
    StopStrings,
    StreamedRow,
    Tokenizer,
    depth_summary,
    stops_of_texts,
    streamed,
)

Prompts = Sequence[Sequence[int] | np.ndarray | jax.Array]
"""Token ids: a list or an array for each row."""

END_REASONS = ("eos", "stop", "length", "cancelled", "deadline", "interrupted", "nan")
"""Finish reasons of requests.

`interrupted`: a call of `Engine.advance` did not return. `nan`: the model's logits were no numbers
(an overflow, or weights that hold NaN); the request keeps its tokens before that.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Completion(Columns):
    """Result of a request: its new tokens, their text and their cost.

    Attributes:
      reason: one of `END_REASONS`. With the last four, tokens read by the host so far are kept.
      text: text of the new tokens before a stop string; empty without a tokenizer.
      pieces: text that each new token adds; a character of several tokens belongs to the last one.
      num_layers: number of layers of the model.
      work: executed work of its decode steps.
      cached_tokens: number of prompt tokens from the prefix cache.
      seconds: seconds from `submit` to the end, measured on the host.
      seconds_in_queue: seconds until prefill began; None if it never did.
      seconds_to_first_token: seconds until the first new token; None without one.
      seconds_between_tokens: mean seconds between new tokens; None if the host took all at once.
    """

    reason: str
    text: str
    pieces: tuple[str, ...]
    num_layers: int
    work: Work
    seconds: float
    seconds_in_queue: float | None
    seconds_to_first_token: float | None
    seconds_between_tokens: float | None
    cached_tokens: int = 0

    @property
    def message(self) -> dict[str, str]:
        """New text as an assistant message, to continue a chat."""
        return {"role": "assistant", "content": self.text}

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return depth_html(self.pieces, self.decided.tolist(), num_layers=self.num_layers)

    def summary(self, *, mode: str | None = None) -> str:
        """Returns the text, the number and depths of its tokens, and the name of their mode."""
        if not self.decided.size:
            return f"{self.text}\n[no new token ({self.reason})]"
        depths = depth_summary(self.decided, num_layers=self.num_layers)
        by = "" if mode is None else f", mode {mode}"
        line = f"{self.decided.size} tokens ({self.reason}){by}: {depths}"
        if self.cached_tokens:
            line += f"; {self.cached_tokens} tokens of the prompt were cached"
        return f"{self.text}\n[{line}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event(Columns):
    """Output of a block for one request: its new tokens since the last event.

    Attributes:
      request: number of the request, as returned by `submit`.
      pieces: pieces of new text, each with the index of its token, from 0. Text that may belong to
        a stop string or an unfinished character is held back.
      finished: result of the request, once it has ended; None while it runs.
    """

    request: int
    pieces: list[tuple[str, int]]
    finished: Completion | None

    @property
    def text(self) -> str:
        """New text: the pieces, joined."""
        return "".join(piece for piece, _ in self.pieces)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReport:
    """Report of a row: new tokens, its length with them, finish reason, and work so far.

    The work is read by a call, as of a row's last report alone.
    """

    columns: Columns
    length: int
    reason: str
    work: Callable[[], Work]


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """Prompt and options of a row, and what the host knows of it, updated with every block.

    For its options, see `requests_of` and `utio_jax.Engine.submit`. Times are seconds on one clock.

    Attributes:
      num_layers: number of layers of the model.
      thresholds: thresholds of its depth policy at the mode's boundaries; None: the mode's own.
      text: streamed text of its new tokens; None without a tokenizer.
      stop_when: ends it after the first new token for which it returns True; it is called with the
        new tokens up to that one.
      block_keys: keys of the prompt's whole blocks; None: it does not use the prefix cache.
      salt: salt of these keys; requests with other salts do not share its blocks.
      cached: number of prompt tokens from the prefix cache.
      read: number of prompt tokens whose K/V are in its row, cached ones included.
      slot: slot in which it runs; None until its prompt has been read.
      admitted: time at which its prompt was first read; None while it waits.
      stepped: True once it has run in a block.
      ending: reason for which the host ends it; None: no reason.
      finished: its result, once its last event has been made.
      parts: new tokens of each event, after one empty part.
    """

    number: int
    prompt: Int[np.ndarray, " token"]
    max_new_tokens: int
    num_layers: int = 0
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = 0
    eos_ids: Sequence[int] = ()
    thresholds: Float[np.ndarray, " boundary"] | None = None
    text: StreamedRow | None = None
    stop_when: Callable[[np.ndarray], bool] | None = None
    whole_prompt: bool = False
    submitted: float = 0.0
    expires: float = math.inf
    block_keys: list[bytes] | None = None
    salt: str = ""
    cached: int = 0
    read: int = 0
    slot: int | None = None
    admitted: float | None = None
    stepped: bool = False
    ending: str | None = None
    finished: Completion | None = None
    parts: list[Columns] = dataclasses.field(default_factory=lambda: [Columns.empty(0)])
    _last: RowReport | None = None
    _times: list[float] = dataclasses.field(default_factory=list)

    @property
    def ends_on_host(self) -> bool:
        """True if the device alone may not see its end."""
        return self.stop_when is not None or (self.text is not None and bool(self.text.stops))

    @property
    def length(self) -> int:
        """Number of tokens of its prompt and of those that were reported."""
        return self.prompt.size if self._last is None else self._last.length

    def take(self, report: RowReport, now: float) -> Event:
        """Returns the event of a block, cut after the token that ends the request on the host."""
        new, reason, pieces = report.columns, report.reason, list[tuple[str, int]]()
        wrong = np.isnan(new.log_probabilities)
        if wrong.any():
            new, reason = new.cut(slice(int(wrong.argmax()))), "nan"
        if self.stop_when is not None:
            ids = np.concatenate([*(part.token_ids for part in self.parts), new.token_ids])
            known, last = ids.size - new.token_ids.size, new.token_ids.size
            end = next((n for n in range(1, last + 1) if self.stop_when(ids[: known + n])), None)
            if end is not None and (end < last or reason == "running"):
                new, reason = new.cut(slice(end)), "stop"
        if self.text is not None:
            pieces = self.text.add(new.token_ids, running=reason == "running")
            if self.text.stopped:
                new, reason = new.cut(slice(self.text.used)), "stop"
        self.parts.append(new)
        self._last = report
        if new.token_ids.size:
            self._times.append(now)
        return Event(
            **vars(new),
            request=self.number,
            pieces=pieces,
            finished=None if reason == "running" else self.finish(reason, now),
        )

    def end(self, reason: str, now: float) -> Event:
        """Ends the request from the host between two blocks; returns its last event."""
        pieces = [] if self.text is None else self.text.add((), running=False)
        finished, none = self.finish(reason, now), self.parts[0]
        return Event(**vars(none), request=self.number, pieces=pieces, finished=finished)

    def interrupted(self, now: float, text: StreamedRow | None, *, returned: int) -> Event:
        """Returns the last event of a request whose engine lost its row.

        The event has the tokens and the text that no call has returned: those after the first
        `returned` parts. `text` is a new reader of the tokens: the interrupt may have left the
        request's own in an undefined state. A request that had already finished keeps its result.
        """
        old, new = (
            Columns.joined([self.parts[0], *parts])
            for parts in (self.parts[:returned], self.parts[returned:])
        )
        pieces, self.text = list[tuple[str, int]](), text
        if text is not None:
            text.add(old.token_ids, running=True)
            pieces = text.add(new.token_ids, running=False)
        finished = self.finished or self.finish("interrupted", now)
        return Event(**vars(new), request=self.number, pieces=pieces, finished=finished)

    def finish(self, reason: str, now: float) -> Completion:
        """Makes the result of the request and stores it; called once."""
        assert self.finished is None
        times, new = self._times, Columns.joined(self.parts)
        size = new.token_ids.size
        self.finished = Completion(
            **vars(new),
            reason=reason,
            text="" if self.text is None else self.text.text,
            pieces=("",) * size if self.text is None else tuple(self.text.pieces),
            num_layers=self.num_layers,
            work=Work.of() if self._last is None else self._last.work(),
            cached_tokens=self.cached,
            seconds=now - self.submitted,
            seconds_in_queue=None if self.admitted is None else self.admitted - self.submitted,
            seconds_to_first_token=times[0] - self.submitted if times else None,
            seconds_between_tokens=(times[-1] - times[0]) / (size - 1) if len(times) > 1 else None,
        )
        return self.finished


def requests_of(
    decoder: Decoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    seeds: int | Sequence[int] = 0,
    eos_ids: Any = None,
    stop_strings: StopStrings = (),
    tokenizer: Tokenizer | None = None,
) -> list[Request]:
    """Returns a request for each prompt. Options and errors are those of `utio_jax.generate`."""
    config = decoder.config
    rows = check_prompts(prompts, config=config, max_new_tokens=max_new_tokens)
    count = len(rows)
    ends = _eos_of_rows(config.eos_ids if eos_ids is None else eos_ids, rows=count)
    drawn = check_sampling(sampling, rows=count)
    row_seeds = check_seeds(seeds, rows=count).tolist()
    strings = stops_of_texts(stop_strings, count)
    return [
        Request(
            number=row,
            prompt=ids,
            max_new_tokens=max_new_tokens,
            num_layers=config.num_layers,
            sampling=drawn[row],
            seed=row_seeds[row],
            eos_ids=ends[row],
            text=streamed(tokenizer, decoder, ids, strings[row]),
            submitted=time.monotonic(),
        )
        for row, ids in enumerate(rows)
    ]


def _eos_of_rows(eos_ids: Any, *, rows: int) -> list[list[int]]:
    """Returns the end tokens of each row: one list for all rows, or a list per row."""
    items = eos_ids if np.iterable(eos_ids) and not isinstance(eos_ids, str) else [""]
    if any(isinstance(item, str) for item in items):
        raise ValueError(
            "Wanted eos_ids as a list of token ids, or such lists for each row. Got "
            f"{eos_ids!r:.60}. Strings that end a text are stop= of a model, stop_strings= "
            "elsewhere."
        )
    given: Any = eos_ids if any(map(_is_list, eos_ids)) else [eos_ids] * rows
    if len(given) != rows or not all(map(_is_list, given)):
        raise ValueError(
            f"Wanted eos_ids for all prompts, or a list of them for each of the {rows}. Got "
            f"{given!r:.80}."
        )
    return [check_ids([*ids], vocab_size=2**31, what="eos_ids").tolist() for ids in given]


def _is_list(value: Any) -> bool:
    """Returns True for a list, tuple, set or range, and for an array of one axis or more."""
    return isinstance(value, (list, tuple, set, frozenset, range)) or np.ndim(value) > 0


def check_prompts(
    prompts: Prompts, *, config: DecoderConfig, max_new_tokens: int
) -> list[np.ndarray]:
    """Returns the prompts as int32 arrays. Raises ValueError, see `utio_jax.generate`."""
    if not is_integer(max_new_tokens, 1):
        raise ValueError(
            f"Wanted max_new_tokens of at least 1, an integer. Got max_new_tokens="
            f"{max_new_tokens!r}."
        )
    if not np.iterable(prompts) or not len(prompts):
        raise ValueError(f"Wanted at least one prompt, in a list. Got {prompts!r}.")
    checked = []
    for index, prompt in enumerate(prompts):
        ids = check_ids(prompt, vocab_size=config.vocab_size, what=f"prompt {index}")
        if not ids.size:
            message = f"Wanted prompts of at least one token. Prompt {index} is empty."
            if config.bos_id is not None:
                message += (
                    f" To start without text, pass the model's bos_id as token ids: "
                    f"[[{config.bos_id}]]."
                )
            raise ValueError(message)
        if ids.size + max_new_tokens > config.context_length:
            raise ValueError(
                "Wanted prompt and new tokens within the model's context of "
                f"{config.context_length}. Got prompt {index} of {ids.size} tokens and "
                f"max_new_tokens={max_new_tokens}. Cut one of them."
            )
        checked.append(ids)
    return checked


def arrays_of(requests: Sequence[Request], *, width: int) -> dict[str, Any]:
    """Returns requests as arrays with a row for each, by the arguments of `begin`.

    Prompts are padded on the right to `width` tokens.
    """
    token_ids = np.zeros((len(requests), width), np.int32)
    for row, request in zip(token_ids, requests, strict=True):
        row[: request.prompt.size] = request.prompt
    lengths = np.asarray([request.prompt.size for request in requests], np.int32)
    new = np.asarray([request.max_new_tokens for request in requests], np.int32)
    seeds = np.asarray([request.seed for request in requests], np.uint32)
    return {"token_ids": token_ids, "lengths": lengths, "limits": lengths + new, "seeds": seeds}
