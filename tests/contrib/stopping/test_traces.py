# SPDX-License-Identifier: Apache-2.0
"""Thoughts that end at every cue: each answer is that of a text written by hand."""

from __future__ import annotations

from typing import Any

from helpers.generation import lively_model

from utio_jax.contrib.stopping import Trace, trace_answers
from utio_jax.decoding import Lengths, generate

PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2]]
THOUGHT, ANSWER, END = 14, 3, (62, 63)
OPTIONS: dict[str, Any] = {"eos_ids": (), "lengths": Lengths(prompt_step=32, key_step=64)}
SIZES: dict[str, Any] = {"max_thought": THOUGHT, "max_answer": ANSWER, "end_ids": END}


def written(texts: list[list[int]], count: int) -> list[list[int]]:
    model = lively_model()
    result = generate(model.decoder, model.params, texts, max_new_tokens=count, **OPTIONS)
    return [ids.tolist() for ids in result.token_ids]


def test_each_place_has_the_answer_of_a_thought_that_ends_there() -> None:
    model = lively_model()
    traces = trace_answers(model.decoder, model.params, PROMPTS, **SIZES, **OPTIONS)
    thoughts = written(PROMPTS, THOUGHT)
    cues = {thoughts[0][2], thoughts[1][4]}
    some = trace_answers(model.decoder, model.params, PROMPTS, cue_ids=[*cues], **SIZES, **OPTIONS)
    changed = 0
    for prompt, thought, trace, few in zip(PROMPTS, thoughts, traces, some, strict=True):
        assert (trace.prompt, trace.thought) == (prompt, thought)
        (whole,) = written([[*prompt, *thought, *END]], ANSWER)
        for size, differs in trace.ends:
            (answer,) = written([[*prompt, *thought[:size], *END]], ANSWER)
            assert differs == (answer != whole)
            changed += differs
        assert [size for size, _ in trace.ends] == [*range(1, THOUGHT)]
        assert few.ends == [end for end in trace.ends if thought[end[0] - 1] in cues]
    assert 0 < changed < len(PROMPTS) * (THOUGHT - 1)


def test_an_end_that_the_model_writes_ends_the_thought() -> None:
    model = lively_model()
    (thought,) = written([PROMPTS[1]], THOUGHT)
    end = tuple(thought[5:7])
    place = next(i for i in range(1, THOUGHT) if tuple(thought[i - 1 : i + 1]) == end) - 1
    (trace,) = trace_answers(
        model.decoder, model.params, [PROMPTS[1]], **SIZES | {"end_ids": end}, **OPTIONS
    )
    assert trace.thought == thought[:place]


def test_the_first_stop_decides() -> None:
    trace = Trace([1], [5, 6, 7, 8], [(1, True), (3, False)])
    assert trace.replay([False, False]) == (4, False)
    assert trace.replay([True, True]) == (1, True)
    assert trace.replay([False, True]) == (3, False)
