# SPDX-License-Identifier: Apache-2.0
"""A server whose engines are replicas of Ray Serve on one machine: `make test-ray`.

A replica is killed under a hundred streams: no client notices, and all get the text that they get
where nobody dies.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import Process, completion, small_folder

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
COMMAND = ["-c", "from utio_jax.cli.main import main; raise SystemExit(main())", "serve"]
MARK = "UTIO_JAX_TEST"
STREAMS, TOKENS, SLOTS, QUEUE = 100, 200, 8, 90
DRAWN = {"ignore_eos": True, "max_tokens": TOKENS, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("served"))


class Replicated(Process):
    """`utio-jax serve --ray local --replicas 2`, whose processes are marked: one is killed."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        self.mark = secrets.token_hex(8)
        os.environ |= {MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0"}
        sizes = ("--slots", str(SLOTS), "--queue", str(QUEUE), "--drain-seconds", "20")
        given = ("--model", str(folder), "--port", "0", "--name", "small", *sizes)
        words = [*COMMAND, *given, "--ray", "local", "--replicas", "2", *options]
        super().__init__(words, log=log)
        self.wait_for(lambda: self.counters()["utio_replicas"] == 2)

    def processes(self, name: str = "") -> list[int]:
        """Returns the marked processes of such a name."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                ours = entry.name.isdecimal() and int(entry.name) != os.getpid()
                if ours and self.mark.encode() in (entry / "environ").read_bytes():
                    said = (entry / "cmdline").read_bytes().decode()
                    if said and name in said:
                        found.append(int(entry.name))
        return found

    def left(self, *, seconds: float) -> list[str]:
        """Returns what is left of its processes after so long at most."""
        end = time.monotonic() + seconds
        while self.processes() and time.monotonic() < end:
            time.sleep(0.2)
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                found.append(f"{pid} {words.replace(chr(0), ' ')[:200]}")
        return found

    @property
    def replicas(self) -> list[int]:
        return self.processes("ray::ServeReplica")


Start = Callable[..., Replicated]


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    running: list[Replicated] = []

    def starting(*options: str) -> Replicated:
        running.append(Replicated(folder, tmp_path / f"{len(running)}.log", *options))
        return running[-1]

    yield starting
    for process in running:
        if process.alive:
            process.signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.ended()
        process.close()
        left = "\n".join(process.left(seconds=90))
        assert not left, f"Ray's processes end with the one that started them: {left}"
        assert not any("fault" in line for line in process.lines)


def streamed(server: Process, number: int, fields: dict[str, Any]) -> tuple[str, int]:
    """Returns a stream's text, and how often it went on elsewhere. An error in it is raised."""
    body = completion("ab"[number % 2] * (1 + number % 7), **fields, seed=number)
    usage = {"stream_options": {"include_usage": True}}
    found = server.stream("/v1/completions", {**body, **usage})
    events = [event for event in found if event != ": ping"]  # Of those that wait in the queue.
    assert events.pop() == "[DONE]"
    told = events[-1]["usage"]
    assert told["completion_tokens"] == TOKENS
    text = "".join(each["text"] for event in events for each in event["choices"])
    return text, told["utio"]["migrations"]


@contextlib.contextmanager
def many(server: Process, fields: dict[str, Any]) -> Iterator[list[concurrent.futures.Future[Any]]]:
    """Opens a hundred streams at once."""
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        yield [pool.submit(streamed, server, number, fields) for number in range(STREAMS)]


def check_a_killed_replica(server: Replicated, fields: dict[str, Any]) -> None:
    with many(server, fields) as found:
        server.wait_for(lambda: server.counters()["utio_open_tasks"] == STREAMS)
        # One too many, as of one process: told to come again.
        more = server.completion(["x"] * 20)
        assert (more.status, more.headers["retry-after"].isdigit()) == (503, True)
        wanted = [each.result(timeout=200) for each in found]
    assert {migrations for _, migrations in wanted} == {0}

    # A replica that has nothing open when it is killed takes nothing with it: then another one is.
    moved = 0
    for _ in range(3):
        moved = moved or check_one_death(server, fields, [text for text, _ in wanted])
    assert moved >= 1
    assert server.counters()["utio_migrations_total"] == moved


def check_one_death(server: Replicated, fields: dict[str, Any], wanted: list[str]) -> int:
    """Kills a replica under a hundred streams; returns how many of them went on elsewhere."""
    before = server.counters()["utio_new_tokens_total"]
    (victim, other) = server.replicas
    with many(server, fields) as found:
        quarter = before + STREAMS * TOKENS / 4
        server.wait_for(lambda: server.counters()["utio_new_tokens_total"] > quarter, seconds=100)
        os.kill(victim, signal.SIGKILL)
        texts = [each.result(timeout=200) for each in found]
    assert [text for text, _ in texts] == wanted
    assert server.counters()["utio_new_tokens_total"] - before == STREAMS * TOKENS
    server.wait_for(server.settled)

    def back() -> bool:
        pids = server.replicas
        return len(pids) == 2 and victim not in pids and server.counters()["utio_replicas"] == 2

    server.wait_for(back, seconds=150)
    assert other in server.replicas
    assert [streamed(server, number, fields)[0] for number in range(4)] == wanted[:4]
    moved = sum(migrations for _, migrations in texts)
    assert moved <= 2 * SLOTS
    return moved


def test_no_client_notices_that_a_replica_is_killed(start: Start) -> None:
    server = start()
    check_a_killed_replica(server, DRAWN)
    # What one process refuses, the router refuses likewise.
    assert server.completion("x", max_tokens=1000).error["code"] == "context_length_exceeded"
    assert server.completion("x", model="other").status == 404
    assert server.completion("x", temperature=-1).status == 400
    assert server.completion("x", utio={"mode": "adaptive"}).error["param"] == "utio.mode"
    scored = server.completion("abc", max_tokens=0, echo=True, logprobs=1).body["choices"][0]
    assert scored["logprobs"]["token_logprobs"][0] is None
    # A client that leaves ends the work of its replica.
    blocks = server.counters()["utio_blocks_total"]
    stream: Any = server.stream("/v1/completions", completion("x", max_tokens=240, ignore_eos=True))
    next(stream)
    stream.close()
    server.wait_for(server.settled)
    server.wait_for(lambda: server.find("request").get("left"))
    assert server.counters()["utio_blocks_total"] - blocks < 30
    # And what was accepted is answered after SIGTERM.
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = [pool.submit(streamed, server, number, DRAWN) for number in range(20)]
        server.wait_for(lambda: server.counters()["utio_open_tasks"] >= 10)
        server.signal()
        server.wait_for(lambda: server.find("draining"))
        assert server.ask("/ready").status == 503
        said = [each.exception(timeout=60) for each in found]
    late = collections.Counter(type(each) for each in said)
    assert late[type(None)] >= 10, said
    assert all("503" in str(each) for each in said if each is not None)
    status, out = server.ended()
    assert status == 0
    assert json.loads(out.splitlines()[-1])["status"] == 0


def test_nor_does_one_of_a_lossless_server(start: Start) -> None:
    check_a_killed_replica(start("--mode", "lossless"), {**DRAWN, "temperature": 0})


FAILING = """
from utio_jax.cluster import Pool, Replicas
def make():
    raise ValueError("Wanted a model on this machine. Got none.")
pool = Pool(
    Replicas(name="x", address="local", count=1, slots=1), make, model_sha256="ab"
)
try:
    pool.deploy()
except ValueError as error:
    print("told:", error)
pool.leave()
"""


def test_what_keeps_replicas_from_starting_is_told(folder: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        paths = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run(
            [sys.executable, *words], env=paths, capture_output=True, text=True, timeout=200
        )

    assert "told: Wanted a model on this machine. Got none." in run("-c", FAILING).stdout
    given = ("--model", str(folder), "--port", "0", "--ray")
    many_of_them = run(*COMMAND, *given, "local", "--replicas", "4096")
    assert many_of_them.returncode == 2
    assert "Wanted processors for --replicas 4096 of 1. Got" in many_of_them.stderr
    nobody = run(*COMMAND, *given, "127.0.0.1:1")
    assert nobody.returncode == 2
    assert "Wanted a Ray cluster at --ray 127.0.0.1:1. Got" in nobody.stderr
