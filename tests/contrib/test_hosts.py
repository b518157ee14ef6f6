# SPDX-License-Identifier: Apache-2.0
"""One engine over two processes (gloo on loopback) against one in this process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.engine import CAPACITY, METHODS, SLOTS, STEPS, Letters, modes, pool
from helpers.generation import lively_model

from utio_jax import uniform
from utio_jax.contrib import hosts
from utio_jax.contrib.hosts import MultiHostEngine
from utio_jax.core.files import flatten, nest
from utio_jax.engine import Shapes
from utio_jax.models.tensor_parallel import put, tensor_parallel

TESTS = Path(__file__).parents[1]
SHAPES = Shapes(prompt_widths=(8,), groups=(SLOTS,), key_step=CAPACITY)
"""Few programs: each of three processes compiles them."""


def engine_of(params: Any, **options: Any) -> MultiHostEngine:
    mode, prefill = modes()["prompts"]
    sizes: dict[str, Any] = {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS, "shapes": SHAPES}
    options = {**sizes, "mode": mode, "prefill": prefill, "tokenizer": Letters(), **options}
    return MultiHostEngine(lively_model().decoder, params, **options)


def answers(engine: MultiHostEngine) -> list[Any]:
    """Returns the results of requests of all kinds that arrive before and between steps."""
    numbers = [request.submit(engine) for request in pool(8)]  # type: ignore[arg-type]
    for refused in ({"max_new_tokens": CAPACITY}, {"policy": uniform(2)}):
        with pytest.raises(ValueError, match="Wanted"):
            engine.submit([1, 2, 3], **refused)
    ended = {event.request: event.finished for event in engine.step() or () if event.finished}
    more: dict[str, Any] = {"max_new_tokens": 30, "eos_ids": (), "sampling": METHODS[1]}
    numbers += [engine.submit([5, number], seed=number, **more) for number in range(3)]
    numbers += [engine.submit([7], stop_strings=["e"], **more)]
    numbers += [engine.submit([8], deadline=1e-6, **more)]
    assert engine.cancel(numbers[9])
    ended |= engine.drain()
    results = [ended[number] for number in numbers]
    return [
        [result.token_ids.tolist(), result.decided.tolist(), result.reason] for result in results
    ]


def start(process: int, port: int) -> subprocess.Popen[str]:
    # Two processes on two cores: with more than one thread each, they fight.
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(process), str(port)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_give_what_one_gives() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(number, port) for number in range(2)]
    try:
        expected = answers(engine_of(lively_model().params))
        (out, error), (_, other) = (process.communicate(timeout=300) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    assert [process.returncode for process in processes] == [0, 0], error + other
    assert {reason for *_, reason in expected} >= {"length", "stop", "cancelled", "deadline"}
    (result,) = [line for line in out.splitlines() if line.startswith("[[")]  # Gloo writes, too.
    assert json.loads(result) == expected


def test_an_interrupted_step_asks_to_restart_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(lively_model().params)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._engine, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match="interrupted or has failed.*Restart all"):
        engine.step()


def main(process: int, port: int) -> None:
    """Runs one of the two processes."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    if process:  # Clocks of machines differ.
        hosts.time = types.SimpleNamespace(monotonic=lambda: -1e6)
    model, mesh = lively_model(), jax.make_mesh((2,), ("model",))
    places = tensor_parallel(model.decoder.config, mesh)
    split = {n: put(np.asarray(x), places(n, x.shape)) for n, x in flatten(model.params).items()}
    params = nest(split)
    with pytest.raises(ValueError, match=r"process 0's on processes \[1\]"):
        engine_of(params, identity=str(process))
    engine = engine_of(params)
    if process == 0:
        print(json.dumps(answers(engine)), flush=True)
        engine.close()
        engine_of(params).step()
        return
    with pytest.raises(RuntimeError, match="a call of submit in process 0"):
        engine.submit([1])
    engine.follow()
    engine = engine_of(params)
    engine._tokens = 1  # As if blocks had brought others.
    with pytest.raises(RuntimeError, match="the tokens of process 0. This process has others"):
        engine.follow()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
