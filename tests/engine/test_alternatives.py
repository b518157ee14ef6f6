# SPDX-License-Identifier: Apache-2.0
"""The most probable tokens at the place of each new one, and log-probabilities as they come."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers.engine import Asked, Letters, engine_of, modes, pool
from helpers.generation import lively_model, true_logits
from helpers.marks import slow

COUNT = 5


def check_against_sorted(asked: Asked, finished: Any, name: str) -> None:
    """Holds a request to a full sort of what the oracle says of its tokens."""
    new, layers = finished.token_ids, lively_model().decoder.config.num_layers
    # Under lossless `decided` is of the draft; what is noted is the full model's all the same.
    depths = finished.decided if name == "propagate" else np.full_like(new, layers)
    logits = true_logits(lively_model(), asked.prompt, new, depths, "propagate")
    truth = np.asarray(jax.nn.log_softmax(logits))
    order = np.argsort(-truth, axis=1, kind="stable")[:, :COUNT]
    best = np.take_along_axis(truth, order, axis=1)
    result = finished.alternatives
    np.testing.assert_allclose(result.log_probabilities, best, atol=1e-4)
    # Two that are as probable within rounding may come in any order: then the values decide.
    apart = np.min(np.diff(np.sort(-truth, axis=1)[:, : COUNT + 1], axis=1), axis=1) > 1e-4
    assert np.mean(apart) > 0.8
    np.testing.assert_array_equal(result.token_ids[apart], order[apart])
    np.testing.assert_allclose(
        finished.log_probabilities, truth[np.arange(new.size), new], atol=1e-4
    )


@pytest.mark.check
@pytest.mark.parametrize(
    "name",
    ["plain", *slow("propagate", "lossless")],
)
def test_alternatives_are_those_of_a_full_sort(name: str, no_compiles: Any) -> None:
    mode, prefill = modes()[name]
    engine = engine_of(
        lively_model(), mode, prefill, alternatives=COUNT, tokenizer=Letters(), read_late=False
    )
    engine.warmup()
    asked = pool(12, seed=4)
    with no_compiles():
        numbers = {
            request.submit(engine, stop_strings=["a"] * (place % 2)): request
            for place, request in enumerate(asked)
        }
        late = engine.submit([1, 2], max_new_tokens=40, eos_ids=())
        events: dict[int, list[Any]] = {}
        while not engine.idle:
            for event in engine.advance():
                events.setdefault(event.request, []).append(event)
                if event.request == late:
                    engine.cancel(late)
    for number, request in numbers.items():
        finished = events[number][-1].finished
        check_against_sorted(request, finished, name)
        parts = events[number]
        for what in ("token_ids", "log_probabilities"):
            joined = np.concatenate([getattr(part.alternatives, what) for part in parts])
            np.testing.assert_array_equal(joined, getattr(finished.alternatives, what))
        np.testing.assert_array_equal(
            np.concatenate([part.log_probabilities for part in parts]), finished.log_probabilities
        )
        assert all(part.log_probabilities.size == part.token_ids.size for part in parts)
    cancelled: Any = events[late][-1]
    assert cancelled.alternatives.token_ids.shape == (0, COUNT)
    assert cancelled.finished.alternatives.token_ids.shape == (
        cancelled.finished.token_ids.size,
        COUNT,
    )
