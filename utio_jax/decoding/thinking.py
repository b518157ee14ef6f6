# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: limits on the thinking tokens of a row before its answer.

    rule = Thinking(end_ids=[7], max_tokens=512, max_answer_tokens=256)
    generate(decoder, params, prompts, thinking=rule)

Thinking begins with a row's first new token, or after `start_ids`. It ends when the row emits
`end_ids` itself, or after `max_tokens` tokens, when the forced sequence is emitted. Forced tokens
run through the model like all others, and their log-probability is that of the model. All further
tokens are the answer, which has its own limit.

The token loop takes rules and progress as arrays with one entry per row (`ThinkingRows`), so new
budgets compile nothing. Without rules, they are not part of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from utio_jax.core.documents import check_ids
from utio_jax.core.pytrees import pytree

LONGEST_SEQUENCE = 32
"""Maximum length of a rule's sequences in tokens. It is a static shape of the program."""

NEVER = 2**30
"""Position that no row reaches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinking:
    """Thinking budget of a row, for one thinking span before its answer.

    Attributes:
      end_ids: token sequence with which the row itself ends thinking, e.g. the id of `</think>`.
      forced_ids: token sequence that is forced when the budget is used up, e.g. a sentence and
        `</think>`; None: `end_ids`.
      start_ids: token sequence after which thinking begins, in the prompt or in new tokens. It has
        begun if the prompt has this sequence without `end_ids` after it. Empty: thinking begins
        with the first new token.
      max_tokens: maximum number of thinking tokens before the end is forced; None: any number.
      max_answer_tokens: maximum number of new tokens after thinking; None: any number. The
        request's `max_new_tokens` limits both, forced tokens included.
    """

    end_ids: Sequence[int]
    forced_ids: Sequence[int] | None = None
    start_ids: Sequence[int] = ()
    max_tokens: int | None = None
    max_answer_tokens: int | None = None

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
        """Tokens that are forced when the budget is used up."""
        return tuple(self.end_ids if self.forced_ids is None else self.forced_ids)

    def check(self, *, vocab_size: int) -> None:
        """Raises ValueError for ids outside the vocabulary."""
        named = {"end_ids": self.end_ids, "forced_ids": self.forced, "start_ids": self.start_ids}
        for name, ids in named.items():
            if len(ids):
                check_ids(ids, vocab_size=vocab_size, what=f"thinking's {name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thought:
    """Thinking span of a row.

    Attributes:
      start: index of the first thinking token among the new tokens; None: thinking never began.
      tokens: number of thinking tokens, including an end that the row emitted itself.
      forced: number of forced tokens after them.
      ended_by: `"model"`, `"budget"`, or `"open"` if thinking has not ended.
    """

    start: int | None
    tokens: int
    forced: int
    ended_by: str

    @property
    def answer(self) -> slice:
        """Slice of the new tokens that are the answer: all if thinking never began.

        The slice is empty if thinking has not ended.
        """
        if self.start is None:
            return slice(0, None)
        return slice(self.start + self.tokens + self.forced, None)

    def first(self, count: int) -> Thought:
        """Returns the thinking span within the first new tokens."""
        if self.start is None or self.start > count:
            return Thought(start=None, tokens=0, forced=0, ended_by="open")
        tokens = min(self.tokens, count - self.start)
        forced = min(self.forced, count - self.start - tokens)
        return dataclasses.replace(self, tokens=tokens, forced=forced)


def thought_of(progress: Sequence[int] | np.ndarray, *, prompt: int, length: int) -> Thought:
    """Returns the thinking span of a row's progress, see `ThinkingRows.progress`."""
    began, forced_at, ended = (int(value) for value in progress)
    if began > length:
        return Thought(start=None, tokens=0, forced=0, ended_by="open")
    own = min(forced_at, ended, length)
    forced = max(0, min(ended, length) - own)
    ended_by = "budget" if forced_at < NEVER else "model" if ended < NEVER else "open"
    return Thought(start=began - prompt, tokens=own - began, forced=forced, ended_by=ended_by)


@pytree
class ThinkingRows:
    """Thinking rules of rows and their progress, as `DecodeState.hook`.

    Attributes:
      budget: maximum number of thinking tokens; `NEVER`: any number.
      answer: maximum number of tokens after thinking; `NEVER`: any number.
      start: start sequence, padded on the left with -1; all -2: none.
      end: end sequence, padded on the left with -1.
      forced: forced sequence, padded on the right with -1.
      began: position of the first thinking token, which may be the next token; `NEVER`: none yet.
      forced_at: position of the first forced token; `NEVER`: none.
      ended: position of the first token after thinking; `NEVER`: none.
    """

    budget: Int[Array | np.ndarray, " batch"]
    answer: Int[Array | np.ndarray, " batch"]
    start: Int[Array | np.ndarray, "batch longest"]
    end: Int[Array | np.ndarray, "batch longest"]
    forced: Int[Array | np.ndarray, "batch longest"]
    began: Int[Array | np.ndarray, " batch"]
    forced_at: Int[Array | np.ndarray, " batch"]
    ended: Int[Array | np.ndarray, " batch"]

    @classmethod
    def of(
        cls, rules: Sequence[Thinking | None], prompts: Sequence[Sequence[int] | np.ndarray]
    ) -> ThinkingRows:
        """Returns the rules of rows, with their progress after the prompts; None: no rule."""
        rows = [_row_of(rule, prompt) for rule, prompt in zip(rules, prompts, strict=True)]
        return cls(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})

    @property
    def progress(self) -> Int[Array, "batch 3"]:
        """`began`, `forced_at` and `ended` of each row."""
        return jnp.stack([*map(jnp.asarray, (self.began, self.forced_at, self.ended))], axis=1)

    def force(
        self,
        lengths: Int[Array, " batch"],
        token_ids: Int[Array, "batch new"],
        counts: Int[Array, " batch"],
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        """Returns new tokens and their number; a due forced token replaces all of them."""
        forces = (lengths >= self.forced_at) & (self.ended == NEVER)
        index = jnp.clip(lengths - self.forced_at, 0, LONGEST_SEQUENCE - 1)
        due = jnp.take_along_axis(jnp.asarray(self.forced), index[:, None], axis=1)[:, 0]
        first = jnp.where(forces, due, token_ids[:, 0])
        return token_ids.at[:, 0].set(first), jnp.where(forces, 1, counts)

    def follow(
        self,
        positions: Int[Array, "batch new"],
        fresh: Bool[Array, "batch new"],
        ends_with: Callable[[Any], Bool[Array, "batch new"]],
    ) -> tuple[ThinkingRows, Bool[Array, "batch new"]]:
        """Returns the progress after new tokens, and a mask of kept tokens: those up to a cut."""
        after = positions + 1
        first = lambda mask: jnp.min(jnp.where(mask, after, NEVER), axis=1)  # noqa: E731
        size = lambda ids: jnp.sum(ids >= 0, axis=1)[:, None]  # noqa: E731
        starts, ends = (ends_with(jnp.asarray(ids)[:, None]) for ids in (self.start, self.end))
        began = jnp.where(self.began == NEVER, first(fresh & starts), self.began)
        since, forced_at = began[:, None], self.forced_at[:, None]
        thinks = fresh & (since <= positions) & (self.ended == NEVER)[:, None]
        forcing = thinks & (forced_at <= positions)
        done = forcing & (after - forced_at == size(self.forced))
        own = thinks & ~forcing & ends & (after - size(self.end) >= since)
        ended, over = first(done | own), first(fresh & (after - since >= self.budget[:, None]))
        # The budget cuts before an end, but not if the row has just emitted one.
        cuts = (self.ended == NEVER) & (self.forced_at == NEVER) & (over < ended)
        cut = jnp.where(cuts, over, NEVER)
        ended = jnp.where(cuts, self.ended, jnp.minimum(self.ended, ended))
        forced_at = jnp.minimum(self.forced_at, cut)
        hook = dataclasses.replace(self, began=began, forced_at=forced_at, ended=ended)
        return hook, fresh & (after <= cut[:, None])

    def limited(self, limits: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns the lengths at which rows end, with the limits of answers applied."""
        ended = jnp.asarray(self.ended)
        return jnp.where(ended == NEVER, limits, jnp.minimum(limits, ended + self.answer))


def check_thinking(
    thinking: Thinking | Sequence[Thinking | None] | None,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
) -> ThinkingRows | None:
    """Returns the rules of all prompts; None if no prompt has a rule.

    Raises:
      ValueError: the number of rules differs from that of prompts, or ids outside the vocabulary.
    """
    rows = rules_of_rows(thinking, rows=len(prompts))
    for rule in rows:
        if rule is not None:
            rule.check(vocab_size=vocab_size)
    return None if all(rule is None for rule in rows) else ThinkingRows.of(rows, prompts)


def rules_of_rows(
    thinking: Thinking | Sequence[Thinking | None] | None, *, rows: int
) -> list[Thinking | None]:
    """Returns the rule of each row. Raises ValueError if their number differs from `rows`."""
    if thinking is None or isinstance(thinking, Thinking):
        return [thinking] * rows
    if len(thinking) != rows:
        raise ValueError(
            f"Wanted one Thinking, or one (or None) for each of the {rows} prompts. Got "
            f"{len(thinking)}."
        )
    return [*thinking]


def opening(rule: Thinking | None, prompt: Sequence[int] | np.ndarray) -> tuple[int, int, int]:
    """Returns a row's progress after its prompt, see `ThinkingRows.progress`."""
    ids = [int(i) for i in prompt]
    if rule is None or (
        rule.start_ids and not _last(rule.start_ids, ids) > _last(rule.end_ids, ids)
    ):
        return NEVER, NEVER, NEVER
    return len(ids), len(ids) if rule.max_tokens == 0 else NEVER, NEVER


def _last(sequence: Sequence[int], ids: list[int]) -> int:
    """Returns the last index at which a sequence occurs; -1: none."""
    size = len(sequence)
    places = [at for at in range(len(ids) - size + 1) if ids[at : at + size] == [*sequence]]
    return max(places, default=-1)


def _row_of(rule: Thinking | None, prompt: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Returns a row of `ThinkingRows`, as numbers and arrays of the static sizes."""
    progress = opening(rule, prompt)
    rule = rule or Thinking(end_ids=(0,))

    def padded(ids: Sequence[int], *, left: bool) -> np.ndarray:
        pad = [-1 if len(ids) else -2] * (LONGEST_SEQUENCE - len(ids))
        return np.asarray([*pad, *ids] if left else [*ids, *pad], np.int32)

    def limit(most: int | None) -> np.int32:
        return np.int32(NEVER if most is None else min(most, NEVER))

    return {
        "budget": limit(rule.max_tokens),
        "answer": limit(rule.max_answer_tokens),
        "start": padded(rule.start_ids, left=True),
        "end": padded(rule.end_ids, left=True),
        "forced": padded(rule.forced, left=False),
        **dict(zip(("began", "forced_at", "ended"), map(np.int32, progress), strict=True)),
    }
