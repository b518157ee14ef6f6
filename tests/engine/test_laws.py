# SPDX-License-Identifier: Apache-2.0
"""Each request gets what `generate` gives it alone, whatever arrives beside it, and when.

So a seed fixes a text whatever the schedule, also where drafts are verified.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engine import SHORT, Asked, alone, assert_as_alone, engine_of, model64, modes, pool
from helpers.models import with_random_maps

from utio_jax.decoding import Plain, generate

NAMES = ("plain", "propagate", "lossless", "drop", "mapped", "copies", "prompts")

pytestmark = pytest.mark.usefixtures("double")


def run_schedule(engine: Any, asked: list[Asked], rng: np.random.Generator) -> dict[int, Any]:
    """Returns what comes of requests that arrive at random times, by their place in `asked`."""
    waiting, numbers, result = list(enumerate(asked)), {}, {}
    handed: dict[int, list[int]] = {}
    while waiting or not engine.idle:
        for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
            index, request = waiting.pop(0)
            numbers[request.submit(engine)] = index
        for event in engine.advance():
            handed.setdefault(event.request, []).extend(event.token_ids.tolist())
            if event.finished is not None:
                assert numbers[event.request] not in result
                assert handed.pop(event.request) == event.finished.token_ids.tolist()
                result[numbers[event.request]] = event.finished
    return result


def check_schedules(name: str, *, schedules: int, requests: int, seed: int = 0) -> int:
    """Returns how many requests were held against what they get alone."""
    mode, prefill = modes()[name]
    model, asked = model64(), pool(requests)
    if name == "mapped":
        model = with_random_maps(model, (1, 2))
    expected = [alone(model, mode, prefill, request) for request in asked]
    assert {result.finish_reasons[0] for result in expected} == {"eos", "stop", "length"}
    engines = [engine_of(model, mode, prefill, read_late=late) for late in (False, True)]
    rng, checked = np.random.default_rng(seed), 0
    for number in range(schedules):
        chosen = rng.choice(len(asked), int(rng.integers(1, 9)), replace=False)
        result = run_schedule(engines[number % 2], [asked[i] for i in chosen], rng)
        assert len(result) == len(chosen)
        for place, index in enumerate(chosen):
            assert_as_alone(result[place], expected[index])
        checked += len(chosen)
    return checked


def test_a_request_gets_what_it_gets_alone() -> None:
    """In the simplest mode: chunks, budgets and a prefix cache hold others to the same."""
    check_schedules("plain", schedules=24, requests=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_schedules(name: str) -> None:
    """Of all modes together; most of the time is compiling, so each mode is a test of its own."""
    checked = check_schedules(name, schedules=10_000 // len(NAMES) + 1, requests=66, seed=1)
    print(f"{name}: {checked} requests")
    assert checked > 4 * (10_000 // len(NAMES))


@pytest.mark.check
def test_a_processor_is_all_requests() -> None:
    """Rows of an engine get from it what `generate` gives them alone."""

    def odd(logits: Any, state: Any) -> Any:
        even = (jnp.arange(64)[None] + state.last_ids[:, None]) % 2 == 0
        return jnp.where(even, -jnp.inf, logits)

    engine, prompts = engine_of(model64(), Plain(), logits_processor=odd), [[5], [9, 8, 7], [3, 4]]
    numbers = [engine.submit(prompt, max_new_tokens=9, eos_ids=()) for prompt in prompts]
    result = engine.drain()
    for number, prompt in zip(numbers, prompts, strict=True):
        (expected,) = generate(
            model64().decoder,
            model64().params,
            [prompt],
            max_new_tokens=9,
            eos_ids=(),
            lengths=SHORT,
            logits_processor=odd,
        ).token_ids
        np.testing.assert_array_equal(result[number].token_ids, expected)
        assert (np.diff([prompt[-1], *expected]) % 2 == 1).all()
