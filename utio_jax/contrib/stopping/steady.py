# SPDX-License-Identifier: Apache-2.0
"""Stopping thought by answer consistency: ask for the answer now and then, stop once it stays.

    rule = Thinking(end_ids=[7], max_tokens=2048)
    generate_steadily(decoder, params, prompts, thinking=rule, steady=Steady(every=64, patience=3))

After every so many new tokens, rows that think are asked: behind what they have thought the end is
forced, and a short answer is decoded, which is thrown away but compared with those before (probing
as in Dynasor-CoT, Fu et al. 2024, arXiv 2412.20993). A row whose answers have been the same so many
times in a row ends its thought for real. Built on `generate(stop_when=)`: each question reads its
prompt and thought anew.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.thinking import Thinking, Thought


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

    def holds(self, answers: list[np.ndarray]) -> bool:
        """Returns whether the last answers are the same, as many as `patience` asks for."""
        last = answers[-self.patience :]
        pairs = itertools.pairwise(last)
        alike = all(a.size > 0 and b.size > 0 and self.same(b, a) for a, b in pairs)
        return len(last) == self.patience and alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steadied:
    """What one prompt came to.

    Attributes:
      token_ids: new tokens.
      thought: how the row has thought; `ended_by` may be `"steady"`.
      asked: tokens decoded for questions and thrown away, forced ends included.
    """

    token_ids: Int[np.ndarray, " new"]
    thought: Thought
    asked: int


def generate_steadily(
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    *,
    thinking: Thinking,
    steady: Steady,
    max_new_tokens: int = 128,
    **options: Any,
) -> list[Steadied]:
    """Returns new tokens for each prompt, whose thought ends once its answer stays the same.

    Args:
      decoder: the model.
      params: its parameters.
      prompts: token ids.
      thinking: of all rows; its thought begins with the first new token.
      steady: when to ask, and what is steady.
      max_new_tokens: per prompt, at most.
      **options: of `utio_jax.generate`, `stop_when` and `chunk` apart. Greedy: an answer that is
        drawn changes by itself.

    Raises:
      ValueError: a rule with `start_ids`, or see `utio_jax.generate`.
    """
    if thinking.start_ids:
        raise ValueError(
            "Wanted a rule whose thought begins with the first new token. Got start_ids="
            f"{tuple(thinking.start_ids)}. Put them at the end of the prompts instead."
        )
    # Behind a thought that is cut, what is forced next is the end: a budget of no further token.
    cut = dataclasses.replace(thinking, max_tokens=0, confidence=None)
    ending, forced = tuple(thinking.end_ids), len(thinking.forced)
    answers: list[list[np.ndarray]] = [[] for _ in prompts]
    asked, stopped = [0] * len(prompts), [False] * len(prompts)

    def behind(row: int, new: np.ndarray, count: int) -> np.ndarray:
        ids = [*prompts[row], *new.tolist()]
        found = generate(decoder, params, [ids], thinking=cut, max_new_tokens=count, **options)
        return found.token_ids[0]

    def is_steady(row: int, new: np.ndarray) -> bool:
        ids, room = new.tolist(), max_new_tokens - new.size
        ended = any(
            tuple(ids[at : at + len(ending)]) == ending for at in range(len(ids) - len(ending) + 1)
        )
        thought = thinking.max_tokens is not None and new.size >= thinking.max_tokens
        if ended or thought or room < 1:
            return False
        said = behind(row, new, min(forced + steady.answer_tokens, room))
        asked[row] += said.size
        answers[row].append(said[forced:])
        stopped[row] = steady.holds(answers[row])
        return stopped[row]

    found = generate(
        decoder,
        params,
        prompts,
        thinking=thinking,
        max_new_tokens=max_new_tokens,
        stop_when=is_steady,
        chunk=steady.every,
        **options,
    )
    rows = []
    for row, (new, told) in enumerate(zip(found.token_ids, found.thought, strict=True)):
        if stopped[row]:
            rest = behind(row, new, max_new_tokens - new.size)
            told = Thought(
                start=0, tokens=new.size, forced=min(forced, rest.size), ended_by="steady"
            )
            new = np.concatenate([new, rest])
        rows.append(Steadied(token_ids=new, thought=told, asked=asked[row]))
    return rows
