# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine: what was asked for, what has come of it, and what is handed out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from utio_jax.core.documents import check_ids
from utio_jax.decoding.sampling import (
    Chain,
    Greedy,
    MinP,
    PerRowSampling,
    Temperature,
    TopK,
    TopP,
)
from utio_jax.decoding.state import PerRowStopRules
from utio_jax.decoding.text import StreamedRow
from utio_jax.decoding.thinking import Thinking, Thought, replay, thought_of
from utio_jax.decoding.thinking_state import Before, thinking_rules
from utio_jax.engine.blocks import Alternatives, RowReport, Rules

Method = Greedy | Temperature | TopK | TopP | MinP | Chain
"""How one request's tokens are drawn."""

MOST_EOS, MOST_SEQUENCES, LONGEST_SEQUENCE = 8, 4, 16
"""What a request may bring of its own to end it: static shapes, so that none compiles anything."""

END_REASONS = ("eos", "stop", "length", "cancelled", "deadline")
"""Why requests end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A request that has ended, with all that came of it.

    Attributes:
      token_ids: new tokens, the one that ended it included.
      reason: one of `END_REASONS`. A cancelled request, or one whose deadline passed, keeps what it
        had by then.
      text: of the new tokens, before the stop string that ended it; empty without a tokenizer.
      decided: layers behind each token, see `utio_jax.decoding.Generated`.
      executed: layers that really ran for it, those for the sake of other rows included.
      log_probabilities: of each token in nats, before any sampling method.
      alternatives: to each token, in an engine that keeps them; else None.
      steps: rounds of the loop that it took part in.
      token_layers: token slots that ran a layer for it after its prompt.
      drafts: drafts that were verified.
      accepted: those that were right.
      seconds: from `submit` to its end, as the host saw it.
      seconds_in_queue: from `submit` until its prompt was begun to be read; None where it never
        was.
      seconds_to_first_token: None where it ended without one.
      seconds_between_tokens: from the first token to the last over the tokens between; None for
        fewer than two.
      longest_pause: the longest time between two events with tokens, in seconds; 0 for one event.
      thought: how it has thought, of all its new tokens, those emitted elsewhere included; None
        without a `Thinking`.
    """

    token_ids: Int[np.ndarray, " new"]
    reason: str
    text: str
    decided: Int[np.ndarray, " new"]
    executed: Int[np.ndarray, " new"]
    log_probabilities: Float[np.ndarray, " new"]
    alternatives: Alternatives | None
    steps: int
    token_layers: int
    drafts: int
    accepted: int
    seconds: float
    seconds_in_queue: float | None
    seconds_to_first_token: float | None
    seconds_between_tokens: float | None
    longest_pause: float
    thought: Thought | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What a block has brought for one request.

    Attributes:
      request: its number, as `submit` returned it.
      token_ids: new tokens since its last event.
      decided: layers behind each of them.
      executed: layers that really ran for it, see `Finished`.
      log_probabilities: of each in nats, before any sampling method.
      alternatives: to each, in an engine that keeps them; else None.
      text: what is new of its text; what may belong to a stop string or an unfinished character is
        held back. Empty without a tokenizer.
      finished: the whole of it, once it has ended; None while it runs.
      uncertainty: of the distribution that each token was taken from, in the measure of its
        `Thinking`: what goes on elsewhere has to bring it along. None without a `Thinking`.
    """

    request: int
    token_ids: Int[np.ndarray, " new"]
    decided: Int[np.ndarray, " new"]
    executed: Int[np.ndarray, " new"]
    log_probabilities: Float[np.ndarray, " new"]
    alternatives: Alternatives | None
    text: str
    finished: Finished | None
    uncertainty: Float[np.ndarray, " new"] | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A request on its way: the engine's own record, which changes with every block.

    Attributes:
      number: its name.
      prompt: token ids.
      emitted: tokens behind it that came elsewhere, and count as new.
      max_new_tokens: at most, with those.
      sampling: how tokens are drawn.
      seed: of the draws.
      eos_ids: tokens that end it.
      sequences: token sequences that end it.
      thresholds: of its depth policy, at the mode's boundaries; None where the mode has none.
      text: reads its tokens; None without a tokenizer.
      whole_prompt: whether its prompt is read in full, whatever the engine's `prefill`.
      alternatives: to each token, that the engine keeps.
      thinking: how long it may think; None: it has no rule.
      emitted_uncertainty: of the emitted tokens; empty where that decides nothing.
      submitted: seconds on the engine's clock.
      expires: likewise; `inf`: never.
      slot: where it runs; None while it waits.
      admitted: seconds on the engine's clock, when its prompt was begun; None while it waits.
      ending: why the host wants it to end; None: it does not.
      done: whether its last event has been made.
    """

    number: int
    prompt: Int[np.ndarray, " token"]
    emitted: Int[np.ndarray, " emitted"]
    max_new_tokens: int
    sampling: Method
    seed: int
    eos_ids: Int[np.ndarray, " eos"]
    sequences: Int[np.ndarray, "sequence longest"]
    thresholds: Float[np.ndarray, " boundary"] | None
    text: StreamedRow | None
    whole_prompt: bool
    alternatives: int
    submitted: float
    expires: float
    thinking: Thinking | None = None
    emitted_uncertainty: Float[np.ndarray, " noted"] = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.float32)
    )
    slot: int | None = None
    admitted: float | None = None
    ending: str | None = None
    done: bool = False
    _reports: list[RowReport] = dataclasses.field(default_factory=list)
    _texts: list[str] = dataclasses.field(default_factory=list)
    _times: list[float] = dataclasses.field(default_factory=list)

    @property
    def read(self) -> Int[np.ndarray, " token"]:
        """What is read before the first step: no layer runs what was emitted last until then."""
        return np.concatenate([self.prompt, self.emitted[:-1]])

    def take(self, report: RowReport, now: float) -> Event:
        """Returns the event of a block, cut behind the token that completed a stop string."""
        if self.emitted.size and not self._reports:
            report = report.without_first()
        reason, text = report.reason, ""
        if self.text is not None:
            text = self.text.add(report.token_ids, running=reason == "running")
            if self.text.stopped:
                report, reason = report.first(self.text.used), "stop"
        self._reports.append(report)
        self._texts.append(text)
        if report.token_ids.size:
            self._times.append(now)
        return Event(
            request=self.number,
            token_ids=report.token_ids,
            decided=report.decided,
            executed=report.executed,
            log_probabilities=report.log_probabilities,
            alternatives=report.alternatives,
            text=text,
            finished=None if reason == "running" else self.finish(reason, now),
            uncertainty=None if self.thinking is None else report.uncertainty,
        )

    def end(self, reason: str, now: float) -> Event:
        """Returns the event of a request that the host ends between two blocks."""
        text = ""
        if self.text is not None:
            text = self.text.add(np.zeros(0, np.int32), running=False)
            self._texts.append(text)
        none = np.zeros(0, np.int32)
        finished = self.finish(reason, now)
        return Event(
            request=self.number,
            token_ids=none,
            decided=none,
            executed=none,
            log_probabilities=none.astype(np.float32),
            alternatives=Alternatives.none(self.alternatives),
            text=text,
            finished=finished,
            uncertainty=None if self.thinking is None else none.astype(np.float32),
        )

    def finish(self, reason: str, now: float) -> Finished:
        """Returns what has come of it. Once: the request is done."""
        assert not self.done
        self.done = True
        times, counts = self._times, self._reports[-1].counts if self._reports else {}

        def all_of(name: str, dtype: type) -> np.ndarray:
            parts = [getattr(report, name) for report in self._reports]
            return np.concatenate([np.zeros(0, dtype), *parts])

        tokens = all_of("token_ids", np.int32)
        many = tokens.size > 1
        return Finished(
            token_ids=tokens,
            reason=reason,
            text="".join(self._texts),
            decided=all_of("decided", np.int32),
            executed=all_of("executed", np.int32),
            log_probabilities=all_of("log_probabilities", np.float32),
            alternatives=self._all_alternatives(),
            **{name: counts.get(name, 0) for name in _COUNTS},
            seconds=now - self.submitted,
            seconds_in_queue=None if self.admitted is None else self.admitted - self.submitted,
            seconds_to_first_token=times[0] - self.submitted if times else None,
            seconds_between_tokens=(times[-1] - times[0]) / (tokens.size - 1) if many else None,
            longest_pause=float(np.max(np.diff(times), initial=0.0)),
            thought=self._thought(self.emitted.size + tokens.size),
        )

    @property
    def before(self) -> Before:
        """What it has had before its first step here."""
        return Before(
            prompt=self.prompt,
            emitted=self.emitted[:-1],
            uncertainty=self.emitted_uncertainty[: max(0, self.emitted.size - 1)],
        )

    def _thought(self, new: int) -> Thought | None:
        if self.thinking is None:
            return None
        size = self.prompt.size
        if not self._reports or self._reports[-1].progress is None:
            emitted, noted = self.emitted.tolist(), self.emitted_uncertainty
            progress = replay(self.thinking, self.prompt, emitted, noted)
            return thought_of(progress, prompt=size, length=size + new)
        return thought_of(self._reports[-1].progress, prompt=size, length=size + new)

    def _all_alternatives(self) -> Alternatives | None:
        found = [each.alternatives for each in self._reports if each.alternatives is not None]
        return Alternatives.joined(found) if found else Alternatives.none(self.alternatives)


_COUNTS = ("steps", "token_layers", "drafts", "accepted")


def stop_arrays(
    eos_ids: Sequence[int], sequences: Sequence[Sequence[int]], *, vocab_size: int
) -> tuple[Int[np.ndarray, " eos"], Int[np.ndarray, "sequence longest"]]:
    """Returns what ends a request as rows of `PerRowStopRules`, of the sizes that all have.

    Raises:
      ValueError: more than there is room for, an empty sequence, or ids that are none.
    """
    longest = max(map(len, sequences), default=0)
    found = len(eos_ids), len(sequences), longest
    room = MOST_EOS, MOST_SEQUENCES, LONGEST_SEQUENCE
    if any(one > most for one, most in zip(found, room, strict=True)):
        raise ValueError(
            f"Wanted at most {MOST_EOS} eos_ids and {MOST_SEQUENCES} stop_sequences of at most "
            f"{LONGEST_SEQUENCE} tokens, which every slot has room for. Got {found[0]} eos_ids and "
            f"{found[1]} sequences of up to {longest} tokens. Name the rest as stop_strings."
        )
    ends = np.full((MOST_EOS,), -1, np.int32)
    if len(eos_ids):
        ends[: len(eos_ids)] = check_ids([*eos_ids], vocab_size=2**31, what="eos_ids")
    padded = np.full((MOST_SEQUENCES, LONGEST_SEQUENCE), -2, np.int32)
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError("Wanted stop sequences of at least one token. Got an empty one.")
        what = f"stop sequence {index}"
        padded[index] = -1
        padded[index, -len(sequence) :] = check_ids(sequence, vocab_size=vocab_size, what=what)
    return ends, padded


def rules_of(
    requests: Sequence[Request],
    *,
    rows: int,
    own: Float[np.ndarray, " boundary"] | None,
    thinking: bool = False,
) -> Rules:
    """Returns the rules of some requests as arrays of `rows` rows; further rows end at once.

    Args:
      requests: at most `rows`.
      rows: of the arrays.
      own: thresholds of the mode; None where it has none, whatever requests were made with.
      thinking: whether requests may bring a `Thinking`.
    """
    missing = rows - len(requests)
    nothing = stop_arrays((), (), vocab_size=1)
    stops = [(each.eos_ids, each.sequences) for each in requests] + [nothing] * missing
    thresholds = None
    if own is not None:
        asked = [own if each.thresholds is None else each.thresholds for each in requests]
        thresholds = np.stack([*asked, *[own] * missing])
    thoughts = None
    if thinking:
        thoughts = thinking_rules(
            [*(each.thinking for each in requests), *[None] * missing],
            [*(each.before for each in requests), *[Before(prompt=())] * missing],
        )
    return Rules(
        thresholds=thresholds,
        sampling=PerRowSampling.of([each.sampling for each in requests] + [Greedy()] * missing),
        stops=PerRowStopRules(
            eos_ids=np.stack([ends for ends, _ in stops]),  # type: ignore[arg-type]
            sequences=np.stack([padded for _, padded in stops]),  # type: ignore[arg-type]
            thinking=thoughts,
        ),
    )
