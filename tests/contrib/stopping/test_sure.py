# SPDX-License-Identifier: Apache-2.0
"""Thoughts that end where the model is sure: as token by token, and the guarantee holds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.generation import lively_model, run, true_logits
from scipy import special, stats

from utio_jax.calibration.guarantee import half_of
from utio_jax.contrib import stopping
from utio_jax.contrib.stopping import Answered, Confidence, ThinkingBudget, Trace, fit_confidence
from utio_jax.decoding import Lengths, SamplingParams

PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2]]
THOUGHT, ANSWER, END = 14, 3, (62, 63)
ONE_SHAPE = Lengths(prompt_step=32, key_step=64)
OPTIONS: dict[str, Any] = {"end_ids": END, "max_thought": THOUGHT, "max_answer": ANSWER}
OPTIONS |= {"chunk": 4, "eos_ids": (), "lengths": ONE_SHAPE}
NEVER = Confidence(threshold=-math.inf, window=1)


def until_sure(confidence: Confidence, prompts: Any = PROMPTS, **changes: Any) -> list[Answered]:
    model, how = lively_model(), OPTIONS | changes
    return stopping.generate_until_sure(
        model.decoder, model.params, prompts, confidence=confidence, **how
    )


def sure_at(share: float, confidence: Confidence = NEVER) -> Confidence:
    """Returns the same with a threshold above a share of what is asked, between two of them."""
    rows = until_sure(dataclasses.replace(confidence, threshold=-math.inf))
    means = sorted(nats for row in rows for nats in row.means if nats < math.inf)
    at = int(share * (len(means) - 2))
    return dataclasses.replace(confidence, threshold=(means[at] + means[at + 1]) / 2)


@functools.cache
def next_token(text: tuple[int, ...]) -> tuple[int, float]:
    """Returns the likeliest token behind a text, and its nats, from a pass over all of it."""
    logits = true_logits(lively_model(), text, np.zeros(1, int), np.full(1, 4), "full")[-1]
    logs = special.log_softmax(logits.astype(np.float64))
    return int(np.argmax(logs)), float(-np.max(logs))


def by_hand(
    prompt: Sequence[int], sure: Confidence, *, end: Sequence[int] = END, eos: Sequence[int] = ()
) -> tuple[list[int], str, list[int]]:
    """Writes one token after the other, and looks behind each."""
    thought, nats, cause = list[int](), list[float](), "budget"
    while len(thought) < THOUGHT and cause == "budget":
        token, surprise = next_token((*prompt, *thought))
        thought.append(token)
        nats.append(surprise)
        asked = len(thought) >= sure.window and len(thought) >= sure.min_tokens
        asked = asked and (not sure.cue_ids or token in sure.cue_ids)
        if thought[-len(end) :] == [*end]:
            cause = "model"
        elif asked and sum(nats[-sure.window :]) / sure.window < sure.threshold:
            cause = "confidence"
        elif token in eos:
            return thought, "eos", []
    text = (*prompt, *thought, *(() if cause == "model" else end))
    answer: list[int] = []
    while len(answer) < ANSWER and not (answer and answer[-1] in eos):
        answer.append(next_token((*text, *answer))[0])
    return thought, cause, answer


@pytest.mark.parametrize(
    ("share", "confidence"),
    [
        (0.05, NEVER),
        (0.3, Confidence(threshold=0, window=3)),
        (0.4, Confidence(threshold=0, window=2, cue_ids=range(0, 64, 2))),
        (1.0, Confidence(threshold=0, window=1, min_tokens=6)),
    ],
)
def test_a_thought_is_cut_where_single_tokens_say(share: float, confidence: Confidence) -> None:
    sure = sure_at(share, confidence)
    rows = until_sure(sure)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert (row.thought, row.ended_by, row.answer) == by_hand(prompt, sure)
        texts = [(*prompt, *row.thought[:size]) for size in range(len(row.thought))]
        np.testing.assert_allclose(row.surprise, [next_token(text)[1] for text in texts], atol=1e-4)
    assert "confidence" in {row.ended_by for row in rows}


@pytest.mark.slow
def test_texts_that_end_by_themselves() -> None:
    free = [row.thought for row in until_sure(NEVER)]
    end, eos = tuple(free[0][3:5]), (free[1][6], free[2][2])  # An end over two chunks.
    rows = until_sure(NEVER, end_ids=end, eos_ids=eos)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert (row.thought, row.ended_by, row.answer) == by_hand(prompt, NEVER, end=end, eos=eos)
    assert {"model", "eos"} <= {row.ended_by for row in rows}


@pytest.mark.slow
def test_never_sure_is_a_budget() -> None:
    how: dict[str, Any] = {"sampling": SamplingParams(temperature=1.1), "seeds": [3, 1, 4, 1]}
    budget = ThinkingBudget(end_ids=END, max_tokens=THOUGHT)
    new = THOUGHT + len(END) + ANSWER
    how |= {"max_new_tokens": new, "logits_processor": budget, "lengths": ONE_SHAPE}
    result = run(lively_model(), PROMPTS, **how)
    del how["max_new_tokens"], how["logits_processor"]
    for row, prompt, ids in zip(until_sure(NEVER, **how), PROMPTS, result.token_ids, strict=True):
        assert [*row.thought, *END, *row.answer] == ids.tolist()
        thought = budget.thought(prompt, ids)
        assert (row.ended_by, len(row.thought)) == (thought.ended_by, THOUGHT)


@pytest.mark.slow
def test_no_chunk_is_written_behind_the_last_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    written, generate = [], stopping.generate

    def counted(*args: Any, **options: Any) -> Any:
        written.append(options["max_new_tokens"])
        return generate(*args, **options)

    monkeypatch.setattr(stopping, "generate", counted)
    until_sure(NEVER)
    assert written == [4, 4, 4, 2, ANSWER]
    written.clear()
    assert max(len(row.thought) for row in until_sure(Confidence(threshold=99, window=5))) == 5
    assert written == [4, 4, ANSWER]


def test_replayed_traces_are_what_is_generated() -> None:
    model, asked = lively_model(), Confidence(threshold=0, window=2, cue_ids=range(0, 64, 2))
    traces = stopping.trace_answers(
        model.decoder, model.params, PROMPTS, confidence=asked, **OPTIONS
    )
    whole = until_sure(NEVER)
    for share in (0.2, 0.6, 1.0):
        sure = sure_at(share, asked)
        for trace, row, full in zip(traces, until_sure(sure), whole, strict=True):
            assert trace.replay(sure.threshold) == (len(row.thought), row.answer != full.answer)
    assert any(changed for trace in traces for _, _, changed in trace.ends)


def drawn(rng: np.random.Generator, count: int) -> list[Trace]:
    """Returns traces whose answers change the more often, the less sure they end."""
    nats = rng.random((count, 6)).tolist()
    return [
        Trace([(4 * i, x, bool(rng.random() < x)) for i, x in enumerate(row)], 30) for row in nats
    ]


def test_a_fitted_threshold_changes_as_few_answers_as_it_should() -> None:
    rng = np.random.default_rng(0)
    results = [
        fit_confidence(drawn(rng, 60), max_changed=0.2, confidence=0.9, seed=seed)
        for seed in range(40)
    ]
    chosen = np.asarray([fitted.chosen for fitted in results if fitted.chosen is not None])
    # One of six places lies below, and there it changes by a uniform chance below the threshold.
    risks = (1 - (1 - chosen) ** 6) * chosen / 2
    assert chosen.size > 25
    assert (risks > 0.2).sum() <= stats.binom.ppf(0.999, 40, 0.1)
    assert risks.max() > 0.1, "nor is it idle"
    settings, costs, *_ = zip(*results[0].ladder, strict=True)
    assert [*settings] == sorted(settings)
    assert [*costs] == sorted(costs, reverse=True)
    assert results[0].tested == 30


def test_the_other_half_of_the_traces_decides() -> None:
    traces = drawn(np.random.default_rng(0), 60)
    pairs = [*zip(traces, half_of(np.arange(60), 0).tolist(), strict=True)]
    for changed in (True, False):  # Of those that test; of those that make thresholds, not.
        opposite = [
            Trace([(*end[:2], changed != fit) for end in row.ends], 30) for row, fit in pairs
        ]
        fitted = fit_confidence(opposite, max_changed=0.2, confidence=0.9)
        assert fitted.chosen == (None if changed else fitted.ladder[-1].setting)
    with pytest.raises(ValueError, match=r"Wanted at least 58 traces for max_changed=0\.1"):
        fit_confidence(traces[:40])
