# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read in full, beside those that are read by importance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.engine import alone, assert_as_alone, engine_of, model64, modes, pool
from helpers.generation import lively_model


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_each_prompt_is_read_as_it_asks(count_compiles: Any) -> None:
    model, (mode, prefill) = model64(), modes()["prompts"]
    engine, asked = engine_of(model, mode, prefill), pool(14, seed=6)
    engine.warmup()
    rng = np.random.default_rng(0)
    whole = rng.random(len(asked)) < 0.5
    with count_compiles() as compiles:
        numbers = [
            request.submit(engine, whole_prompt=bool(is_whole))
            for request, is_whole in zip(asked, whole, strict=True)
        ]
        result = engine.drain()
    assert compiles.count == 0
    differ = 0
    for number, request, is_whole in zip(numbers, asked, whole, strict=True):
        both = [alone(model, mode, how, request) for how in (prefill, None)]
        assert_as_alone(result[number], both[int(is_whole)])
        first, second = (one.log_probabilities[0][0] for one in both)
        differ += abs(first - second) > 1e-4
    assert differ > 8  # Or nothing would be tested.


def test_prompts_of_both_kinds_are_read_apart() -> None:
    engine = engine_of(lively_model(), *modes()["prompts"])
    for whole in (True, False, False):
        engine.submit([1, 2], max_new_tokens=2, whole_prompt=whole)
    engine.drain()
    assert engine.stats().prompt_groups == 2
    plain = engine_of(lively_model(), modes()["plain"][0])
    for whole in (True, False, False):  # All are read in full: together.
        plain.submit([1, 2], max_new_tokens=2, whole_prompt=whole)
    plain.drain()
    assert plain.stats().prompt_groups == 1
