# SPDX-License-Identifier: Apache-2.0
"""An engine that tells others what to do on devices, between threads here, against one alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from helpers.engine import CAPACITY, SHAPES, SLOTS, STEPS, engine_of, modes, pool
from helpers.generation import lively_model
from helpers.lines import joined
from helpers.models import Model, live_params

from utio_jax.decoding import Confidence, Thinking
from utio_jax.decoding.sampling import Chain, Greedy, MinP, Temperature, TopK, TopP
from utio_jax.engine import LedEngine, follow
from utio_jax.engine import led as subject
from utio_jax.engine.led import pack, unpack
from utio_jax.engine.requests import Request, stop_arrays
from utio_jax.engine.slots import Slots

SIZES: dict[str, Any] = {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS, "shapes": SHAPES}


@contextlib.contextmanager
def led(model: Model, other: Model | None = None, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yields an engine and what has become of its one follower, in a thread."""
    first, second = joined(2)
    options = {**SIZES, **options}
    theirs = other or model
    with ThreadPoolExecutor() as threads:
        try:
            followed = threads.submit(
                follow, second, theirs.decoder, theirs.params, **options, deeds={}
            )
            yield LedEngine(first, model.decoder, model.params, **options), followed
        finally:
            first.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Slots]:
    """Returns the followers' rows."""
    found: list[Slots] = []

    class Noted(Slots):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(subject, "Slots", Noted)
    return found


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_requests_come_out_as_alone_and_the_other_has_done_the_same(
    name: str, rows: list[Slots]
) -> None:
    """Some are cancelled, one is released behind a block, prompts come in chunks."""
    model, (mode, prefill) = lively_model(), modes()[name]
    shapes = dataclasses.replace(SHAPES, chunk=4)
    options: dict[str, Any] = {"mode": mode, "prefill": prefill, "shapes": shapes}
    with led(model, **options) as (engine, followed):
        found = []
        for each in (engine, engine_of(model, **options)):
            numbers = [asked.submit(each) for asked in pool(12)]
            first = {event.request: event.finished for event in each.advance()}
            each.cancel(numbers[1])
            each.cancel(numbers[-1])
            ended = {**first, **each.drain()}
            each.advance()  # Frees what ended last.
            found.append([ended[number] for number in numbers])
        for one, other in zip(*found, strict=True):
            assert one.reason == other.reason
            for field in ("token_ids", "decided", "executed", "log_probabilities"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert {each.reason for each in found[0]} >= {"cancelled", "length"}
        engine.close()
        followed.result(timeout=60)
        (mirror,) = rows
        for mine, theirs in zip(
            *(jax.tree.leaves(each.state) for each in (engine._rows, mirror)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        assert len(engine._mine) < 4  # What the other says of the last blocks may come later.
        assert not engine._theirs


def test_other_options_or_weights_are_refused_on_both_sides() -> None:
    model = lively_model()
    first, second = joined(2)
    with ThreadPoolExecutor() as threads:
        followed = threads.submit(
            follow, second, model.decoder, model.params, **SIZES, identity="other weights"
        )
        with pytest.raises(ValueError, match=r"process 0's on processes \[1\]"):
            LedEngine(first, model.decoder, model.params, **SIZES, identity="weights")
        with pytest.raises(ValueError, match="the same model and options on all 2 processes"):
            followed.result(timeout=60)
    first.close()


def test_a_process_that_comes_to_other_tokens_is_found_out() -> None:
    model = lively_model()
    other = Model(model.decoder, live_params(model.decoder, seed=5))
    with led(model, other) as (engine, _):
        pool(1)[0].submit(engine)
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())
        with pytest.raises(RuntimeError, match=r"Processes \[1\] have others in block"):
            engine.drain()


def test_an_engine_whose_follower_is_gone_says_so() -> None:
    model = lively_model()
    with led(model) as (engine, followed):
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())
        engine.advance()
        engine.close()
        followed.result(timeout=60)
        engine._lines._lines[0].lose("has ended")
        with pytest.raises(subject.ProcessLostError, match="Process 1 has ended"):
            engine.drain()


def test_an_error_of_a_collective_is_blamed_on_who_is_gone(monkeypatch: Any) -> None:
    model = lively_model()
    with led(model) as (engine, followed):
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())

        def broken(*_: Any) -> Any:
            raise RuntimeError("Gloo all-reduce failed")

        monkeypatch.setattr(Slots, "run", broken)
        with pytest.raises((subject.ProcessLostError, RuntimeError)) as caught:
            engine.advance()
        # The follower fails in the same way; a follower that lives on blames nobody.
        assert followed.exception(timeout=60) is not None
        assert "Gloo" in str(caught.value)
        engine._lines._lines[0].lose("has ended")
        with pytest.raises(subject.ProcessLostError, match="Process 1 has ended"):
            engine._together(broken)


def test_no_plan_is_made_of_times_that_one_process_cannot_take() -> None:
    model = lively_model()
    with led(model) as (engine, _), pytest.raises(ValueError, match="a warmup without a histogram"):
        engine.warmup(histogram={1: 1.0})


METHODS = (
    Greedy(),
    Temperature(0.8),
    TopK(3),
    TopP(0.9),
    MinP(0.1),
    Chain((Temperature(1.2), TopK(12))),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda each: type(each).__name__)
def test_a_request_arrives_as_it_was_sent(method: Any) -> None:
    ends, sequences = stop_arrays([3, 4], [[1, 2]], vocab_size=10)
    known: dict[str, Any] = {
        "number": 7,
        "max_new_tokens": 5,
        "seed": 2**32 - 1,
        "alternatives": 5,
        "text": None,
        "submitted": 1.0,
        "expires": 2.0,
        "whole_prompt": True,
        "prompt": np.arange(5, dtype=np.int32),
        "sampling": method,
        "eos_ids": ends,
        "sequences": sequences,
        "thresholds": np.asarray([-np.inf, 0.1], np.float32),
        "thinking": Thinking(
            end_ids=(3, 4), confidence=Confidence(threshold=float("inf"), cue_ids=(1,))
        ),
    }
    request = Request(**known)
    found = unpack(json.loads(json.dumps(pack(request))), alternatives=5)
    for name in subject._sent():
        one, other = getattr(request, name), getattr(found, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other, name
    assert found.text is None
    assert found.expires == float("inf")
