# SPDX-License-Identifier: Apache-2.0
"""How long a request may think: what its fields come to, what is refused, and what is reported."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import CONTEXT, alone, completion, running, served_model

from utio_jax.cli.serve import Serve
from utio_jax.decoding import SamplingParams, Thinking, Thought
from utio_jax.serving import Limits, ServedModel
from utio_jax.serving.gate import ApiError
from utio_jax.serving.requests import Reader
from utio_jax.serving.schema import CompletionRequest

NOTHING: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}}
RULE = Thinking(end_ids=(70, 71), max_tokens=20)


def served(folder: Path, thinking: Thinking | None) -> ServedModel:
    # A name and a model are enough, as docs/contrib/ray.md has it: plain decoding.
    return ServedModel(name="small", text=served_model(folder).text, thinking=thinking)


def read(model: ServedModel, **fields: Any) -> Any:
    reader = Reader(model, capacity=CONTEXT, limits=Limits())
    body = CompletionRequest(**completion("x", max_tokens=40, **fields))
    reading = asyncio.run(reader.completion(body))
    (task,) = reading.tasks
    assert task.options is not None
    return task.options.get("thinking")


def test_fields_change_the_operators_rule(folder: Path) -> None:
    model = served(folder, RULE)
    assert read(model) == RULE
    assert read(model, thinking_token_budget=7).max_tokens == 7
    assert read(model, thinking_token_budget=0).max_tokens == 0
    assert read(model, thinking_token_budget=-1).max_tokens is None
    rule = Thinking(end_ids=(70,), start_ids=(10,))
    result = read(served(folder, rule), thinking_token_budget=3)
    assert result == dataclasses.replace(rule, max_tokens=3)


def test_fields_that_cannot_be_served_are_named(folder: Path) -> None:
    def refused(model: ServedModel, **fields: Any) -> tuple[str, str | None]:
        with pytest.raises(ApiError) as caught:
            read(model, **fields)
        error = caught.value.body["error"]
        return error["message"], error["param"]

    off = served(folder, None)
    assert read(off) is None
    assert read(off, thinking_token_budget=-1) is None
    message, param = refused(off, thinking_token_budget=9)
    assert param == "thinking_token_budget"
    assert "started without --think-end" in message
    message, param = refused(off, utio={"budget": 0.7})
    assert param == "utio.budget"
    assert "started without --mode adaptive. Got 0.7" in message


def test_options_of_the_command_line_make_a_rule(folder: Path) -> None:
    tokenizer = served(folder, None).text.tokenizer
    assert Serve().thinking(tokenizer) is None
    with pytest.raises(ValueError, match="Wanted --think-end TEXT with --think-start"):
        Serve(max_thinking_tokens=0).thinking(tokenizer)
    rule = Serve(think_end="ab", think_start="ca").thinking(tokenizer)
    assert rule is not None
    assert tokenizer.decode([*rule.end_ids]) == "ab"
    assert tokenizer.decode([*rule.start_ids]) == "ca"
    assert rule.forced == rule.end_ids


@pytest.mark.check
def test_a_server_forces_the_end_and_says_how_it_came(folder: Path) -> None:
    model, fields = served(folder, RULE), {"return_token_ids": True, "ignore_eos": True}
    with running(model) as server:
        assert server.ask("/v1/models").body["data"][0]["utio"]["thinking"]
        for budget in (0, 3, 11):
            asked = {"max_tokens": 30, "thinking_token_budget": budget, **fields}
            result = server.completion("x", **asked)
            assert result.status == 200, result.body
            rule = dataclasses.replace(RULE, max_tokens=budget)
            expected = alone(model.text, "x", 30, SamplingParams(), thinking=rule, eos_ids=())
            (choice,) = result.body["choices"]
            assert choice["token_ids"] == expected.token_ids[0].tolist()
            usage = result.body["usage"]
            thinking: Any = {"tokens": budget, "forced": 2, "ended_by": "budget"}
            assert expected.thought[0] == Thought(start=0, **thinking)
            assert usage["completion_tokens_details"] == {"reasoning_tokens": budget}
            assert usage["utio"]["thinking"] == [thinking]
