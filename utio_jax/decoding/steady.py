# SPDX-License-Identifier: Apache-2.0
"""Stopping thought by answer consistency: ask for the answer now and then, stop once it stays.

    rule = Thinking(end_ids=[7], max_tokens=2048)
    generate(decoder, params, prompts, thinking=rule, steady=Steady(every=64, patience=3))

After every so many new tokens, rows that think are asked: in a copy of the state the end is forced,
and a short answer is decoded, which is thrown away but compared with those before (probing as in
Dynasor-CoT, Fu et al. 2024, arXiv 2412.20993). A row whose answers have been the same so many times
in a row ends its thought for real. The states of the loop are values, so that a copy costs memory
for one more cache, and no prompt is read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.thinking import BY_STEADY, NEVER, Thinking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steady:
    """When an answer is steady enough to stop thinking.

    Attributes:
      every: new tokens between two questions.
      patience: answers in a row that have to be the same, at least 2.
      answer_tokens: that are decoded of each, at most; a question costs them and the forced end.
      same: whether two answers, token ids `[new]`, are the same; by default token by token. One
        without tokens is like no other.
    """

    every: int
    patience: int = 2
    answer_tokens: int = 8
    same: Callable[[np.ndarray, np.ndarray], bool] = np.array_equal

    def __post_init__(self) -> None:
        if self.every < 1 or self.patience < 2 or self.answer_tokens < 1:
            raise ValueError(
                "Wanted every and answer_tokens of at least 1, and a patience of at least 2 "
                f"answers. Got every={self.every}, answer_tokens={self.answer_tokens}, "
                f"patience={self.patience}."
            )


class Asking:
    """What the rows of a batch have answered so far, on the host.

    Attributes:
      tokens: decoded for questions, by row: forced ends, answers, and what a row decodes beyond
        while another is still at its own.
    """

    def __init__(self, steady: Steady, rules: list[Thinking | None]) -> None:
        """Asks rows with a rule; raises ValueError where none has one."""
        if all(rule is None for rule in rules):
            raise ValueError("Wanted thinking=Thinking(...) with steady: nobody thinks. Got none.")
        self.steady = steady
        self.forced = [0 if rule is None else len(rule.forced) for rule in rules]
        self.last: list[np.ndarray | None] = [None] * len(rules)
        self.times = [0] * len(rules)
        self.tokens: Int[np.ndarray, " row"] = np.zeros(len(rules), np.int64)

    def ask(
        self, state: DecodeState, go_on: Callable[[DecodeState, int], DecodeState]
    ) -> DecodeState:
        """Returns the state, with an end due in rows whose answer is steady.

        Args:
          state: between two steps.
          go_on: returns a state once its running rows have so many new tokens; consumes it.
        """
        assert state.thinking is not None
        now = state.thinking.progress
        lengths, reason = np.asarray(state.lengths), np.asarray(state.reason)
        began, forced_at, ended = (
            np.asarray(leaf) for leaf in (now.began, now.forced_at, now.ended)
        )
        thinks = (reason == 0) & (began < lengths) & (forced_at == NEVER) & (ended == NEVER)
        if not thinks.any():
            return state
        fresh = lengths - np.asarray(state.prompt_lengths)
        more = max(self.forced) + self.steady.answer_tokens
        branch = _end_due(jax.tree.map(jnp.copy, state), thinks)
        others = jnp.where(thinks, branch.reason, 1)  # Rows that are not asked take no step.
        branch = dataclasses.replace(branch, reason=others.astype(branch.reason.dtype))
        branch = go_on(branch, int(fresh[thinks].max()) + more)
        known, ends = np.asarray(branch.token_ids), np.asarray(branch.lengths)
        steady = np.zeros_like(thinks)
        for row in np.flatnonzero(thinks).tolist():
            first = int(lengths[row]) + self.forced[row]
            last = min(first + self.steady.answer_tokens, int(ends[row]))
            self.tokens[row] += int(ends[row] - lengths[row])
            steady[row] = self._hears(row, known[row, first : max(first, last)].copy())
        return _end_due(state, steady) if steady.any() else state

    def _hears(self, row: int, answer: np.ndarray) -> bool:
        """Returns whether a row's answers are steady with this one."""
        before, self.last[row] = self.last[row], answer
        like = False
        if before is not None and before.size > 0 and answer.size > 0:
            like = self.steady.same(answer, before)
        self.times[row] = self.times[row] + 1 if like else 1
        return self.times[row] >= self.steady.patience


def _end_due(state: DecodeState, rows: np.ndarray) -> DecodeState:
    """Returns the state in which the next token of some rows is the first of their forced end."""
    assert state.thinking is not None
    now = state.thinking.progress
    due = dataclasses.replace(
        now,
        forced_at=jnp.where(rows, state.lengths, now.forced_at),
        cause=jnp.where(rows, BY_STEADY, now.cause).astype(now.cause.dtype),
    )
    return dataclasses.replace(state, thinking=dataclasses.replace(state.thinking, progress=due))
