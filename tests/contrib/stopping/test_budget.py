# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: tokens, in every mode, against a loop of one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from helpers.generation import DepthAt, EagerNGram, depth_table, run, true_logits

from utio_jax.contrib.stopping import ThinkingBudget, Thought
from utio_jax.decoding import Adaptive, Lossless, SamplingParams

NEW = 24
PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2], [0, 5, 7], [9, 1]]
BUDGETS = np.asarray([3, 7, 0, 11, 15, 30], np.int32)


def look(rule: ThinkingBudget, row: int, new: Sequence[int]) -> tuple[int | None, Thought]:
    """Returns the token that is due after some new ones, if any, and the row's thought.

    From scratch: first where thinking begins, then the first place where it ends.
    """
    start, end, forced = [*rule.start_ids], [*rule.end_ids], rule.forced_ids or rule.end_ids
    budget, begin = int(np.broadcast_to(rule.max_tokens, 6)[row]), 0
    text, *marks = (",".join(map(str, ["", *ids, ""])) for ids in (PROMPTS[row], start, end))
    if start and text.rfind(marks[0]) <= text.rfind(marks[1]):
        places = range(len(start), len(new) + 1)
        begin = next((i for i in places if [*new[i - len(start) : i]] == start), None)
        if begin is None:
            return None, Thought(start=None)
    for cut in range(begin, len(new) + 1):
        size, done = cut - begin, len(new) - cut
        if [*new[begin:cut]][-len(end) :] == end:
            return None, Thought(start=begin, tokens=size, ended_by="model")
        if size >= budget:
            put = min(done, len(forced))
            by = "budget" if put else "open"
            thought = Thought(start=begin, tokens=size, forced=put, ended_by=by)
            return (forced[done] if done < len(forced) else None), thought
    return None, Thought(start=begin, tokens=len(new) - begin)


known: dict[Any, np.ndarray] = {}
"""Logits after texts all of whose tokens have run all layers."""


def by_hand(model: Any, row: int, rule: ThinkingBudget, depths: np.ndarray, kv: str) -> list[int]:
    """Writes one token after the other, each from a pass over the whole text."""
    new: list[int] = []
    while len(new) < NEW:
        text = (*PROMPTS[row], *new), kv
        if kv != "full" or text not in known:
            ids = np.asarray([*new, 0])
            known[text] = true_logits(model, PROMPTS[row], ids, depths[: len(new) + 1], kv)[-1]
        due = look(rule, row, new)[0]
        new.append(int(np.argmax(known[text])) if due is None else int(due))
    return new


@pytest.fixture(scope="module")
def rules(model: Any) -> dict[str, ThinkingBudget]:
    """Rules whose ends and starts occur in the model's text."""
    free = run(model, PROMPTS, max_new_tokens=NEW).token_ids
    end, start = tuple(free[1][4:6].tolist()), tuple(free[3][2:3].tolist())
    half = tuple(free[3][2:4].tolist())
    return {
        "end": ThinkingBudget(end_ids=end, forced_ids=(3, 9, 3), max_tokens=BUDGETS),
        "start": ThinkingBudget(end_ids=(60, 1), start_ids=start, max_tokens=4),
        # The start is the first half of the end: it does not end what it begins.
        "half": ThinkingBudget(end_ids=half, start_ids=start, max_tokens=1),
    }


@pytest.fixture(scope="module")
def expected(model: Any, rules: Any) -> dict[str, list[list[int]]]:
    deep = np.full(NEW, 4)
    return {
        name: [by_hand(model, row, rule, deep, "full") for row in range(6)]
        for name, rule in rules.items()
    }


def test_rows_think_as_a_loop_over_single_tokens_does(
    model: Any, rules: Any, expected: Any, no_compiles: Any
) -> None:
    causes = set()
    for name, rule in rules.items():
        result = run(model, PROMPTS, max_new_tokens=NEW, logits_processor=rule)
        for row, (new, tokens) in enumerate(zip(result.token_ids, expected[name], strict=True)):
            assert new.tolist() == tokens, (name, row)
            thought = rule.thought(PROMPTS[row], tokens, row=row)
            assert thought == look(rule, row, tokens)[1]
            causes.add(thought.ended_by)
    assert causes == {"open", "model", "budget"}
    other = dataclasses.replace(rules["end"], max_tokens=BUDGETS + 1)
    with no_compiles("of other budgets"):
        run(model, PROMPTS, max_new_tokens=NEW, logits_processor=other)


@pytest.mark.parametrize("name", ["exit", pytest.param("ngram", marks=pytest.mark.slow)])
def test_drafts_end_where_single_tokens_do(
    model: Any, rules: Any, expected: Any, name: str
) -> None:
    copies = Lossless(drafter="ngram", ngram=EagerNGram())
    mode: Any = Lossless(exit=2, max_draft=3) if name == "exit" else copies
    result = run(model, PROMPTS, max_new_tokens=NEW, logits_processor=rules["end"], mode=mode)
    assert [new.tolist() for new in result.token_ids] == expected["end"]
    assert (result.work.steps < NEW).any() or name == "ngram"


def test_tokens_that_stop_early_think_too(model: Any, rules: Any) -> None:
    table = depth_table((1, 2, 4), shape=(len(PROMPTS), 64))
    mode = Adaptive(policy=DepthAt(table=table, depths=(1, 2, 4)), kv="drop")
    result = run(model, PROMPTS, max_new_tokens=NEW, logits_processor=rules["end"], mode=mode)
    for row, prompt in enumerate(PROMPTS):
        decided = np.asarray(table[row])[len(prompt) - 1 :][:NEW].copy()
        decided[0] = 4
        assert result.token_ids[row].tolist() == by_hand(model, row, rules["end"], decided, "drop")


def test_what_is_drawn_is_drawn_as_without_a_budget(model: Any, rules: Any) -> None:
    how: dict[str, Any] = {"sampling": SamplingParams(temperature=1.1), "seeds": [3, 1, 4, 1, 5, 9]}
    how |= {"max_new_tokens": NEW}
    free = run(model, PROMPTS, **how)
    result, rule = run(model, PROMPTS, logits_processor=rules["end"], **how), rules["end"]
    texts, answers = [*PROMPTS], [list[int]()] * len(PROMPTS)
    for row, new in enumerate(result.token_ids):
        thought, tokens = rule.thought(PROMPTS[row], new, row=row), new.tolist()
        logits = true_logits(model, PROMPTS[row], new, np.full(NEW, 4), "full")
        logs = np.asarray(jax.nn.log_softmax(logits))[np.arange(NEW), tokens]
        np.testing.assert_allclose(result.log_probabilities[row], logs, atol=1e-4)
        assert tokens[: thought.tokens] == free.token_ids[row][: thought.tokens].tolist()
        if thought.ended_by == "budget":
            texts[row] = [*PROMPTS[row], *tokens[: thought.answer.start]]
            answers[row] = tokens[thought.answer]
    # What follows is what follows these tokens in a prompt: positions and seed are alike.
    for new, answer in zip(run(model, texts, **how).token_ids, answers, strict=True):
        assert new.tolist()[: len(answer)] == answer
    assert sum(map(len, answers)) > 15


def test_thinking_that_a_prompt_has_opened_is_open() -> None:
    rule = ThinkingBudget(end_ids=(8, 9), start_ids=(5, 6), max_tokens=2)
    opened = Thought(start=0, tokens=2, forced=1, ended_by="budget")
    for prompt in ([1, 5, 6, 2], [5, 6, 8, 9, 5, 6]):
        assert rule.thought(prompt, [1, 2, 8]) == opened
        assert rule.thought(prompt, [1, 2]) == Thought(start=0, tokens=2)  # Its row ended.
    for prompt in ([5, 6, 8, 9, 2], [1, 5]):
        assert rule.thought(prompt, [1, 2, 8]) == Thought(start=None)
    assert Thought(start=None).answer == slice(0, None)


def test_a_list_of_budgets_has_one_for_each_row() -> None:
    lists: Any = [1, 2], (1, 2)
    for several in lists:
        rule = ThinkingBudget(end_ids=(7,), max_tokens=several)
        assert jax.tree.leaves(rule)[0].tolist() == [1, 2]
    assert jax.tree.map(np.shape, ThinkingBudget(end_ids=(7,), max_tokens=3)).max_tokens == ()


def test_rules_that_do_not_fit_are_named(model: Any, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="Wanted end_ids of at least one token"):
        ThinkingBudget(end_ids=(), max_tokens=1)
    wrong: Any = (-1, np.int64(-2), 4.5, True, [3, -1])
    for most in wrong:
        with pytest.raises(ValueError, match="Wanted max_tokens of at least 0, an integer"):
            ThinkingBudget(end_ids=(1,), max_tokens=most)
    with pytest.raises(ValueError, match="ThinkingBudget from 0 to 63"):
        run(model, logits_processor=ThinkingBudget(end_ids=(64,), max_tokens=1))
    with pytest.raises(ValueError, match=r"each of 3 rows that run together. Got shape \(6,\)"):
        run(model, logits_processor=ThinkingBudget(end_ids=(6,), max_tokens=BUDGETS))
