# SPDX-License-Identifier: Apache-2.0
"""Servers of other modes: each answers as `generate` does in that mode, and says whose numbers."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from helpers.serving import SHAPES, alone, by_importance, completion, running, served_model
from helpers.texts import new_text

from utio_jax.contrib.stopping import ThinkingBudget
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import planning
from utio_jax.serving.app import Application

pytestmark = pytest.mark.check

# Engines are tested in all modes; a server adds what it says of them: the mode, and whose numbers.
MODES: dict[str, tuple[Any, Any, str]] = {
    "prompts": (Plain(), by_importance(), "routed"),
    "lossless": (Lossless(exit=2, max_draft=3), None, "full"),
}
PROMPTS = ("def mean(values):\n    return", "x", "aaaa bbbb aaaa", "naïve € 😀 text\n")


@pytest.mark.parametrize("name", ["lossless", pytest.param("prompts", marks=pytest.mark.slow)])
def test_texts_are_those_of_generate_in_this_mode(folder: Path, name: str) -> None:
    mode, prefill, logprobs_of = MODES[name]
    nothing: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}}
    nothing["prompt_budget"] = None if prefill is None else 0.6
    how = {"mode": mode, "prefill": prefill}
    how["logits_processor"] = ThinkingBudget(end_ids=(70, 71), max_tokens=9)
    served = served_model(folder, **how, **nothing)
    model: Any = served.text
    # Drawn tokens of drafts follow those of all rows: their distribution alone is the same.
    draws = [0.0] if name == "lossless" else [0.0, 0.9]
    cases = [(prompt, heat) for prompt in PROMPTS for heat in draws]
    bodies = [
        completion(prompt, temperature=heat, seed=5, max_tokens=30, logprobs=1)
        for prompt, heat in cases
    ]
    with running(served, slots=1) as server:  # Engines of more are tested elsewhere.
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: server.ask("/v1/completions", body), bodies))
        other = server.completion("x", utio={"mode": "adaptive"})
    assert (other.status, other.error["param"]) == (400, "utio.mode")
    for (prompt, heat), answer in zip(cases, answers, strict=True):
        assert answer.status == 200, answer.body
        drawn = SamplingParams(temperature=heat)
        expected = alone(model, prompt, 30, drawn, seeds=[5], **how)
        assert expected.token_ids[0][9:11].tolist() == [70, 71]
        (choice,) = answer.body["choices"]
        (ids,) = model.encode([prompt])
        assert choice["text"] == new_text(model.tokenizer, ids, expected.token_ids[0])
        result = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(result, expected.log_probabilities[0], atol=2e-4)
        fields = answer.body["usage"]["utio"]
        assert (fields["mode"], fields["logprobs_of"]) == (mode.name, logprobs_of)


@pytest.mark.parametrize("pays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_run_in_full_where_a_depth_per_token_is_predicted_not_to_pay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    seconds = {True: 0.012 if pays else 0.005, False: 0.006}

    def timed(served: Any, shares: Any) -> float:
        return seconds[shares is None]

    monkeypatch.setattr(planning, "_seconds", timed)
    with running(served_model(folder, histogram={2: 0.9, 4: 0.1}), slots=4) as server:
        ready = server.ask("/ready").body
        mode = "adaptive" if pays else "plain"
        (planned,) = (line for line in server.lines if line["event"] == "planned")
        assert ready == {"status": "ready", "mode": mode, "plan": planned["why"]}
        assert planned["speedup"] == round(seconds[True] / 0.006, 3)
        assert (planned["ms"], planned["plain_ms"]) == (6.0, 1e3 * seconds[True])
        assert planned["why"].endswith("run at 0.5." if pays else "run in full.")
        assert {"event": "timing", "done": 1, "kinds": 2} in server.lines
        about = server.ask("/v1/models").body["data"][0]["utio"]
        assert (about["mode"], about["default_mode"]) == ("adaptive", mode)

        def used(**asked: Any) -> tuple[str, float]:
            utio = server.completion("def mean(", max_tokens=30, utio=asked).body["usage"]["utio"]
            return utio["mode"], utio["mean_depth_decided"]

        assert used(mode="plain") == ("plain", 4)
        shallow = used(budget=0.5)
        assert shallow == used(mode="adaptive")
        assert shallow[0] == "adaptive"
        assert shallow[1] < 4
        assert used() == (shallow if pays else ("plain", 4))


@pytest.mark.parametrize(
    ("timed", "why"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out"), "RESOURCE_EXHAUSTED: Out"),
        (ValueError("Wanted slots for a prompt"), "Wanted slots"),
    ],
)
def test_a_server_stays_as_asked_without_a_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, timed: Any, why: str
) -> None:
    monkeypatch.setattr(planning, "_seconds", mock.Mock(side_effect=timed))
    lines = list[dict[str, Any]]()
    model = served_model(folder, histogram={2: 0.9, 4: 0.1})
    app = Application(model, slots=1, shapes=SHAPES, log=lines.append)
    app.worker._plan()
    *_, planned = lines
    assert planned["event"] == "planned"
    assert why in planned["why"]
    assert not app.reader.in_full


@pytest.mark.parametrize(("milliseconds", "how"), [(5, "by it"), (7, "in full")])
def test_a_policy_without_a_budget_is_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, milliseconds: float, how: str
) -> None:
    def timed(served: Any, shares: Any) -> float:
        return 0.006 if shares is None else milliseconds / 1e3

    monkeypatch.setattr(planning, "_seconds", timed)
    nothing: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}}
    model = served_model(folder, histogram={2: 0.9, 4: 0.1}, **nothing)
    app = Application(model, slots=1, shapes=SHAPES, log=lambda record: None)
    app.worker._plan()
    assert "the depth policy is predicted to be" in app.planned
    assert app.planned.endswith(f"nor a budget run {how}.")
