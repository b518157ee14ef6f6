# SPDX-License-Identifier: Apache-2.0
"""An engine that broadcasts its calls to workers, between threads here, against one alone."""

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
from helpers.models import Model, live_params
from helpers.processes import exchanges

from utio_jax.core.processes import ProcessLostError
from utio_jax.decoding import Thinking
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import LeaderEngine
from utio_jax.engine import leader as subject
from utio_jax.engine.leader import Channel, decode, encode, run_worker
from utio_jax.engine.slots import Slots

SIZES: dict[str, Any] = {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS, "shapes": SHAPES}


@contextlib.contextmanager
def spread(model: Model, other: Model | None = None, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yields an engine and what has become of its one worker, in a thread."""
    with exchanges(2) as (first, second), ThreadPoolExecutor() as threads:
        try:
            options = {**SIZES, **options}
            theirs = other or model
            worker = threads.submit(
                run_worker, Channel(second), theirs.decoder, theirs.params, **options
            )
            yield LeaderEngine(Channel(first), model.decoder, model.params, **options), worker
        finally:
            first.end()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Slots]:
    """Returns the workers' rows."""
    found: list[Slots] = []

    class Noted(Slots):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(subject, "Slots", Noted)
    return found


@pytest.mark.parametrize("name", ["plain", "propagate"])
def test_requests_come_out_as_alone_and_the_other_has_done_the_same(
    name: str, rows: list[Slots]
) -> None:
    """Some are cancelled, one is released behind a block, prompts come in chunks."""
    model, (mode, prefill) = lively_model(), modes()[name]
    shapes = dataclasses.replace(SHAPES, chunk=4)
    options: dict[str, Any] = {"mode": mode, "prefill": prefill, "shapes": shapes}
    with spread(model, **options) as (engine, worker):
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
        worker.result(timeout=60)
        (mirror,) = rows
        for mine, theirs in zip(
            *(jax.tree.leaves(each.state) for each in (engine._rows, mirror)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)


def test_other_options_or_weights_are_refused_on_both_sides() -> None:
    model = lively_model()
    arguments: Any = model.decoder, model.params
    with exchanges(2) as (first, second), ThreadPoolExecutor() as threads:
        other: dict[str, Any] = {**SIZES, "identity": "other weights"}
        worker = threads.submit(run_worker, Channel(second), *arguments, **other)
        with pytest.raises(ValueError, match=r"process 0's on processes \[1\]"):
            LeaderEngine(Channel(first), *arguments, **SIZES, identity="weights")
        with pytest.raises(ValueError, match="the same model and options on all 2 processes"):
            worker.result(timeout=60)


def test_a_process_that_comes_to_other_tokens_is_found_out() -> None:
    model = lively_model()
    other = Model(model.decoder, live_params(model.decoder, seed=5))
    with spread(model, other) as (engine, worker):
        pool(1)[0].submit(engine)
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())
        with pytest.raises(RuntimeError, match=r"Processes \[1\] have others than process 0"):
            engine.drain()
        with pytest.raises(RuntimeError, match=r"Processes \[1\] have others than process 0"):
            worker.result(timeout=60)


def test_where_one_has_ended_the_other_gets_an_error_with_requests_and_without() -> None:
    model = lively_model()
    with spread(model) as (engine, worker):
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())
        engine.advance()
        engine._channel.exchange.end()
        with pytest.raises(ProcessLostError):
            engine.drain()
        with pytest.raises(ProcessLostError):
            worker.result(timeout=60)
    with spread(model) as (engine, worker):
        engine._channel.exchange.end()
        with pytest.raises(ProcessLostError):
            engine.advance()


def test_an_error_of_the_runtime_means_that_a_process_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lively_model()
    with spread(model) as (engine, _):
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())

        def broken(*_: Any, **__: Any) -> Any:
            raise jax.errors.JaxRuntimeError("Gloo all-reduce failed")

        monkeypatch.setattr(Slots, "run", broken)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ProcessLostError, match="A collective failed.*Gloo all-reduce failed"):
            engine.advance()


def test_a_leader_that_was_interrupted_says_that_all_have_to_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with spread(lively_model()) as (engine, _):
        engine.submit([1, 2, 3], max_new_tokens=40, eos_ids=())

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(Slots, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.advance()
        with pytest.raises(RuntimeError, match="interrupted, or has failed.*start them again"):
            engine.advance()


def test_a_worker_asks_the_leader_to_end_and_rests_meanwhile() -> None:
    model, asked = lively_model(), list[bool]()
    with exchanges(2) as (first, second), ThreadPoolExecutor() as threads:
        channels, arguments = (Channel(first), Channel(second)), (model.decoder, model.params)
        worker = threads.submit(run_worker, channels[1], *arguments, **SIZES)
        engine = LeaderEngine(channels[0], *arguments, **SIZES)
        channels[0].on_ask = lambda: asked.append(True)
        assert engine.advance() == []
        assert not asked
        channels[1].ending = True
        for _ in range(2):  # It may wait in an exchange that it began before.
            engine.advance()
        assert asked
        engine.close()
        worker.result(timeout=60)


def test_arrays_of_requests_arrive_as_they_were_sent() -> None:
    engine = engine_of(lively_model(), modes()["propagate"][0], thinking=True)
    rule = Thinking(end_ids=(3, 4), max_tokens=5)
    engine.submit([1, 2], max_new_tokens=8, thinking=rule, stop_sequences=[[1, 2]], seed=2**32 - 1)
    engine.submit(
        [3],
        max_new_tokens=8,
        sampling=SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.1),
    )
    sent = engine._rows.fresh([*engine._known.values()], rows=3, width=4)
    like = engine._rows.fresh((), rows=1, width=1)
    found = decode(json.loads(json.dumps(encode(sent))), like)
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    for one, other in zip(jax.tree.leaves(sent), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
