# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: what comes out, and what it costs, against a loop of one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from helpers.generation import DepthAt, depth_table, run, true_logits

from utio_jax.decoding import Adaptive, Lossless, SamplingParams, Thinking, Thought
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.thinking import NEVER, opening

NEW = 24
PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2], [0, 5, 7], [9, 1]]


def look(rule: Thinking, prompt: Sequence[int], new: Sequence[int]) -> tuple[int | None, Thought]:
    """Returns the token that is due behind some new ones, if any, and how the row has thought.

    From scratch: first where thinking begins, then the first place where it ends.
    """
    start, end, forced = [*rule.start_ids], [*rule.end_ids], rule.forced
    begin: int | None = 0
    if start:
        text = ",".join(map(str, ["", *prompt, ""]))
        marks = [",".join(map(str, ["", *ids, ""])) for ids in (start, end)]
        if text.rfind(marks[0]) <= text.rfind(marks[1]):
            places = range(len(start), len(new) + 1)
            begin = next((i for i in places if [*new[i - len(start) : i]] == start), None)
    if begin is None:
        return None, Thought(start=None, tokens=0, forced=0, ended_by="open")
    for cut in range(begin, len(new) + 1):
        size, done = cut - begin, len(new) - cut
        if [*new[begin:cut]][-len(end) :] == end:
            return None, Thought(start=begin, tokens=size, forced=0, ended_by="model")
        if rule.max_tokens is not None and size >= rule.max_tokens:
            put = min(done, len(forced))
            thought = Thought(start=begin, tokens=size, forced=put, ended_by="budget")
            return (forced[done] if done < len(forced) else None), thought
    return None, Thought(start=begin, tokens=len(new) - begin, forced=0, ended_by="open")


known: dict[Any, np.ndarray] = {}
"""Logits behind texts of which every token has run all layers."""


def by_hand(
    model: Any, prompt: list[int], rule: Thinking | None, depths: np.ndarray, kv: str
) -> tuple[list[int], Thought | None]:
    """Writes one token after the other, each from a pass over the whole text."""
    new: list[int] = []
    while len(new) < NEW:
        text = (*prompt, *new), kv
        if kv != "full" or text not in known:
            ids = np.asarray([*new, 0])
            known[text] = true_logits(model, prompt, ids, depths[: len(new) + 1], kv)[-1]
        due = None if rule is None else look(rule, prompt, new)[0]
        new.append(int(np.argmax(known[text])) if due is None else int(due))
        if rule is not None and rule.max_answer_tokens is not None:
            ids = look(rule, prompt, new)[1]
            behind = ids.start is not None and ids.tokens + ids.forced + ids.start
            full = ids.ended_by == "model" or ids.forced == len(rule.forced)
            if full and len(new) - behind >= rule.max_answer_tokens:
                break
    return new, None if rule is None else look(rule, prompt, new)[1]


@pytest.fixture(scope="module")
def rules(model: Any) -> list[list[Thinking | None]]:
    """Rules for the prompts' rows, three sets; ends and starts occur in what the model writes."""
    free = run(model, PROMPTS, max_new_tokens=NEW).token_ids
    rule_sets = []
    for turn in range(3):
        rng = np.random.default_rng(turn)
        rows: list[Thinking | None] = []
        for row, new in enumerate(free):
            at = int(rng.integers(2, 12))
            kinds = [
                None,
                Thinking(end_ids=[63], max_tokens=at, max_answer_tokens=4),
                Thinking(end_ids=new[at : at + 2].tolist(), forced_ids=[3, 9, 3]),
                Thinking(end_ids=[62, 63], forced_ids=[3], max_tokens=at),
                Thinking(end_ids=[61], start_ids=new[at : at + 1].tolist(), max_tokens=turn),
                Thinking(end_ids=[60, 1], max_tokens=15, max_answer_tokens=2),
            ]
            rows.append(kinds[(row + turn) % 6])
        rule_sets.append(rows)
    return rule_sets


def check(result: Any, expected: list[Any]) -> None:
    for row, (new, thought) in enumerate(expected):
        assert result.token_ids[row].tolist() == new
        assert thought is None or result.thought[row] == thought


@pytest.fixture(scope="module")
def expected(model: Any, rules: Any) -> list[Any]:
    deep = np.full(NEW, 4)
    rows = [zip(PROMPTS, row_rules, strict=True) for row_rules in rules]
    return [[by_hand(model, *row, deep, "full") for row in turn] for turn in rows]


def test_rows_think_as_a_loop_over_single_tokens_does(
    model, rules, expected, count_compiles
) -> None:
    causes, warm = set(), None
    for row_rules, by_loop in zip(rules, expected, strict=True):
        with count_compiles() as seen:
            result = run(model, PROMPTS, max_new_tokens=NEW, thinking=row_rules)
        check(result, by_loop)
        causes |= {thought.ended_by for thought in result.thought}
        # Each token but prefill's is one round of all layers, forced ones too.
        sizes = [new.size for new in result.token_ids]
        assert result.steps.tolist() == [size - 1 for size in sizes]
        assert result.token_layers.tolist() == [4 * (size - 1) for size in sizes]
        assert warm is None or not seen.count, "other rules compile nothing"
        warm = result
    assert causes == {"open", "model", "budget"}, "each of them occurs"


LOSSLESS = {
    "exit": Lossless(exit=2, max_draft=3),
    "ngram": Lossless(drafter="ngram", max_draft=4, ngram=NGram(longest=2)),
}


@pytest.mark.parametrize("name", ["exit", pytest.param("ngram", marks=pytest.mark.slow)])
def test_several_tokens_a_round_end_where_single_ones_do(model, rules, expected, name) -> None:
    for row_rules, by_loop in zip(rules[:2], expected, strict=False):
        result = run(model, PROMPTS, max_new_tokens=NEW, thinking=row_rules, mode=LOSSLESS[name])
        check(result, by_loop)
        assert (result.steps < [new.size for new in result.token_ids]).any() or name == "ngram"


def test_tokens_that_stop_early_think_too(model, rules) -> None:
    table = depth_table((1, 2, 4), shape=(len(PROMPTS), 64))
    mode = Adaptive(policy=DepthAt(table=table, depths=(1, 2, 4)), kv="drop")
    result = run(model, PROMPTS, max_new_tokens=NEW, thinking=rules[0], mode=mode)
    rows = []
    for row, (prompt, rule) in enumerate(zip(PROMPTS, rules[0], strict=True)):
        decided = np.asarray(table[row])[len(prompt) - 1 :][:NEW].copy()
        decided[0] = 4
        rows.append(by_hand(model, prompt, rule, decided, "drop"))
    check(result, rows)


@pytest.mark.parametrize(
    "mode",
    [
        None,
        pytest.param("exit", marks=pytest.mark.check),
        pytest.param("ngram", marks=pytest.mark.slow),
    ],
)
def test_what_is_drawn_is_drawn_as_without_rules(model, rules, mode) -> None:
    how: dict[str, Any] = {"sampling": SamplingParams(temperature=1.1), "seeds": [3, 1, 4, 1, 5, 9]}
    how |= {"max_new_tokens": NEW} | ({} if mode is None else {"mode": LOSSLESS[mode]})
    free = run(model, PROMPTS, **how)
    result = run(model, PROMPTS, thinking=rules[1], **how)
    behind, answers = [*PROMPTS], [list[int]()] * len(PROMPTS)
    for row, thought in enumerate(result.thought):
        new_tokens = result.token_ids[row].tolist()
        logits = true_logits(
            model, PROMPTS[row], np.asarray(new_tokens), np.full(len(new_tokens), 4), "full"
        )
        logs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(new_tokens)), new_tokens]
        np.testing.assert_allclose(result.log_probabilities[row], logs, atol=1e-4)
        own = len(new_tokens) if thought.start is None else thought.start + thought.tokens
        if mode is None:  # Draws of drafted tokens depend on where rounds begin.
            assert new_tokens[:own] == free.token_ids[row][:own].tolist()
        rule = rules[1][row]
        if rule is not None and thought.ended_by == "budget":
            assert new_tokens[own : own + thought.forced] == [*rule.forced][: thought.forced]
        if mode is None and thought.forced:
            behind[row] = [*PROMPTS[row], *new_tokens[: own + thought.forced]]
            answers[row] = new_tokens[own + thought.forced :]
    # What follows is what follows these tokens in a prompt: positions and seed are alike.
    again = run(model, behind, **how)
    for new, answer in zip(again.token_ids, answers, strict=True):
        assert new.tolist()[: len(answer)] == answer
    assert mode is not None or sum(map(len, answers)) > 15


def test_rows_without_a_rule_and_no_rules_at_all_are_the_plain_loop(model) -> None:
    free = run(model, PROMPTS, max_new_tokens=NEW)
    none = run(model, PROMPTS, max_new_tokens=NEW, thinking=[None] * len(PROMPTS))
    assert free.thought == none.thought == ()
    some: list[Any] = [None] * len(PROMPTS)
    some[2] = Thinking(end_ids=[1], max_tokens=0)
    # An end of which the start is half, which stands there: it does not end what it begins.
    tag = free.token_ids[3][4:6].tolist()
    some[3] = Thinking(start_ids=tag[:1], end_ids=tag, forced_ids=[1], max_tokens=6)
    mixed = run(model, PROMPTS, max_new_tokens=NEW, thinking=some)
    for row, new in enumerate(free.token_ids):
        assert row in (2, 3) or mixed.token_ids[row].tolist() == new.tolist()
    assert mixed.token_ids[2][0] == 1
    assert mixed.thought[2] == Thought(start=0, tokens=0, forced=1, ended_by="budget")
    assert mixed.thought[0].answer == slice(0, None)
    thought = look(some[3], PROMPTS[3], mixed.token_ids[3].tolist())[1]
    assert mixed.thought[3] == thought
    assert thought.tokens > 1


@pytest.mark.slow
def test_rows_on_a_mesh_think_as_without_it(model, rules, expected) -> None:
    mesh = jax.make_mesh((1,), ("data",))
    check(run(model, PROMPTS, max_new_tokens=NEW, thinking=rules[0], mesh=mesh), expected[0])


def test_an_answer_counts_from_behind_the_end_and_the_text_ends_within_its_limit(model) -> None:
    rule = Thinking(end_ids=[1, 2], max_tokens=5, max_answer_tokens=3)
    result = run(model, PROMPTS, max_new_tokens=NEW, thinking=rule)
    for new, thought in zip(result.token_ids, result.thought, strict=True):
        assert new.size == 10
        assert new[5:7].tolist() == [1, 2]
        assert new[thought.answer].size == 3
    assert set(result.finish_reasons) == {"length"}
    short = run(model, PROMPTS, max_new_tokens=6, thinking=rule)
    assert [new.size for new in short.token_ids] == [6] * len(PROMPTS)
    assert short.thought[0] == Thought(start=0, tokens=5, forced=1, ended_by="budget")
    assert result.first([6] * 6, finish_reasons=["stop"] * 6).thought[0] == short.thought[0]


def test_thinking_that_a_prompt_has_opened_is_open() -> None:
    rule = Thinking(end_ids=[8, 9], start_ids=[5, 6], max_tokens=0)
    assert opening(rule, [1, 5, 6, 2]) == (4, 4, NEVER)
    assert opening(rule, [5, 6, 8, 9, 2])[0] == NEVER
    assert opening(rule, [5, 6, 8, 9, 5, 6])[0] == 6
    assert opening(rule, [1, 5])[0] == NEVER
    assert opening(dataclasses.replace(rule, start_ids=()), [1, 8, 9])[0] == 3


def test_an_end_is_of_thought_alone(model) -> None:
    """Half of it stands in the prompt, or is the last of the start: it ends nothing."""
    free = run(model, [[4]], max_new_tokens=NEW).token_ids[0].tolist()
    half = Thinking(end_ids=[4, free[0]], max_tokens=9)
    tagged = Thinking(start_ids=free[:1], end_ids=free[:2], max_tokens=9)
    for rule, start in ((half, 0), (tagged, 1)):
        result = run(model, [[4]], max_new_tokens=NEW, thinking=rule)
        thought = result.thought[0]
        assert thought == look(rule, [4], result.token_ids[0].tolist())[1]
        assert (thought.start, thought.ended_by, thought.tokens) == (start, "budget", 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"end_ids": []}, "Wanted end_ids of 1 to 32 tokens. Got 0"),
        ({"forced_ids": [1] * 33}, "Wanted forced_ids of 1 to 32 tokens. Got 33"),
        ({"max_tokens": -1}, "Wanted max_tokens of at least 0. Got -1"),
        ({"max_answer_tokens": 0}, "Wanted max_answer_tokens of at least 1. Got 0"),
    ],
)
def test_bad_rules_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thinking(**{"end_ids": [1]} | fields)  # pyright: ignore[reportArgumentType]


def test_rules_that_do_not_fit_are_named(model) -> None:
    with pytest.raises(ValueError, match="thinking's end_ids"):
        run(model, thinking=Thinking(end_ids=[64]))
    with pytest.raises(ValueError, match="for each of the 3 prompts. Got 1"):
        run(model, thinking=[Thinking(end_ids=[1])])
