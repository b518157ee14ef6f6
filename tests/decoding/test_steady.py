# SPDX-License-Identifier: Apache-2.0
"""Thought that ends once its answer stays the same, against asking by hand, all read anew."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.generation import SMALL, lively_model

from utio_jax import generate
from utio_jax.decoding import Generated, Lossless, Plain, Steady, Thinking
from utio_jax.decoding.steady import Asking

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


@pytest.mark.parametrize("patience", [2, 3])
@pytest.mark.parametrize("mode", [Plain(), Lossless(exit=2)], ids=["plain", "lossless"])
def test_rows_stop_where_asking_by_hand_says(mode: Any, patience: int) -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    steady = Steady(every=4, patience=patience, answer_tokens=3, same=alike)
    if mode.block > 1:  # A round has several tokens: then places differ, and tokens still count.
        steady = Steady(every=8, patience=patience, answer_tokens=3, same=lambda a, b: False)
    found = generate(
        model.decoder,
        model.params,
        PROMPTS,
        mode=mode,
        max_new_tokens=NEW,
        eos_ids=(),
        lengths=SMALL,
        thinking=rule,
        steady=steady,
    )
    causes = set()
    for row, prompt in enumerate(PROMPTS):
        if mode.block > 1:
            assert found.token_ids[row].tolist() == new_tokens(model, prompt, NEW, thinking=rule)
            assert found.asked[row] > 0
            continue
        tokens, thought, cause, asked = by_hand(model, prompt, rule, steady)
        told = found.thought[row]
        assert found.token_ids[row].tolist() == tokens
        assert (told.tokens, told.ended_by, found.asked[row]) == (thought, cause, asked)
        causes.add(cause)
    assert mode.block > 1 or "steady" in causes


def test_rounds_of_several_tokens_end_where_the_same_thought_cut_by_hand_does() -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    steady = Steady(every=8, answer_tokens=3, same=lambda a, b: True)
    options: dict[str, Any] = {"mode": Lossless(exit=2), "thinking": rule, "steady": steady}
    for prompt in PROMPTS:
        found = alone(model, prompt, NEW, **options)
        told = found.thought[0]
        assert told.ended_by == "steady"
        assert told.tokens < 26
        full = new_tokens(model, prompt, NEW, thinking=rule)[: told.tokens]
        cut = Thinking(end_ids=END, max_tokens=0, max_answer_tokens=5)
        rest = new_tokens(model, prompt + full, NEW - told.tokens, thinking=cut)
        assert found.token_ids[0].tolist() == full + rest
        # Two questions, each of at least a forced end and an answer, and less than a round more.
        assert 10 <= found.asked[0] < 10 + 2 * Lossless(exit=2).block


def test_questions_compile_nothing_and_cost_what_they_say(count_compiles: Any) -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "eos_ids": (),
        "lengths": SMALL,
        "thinking": rule,
    }
    early = Steady(every=9, answer_tokens=2, same=lambda a, b: True)
    generate(model.decoder, model.params, PROMPTS, steady=early, **options)
    steady = Steady(every=9, answer_tokens=3, same=lambda a, b: False)
    others = [prompt[::-1] for prompt in PROMPTS]
    with count_compiles() as compiles:
        found = generate(model.decoder, model.params, others, steady=steady, **options)
    assert compiles.count == 0
    # Behind 10 and 19 tokens, each with an end of two and an answer of three.
    assert [each.tokens for each in found.thought] == [26] * len(PROMPTS)
    assert found.asked.tolist() == [10] * len(PROMPTS)
    assert found.only(slice(1, 3)).asked.tolist() == [10, 10]


def test_a_thought_that_ends_by_itself_is_asked_no_more() -> None:
    model, prompt = lively_model(), PROMPTS[0]
    end = tuple(new_tokens(model, prompt, 8)[6:])
    rule = Thinking(end_ids=end, max_tokens=26, max_answer_tokens=26)
    steady = Steady(every=4, answer_tokens=3, same=lambda a, b: False)
    found = alone(model, prompt, NEW, thinking=rule, steady=steady)
    told = found.thought[0]
    assert (told.tokens, told.ended_by) == (8, "model")
    assert found.token_ids[0].tolist() == new_tokens(model, prompt, NEW)
    assert found.asked.tolist() == [len(end) + 3]  # Behind 5 tokens, not behind 9 and more.


def test_rows_without_a_rule_are_never_asked() -> None:
    model = lively_model()
    rule = Thinking(end_ids=END, max_tokens=26, max_answer_tokens=5)
    rules = [rule, None, rule, None, rule]
    steady = Steady(every=4, answer_tokens=3, same=lambda a, b: True)
    found = generate(
        model.decoder,
        model.params,
        PROMPTS,
        max_new_tokens=NEW,
        eos_ids=(),
        lengths=SMALL,
        thinking=rules,
        steady=steady,
    )
    for row, prompt in enumerate(PROMPTS):
        if rules[row] is None:
            assert found.token_ids[row].tolist() == new_tokens(model, prompt, NEW)
            assert found.asked[row] == 0
        else:
            assert found.thought[row].ended_by == "steady"
            assert found.thought[row].tokens == 9


def test_an_answer_without_tokens_is_like_no_other() -> None:
    asking = Asking(Steady(every=1, same=np.array_equal), [Thinking(end_ids=END)])
    nothing = np.zeros(0, np.int32)
    assert not any(asking._hears(0, nothing) for _ in range(4))
    assert not asking._hears(0, np.array([1]))
    assert asking._hears(0, np.array([1]))
    lenient = Asking(Steady(every=1, same=lambda a, b: True), [Thinking(end_ids=END)])
    heard = [lenient._hears(0, answer) for answer in (nothing, np.array([1]), np.array([2]))]
    assert heard == [False, False, True]


def test_bad_input_says_what_was_wanted() -> None:
    model = lively_model()
    with pytest.raises(ValueError, match="a patience of at least 2"):
        Steady(every=4, patience=1)
    with pytest.raises(ValueError, match="nobody thinks"):
        generate(model.decoder, model.params, PROMPTS, steady=Steady(every=4))
    with pytest.raises(ValueError, match="Wanted steady without stop_when"):
        generate(
            model.decoder,
            model.params,
            PROMPTS,
            thinking=Thinking(end_ids=END),
            steady=Steady(every=4),
            stop_when=lambda row, new: False,
        )
