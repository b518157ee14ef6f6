# SPDX-License-Identifier: Apache-2.0
"""Requests that think, each by its own rule, get what they get alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.engine import SHAPES, SHORT, engine_of, modes
from helpers.generation import lively_model

from utio_jax.decoding import Generated, SamplingParams, Thinking, Thought, generate
from utio_jax.engine import Engine

NEW = 20
ONE = dataclasses.replace(SHAPES, prompt_widths=(8,), groups=(3,))
"""One program that reads prompts."""


def asked() -> list[dict[str, Any]]:
    """Returns requests of all kinds: prompts with their rules."""
    rules = [
        Thinking(end_ids=(63,), max_tokens=6, max_answer_tokens=4),
        Thinking(end_ids=(62, 63), forced_ids=(3, 9, 3), max_tokens=9),
        None,
        Thinking(end_ids=(60,), max_tokens=0),
        Thinking(end_ids=tuple(range(3)), max_answer_tokens=3),
    ]
    prompts = np.random.default_rng(0).integers(0, 64, (12, 5)).tolist()
    return [
        {"prompt_ids": prompt[: 1 + row % 5], "thinking": rules[row % len(rules)], "seed": row}
        for row, prompt in enumerate(prompts)
    ]


def alone(model: Any, mode: Any, request: dict[str, Any]) -> Generated:
    return generate(
        model.decoder,
        model.params,
        [request["prompt_ids"]],
        mode=mode,
        sampling=SamplingParams(),
        max_new_tokens=NEW,
        seeds=[request["seed"]],
        eos_ids=(),
        thinking=request["thinking"],
        lengths=SHORT,
    )


def submit(engine: Engine, request: dict[str, Any], **options: Any) -> int:
    return engine.submit(**request, max_new_tokens=NEW, eos_ids=(), **options)


@pytest.mark.parametrize("name", ["plain", pytest.param("lossless", marks=pytest.mark.check)])
def test_requests_think_as_alone_and_compile_nothing(
    name: str, count_compiles: Callable[[], Any]
) -> None:
    model, mode = lively_model(), modes()[name][0]
    engine = engine_of(model, mode, thinking=True, shapes=ONE)
    engine.warmup()
    with count_compiles() as seen:
        numbers = [submit(engine, each) for each in asked()]
        ended = engine.drain()
    assert not seen.count
    causes = set()
    for number, request in zip(numbers, asked(), strict=True):
        found, wanted = ended[number], alone(model, mode, request)
        np.testing.assert_array_equal(found.token_ids, wanted.token_ids[0])
        assert found.reason == wanted.finish_reasons[0]
        if request["thinking"] is None:
            assert found.thought is None
        else:
            assert found.thought == wanted.thought[0]
            causes.add(wanted.thought[0].ended_by)
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
