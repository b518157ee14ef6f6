# SPDX-License-Identifier: Apache-2.0
"""Prompts read in blocks and chunks: their tokens, cost, and how long running rows pause."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.engine import (
    SHAPES,
    Asked,
    alone,
    assert_as_alone,
    engine_of,
    model64,
    modes,
    pool,
    run_schedule,
)
from helpers.generation import lively_model
from helpers.marks import checked, slow

from utio_jax.core.platform import compiling_for
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Lengths
from utio_jax.engine import Shapes
from utio_jax.engine.prompts import most_blocks
from utio_jax.engine.requests import Request
from utio_jax.models.presets import TINY

CHUNK = 8
CHUNKED = dataclasses.replace(SHAPES, prompt_tokens=(), chunk=CHUNK, key_step=32)
LONG = Lengths(prompt_step=64, key_step=128)
SIZES = (16, 17, 41, 5, 33, 8, 1, 59, 7, 9, 31, 32)
"""Tokens of prompts, most of them several chunks, up to the longest that drafts leave room for."""


def long_pool() -> list[Asked]:
    """Returns a request for each size."""
    rng, asked = np.random.default_rng(1), []
    for size, request in zip(SIZES, pool(len(SIZES), seed=7), strict=True):
        prompt, new = rng.integers(0, 64, size).tolist(), min(request.new, 17, 60 - size)
        asked.append(dataclasses.replace(request, prompt=prompt, new=new))
    return asked


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "name",
    # With `drop` each row remembers what others may see.
    ["plain", *checked("drop"), *slow("propagate", "lossless", "copies")],
)
def test_prompts_in_chunks_are_as_whole(name: str, no_compiles: Any) -> None:
    model, mode, asked = model64(), modes()[name][0], long_pool()
    engine = engine_of(model, mode, shapes=CHUNKED)
    engine.warmup()
    with no_compiles():
        result = run_schedule(engine, asked, np.random.default_rng(0))
    for place, request in enumerate(asked):
        assert_as_alone(result[place], alone(model, mode, None, request, lengths=LONG))


def test_rows_go_on_between_chunks() -> None:
    """A prompt of 40 tokens takes five blocks, and in each the running rows get their tokens."""
    engine = engine_of(lively_model(), modes()["plain"][0], shapes=CHUNKED, read_late=False)
    running = [engine.submit([1 + n], max_new_tokens=40, eos_ids=()) for n in range(2)]
    engine.advance()
    late = engine.submit([2] * 40, max_new_tokens=2, eos_ids=())
    short = engine.submit([3], max_new_tokens=2, eos_ids=())
    read, seen = [], []
    for _ in range(6):
        before = engine.stats().padded_prompt_tokens
        events = {event.request: event for event in engine.advance()}
        assert all(events[number].token_ids.size for number in running)
        seen += [number for number in (late, short) if number in events]
        read.append(engine.stats().padded_prompt_tokens - before)
    # One chunk each; then the short one, in the order of submission.
    assert read == [CHUNK] * 6
    assert seen == [late, short]
    assert engine.stats().prompt_groups == 2 + 5 + 1
    for number in running:
        engine.cancel(number)
    engine.drain()
    # Alone, it is read at once.
    engine.submit([2] * 40, max_new_tokens=1, eos_ids=())
    assert [event.finished is not None for event in engine.advance()] == [True]


@pytest.mark.check
@pytest.mark.parametrize(
    ("platform", "capacity", "passes"), [("cpu", 72, [128]), *slow(("tpu", 80, [128, 32]))]
)
def test_parts_of_several_prompts_share_a_pass(
    platform: str, capacity: int, passes: list[int]
) -> None:
    """Of 40, 1, 20 and 9 tokens: close together, or in blocks of 32 without place for the last."""
    model = lively_model()
    counting = type(model)(Counting(model.decoder.config), model.params)
    shapes = Shapes(prompt_tokens=(32, 128), key_step=32)
    prompts = [[2] * 40, [3], [4] * 20, [5] * 9]
    read_counts()
    with compiling_for(platform):  # A capacity of its own: what is traced is not traced again.
        engine = engine_of(counting, modes()["plain"][0], slots=4, capacity=capacity, shapes=shapes)
        numbers = [engine.submit(prompt, max_new_tokens=1, eos_ids=()) for prompt in prompts]
        done = engine.drain()
    stats = engine.stats()
    assert (stats.prompt_groups, stats.padded_prompt_tokens) == (len(passes), sum(passes))
    assert read_counts()["queries"] == TINY.num_layers * sum(passes)
    expected = generate(model.decoder, model.params, prompts, max_new_tokens=1, eos_ids=())
    for row, number in enumerate(numbers):
        np.testing.assert_array_equal(done[number].token_ids, expected.token_ids[row])
        np.testing.assert_allclose(
            done[number].log_probabilities, expected.log_probabilities[row], atol=1e-4
        )


def test_prompts_of_any_lengths_fill_passes() -> None:
    """Every pass reads on, in blocks that end within it; a short prompt takes no whole block."""
    options: dict[str, Any] = {"slots": 6, "capacity": 600, "shapes": Shapes()}
    rows = engine_of(lively_model(), modes()["plain"][0], **options)._rows
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, rng.choice([9, 40, 500]), rng.integers(1, 7)).tolist()
        reading = {
            row: Request(number=row, prompt=np.zeros(length, np.int32), max_new_tokens=1)
            for row, length in enumerate(lengths)
        }
        slots = 0
        while reading:
            chosen = rows.next_pass(reading)
            assert chosen is not None
            block, place, blocks = rows._block_of(chosen.tokens), 0, 0
            for row, request, start, stop in chosen.parts:
                assert request.read == start < stop
                blocks += -(-(stop - start) // block)
                assert place + -(-(stop - start) // block) * block <= chosen.tokens
                request.read, place = stop, place + stop - start
                if stop == request.prompt.size:
                    del reading[row]
            assert 0 < blocks <= most_blocks(chosen.tokens, block)
            slots += chosen.tokens
        assert slots < sum(lengths) + 32 * 8  # Padding does not grow with the prompts.


# Prompts that are read in full beside others.


@pytest.mark.check
def test_prompts_of_both_kinds_are_read_apart() -> None:
    engine = engine_of(lively_model(), *modes()["prompts"])
    plain = engine_of(lively_model(), modes()["plain"][0])  # All are read in full: together.
    for served, groups in ((engine, 2), (plain, 1)):
        for whole in (True, False, False):  # Of one token, which the prompt's pass makes.
            served.submit([1, 2], max_new_tokens=1, whole_prompt=whole)
        served.drain()
        assert served.stats().prompt_groups == groups
