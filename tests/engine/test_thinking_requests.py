# SPDX-License-Identifier: Apache-2.0
"""Requests that think, each by its own rule, get what they get alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from helpers.engine import SHAPES, Asked, alone, assert_as_alone, engine_of, modes, pool
from helpers.generation import lively_model

from utio_jax.decoding import SamplingParams, Thinking, Thought

ONE = dataclasses.replace(SHAPES, prompt_tokens=(96,))
"""One program that reads prompts."""

RULES = (
    Thinking(end_ids=(63,), max_tokens=6, max_answer_tokens=4),
    Thinking(end_ids=(62, 63), forced_ids=(3, 9, 3), max_tokens=9),
    None,
    Thinking(end_ids=(60,), max_tokens=0),
    Thinking(end_ids=tuple(range(3)), max_answer_tokens=3),
)


def asked() -> list[Asked]:
    """Returns greedy requests, with all rules in turn."""
    turns, greedy = zip(pool(12), itertools.cycle(RULES), strict=False), SamplingParams()
    return [dataclasses.replace(request, sampling=greedy, thinking=rule) for request, rule in turns]


@pytest.mark.parametrize("name", ["plain", pytest.param("lossless", marks=pytest.mark.slow)])
def test_requests_think_as_alone_and_compile_nothing(name: str, count_compiles: Any) -> None:
    model, mode = lively_model(), modes()[name][0]
    engine = engine_of(model, mode, thinking=True, shapes=ONE)
    engine.warmup()
    with count_compiles() as seen:
        numbers = [request.submit(engine) for request in asked()]
        ended = engine.drain()
    assert not seen.count
    causes = set()
    for number, request in zip(numbers, asked(), strict=True):
        result, expected = ended[number], alone(model, mode, None, request)
        assert_as_alone(result, expected)
        if request.thinking is None:
            assert result.thought is None
        else:
            assert result.thought == expected.thought[0]
            causes.add(expected.thought[0].ended_by)
    assert causes >= {"budget", "open"}


def test_what_a_rule_needs_is_asked_for() -> None:
    model = lively_model()
    plain = engine_of(model, modes()["plain"][0])
    short: dict[str, Any] = {"max_new_tokens": 8, "eos_ids": ()}
    rule = Thinking(end_ids=(1,))
    with pytest.raises(ValueError, match="an engine that takes a Thinking"):
        plain.submit([1], thinking=rule, **short)
    engine = engine_of(model, modes()["plain"][0], thinking=True, shapes=ONE)
    with pytest.raises(ValueError, match="thinking's end_ids"):
        engine.submit([1], thinking=Thinking(end_ids=(64,)), **short)
    assert engine.idle
    budget = Thinking(end_ids=(1,), max_tokens=3)
    number = engine.submit([1], thinking=budget, **short)
    engine.cancel(number)
    assert engine.drain()[number].thought == Thought(start=0, tokens=0, forced=0, ended_by="open")
