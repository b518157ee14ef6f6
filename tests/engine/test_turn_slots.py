# SPDX-License-Identifier: Apache-2.0
"""An engine of a looped model: slots at any turn, and steps that are those of a simulation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers.looped import looped_model

from utio_jax import Adaptive, Engine, generate
from utio_jax.policies import random_depths

DEPTHS = (4, 8, 12, 16)
REQUESTS = [(3, 9), (1, 14), (5, 2), (2, 6), (4, 1), (1, 11), (6, 7)]
"""Tokens of prompts, and new tokens."""


def policy() -> Any:
    """A draw of depths by each token's id and position, whatever its row and its step."""
    return random_depths((0.4, 0.2, 0.1, 0.3), depths=DEPTHS, key=jax.random.key(3))


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 64, size).astype(np.int32) for size, _ in REQUESTS]


def engine(**options: Any) -> Engine:
    model = looped_model(4)
    sizes: dict[str, Any] = {"slots": 3, "capacity": 32, "mode": Adaptive(policy=policy())}
    return Engine(model.decoder, model.params, **{**sizes, **options})


def alone(prompt: np.ndarray, new: int) -> Any:
    model = looped_model(4)
    return generate(
        model.decoder, model.params, [prompt], max_new_tokens=new, mode=Adaptive(policy=policy())
    )


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("late", [False, True])
def test_requests_get_the_tokens_that_they_get_alone(
    steps: int, late: bool, no_compiles: Any
) -> None:
    """At any mixture of turns, arrivals and ends; none runs a turn for another; none compiles."""
    served = engine(steps=steps, read_late=late)
    served.warmup()
    events = list[Any]()
    with no_compiles("after warm-up nothing compiles"):
        numbers = []
        for prompt, (_, new) in zip(prompts(), REQUESTS, strict=True):
            numbers.append(served.submit(prompt, max_new_tokens=new, eos_ids=()))
            events += served.advance()  # Others run as this one arrives.
        while not served.idle:
            events += served.advance()
    results = {event.request: event.finished for event in events if event.finished is not None}
    for number, prompt, (_, new) in zip(numbers, prompts(), REQUESTS, strict=True):
        expected, completion = alone(prompt, new), results[number]
        np.testing.assert_array_equal(completion.token_ids, expected.token_ids[0])
        np.testing.assert_array_equal(completion.decided, expected.decided[0])
        assert completion.work.steps == sum(completion.decided[1:]) // 4


def test_steps_are_those_of_a_simulation() -> None:
    """A freed slot takes the next request at once; the total is no sum over deepest rows."""
    served = engine(steps=1, read_late=False)
    numbers = [
        served.submit(prompt, max_new_tokens=new, eos_ids=())
        for prompt, (_, new) in zip(prompts(), REQUESTS, strict=True)
    ]
    results = served.drain()
    turns = [sum(results[number].decided[1:]) // 4 for number in numbers]
    assert served.stats().blocks == simulated_blocks(turns, slots=3)


def simulated_blocks(turns: list[int], *, slots: int) -> int:
    """Returns the blocks of one step until requests of so many turns have ended.

    A block that holds new requests alone runs no step: their first tokens are those of prompts.
    """
    waiting, running, blocks = [*turns], list[int](), 0
    while waiting or running:
        new = waiting[: slots - len(running)]
        waiting = waiting[len(new) :]
        steps = 1 if running else 0
        if not new:
            steps = 1
        running = [left - steps for left in (*running, *new) if left - steps > 0 or not steps]
        running = [left for left in running if left > 0]
        blocks += 1
    return blocks
