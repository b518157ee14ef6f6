# SPDX-License-Identifier: Apache-2.0
"""Each request gets what `generate` gives it alone, whatever arrives beside it, and when.

So a seed fixes a text whatever the schedule, also where drafts are verified.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.engine import (
    SHAPES,
    alone,
    assert_as_alone,
    engine_of,
    model64,
    modes,
    pool,
    run_schedule,
)
from helpers.models import with_random_maps

NAMES = ("plain", "propagate", "lossless", "drop", "mapped", "copies", "prompts")

pytestmark = pytest.mark.usefixtures("double")


def check_schedules(name: str, *, schedules: int, requests: int, seed: int = 0) -> int:
    """Returns how many requests were held against what they get alone."""
    mode, prefill = modes()[name]
    model, asked = model64(), pool(requests)
    if name == "mapped":
        model = with_random_maps(model, (1, 2))
    expected = [alone(model, mode, prefill, request) for request in asked]
    assert {result.finish_reasons[0] for result in expected} == {"eos", "length"}
    shapes = dataclasses.replace(SHAPES, key_step=32)  # Two widths of attention.
    engines = [
        engine_of(model, mode, prefill, shapes=shapes, read_late=late) for late in (False, True)
    ]
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
