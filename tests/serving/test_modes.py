# SPDX-License-Identifier: Apache-2.0
"""Servers of other modes: each answers as `generate` does in that mode, and says whose numbers."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.serving import CONTEXT, Running, by_importance, completion, served_model
from helpers.texts import new_text

from utio_jax.decoding.base import Plain
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.sampling import SamplingParams, rows_of

pytestmark = pytest.mark.check

MODES: dict[str, tuple[Any, Any, str]] = {
    "plain": (Plain(), None, "full"),
    "prompts": (Plain(), by_importance(), "routed"),
    "lossless": (Lossless(exit=2, max_draft=3), None, "full"),
    "copies": (Lossless(drafter="ngram", max_draft=3, ngram=NGram(longest=2)), None, "full"),
}
PROMPTS = ("def mean(values):\n    return", "x", "aaaa bbbb aaaa", "naïve € 😀 text\n")


@pytest.mark.parametrize("name", MODES)
def test_texts_are_those_of_generate_in_this_mode(folder: Path, name: str) -> None:
    mode, prefill, told = MODES[name]
    nothing: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}}
    budget = None if prefill is None else 0.6
    served = served_model(folder, mode=mode, prefill=prefill, prompt_budget=budget, **nothing)
    model: Any = served.text
    server = Running(served)
    try:
        # Drawn tokens of drafts follow those of all rows: their distribution alone is the same.
        draws = [0.0] if name == "lossless" else [0.0, 0.9]
        cases = [(prompt, heat) for prompt in PROMPTS for heat in draws] * 2
        bodies = [
            completion(prompt, temperature=heat, seed=5, max_tokens=30, logprobs=1)
            for prompt, heat in cases
        ]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: server.ask("/v1/completions", body), bodies))
        for (prompt, heat), answer in zip(cases, answers, strict=True):
            assert answer.status == 200, answer.body
            (ids,) = model.encode([prompt])
            wanted = generate(
                model.decoder,
                model.params,
                [ids],
                mode=mode,
                prefill=prefill,
                sampling=rows_of([SamplingParams(temperature=heat)]),
                seeds=[5],
                max_new_tokens=30,
                lengths=Lengths(prompt_step=64, key_step=CONTEXT),
            )
            (choice,) = answer.body["choices"]
            assert choice["text"] == new_text(model.tokenizer, ids, wanted.token_ids[0])
            np.testing.assert_allclose(
                choice["logprobs"]["token_logprobs"], wanted.log_probabilities[0], atol=2e-4
            )
            said = answer.body["usage"]["utio"]
            assert (said["mode"], said["logprobs_of"]) == (mode.name, told)
        other = server.completion("x", utio={"mode": "adaptive"})
        assert (other.status, other.error["param"]) == (400, "utio.mode")
    finally:
        server.close()
    assert not server.faults
