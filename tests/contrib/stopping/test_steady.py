# SPDX-License-Identifier: Apache-2.0
"""Thought that ends once its answer stays the same, against asking by hand, all read anew."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.generation import SMALL, lively_model

from utio_jax import generate
from utio_jax.contrib.stopping import Steadied, Steady, generate_steadily
from utio_jax.decoding import Generated, Lossless, Plain, Thinking

PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2], [9, 1]]
END, NEW = (3, 11), 34


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Answers of a model that means nothing: the same where their first tokens are near."""
    return abs(int(a[0]) - int(b[0])) < 12


def alone(model: Any, prompt: list[int], count: int, **options: Any) -> Generated:
    options |= {"max_new_tokens": count, "eos_ids": (), "lengths": SMALL}
    return generate(model.decoder, model.params, [prompt], **options)


def new_tokens(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    return alone(model, prompt, count, **options).token_ids[0].tolist()


def by_hand(
    model: Any, prompt: list[int], rule: Thinking, steady: Steady
) -> tuple[list[int], int, str, int]:
    """Returns new tokens, how many of them are thought, what ended it, and tokens of questions."""
    full = new_tokens(model, prompt, NEW, thinking=rule)
    told = alone(model, prompt, NEW, thinking=rule).thought[0]
    cut = Thinking(end_ids=END, max_tokens=0, max_answer_tokens=rule.max_answer_tokens)
    answers: list[np.ndarray] = []
    asked = 0
    for place in range(1 + steady.every, min(told.tokens, NEW), steady.every):
        room = min(len(END) + steady.answer_tokens, NEW - place)
        said = new_tokens(model, prompt + full[:place], room, thinking=cut)
        asked += len(said)
        answers.append(np.asarray(said[len(END) :]))
        last = answers[-steady.patience :]
        same = all(a.size and b.size and alike(a, b) for a, b in itertools.pairwise(last))
        if len(last) == steady.patience and same:
            rest = new_tokens(model, prompt + full[:place], NEW - place, thinking=cut)
            return full[:place] + rest, place, "steady", asked
    return full, told.tokens, told.ended_by, asked


def steadily(prompts: Any, rule: Thinking, steady: Steady, **options: Any) -> list[Steadied]:
    model = lively_model()
    options = {"max_new_tokens": NEW, "eos_ids": (), "lengths": SMALL} | options
    return generate_steadily(
        model.decoder, model.params, prompts, thinking=rule, steady=steady, **options
    )


@pytest.mark.parametrize("patience", [2, 3])
def test_rows_stop_where_asking_by_hand_says(patience: int) -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    steady = Steady(every=4, patience=patience, answer_tokens=3, same=alike)
    found, causes = steadily(PROMPTS, rule, steady, mode=Plain()), set()
    for each, prompt in zip(found, PROMPTS, strict=True):
        tokens, thought, cause, asked = by_hand(model, prompt, rule, steady)
        told = each.thought
        assert each.token_ids.tolist() == tokens
        assert (told.tokens, told.ended_by, each.asked) == (thought, cause, asked)
        assert each.token_ids[told.answer].tolist() == tokens[thought + len(END) :]
        causes.add(cause)
    assert "steady" in causes


def test_rounds_of_several_tokens_end_where_the_same_thought_cut_by_hand_does() -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    always = Steady(every=8, answer_tokens=3, same=lambda a, b: True)
    for prompt in PROMPTS:  # Beside others a row may run ahead, while they come to a question.
        (each,) = steadily([prompt], rule, always, mode=Lossless(exit=2))
        told = each.thought
        assert told.ended_by == "steady"
        assert told.tokens < 26
        full = new_tokens(model, prompt, NEW, thinking=rule)[: told.tokens]
        cut = Thinking(end_ids=END, max_tokens=0, max_answer_tokens=5)
        rest = new_tokens(model, prompt + full, NEW - told.tokens, thinking=cut)
        assert each.token_ids.tolist() == full + rest
        assert each.asked == 2 * (len(END) + 3)


def test_answers_that_change_change_nothing() -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    never = Steady(every=9, answer_tokens=3, same=lambda a, b: False)
    for each, prompt in zip(steadily(PROMPTS, rule, never), PROMPTS, strict=True):
        assert each.token_ids.tolist() == new_tokens(model, prompt, NEW, thinking=rule)
        assert (each.thought.tokens, each.thought.ended_by) == (26, "budget")
        # Behind 10 and 19 tokens, each with an end of two and an answer of three.
        assert each.asked == 10


def test_a_thought_that_ends_by_itself_is_asked_no_more() -> None:
    model, prompt = lively_model(), PROMPTS[0]
    end = tuple(new_tokens(model, prompt, 8)[6:])
    rule = Thinking(end_ids=end, max_tokens=26, max_answer_tokens=26)
    never = Steady(every=4, answer_tokens=3, same=lambda a, b: False)
    (found,) = steadily([prompt], rule, never)
    assert (found.thought.tokens, found.thought.ended_by) == (8, "model")
    assert found.token_ids.tolist() == new_tokens(model, prompt, NEW)
    assert found.asked == len(end) + 3  # Behind 5 tokens, not behind 9 and more.


def test_an_answer_without_tokens_is_like_no_other() -> None:
    nothing, one, two = np.zeros(0, np.int32), np.array([1]), np.array([2])
    strict, lenient = Steady(every=1), Steady(every=1, same=lambda a, b: True)
    assert not strict.holds([nothing] * 4)
    assert not strict.holds([nothing, one])
    assert strict.holds([nothing, one, one])
    assert [lenient.holds([nothing, one][:n]) for n in (1, 2)] == [False, False]
    assert lenient.holds([nothing, one, two])
    assert not Steady(every=1, patience=3).holds([two, one, one])


def test_bad_input_says_what_was_wanted() -> None:
    with pytest.raises(ValueError, match="a patience of at least 2"):
        Steady(every=4, patience=1)
    with pytest.raises(ValueError, match=r"begins with the first new token. Got start_ids=\(5,\)"):
        steadily(PROMPTS, Thinking(end_ids=END, start_ids=(5,)), Steady(every=4))
