# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: how long a row may think before its answer, and what ends that early.

    rule = Thinking(end_ids=[7], max_tokens=512, confidence=Confidence(threshold=0.2, cue_ids=[13]))
    generate(decoder, params, prompts, thinking=rule)

A row thinks from its first new token on, or from behind `start_ids`. Thinking ends where the row
writes `end_ids` itself, or where the forced sequence follows: behind `max_tokens`, or at a cue at
which the model was sure over its last tokens (dynamic early exit, Yang et al. 2025, arXiv
2504.15895; at cues of the text as in LYNX). Forced tokens run through the model like any other, and
their log-probability is the model's own. What comes then is the answer, with a limit of its own.

`ThinkingRows` is what the token loop sees of it: rules and progress as arrays, a row each, so that
other budgets and thresholds compile nothing. Without rules the loop is the program that it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.documents import check_ids
from utio_jax.core.pytrees import pytree

LONGEST_SEQUENCE, MOST_CUES, LONGEST_WINDOW = 32, 64, 64
"""What a rule may bring: static shapes, so that none compiles anything."""

NEVER = 2**30
"""A position that no row comes to."""

CAUSES = ("open", "model", "budget", "confidence")
"""Why thinking ended; `"open"`: it has not."""
OPEN, BY_MODEL, BY_BUDGET, BY_CONFIDENCE = range(4)

_PLACES = ("began", "forced_at", "ended", "cause")

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
      progress: of the row, see `ThinkingRows.progress`.
      prompt: its tokens.
      length: those of prompt and new tokens.
    """
    began, forced_at, ended, cause = (int(value) for value in progress)
    if began > length:
        return Thought(start=None, tokens=0, forced=0, ended_by=CAUSES[OPEN])
    own = min(forced_at, ended, length)
    forced = max(0, min(ended, length) - own)
    return Thought(start=began - prompt, tokens=own - began, forced=forced, ended_by=CAUSES[cause])


@pytree
class Followed:
    """What rules of thinking make of some new tokens.

    Attributes:
      hook: the rules and progress behind them.
      kept: which of them come out.
      limits: lengths at which rows end.
      last: whether a row has reached its limit with each.
    """

    hook: Any
    kept: Bool[Array, "batch new"]
    limits: Int[Array, " batch"]
    last: Bool[Array, "batch new"]


@pytree
class ThinkingRows:
    """A `Thinking` for each row, and how far it has come: the `DecodeState.hook` of thinking.

    Places are positions in the row, `NEVER` for what has not happened.

    Attributes:
      on: whether the row has a rule.
      budget: thought tokens; `NEVER`: any number.
      answer: tokens behind thinking; likewise.
      start: padded on the left with -1; -2 throughout: none.
      end: padded on the left with -1.
      end_size: of it.
      forced: padded on the right.
      forced_size: of it.
      cues: padded with -2; the first -1: every token is one.
      window: tokens that confidence looks at.
      min_tokens: thought tokens before it is asked.
      threshold: below which the row is sure; -inf: never.
      doubt: whether the measure is doubt instead of entropy.
      began: place of the first token that was thought, or will be.
      forced_at: of the first forced token.
      ended: of the first token behind thinking.
      cause: index into `CAUSES`.
    """

    on: Bool[Array | np.ndarray, " batch"]
    budget: Int[Array | np.ndarray, " batch"]
    answer: Int[Array | np.ndarray, " batch"]
    start: Int[Array | np.ndarray, "batch longest"]
    end: Int[Array | np.ndarray, "batch longest"]
    end_size: Int[Array | np.ndarray, " batch"]
    forced: Int[Array | np.ndarray, "batch longest"]
    forced_size: Int[Array | np.ndarray, " batch"]
    cues: Int[Array | np.ndarray, "batch cue"]
    window: Int[Array | np.ndarray, " batch"]
    min_tokens: Int[Array | np.ndarray, " batch"]
    threshold: Float[Array | np.ndarray, " batch"]
    doubt: Bool[Array | np.ndarray, " batch"]
    began: Int[Array | np.ndarray, " batch"]
    forced_at: Int[Array | np.ndarray, " batch"]
    ended: Int[Array | np.ndarray, " batch"]
    cause: Int[Array | np.ndarray, " batch"]

    @classmethod
    def of(
        cls, rules: Sequence[Thinking | None], prompts: Sequence[Sequence[int] | np.ndarray]
    ) -> ThinkingRows:
        """Returns rules of rows, one each, behind their prompts; None: the row has none."""
        rows = [_row_of(rule, prompt) for rule, prompt in zip(rules, prompts, strict=True)]
        kinds = {"on": np.bool_, "doubt": np.bool_, "threshold": np.float32}
        return cls(
            **{
                name: np.stack([row[name] for row in rows]).astype(kinds.get(name, np.int32))
                for name in rows[0]
            }
        )

    @property
    def progress(self) -> Int[Array, "batch 4"]:
        """`began`, `forced_at`, `ended` and `cause` of each row."""
        return jnp.stack([jnp.asarray(getattr(self, name)) for name in _PLACES], axis=1)

    def force(
        self,
        lengths: Int[Array, " batch"],
        token_ids: Int[Array, "batch new"],
        counts: Int[Array, " batch"],
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        """Returns new tokens and how many are real: one, the forced one, where it is its turn."""
        forces = jnp.asarray(self.on) & (lengths >= self.forced_at) & (self.ended == NEVER)
        index = jnp.clip(lengths - self.forced_at, 0, LONGEST_SEQUENCE - 1)
        due = jnp.take_along_axis(jnp.asarray(self.forced), index[:, None], axis=1)[:, 0]
        first = jnp.where(forces, due, token_ids[:, 0])
        return token_ids.at[:, 0].set(first), jnp.where(forces, 1, counts)

    def measure(
        self, logits: Float[Array, "batch new vocab"], total: Float[Array, "batch new"]
    ) -> Float[Array, "batch new"]:
        """Returns each row's measure of distributions, of which `total` is the `logsumexp`."""
        chances = jnp.exp(logits - total[:, :, None])
        entropy = total - jnp.sum(jnp.where(chances > 0, chances * logits, 0), axis=-1)
        doubt = 1 - jnp.exp(jnp.max(logits, axis=-1) - total)
        return jnp.where(jnp.asarray(self.doubt)[:, None], doubt, entropy)

    def follow(
        self,
        token_ids: Int[Array, "batch new"],
        positions: Int[Array, "batch new"],
        fresh: Bool[Array, "batch new"],
        limits: Int[Array, " batch"],
        *,
        uncertainty: Float[Array, "batch slot"],
        ends_with: Callable[[Any], Bool[Array, "batch new"]],
    ) -> Followed:
        """Returns what comes of new tokens, one after the other; behind a cut, none do.

        Args:
          token_ids: forced ones included.
          positions: theirs.
          fresh: which are real.
          limits: lengths at which rows end.
          uncertainty: of all tokens so far, these included, by position.
          ends_with: maps sequences of each row to whether one ends at each new token.
        """
        sure = self._sure(token_ids, positions, uncertainty)
        least = jnp.maximum(jnp.asarray(self.min_tokens), jnp.asarray(self.window))

        def step(carry: tuple[ThinkingRows, jax.Array, jax.Array], at: Any) -> tuple[Any, Any]:
            now, limits, cut = carry
            position, real, starts, ends, sure = at
            behind, live = position + 1, real & self.on & ~cut
            thinks = live & (now.began <= position) & (now.ended == NEVER)
            began = jnp.where(live & (now.began == NEVER) & starts, behind, now.began)
            forcing = thinks & (now.forced_at <= position)
            done = forcing & (behind - now.forced_at == self.forced_size)
            own = thinks & ~forcing & ends & (behind - self.end_size >= now.began)
            ended = jnp.where(done | own, behind, now.ended)
            open_ = live & (began <= behind) & (ended == NEVER) & (now.forced_at == NEVER)
            thought = behind - began
            over = open_ & (thought >= self.budget)
            stops = over | (open_ & sure & (thought >= least))
            cause = jnp.where(stops, jnp.where(over, BY_BUDGET, BY_CONFIDENCE), now.cause)
            now = dataclasses.replace(
                now,
                began=began,
                forced_at=jnp.where(stops, behind, now.forced_at),
                ended=ended,
                cause=jnp.where(own, BY_MODEL, cause).astype(jnp.int32),
            )
            limits = jnp.where(done | own, jnp.minimum(limits, behind + self.answer), limits)
            return (now, limits, cut | stops), (real & ~cut, behind >= limits)

        ends = [ends_with(jnp.asarray(ids)[:, None]) for ids in (self.start, self.end)]
        by_place = [jnp.moveaxis(leaf, 1, 0) for leaf in (positions, fresh, *ends, sure)]
        here = jax.tree.map(jnp.asarray, self)
        carry = here, limits, jnp.zeros_like(here.on)
        (hook, limits, _), (kept, last) = jax.lax.scan(step, carry, tuple(by_place))
        kept, last = (jnp.moveaxis(leaf, 0, 1) for leaf in (kept, last))
        return Followed(hook=hook, kept=kept, limits=limits, last=last)

    def _sure(
        self,
        token_ids: Int[Array, "batch new"],
        positions: Int[Array, "batch new"],
        uncertainty: Float[Array, "batch slot"],
    ) -> Bool[Array, "batch new"]:
        """Returns whether a row's last tokens are sure behind each, if it is a cue."""
        cues, window = jnp.asarray(self.cues), jnp.asarray(self.window)
        is_cue = jnp.any(token_ids[:, :, None] == cues[:, None, :], axis=-1)
        is_cue |= (cues[:, :1] == -1) & (token_ids >= 0)
        back = jnp.arange(LONGEST_WINDOW, dtype=jnp.int32)[None, None, :]
        places = jnp.maximum(positions[:, :, None] - back, 0)
        row = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None, None]
        seen = uncertainty.at[row, places].get(mode="clip")
        total = jnp.sum(jnp.where(back < window[:, None, None], seen, 0), axis=-1)
        mean = total / window[:, None]
        return is_cue & (mean < jnp.asarray(self.threshold)[:, None])


def check_thinking(
    thinking: Thinking | Sequence[Thinking | None] | None,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
) -> ThinkingRows | None:
    """Returns the rules of all prompts; None where none has one.

    Raises:
      ValueError: rules of more or fewer rows, or ids outside the vocabulary.
    """
    if thinking is None or isinstance(thinking, Thinking):
        thinking = [thinking] * len(prompts)
    rows = [*thinking]
    if len(rows) != len(prompts):
        raise ValueError(
            f"Wanted one Thinking, or one (or None) for each of the {len(prompts)} prompts. Got "
            f"{len(rows)}."
        )
    for rule in rows:
        if rule is not None:
            rule.check(vocab_size=vocab_size)
    return None if all(rule is None for rule in rows) else ThinkingRows.of(rows, prompts)


def opening(rule: Thinking | None, prompt: Sequence[int] | np.ndarray) -> tuple[int, int, int, int]:
    """Returns a row's progress behind its prompt, see `ThinkingRows.progress`."""
    if rule is None:
        return NEVER, NEVER, NEVER, OPEN
    ids, start, end = [int(i) for i in prompt], [*rule.start_ids], [*rule.end_ids]
    if start and not _last(start, ids) > _last(end, ids):
        return NEVER, NEVER, NEVER, OPEN
    if rule.max_tokens == 0:
        return len(ids), len(ids), NEVER, BY_BUDGET
    return len(ids), NEVER, NEVER, OPEN


def _last(wanted: list[int], ids: list[int]) -> int:
    """Returns where a sequence stands last; -1: nowhere."""
    size = len(wanted)
    places = [at for at in range(len(ids) - size + 1) if ids[at : at + size] == wanted]
    return max(places, default=-1)


def _row_of(rule: Thinking | None, prompt: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Returns a row of `ThinkingRows`, as numbers and arrays of the static sizes."""
    progress = dict(zip(_PLACES, opening(rule, prompt), strict=True))
    if rule is None:
        return _row_of(Thinking(end_ids=(0,)), ()) | {"on": False, **progress}

    def left(ids: Sequence[int]) -> np.ndarray:
        padded = np.full(LONGEST_SEQUENCE, -1 if len(ids) else -2, np.int32)
        padded[LONGEST_SEQUENCE - len(ids) :] = ids
        return padded

    sure = rule.confidence or Confidence(threshold=-math.inf)
    cues = np.full(MOST_CUES, -2, np.int32)
    cues[: max(1, len(sure.cue_ids))] = sure.cue_ids if len(sure.cue_ids) else -1
    forced = np.full(LONGEST_SEQUENCE, -1, np.int32)
    forced[: len(rule.forced)] = rule.forced
    return {
        "on": True,
        "budget": NEVER if rule.max_tokens is None else min(rule.max_tokens, NEVER),
        "answer": NEVER if rule.max_answer_tokens is None else min(rule.max_answer_tokens, NEVER),
        "start": left(rule.start_ids),
        "end": left(rule.end_ids),
        "end_size": len(rule.end_ids),
        "forced": forced,
        "forced_size": len(rule.forced),
        "cues": cues,
        "window": sure.window,
        "min_tokens": sure.min_tokens,
        "threshold": sure.threshold,
        "doubt": sure.measure == "doubt",
        **progress,
    }
