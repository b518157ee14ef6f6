# SPDX-License-Identifier: Apache-2.0
"""One model over two processes (gloo on loopback): as one process, and when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import Process, completion, small_folder

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
# Two processes on two cores: each with one thread, or they fight.
FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("small"))


def serve(folder: Path, *options: str) -> list[str]:
    sizes = ("--name", "small", "--slots", "3", "--capacity", "64", "--port", "0")
    return ["-m", "utio_jax", "serve", "--model", str(folder), *sizes, *options]


class Pair:
    """Two processes of one server: `first` is a client of process 0."""

    def __init__(self, folder: Path, logs: Path, *, wait: bool = True) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        joined = ("--distributed", "--coordinator", place, "--num-processes", "2", "--process-id")
        self.log = logs / "second"
        with self.log.open("wb") as errors:
            self.second = subprocess.Popen(
                [sys.executable, *serve(folder, *joined, "1")],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self.first = Process(serve(folder, *joined, "0"), log=logs / "first", wait=wait)

    def close(self) -> None:
        self.second.kill()
        self.second.wait(60)
        self.first.close()


@pytest.fixture
def pair(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with contextlib.closing(Pair(folder, tmp_path, wait=getattr(request, "param", True))) as made:
        yield made


def bodies() -> list[dict[str, Any]]:
    """Returns 20 requests of all kinds, some of which have their prompts scored."""
    found = []
    for number in range(20):
        body = completion("def f(x):"[: 1 + number % 9], max_tokens=4 + number, seed=number)
        drawn = {"temperature": 0.9, "top_p": 0.9} if number % 2 else {}
        scored = {"echo": True, "logprobs": 2} if number % 5 == 4 else {}
        stopped = {"stop": ["e", "zz"]} if number % 3 == 0 else {}
        found.append({**body, "return_token_ids": True, **drawn, **scored, **stopped})
    return found


def answers(server: Process) -> list[Any]:
    with ThreadPoolExecutor(6) as clients:
        found = [*clients.map(lambda body: server.ask("/v1/completions", body), bodies())]
    assert [each.status for each in found] == [200] * len(found)
    return [each.body["choices"][0] for each in found]


def test_two_processes_answer_as_one_and_a_dead_one_is_the_end(
    pair: Pair, folder: Path, tmp_path: Path
) -> None:
    with contextlib.closing(Process(serve(folder), log=tmp_path / "alone")) as alone:
        wanted = answers(alone)
    for one, other in zip(answers(pair.first), wanted, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["text"] == other["text"]
        assert one["finish_reason"] == other["finish_reason"]
    assert len({each["finish_reason"] for each in wanted}) > 1

    # Frozen first, so that what is asked for now is open for sure when it dies.
    os.kill(pair.second.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as clients:
        waits = clients.submit(pair.first.completion, "def")
        pair.first.wait_for(lambda: pair.first.counters()["utio_open_tasks"] == 1)
        killed = time.monotonic()
        os.kill(pair.second.pid, signal.SIGKILL)
        answer = waits.result()
    assert answer.status == 503
    assert answer.error["code"] == "process_lost"
    status, out = pair.first.ended(seconds=60)
    assert status == 1
    assert "{" not in out  # Gloo says there who is connected.
    assert time.monotonic() - killed < 60
    assert "A collective failed" in pair.first.find("engine_died")["why"]


def test_a_signal_to_any_process_drains_all(pair: Pair) -> None:
    stream = pair.first.stream("/v1/completions", completion("def", max_tokens=50, ignore_eos=True))
    assert next(stream)["choices"]
    pair.second.send_signal(signal.SIGTERM)
    assert [*stream][-1] == "[DONE]"
    status, out = pair.first.ended()
    assert status == 0
    (said,) = [line for line in out.splitlines() if line.startswith("{")]
    assert json.loads(said)["new_tokens"] == 50
    assert pair.second.wait(60) == 0
    assert not pair.first.find("engine_died")
    assert '"event": "ended"' in pair.log.read_text()


@pytest.mark.parametrize("pair", [False], indirect=True)  # While programs compile.
def test_where_process_0_dies_the_others_end(pair: Pair) -> None:
    pair.first.signal(signal.SIGKILL)
    killed = time.monotonic()
    assert pair.second.wait(60) not in (0, None)
    assert time.monotonic() - killed < 60
