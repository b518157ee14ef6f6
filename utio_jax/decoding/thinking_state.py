# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets in the token loop: rules of rows as arrays, and what they make of new tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.pytrees import pytree
from utio_jax.decoding.thinking import (
    BY_BUDGET,
    BY_CONFIDENCE,
    BY_MODEL,
    LONGEST_SEQUENCE,
    LONGEST_WINDOW,
    MOST_CUES,
    NEVER,
    OPEN,
    Confidence,
    Thinking,
    replay,
)


@pytree
class Progress:
    """How far rows have come with thinking, in positions; `NEVER` for what has not happened.

    Attributes:
      began: of the first token that was thought, or will be.
      forced_at: of the first forced token.
      ended: of the first token behind thinking.
      cause: index into `CAUSES`.
    """

    began: Int[Array | np.ndarray, " batch"]
    forced_at: Int[Array | np.ndarray, " batch"]
    ended: Int[Array | np.ndarray, " batch"]
    cause: Int[Array | np.ndarray, " batch"]


@pytree
class ThinkingRules:
    """A `Thinking` for each row, as arrays, and where each begins. Rows without one are not `on`.

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
      begin: the row's progress behind its prompt and all but the last token emitted elsewhere.
      recent: measures of the last of those tokens, as they stand; 0 where there are none.
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
    begin: Progress
    recent: Float[Array | np.ndarray, "batch window"]

    def limits(self, limits: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns lengths at which rows end, those included whose answer has begun elsewhere."""
        ended, answer = jnp.asarray(self.begin.ended), jnp.asarray(self.answer)
        return jnp.minimum(limits, jnp.where(ended < NEVER, ended + answer, limits))


@pytree
class ThinkingState:
    """What the token loop remembers of thinking.

    Attributes:
      progress: of each row.
      uncertainty: the measure of the distribution that each new token was taken from, by its
        position.
    """

    progress: Progress
    uncertainty: Float[Array, "batch slot"]

    @classmethod
    def start(
        cls, rules: ThinkingRules, lengths: Int[Array, " batch"], *, slots: int
    ) -> ThinkingState:
        """Returns what is known before the first new token of rows of so many tokens."""
        batch = lengths.shape[0]
        back = jnp.arange(LONGEST_WINDOW, dtype=jnp.int32)[None, :] - LONGEST_WINDOW
        places = lengths[:, None] + back
        places = jnp.where(places < 0, slots, places)
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        recent = jnp.asarray(rules.recent)
        empty = jnp.zeros((batch, slots), jnp.float32)
        return cls(
            progress=jax.tree.map(jnp.asarray, rules.begin),
            uncertainty=empty.at[row, places].set(recent, mode="drop"),
        )

    def forced(
        self,
        rules: ThinkingRules,
        lengths: Int[Array, " batch"],
        token_ids: Int[Array, "batch new"],
        counts: Int[Array, " batch"],
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        """Returns new tokens and how many are real: one, the forced one, where it is its turn.

        Args:
          rules: of the rows.
          lengths: before them.
          token_ids: as they were drawn.
          counts: how many of them are real.
        """
        forces = jnp.asarray(rules.on) & (lengths >= self.progress.forced_at)
        forces &= self.progress.ended == NEVER
        index = jnp.clip(lengths - self.progress.forced_at, 0, LONGEST_SEQUENCE - 1)
        due = jnp.take_along_axis(jnp.asarray(rules.forced), index[:, None], axis=1)[:, 0]
        first = jnp.where(forces, due, token_ids[:, 0])
        return token_ids.at[:, 0].set(first), jnp.where(forces, 1, counts)

    def sure(
        self,
        rules: ThinkingRules,
        token_ids: Int[Array, "batch new"],
        positions: Int[Array, "batch new"],
    ) -> Bool[Array, "batch new"]:
        """Returns whether a row's last tokens are sure behind each, if it is a cue."""
        cues, window = jnp.asarray(rules.cues), jnp.asarray(rules.window)
        is_cue = jnp.any(token_ids[:, :, None] == cues[:, None, :], axis=-1)
        is_cue |= (cues[:, :1] == -1) & (token_ids >= 0)
        back = jnp.arange(LONGEST_WINDOW, dtype=jnp.int32)[None, None, :]
        places = jnp.maximum(positions[:, :, None] - back, 0)
        row = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None, None]
        seen = self.uncertainty.at[row, places].get(mode="clip")
        total = jnp.sum(jnp.where(back < window[:, None, None], seen, 0), axis=-1)
        mean = total / window[:, None]
        return is_cue & (mean < jnp.asarray(rules.threshold)[:, None])


@pytree
class Followed:
    """What thinking makes of some new tokens.

    Attributes:
      state: behind them.
      kept: which of them come out: behind the place where an end has to follow, none.
      limits: of the rows; those of answers among them.
      last: whether a row has reached its limit with each.
    """

    state: ThinkingState
    kept: Bool[Array, "batch new"]
    limits: Int[Array, " batch"]
    last: Bool[Array, "batch new"]


def measures(
    rules: ThinkingRules,
    logits: Float[Array, "batch new vocab"],
    total: Float[Array, "batch new"],
) -> Float[Array, "batch new"]:
    """Returns each row's measure of distributions: entropy in nats, or doubt.

    Args:
      rules: say which.
      logits: of the distributions.
      total: their logarithms' sums, `logsumexp`.
    """
    chances = jnp.exp(logits - total[:, :, None])
    entropy = total - jnp.sum(jnp.where(chances > 0, chances * logits, 0), axis=-1)
    doubt = 1 - jnp.exp(jnp.max(logits, axis=-1) - total)
    return jnp.where(jnp.asarray(rules.doubt)[:, None], doubt, entropy)


def follow(  # noqa: PLR0913 (arrays of one batch)
    rules: ThinkingRules,
    state: ThinkingState,
    token_ids: Int[Array, "batch new"],
    positions: Int[Array, "batch new"],
    fresh: Bool[Array, "batch new"],
    limits: Int[Array, " batch"],
    *,
    starts: Bool[Array, "batch new"],
    ends: Bool[Array, "batch new"],
    uncertainty: Float[Array, "batch new"],
) -> Followed:
    """Returns what thinking makes of new tokens: one after the other, as a loop would.

    Args:
      rules: of the rows.
      state: before them.
      token_ids: forced ones included, see `ThinkingState.forced`.
      positions: theirs.
      fresh: which are real.
      limits: lengths at which rows end.
      starts: behind which `start` stands.
      ends: behind which `end` stands, wherever that began.
      uncertainty: of the distributions that they were taken from, see `measures`.
    """
    row = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
    slots = jnp.where(fresh, positions, state.uncertainty.shape[1])
    noted = state.uncertainty.at[row, slots].set(uncertainty, mode="drop")
    state = dataclasses.replace(state, uncertainty=noted)
    sure = state.sure(rules, token_ids, positions)
    least = jnp.maximum(jnp.asarray(rules.min_tokens), jnp.asarray(rules.window))
    on = jnp.asarray(rules.on)

    def step(carry: tuple[Progress, jax.Array, jax.Array], at: Any) -> tuple[Any, Any]:
        now, limits, cut = carry
        position, real, starts, ends, sure = at
        behind, live = position + 1, real & on & ~cut
        thinks = live & (now.began <= position) & (now.ended == NEVER)
        began = jnp.where(live & (now.began == NEVER) & starts, behind, now.began)
        forcing = thinks & (now.forced_at <= position)
        done = forcing & (behind - now.forced_at == rules.forced_size)
        own = thinks & ~forcing & ends & (behind - rules.end_size >= now.began)
        ended = jnp.where(done | own, behind, now.ended)
        open_ = live & (began <= behind) & (ended == NEVER) & (now.forced_at == NEVER)
        thought = behind - began
        over = open_ & (thought >= rules.budget)
        stops = over | (open_ & sure & (thought >= least))
        cause = jnp.where(stops, jnp.where(over, BY_BUDGET, BY_CONFIDENCE), now.cause)
        limits = jnp.where(done | own, jnp.minimum(limits, behind + rules.answer), limits)
        now = Progress(
            began=began,
            forced_at=jnp.where(stops, behind, now.forced_at),
            ended=ended,
            cause=jnp.where(own, BY_MODEL, cause).astype(jnp.int32),
        )
        return (now, limits, cut | stops), (real & ~cut, behind >= limits)

    by_place = [jnp.moveaxis(leaf, 1, 0) for leaf in (positions, fresh, starts, ends, sure)]
    carry = state.progress, limits, jnp.zeros_like(on)
    (progress, limits, _), (kept, last) = jax.lax.scan(step, carry, tuple(by_place))
    return Followed(
        state=dataclasses.replace(state, progress=progress),
        kept=jnp.moveaxis(kept, 0, 1),
        limits=limits,
        last=jnp.moveaxis(last, 0, 1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Before:
    """What a row had before it came here.

    Attributes:
      prompt: token ids.
      emitted: new tokens behind it, but the last.
      uncertainty: the measure of each of these; empty where no confidence is asked.
    """

    prompt: Sequence[int] | np.ndarray
    emitted: Sequence[int] | np.ndarray = ()
    uncertainty: Sequence[float] | np.ndarray = ()


def thinking_rules(rules: Sequence[Thinking | None], rows: Sequence[Before]) -> ThinkingRules:
    """Returns the rules of rows, one each, as arrays; None: the row has none.

    Args:
      rules: of the rows.
      rows: what each has had before.
    """
    made = [_row_of(rule, before) for rule, before in zip(rules, rows, strict=True)]
    progress = np.asarray([row.pop("begin") for row in made], np.int32).reshape(-1, 4)
    began, forced_at, ended, cause = progress.T.copy()
    begin = Progress(began=began, forced_at=forced_at, ended=ended, cause=cause)
    kinds = {"on": np.bool_, "doubt": np.bool_, "threshold": np.float32, "recent": np.float32}
    arrays: dict[str, Any] = {
        name: np.stack([row[name] for row in made]).astype(kinds.get(name, np.int32))
        for name in made[0]
    }
    return ThinkingRules(begin=begin, **arrays)


def rules_of(
    thinking: Thinking | Sequence[Thinking | None] | None, *, rows: int
) -> list[Thinking | None]:
    """Returns the rule of each row.

    Raises:
      ValueError: rules of more or fewer rows.
    """
    if thinking is None or isinstance(thinking, Thinking):
        return [thinking] * rows
    if len(thinking) != rows:
        raise ValueError(
            f"Wanted one Thinking, or one (or None) for each of the {rows} prompts. Got "
            f"{len(thinking)}."
        )
    return [*thinking]


def check_thinking(
    thinking: Thinking | Sequence[Thinking | None] | None,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
) -> ThinkingRules | None:
    """Returns the rules of all prompts; None where none has one.

    Raises:
      ValueError: rules of more or fewer rows, or ids outside the vocabulary.
    """
    rows = rules_of(thinking, rows=len(prompts))
    for rule in rows:
        if rule is not None:
            rule.check(vocab_size=vocab_size)
    if all(rule is None for rule in rows):
        return None
    return thinking_rules(rows, [Before(prompt=prompt) for prompt in prompts])


def _row_of(rule: Thinking | None, before: Before) -> dict[str, Any]:
    """Returns a row's rule, as numbers and arrays of the static sizes."""
    if rule is None:
        off = _row_of(Thinking(end_ids=(0,)), Before(prompt=()))
        return off | {"on": False, "begin": (NEVER, NEVER, NEVER, OPEN)}

    def left(ids: Sequence[int]) -> np.ndarray:
        padded = np.full(LONGEST_SEQUENCE, -1 if len(ids) else -2, np.int32)
        padded[LONGEST_SEQUENCE - len(ids) :] = ids
        return padded

    sure = rule.confidence or Confidence(threshold=-math.inf)
    cues = np.full(MOST_CUES, -2, np.int32)
    cues[: max(1, len(sure.cue_ids))] = sure.cue_ids if len(sure.cue_ids) else -1
    forced = np.full(LONGEST_SEQUENCE, -1, np.int32)
    forced[: len(rule.forced)] = rule.forced
    recent = np.zeros(LONGEST_WINDOW, np.float32)
    known = np.asarray(before.uncertainty, np.float32)[-LONGEST_WINDOW:]
    recent[LONGEST_WINDOW - known.size :] = known
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
        "begin": replay(rule, before.prompt, before.emitted, before.uncertainty),
        "recent": recent,
    }
