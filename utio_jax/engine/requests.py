# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine: what was asked for, what has come of it, what is handed out, counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt32

from utio_jax.core.pytrees import pytree
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.decoding.state import STOPS_ROOM, Columns, Stops, stop_rules
from utio_jax.decoding.text import StreamedRow
from utio_jax.decoding.thinking import Thinking, ThinkingRows, Thought, opening, thought_of
from utio_jax.engine.blocks import TALLIED, RowReport, Rules

END_REASONS = ("eos", "stop", "length", "cancelled", "deadline", "interrupted")
"""Why requests end. Interrupted: an `Engine.advance` that ran it did not return."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished(Columns):
    """A request that has ended: its new tokens, and what they took.

    Attributes:
      reason: one of `END_REASONS`. The last three keep the tokens that had been read by then.
      text: of the new tokens, before the stop string that ended it; empty without a tokenizer.
      steps: rounds of the loop that it took part in.
      token_layers: token slots that ran a layer for it after its prompt.
      drafts: that were verified.
      accepted: those that were right.
      cached_tokens: tokens of its prompt that came from the prefix cache.
      seconds: from `submit` to its end, as the host saw it.
      seconds_in_queue: until its prompt was begun to be read; None where it never was.
      seconds_to_first_token: None where it ended without one.
      seconds_between_tokens: mean; None for fewer than two tokens.
      thought: how it has thought; None without a `Thinking`.
    """

    reason: str
    text: str
    steps: int
    token_layers: int
    drafts: int
    accepted: int
    seconds: float
    seconds_in_queue: float | None
    seconds_to_first_token: float | None
    seconds_between_tokens: float | None
    thought: Thought | None = None
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event(Columns):
    """What a block has brought for one request: its new tokens since the last event.

    Attributes:
      request: its number, as `submit` returned it.
      pieces: what is new of its text, each with the number of the token that it is of, from 0; not
        what may belong to a stop string or an unfinished character.
      finished: the whole of it, once it has ended; None while it runs.
    """

    request: int
    pieces: list[tuple[str, int]]
    finished: Finished | None

    @property
    def text(self) -> str:
        """What is new of its text: the pieces, joined."""
        return "".join(piece for piece, _ in self.pieces)


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """What an engine has done since it was made, or warmed up.

    Attributes:
      mode: name of the decoding mode.
      slots: requests that can run at once.
      queued: requests that wait for a slot.
      running: requests that have one.
      ended: how many requests ended, by reason.
      blocks: that were run.
      prompt_groups: passes that read prompts.
      prompt_tokens: of admitted prompts.
      cached_tokens: prompt tokens that came from the prefix cache, and were not read.
      prefix_blocks: blocks that it holds now.
      prefix_evictions: blocks that made room for others.
      padded_prompt_tokens: token slots that these passes ran, padding included.
      new_tokens: handed out.
      decided: layers behind these, summed.
      executed: layers that ran for them, those for the sake of other rows included, summed.
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
        """Layers behind a new token; None where there is none."""
        return self.decided / self.new_tokens if self.new_tokens else None

    @property
    def mean_depth_executed(self) -> float | None:
        """Layers that ran for a new token; None where there is none."""
        return self.executed / self.new_tokens if self.new_tokens else None

    def add(self, event: Event) -> None:
        """Counts what an event brings."""
        self.new_tokens += event.token_ids.size
        self.decided += int(event.decided.sum())
        self.executed += int(event.executed.sum())
        if event.finished is not None:
            self.ended[event.finished.reason] += 1


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A request on its way: the engine's own record, which changes with every block.

    See `Engine.submit` for what was asked. Times are seconds on the engine's clock.

    Attributes:
      thresholds: of its depth policy, at the mode's boundaries; None where the mode has none.
      text: reads its tokens; None without a tokenizer.
      block_keys: of the prompt's whole blocks; None: the prefix cache takes no part in it.
      salt: requests of other salts do not share its blocks.
      cached: tokens of its prompt that came from the prefix cache.
      read: tokens of its prompt whose K/V are in its row, these included.
      slot: where it runs; None until its prompt has been read.
      admitted: when its prompt was begun; None while it waits.
      stepped: whether a block has run with it.
      ending: why the host wants it to end; None: it does not.
      finished: what has come of it, once its last event has been made.
      parts: its new tokens, event by event, behind one part without any.
    """

    number: int
    prompt: Int[np.ndarray, " token"]
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = 0
    stops: Stops = ((), ())
    thresholds: Float[np.ndarray, " boundary"] | None = None
    text: StreamedRow | None = None
    whole_prompt: bool = False
    submitted: float = 0.0
    expires: float = math.inf
    thinking: Thinking | None = None
    block_keys: list[bytes] | None = None
    salt: str = ""
    cached: int = 0
    read: int = 0
    slot: int | None = None
    admitted: float | None = None
    stepped: bool = False
    ending: str | None = None
    finished: Finished | None = None
    parts: list[Columns] = dataclasses.field(default_factory=lambda: [Columns.empty(0)])
    _last: RowReport | None = None
    _times: list[float] = dataclasses.field(default_factory=list)

    def take(self, report: RowReport, now: float) -> Event:
        """Returns the event of a block, cut behind the token that completed a stop string."""
        new, reason, pieces = report.columns, report.reason, list[tuple[str, int]]()
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
        """Returns the event of a request that the host ends between two blocks."""
        pieces = [] if self.text is None else self.text.add((), running=False)
        return self.last_event(self.finish(reason, now), pieces)

    def interrupted(self, now: float, text: StreamedRow | None) -> Event:
        """Returns the last event of a request whose engine lost its row, with no further token.

        `text` is a fresh reader of its tokens: an interrupt may have left its own half-updated. A
        request that had already finished keeps its result.
        """
        if self.finished is None:
            self.text = text
            if text is not None:
                text.add(Columns.joined(self.parts).token_ids, running=False)
            self.finish("interrupted", now)
        assert self.finished is not None
        return self.last_event(self.finished, [])

    def last_event(self, finished: Finished, pieces: list[tuple[str, int]]) -> Event:
        """Returns an event that ends the request and brings no token."""
        none = self.parts[0]
        return Event(**vars(none), request=self.number, pieces=pieces, finished=finished)

    def finish(self, reason: str, now: float) -> Finished:
        """Returns what has come of it, once, and keeps it."""
        assert self.finished is None
        times, last = self._times, self._last
        counts: dict[str, Any] = dict.fromkeys(TALLIED, 0) if last is None else last.counts
        new = Columns.joined(self.parts)
        size, thought = new.token_ids.size, None
        if self.thinking is not None:
            progress = opening(self.thinking, self.prompt) if last is None else last.progress
            prompt = self.prompt.size
            thought = thought_of(progress, prompt=prompt, length=prompt + size)
        self.finished = Finished(
            **vars(new),
            reason=reason,
            text="" if self.text is None else self.text.text,
            **counts,
            cached_tokens=self.cached,
            seconds=now - self.submitted,
            seconds_in_queue=None if self.admitted is None else self.admitted - self.submitted,
            seconds_to_first_token=times[0] - self.submitted if times else None,
            seconds_between_tokens=(times[-1] - times[0]) / (size - 1) if size > 1 else None,
            thought=thought,
        )
        return self.finished


@pytree
class Fresh:
    """Prompts, padded on the right, and rules of requests on their way into rows."""

    token_ids: Int[Any, "row token"]
    lengths: Int[Any, " row"]
    limits: Int[Any, " row"]
    seeds: UInt32[Any, " row"]
    hook: ThinkingRows | None
    rules: Rules

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The rows as `utio_jax.decoding.loop.begin` takes them."""
        return self.token_ids, self.lengths, self.limits, self.seeds, self.hook


def fresh_of(
    requests: Sequence[Request],
    *,
    rows: int,
    width: int,
    own: Float[np.ndarray, " boundary"] | None,
    thinking: bool,
) -> Fresh:
    """Returns requests as arrays; rows behind the last request end at once."""
    filler = Request(number=-1, prompt=np.zeros(1, np.int32), max_new_tokens=0)
    asked = [*requests, *[filler] * (rows - len(requests))]
    token_ids = np.zeros((rows, width), np.int32)
    for row, each in zip(token_ids, asked, strict=True):
        row[: each.prompt.size] = each.prompt
    lengths = np.asarray([each.prompt.size for each in asked], np.int32)
    thresholds = hook = None
    if own is not None:
        thresholds = np.stack(
            [own if each.thresholds is None else each.thresholds for each in asked]
        )
    if thinking:
        hook = ThinkingRows.of([each.thinking for each in asked], [each.prompt for each in asked])
    return Fresh(
        token_ids=token_ids,
        lengths=lengths,
        limits=lengths + np.asarray([each.max_new_tokens for each in asked], np.int32),
        seeds=np.asarray([each.seed for each in asked], np.uint32),
        hook=hook,
        rules=Rules(
            sampling=rows_of([each.sampling for each in asked]),
            stops=stop_rules([each.stops for each in asked], room=STOPS_ROOM),
            thresholds=thresholds,
        ),
    )
