# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine: their state, events and results, and engine statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt32

from utio_jax.core.html import depth_html
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.decoding.state import STOPS_ROOM, Columns, Stops, stop_rules
from utio_jax.decoding.text import StreamedRow, depth_summary
from utio_jax.engine.blocks import TALLIED, RowReport, Rules

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
      steps: number of decode steps.
      token_layers: token slots that ran a layer after prefill.
      drafts: number of verified drafts.
      accepted: number of accepted drafts.
      cached_tokens: number of prompt tokens from the prefix cache.
      seconds: seconds from `submit` to the end, measured on the host.
      seconds_in_queue: seconds until prefill began; None if it never did.
      seconds_to_first_token: seconds until the first new token; None without one.
      seconds_between_tokens: mean seconds between new tokens; None for fewer than two.
    """

    reason: str
    text: str
    pieces: tuple[str, ...]
    num_layers: int
    steps: int
    token_layers: int
    drafts: int
    accepted: int
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

    def summary(self) -> str:
        """Returns the text, and the number and depths of its tokens."""
        if not self.decided.size:
            return f"{self.text}\n[no new token ({self.reason})]"
        depths = depth_summary(self.decided, num_layers=self.num_layers)
        line = f"{self.decided.size} tokens ({self.reason}): {depths}"
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


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Engine statistics: counts since the engine was made or warmed up.

    Attributes:
      mode: name of the decoding mode.
      slots: number of requests that can run at once.
      queued: number of requests that wait for a slot.
      running: number of requests that have a slot.
      ended: number of finished requests by reason.
      blocks: number of blocks of decode steps.
      prompt_groups: number of prefill passes.
      prompt_tokens: number of tokens of prompts that have been read.
      cached_tokens: number of these tokens that came from the prefix cache.
      prefix_blocks: number of blocks in the prefix cache.
      prefix_evictions: number of blocks evicted from the prefix cache.
      padded_prompt_tokens: token slots that prefill passes ran, padding included.
      new_tokens: number of new tokens in events.
      decided: sum of the decided depths of new tokens in layers.
      executed: sum of the layers that ran for new tokens, including those for other rows.
    """

    mode: str
    slots: int
    queued: int = 0
    running: int = 0
    ended: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    blocks: int = 0
    prompt_groups: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_blocks: int = 0
    prefix_evictions: int = 0
    padded_prompt_tokens: int = 0
    new_tokens: int = 0
    decided: int = 0
    executed: int = 0

    @property
    def mean_depth_decided(self) -> float | None:
        """Mean decided depth of new tokens in layers; None without new tokens."""
        return self.decided / self.new_tokens if self.new_tokens else None

    @property
    def mean_depth_executed(self) -> float | None:
        """Mean number of layers that ran for a new token; None without new tokens."""
        return self.executed / self.new_tokens if self.new_tokens else None

    def add(self, event: Event) -> None:
        """Adds the tokens and the end of an event to the counts."""
        self.new_tokens += event.token_ids.size
        self.decided += int(event.decided.sum())
        self.executed += int(event.executed.sum())
        if event.finished is not None:
            self.ended[event.finished.reason] += 1


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """State of a request in an engine, updated with every block.

    For its options, see `Engine.submit`. Times are seconds on the engine's clock.

    Attributes:
      num_layers: number of layers of the model.
      thresholds: thresholds of its depth policy at the mode's boundaries; None: the mode's own.
      text: streamed text of its new tokens; None without a tokenizer.
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
    stops: Stops = ((), ())
    thresholds: Float[np.ndarray, " boundary"] | None = None
    text: StreamedRow | None = None
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
    def length(self) -> int:
        """Number of tokens of its prompt and of those that were reported."""
        return self.prompt.size if self._last is None else self._last.length

    def take(self, report: RowReport, now: float) -> Event:
        """Returns the event of a block, cut after the token that completed a stop string."""
        new, reason, pieces = report.columns, report.reason, list[tuple[str, int]]()
        wrong = np.isnan(new.log_probabilities)
        if wrong.any():
            new, reason = new.cut(slice(int(wrong.argmax()))), "nan"
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
        times, last = self._times, self._last
        counts: dict[str, Any] = dict.fromkeys(TALLIED, 0) if last is None else last.counts
        new = Columns.joined(self.parts)
        size = new.token_ids.size
        self.finished = Completion(
            **vars(new),
            reason=reason,
            text="" if self.text is None else self.text.text,
            pieces=("",) * size if self.text is None else tuple(self.text.pieces),
            num_layers=self.num_layers,
            **counts,
            cached_tokens=self.cached,
            seconds=now - self.submitted,
            seconds_in_queue=None if self.admitted is None else self.admitted - self.submitted,
            seconds_to_first_token=times[0] - self.submitted if times else None,
            seconds_between_tokens=(times[-1] - times[0]) / (size - 1) if size > 1 else None,
        )
        return self.finished


@pytree
class Fresh:
    """Right-padded prompts and rules of requests, to be inserted into rows."""

    token_ids: Int[Any, "row token"]
    lengths: Int[Any, " row"]
    limits: Int[Any, " row"]
    seeds: UInt32[Any, " row"]
    rules: Rules


def fresh_of(
    requests: Sequence[Request],
    *,
    rows: int,
    width: int,
    own: Float[np.ndarray, " boundary"] | None,
) -> Fresh:
    """Returns requests as arrays; padding rows after the last request end at once."""
    filler = Request(number=-1, prompt=np.zeros(1, np.int32), max_new_tokens=0)
    requests = [*requests, *[filler] * (rows - len(requests))]
    token_ids = np.zeros((rows, width), np.int32)
    for row, request in zip(token_ids, requests, strict=True):
        row[: request.prompt.size] = request.prompt
    lengths = np.asarray([request.prompt.size for request in requests], np.int32)
    thresholds = None
    if own is not None:
        thresholds = np.stack(
            [own if request.thresholds is None else request.thresholds for request in requests]
        )
    return Fresh(
        token_ids=token_ids,
        lengths=lengths,
        limits=lengths + np.asarray([request.max_new_tokens for request in requests], np.int32),
        seeds=np.asarray([request.seed for request in requests], np.uint32),
        rules=Rules(
            sampling=rows_of([request.sampling for request in requests]),
            stops=stop_rules([request.stops for request in requests], room=STOPS_ROOM),
            thresholds=thresholds,
        ),
    )
