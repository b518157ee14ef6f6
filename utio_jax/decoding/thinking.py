# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: how long a row may think before its answer, and what ends that early.

    rule = Thinking(end_ids=[7], max_tokens=512, confidence=Confidence(threshold=0.2, cue_ids=[13]))
    generate(decoder, params, prompts, thinking=rule)

A row thinks from its first new token on, or from behind `start_ids`. Thinking ends where the row
writes `end_ids` itself, or where the forced sequence follows: behind `max_tokens`, or at a cue at
which the model was sure over its last tokens (dynamic early exit, Yang et al. 2025, arXiv
2504.15895; at cues of the text as in LYNX). Forced tokens run through the model like any other, and
their log-probability is the model's own. What comes then is the answer, with a limit of its own.

Rules are arrays, a row each: other budgets and thresholds compile nothing. Without rules the token
loop is the program that it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from utio_jax.core.documents import check_ids

LONGEST_SEQUENCE, MOST_CUES, LONGEST_WINDOW = 32, 64, 64
"""What a rule may bring: static shapes, so that none compiles anything."""

NEVER = 2**30
"""A position that no row comes to."""

CAUSES = ("open", "model", "budget", "confidence")
"""Why thinking ended; `"open"`: it has not."""
OPEN, BY_MODEL, BY_BUDGET, BY_CONFIDENCE = range(4)

Measure = Literal["entropy", "doubt"]
"""Of the distribution a token was drawn from: its entropy in nats, or 1 - its largest chance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
    """When a row is sure enough to stop thinking.

    Asked behind each cue: whether the measure's mean over the last `window` thought tokens lies
    below `threshold`. `utio_jax.contrib.stopping.fit_stop` fits one.

    Attributes:
      threshold: in the measure's unit. Infinity: sure at every cue.
      window: thought tokens that are looked at; before there are as many, no row is sure.
      cue_ids: tokens behind which is asked, as those of a line's end; empty: behind all.
      min_tokens: thought tokens before which is never asked.
      measure: "entropy" in nats, or "doubt": 1 - the largest probability. Of the model's own
        distribution, before any sampling method.
    """

    threshold: float
    window: int = 16
    cue_ids: Sequence[int] = ()
    min_tokens: int = 0
    measure: Measure = "entropy"

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise ValueError("Wanted a threshold in the measure's unit. Got NaN.")
        if not 1 <= self.window <= LONGEST_WINDOW or self.min_tokens < 0:
            raise ValueError(
                f"Wanted a window of 1 to {LONGEST_WINDOW} tokens and min_tokens of at least 0. "
                f"Got window={self.window} and min_tokens={self.min_tokens}."
            )
        if self.measure not in get_args(Measure):
            raise ValueError(
                f"Wanted a measure of {', '.join(get_args(Measure))}. Got {self.measure!r}."
            )
        if len(self.cue_ids) > MOST_CUES:
            raise ValueError(
                f"Wanted at most {MOST_CUES} cue_ids, which every row has room for. Got "
                f"{len(self.cue_ids)}. Keep the most frequent ones."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinking:
    """How long a row may think, once, before its answer.

    Attributes:
      end_ids: what ends thinking where the row writes it itself, e.g. the id of `</think>`.
      forced_ids: what is put behind thinking that has to end; None: `end_ids`. For example a
        sentence and `</think>`.
      start_ids: behind which thinking begins, in the prompt or in the new tokens; empty: with the
        first new token. A prompt in which they stand without `end_ids` behind them has it begun.
      max_tokens: new tokens thought, before the end is forced; None: any number.
      max_answer_tokens: new tokens behind the end; None: any number. Both within the request's
        `max_new_tokens`, which counts forced tokens, too.
      confidence: what ends thinking before that; None: nothing.
    """

    end_ids: Sequence[int]
    forced_ids: Sequence[int] | None = None
    start_ids: Sequence[int] = ()
    max_tokens: int | None = None
    max_answer_tokens: int | None = None
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        for name in ("end_ids", "forced_ids", "start_ids"):
            size = len(getattr(self, name) or ())
            least = 0 if name == "start_ids" or getattr(self, name) is None else 1
            if not least <= size <= LONGEST_SEQUENCE:
                raise ValueError(
                    f"Wanted {name} of {least} to {LONGEST_SEQUENCE} tokens. Got {size}."
                )
        for name, least in (("max_tokens", 0), ("max_answer_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"Wanted {name} of at least {least}. Got {value}.")

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that are put behind thinking that has to end."""
        return tuple(self.end_ids if self.forced_ids is None else self.forced_ids)

    def check(self, *, vocab_size: int) -> None:
        """Raises ValueError for ids outside the vocabulary."""
        cues = () if self.confidence is None else self.confidence.cue_ids
        named = {"end_ids": self.end_ids, "forced_ids": self.forced, "start_ids": self.start_ids}
        for name, ids in {**named, "cue_ids": cues}.items():
            if len(ids):
                check_ids(ids, vocab_size=vocab_size, what=f"thinking's {name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thought:
    """How a row has thought.

    Attributes:
      start: index of the first token that was thought, among its new ones; None: it never began.
      tokens: that it thought, an end that it wrote itself included.
      forced: tokens behind them that were put there.
      ended_by: one of `CAUSES`; `"open"`: nothing did.
    """

    start: int | None
    tokens: int
    forced: int
    ended_by: str

    @property
    def answer(self) -> slice:
        """Which of the new tokens are the answer: those behind thinking, all where it never began.

        None of them, where it has not ended.
        """
        if self.start is None:
            return slice(0, None)
        return slice(self.start + self.tokens + self.forced, None)

    def first(self, count: int) -> Thought:
        """Returns the same of the first new tokens alone."""
        if self.start is None or self.start > count:
            return Thought(start=None, tokens=0, forced=0, ended_by=CAUSES[OPEN])
        tokens = min(self.tokens, count - self.start)
        forced = min(self.forced, count - self.start - tokens)
        return dataclasses.replace(self, tokens=tokens, forced=forced)


def thought_of(progress: Sequence[int], *, prompt: int, length: int) -> Thought:
    """Returns what a row's progress comes to.

    Args:
      progress: `began`, `forced_at`, `ended` and `cause` of the row.
      prompt: its tokens.
      length: those of prompt and new tokens.
    """
    began, forced_at, ended, cause = (int(value) for value in progress)
    if began > length:
        return Thought(start=None, tokens=0, forced=0, ended_by=CAUSES[OPEN])
    own = min(forced_at, ended, length)
    forced = max(0, min(ended, length) - own)
    return Thought(start=began - prompt, tokens=own - began, forced=forced, ended_by=CAUSES[cause])


def replay(
    rule: Thinking,
    prompt: Sequence[int] | np.ndarray,
    emitted: Sequence[int] | np.ndarray = (),
    uncertainty: Sequence[float] | np.ndarray = (),
) -> tuple[int, int, int, int]:
    """Returns `began`, `forced_at`, `ended` and `cause` behind a prompt and tokens emitted before.

    Args:
      rule: of the row.
      prompt: token ids.
      emitted: new tokens that it had.
      uncertainty: the measure of each; may be left out where the rule has no `confidence`.
    """
    prompt, new = [int(i) for i in prompt], [int(i) for i in emitted]
    start, end, size = [*rule.start_ids], [*rule.end_ids], len(prompt)
    began = size if not start or _left_open(prompt, start, end) else NEVER
    forced_at, ended, cause = NEVER, NEVER, OPEN
    budget = NEVER if rule.max_tokens is None else rule.max_tokens
    if began == size and budget == 0:
        forced_at, cause = size, BY_BUDGET
    for count in range(1, len(new) + 1):
        behind = size + count
        if ended != NEVER:
            break
        if began == NEVER:
            if new[:count][-len(start) :] != start:
                continue
            began = behind
        elif forced_at != NEVER:
            ended = behind if behind - forced_at == len(rule.forced) else NEVER
            continue
        elif new[max(0, began - size) : count][-len(end) :] == end:
            ended, cause = behind, BY_MODEL
            continue
        thought = behind - began
        if thought >= budget:
            forced_at, cause = behind, BY_BUDGET
        elif _sure(rule.confidence, new[:count], uncertainty[:count], thought):
            forced_at, cause = behind, BY_CONFIDENCE
    return began, forced_at, ended, cause


def _sure(
    rule: Confidence | None,
    new: list[int],
    uncertainty: Sequence[float] | np.ndarray,
    thought: int,
) -> bool:
    if rule is None or thought < max(rule.window, rule.min_tokens):
        return False
    if len(rule.cue_ids) and new[-1] not in rule.cue_ids:
        return False
    seen = np.asarray(uncertainty[-rule.window :], np.float32)
    return bool(seen.mean(dtype=np.float32) < np.float32(rule.threshold))


def _left_open(ids: list[int], start: list[int], end: list[int]) -> bool:
    def last(wanted: list[int]) -> int:
        size = len(wanted)
        places = [at for at in range(len(ids) - size + 1) if ids[at : at + size] == wanted]
        return max(places, default=-1)

    return last(start) > last(end)
