# SPDX-License-Identifier: Apache-2.0
"""A server whose engines are elsewhere: streams outlive the replicas that they began in.

Replicas are in this process here, and die when a test says so. By Ray: `make test-ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import SHAPES, Running, served_model

from utio_jax.cluster import ReplicaLostError
from utio_jax.decoding.base import Plain
from utio_jax.serving import ServedModel, Station

SLOTS = 4
LONG = {"model": "small", "max_tokens": 60, "ignore_eos": True, "seed": 3}


class Replicas:
    """Two stations in a loop of their own; each task goes to the next one."""

    count = 2

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.lost: set[Station] = set()
        self.dying = 0
        """Pieces of news after which a station takes its streams with it; 0: it does not."""
        self.sent: list[Any] = []

    def deploy(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        sizes: dict[str, Any] = {"slots": SLOTS, "shapes": SHAPES, "model_sha256": ""}
        self.stations = [Station(self.model, **sizes) for _ in range(self.count)]
        for station in self.stations:
            asyncio.run_coroutine_threadsafe(station.start(), self.loop).result(timeout=300)

    async def stream(self, task: Any) -> AsyncIterator[Any]:
        self.sent.append(task)
        station = self.stations[len(self.sent) % 2]
        found = station.stream(task)
        heard = 0
        try:
            while True:
                news = asyncio.run_coroutine_threadsafe(anext(found, None), self.loop)
                item = await asyncio.wrap_future(news)
                if item is None:
                    return
                heard += 1
                yield item
                if self.dying and heard == self.dying:
                    raise ReplicaLostError
        finally:
            asyncio.run_coroutine_threadsafe(found.aclose(), self.loop)  # type: ignore[attr-defined]

    async def states(self) -> list[Any]:
        return [station.state() for station in self.stations]

    def leave(self) -> None:
        for station in self.stations:
            station.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)

    @contextlib.contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Lets each block take longer for a while."""
        engines: list[Any] = [station._worker._engine for station in self.stations]
        for engine in engines:
            engine.advance = partial(_later, engine, seconds)
        try:
            yield
        finally:
            for engine in engines:
                del engine.advance

    @contextlib.contextmanager
    def die_after(self, pieces: int) -> Iterator[None]:
        self.dying = pieces
        try:
            yield
        finally:
            self.dying = 0


def _later(engine: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return type(engine).advance(engine)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Replicas:
    plain: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}, "prefill": None}
    return Replicas(served_model(folder, mode=Plain(), prompt_budget=None, **plain))


@pytest.fixture(scope="module")
def router(pool: Replicas) -> Iterator[Running]:
    running = Running(pool.model, pool=pool, slots=SLOTS)
    yield running
    running.close()
    assert not running.faults


def text_of(events: list[Any]) -> str:
    assert events[-1] == "[DONE]"
    return "".join(c["text"] for event in events[:-1] for c in event["choices"])


def test_a_stream_goes_on_where_its_replica_died(router: Running, pool: Replicas) -> None:
    body = {**LONG, "prompt": "x", "logprobs": 2, "stop": ["\x00\x00\x00"]}
    whole = router.ask("/v1/completions", body).body
    assert whole["usage"]["utio"]["migrations"] == 0
    usage = {"stream_options": {"include_usage": True}}
    with pool.die_after(3):
        # It has four replicas, of which the last one lives to see 60 tokens, of 8 a block.
        events = list(router.stream("/v1/completions", {**body, **usage}))
    assert text_of(events) == whole["choices"][0]["text"]
    told = events[-2]["usage"]
    assert told["utio"].pop("migrations") == 2
    assert told["completion_tokens"] == 60
    for name in ("mean_depth_decided", "mean_depth_executed", "mode"):
        assert told["utio"][name] == whole["usage"]["utio"][name]
    parts = [c for event in events[:-2] for c in event["choices"] if c.get("logprobs")]
    tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]
    logs = [number for part in parts for number in part["logprobs"]["token_logprobs"]]
    assert logs == pytest.approx(whole["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4)
    assert [task.options.get("emitted") is not None for task in pool.sent[-3:]] == [
        False,
        True,
        True,
    ]
    assert router.counters()["utio_migrations_total"] == 2


def test_after_three_losses_it_is_told(router: Running, pool: Replicas) -> None:
    with pool.die_after(1):
        found = router.ask("/v1/completions", {**LONG, "prompt": "x"})
    assert (found.status, found.error["code"]) == (503, "replicas_lost")
    assert "retry-after" in found.headers


def test_slots_of_replicas_are_freed_where_a_client_leaves(router: Running, pool: Replicas) -> None:
    with pool.slowed(0.2):  # Else it would end before anybody looked.
        stream: Any = router.stream("/v1/completions", {**LONG, "prompt": "x", "max_tokens": 200})
        next(stream)
        router.wait_for(lambda: router.counters()["utio_running"] == 1)
        stream.close()
        router.wait_for(router.settled, seconds=4)
    counters = router.counters()
    assert (counters["utio_slots"], counters["utio_replicas"]) == (2 * SLOTS, 2)


def test_prompts_are_scored_in_replicas(router: Running, pool: Replicas) -> None:
    body = {"model": "small", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    found = router.ask("/v1/completions", body).body["choices"][0]
    assert len(found["logprobs"]["tokens"]) >= 3
    assert found["text"] == "abc"
