# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own: signals, sudden ends, load, clients that leave or dawdle."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import (
    PROGRAM,
    Answered,
    Process,
    completion,
    request_bytes,
    running,
    served_model,
)

from utio_jax.serving import Limits

pytestmark = pytest.mark.check

COMMAND = ["-c", "from utio_jax.cli.main import main; raise SystemExit(main())", "serve"]
Start = Callable[..., Process]


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers: of the command line, or with options that it does not have."""
    running: list[Process] = []

    def starting(*, wait: bool = True, **options: Any) -> Process:
        log = tmp_path / f"{len(running)}.log"
        if options:
            words = [str(PROGRAM), str(folder), json.dumps(options)]
        else:
            given = ["--model", str(folder), "--port", "0", "--slots", "4", "--name", "small"]
            words = [*COMMAND, *given]
        running.append(Process(words, log=log, wait=wait))
        return running[-1]

    yield starting
    for process in running:
        process.close()
        assert not any("fault" in line for line in process.lines if line["event"] == "request")


LONG = completion("x", max_tokens=180, ignore_eos=True)


def in_thread(function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Returns what a function returns, or raises, once it has, from a thread of its own."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ask_many(server: Process, count: int) -> list[concurrent.futures.Future[Any]]:
    """Sends long requests side by side, every second of them streamed."""

    def ask(number: int) -> Any:
        path = "/v1/completions"
        return list(server.stream(path, LONG)) if number % 2 else server.ask(path, LONG)

    return [in_thread(functools.partial(ask, number)) for number in range(count)]


def test_what_was_accepted_is_answered_after_sigterm(start: Start) -> None:
    server = start()
    alone = server.ask("/v1/completions", LONG).body["choices"][0]["text"]
    data = request_bytes(json.dumps(completion("x")))
    with server.connect(data[:-9]) as slow, server.connect() as idle:
        futures = ask_many(server, 24)
        server.wait_for(lambda: server.counters()["utio_open_tasks"] == 24)
        server.signal()
        time.sleep(0.3)
        with pytest.raises(ConnectionError):
            server.ask("/ready")
        assert not all(future.done() for future in futures), "it was under load"
        for future in futures:
            result = future.result(timeout=120)
            if isinstance(result, Answered):
                assert result.status == 200
                text = result.body["choices"][0]["text"]
            else:
                assert result[-1] == "[DONE]"
                text = "".join(event["choices"][0]["text"] for event in result[:-1])
            assert text == alone
        time.sleep(3.5)  # Of those that were let in, one has not said yet what it wants.
        slow.sendall(data[-9:])
        assert slow.recv(2**16).startswith(b"HTTP/1.1 200 OK")
        status, out = server.ended()
        assert idle.recv(1) == b"", "an idle connection is closed"
    assert status == 0
    done = json.loads(out)
    assert (done["command"], done["status"], done["new_tokens"]) == ("serve", 0, 25 * 180 + 8)


@pytest.mark.parametrize("ending", ["drain", "second signal"])
def test_answers_that_the_end_cuts_short_say_so(folder: Path, ending: str) -> None:
    """A stream by an event, a whole answer by its status; the log has the tokens so far."""
    limits = Limits(drain_seconds=1 if ending == "drain" else 60)
    with running(served_model(folder), limits=limits) as server, server.slowed(0.2):
        whole = in_thread(lambda: server.ask("/v1/completions", LONG))
        stream = server.stream("/v1/completions", {**LONG, "return_token_ids": True})
        events = [next(stream) for _ in range(3)]
        server.server.stop()
        server.wait_for(lambda: server.lines[-1]["event"] == "draining")
        if ending == "second signal":
            server.server._server.handle_exit(signal.SIGTERM, None)
        events += stream
        answer = whole.result(timeout=60)
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert events[-1]["error"]["code"] == "shutting_down"
    (draining,) = (line for line in server.lines if line["event"] == "draining")
    assert draining == {"event": "draining", "open": 2, "seconds": limits.drain_seconds}
    lines = [line for line in server.lines if line.get("path") == "/v1/completions"]
    streamed, asked = sorted(lines, key=lambda line: line["status"])
    assert (streamed["status"], streamed["error"]) == (200, "shutting_down")
    assert (asked["status"], asked["error"]) == (503, "shutting_down")
    sizes = [len(choice["token_ids"]) for event in events[:-1] for choice in event["choices"]]
    assert streamed["new_tokens"] == sum(sizes) > 8
    assert 0 < asked["new_tokens"] < 180
    for line in lines:
        assert line["seconds_to_first_token"] < line["seconds"]
        assert 1 <= line["mean_depth"] <= 4


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_counts_the_tokens_of_a_client_that_left(folder: Path, stream: bool) -> None:
    with running(served_model(folder)) as server, server.slowed(0.1):
        seen = len(server.lines)
        if stream:
            server.leave({**LONG, "stream": True}, chunks=3)
        else:
            with server.connect(request_bytes(json.dumps(LONG))):
                server.wait_for(lambda: server.counters()["utio_new_tokens_total"] > 8)
        server.wait_for(lambda: len(server.lines) > seen)
    line = server.lines[seen]
    assert line["left"] == "ClientLeftError"
    assert 8 < line["new_tokens"] < 180
    assert line["seconds_to_first_token"] < line["seconds"]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start()
    result = ask_many(server, 80)
    server.wait_for(lambda: server.counters()["utio_open_tasks"] >= 40)
    server.signal()
    time.sleep(0.3)
    began = time.monotonic()
    server.signal(signal.SIGINT)
    status, _ = server.ended(seconds=20)
    assert time.monotonic() - began < 10
    assert status == 1
    outcomes = collections.Counter(outcome_of(result) for result in result)
    assert outcomes["nothing"] == 0
    assert outcomes["error"] > 0
    assert {*outcomes} <= {"error", "answer", "cut"}


def outcome_of(future: concurrent.futures.Future[Any]) -> str:
    """Returns how a request ended: `answer`, `error` with its object, `cut` or `nothing`."""
    try:
        result = future.result(timeout=60)
    except TimeoutError:
        return "nothing"
    except AssertionError as error:  # Of a stream that did not begin.
        status, body = error.args[0]
        assert status in (500, 503)
        assert b'"error"' in body
        return "error"
    except Exception:
        return "cut"
    if isinstance(result, Answered):
        if result.status == 200:
            return "answer"
        assert result.status in (500, 503)
        return "error" if result.error else "nothing"
    last = result[-1] if result else None
    if last == "[DONE]":
        return "answer"
    return "error" if isinstance(last, dict) and "error" in last else "cut"


@pytest.mark.slow
def test_a_signal_while_it_warms_up_ends_it(start: Start) -> None:
    server = start(wait=False)
    assert server.ask("/ready").status == 503
    busy = server.ask("/v1/completions", completion("x"))
    if busy.status != 200:  # It may be that fast.
        assert (busy.status, "retry-after" in busy.headers) == (503, True)
    server.signal()
    status, _ = server.ended(seconds=60)
    assert status == 0


@pytest.mark.slow
def test_an_engine_that_dies_takes_the_process_with_it(start: Start) -> None:
    server = start(die_after=12, saying="secret")
    result = ask_many(server, 12)
    status, out = server.ended(seconds=60)
    outcomes = collections.Counter(outcome_of(result) for result in result)
    assert (status, json.loads(out)["status"]) == (1, 1)
    assert outcomes["error"] >= 8, outcomes
    assert outcomes["nothing"] == outcomes["cut"] == 0, outcomes
    died = server.find("engine_died")
    assert died["fault"] == "RuntimeError"
    assert "secret" not in server.log.read_text()
    stamps = {line["event"]: line["time"] for line in server.lines}
    seconds = [float(stamps[name][-7:-1]) for name in ("engine_died", "ended")]
    assert (seconds[1] - seconds[0]) % 60 < 5


def ended_of(counters: dict[str, float], *reasons: str) -> float:
    """Returns how many requests have ended for these reasons so far."""
    return sum(counters.get(f'utio_ended_total{{reason="{why}"}}', 0) for why in reasons)


@pytest.mark.slow
def test_hundreds_that_leave_cost_nothing_that_stays(start: Start) -> None:
    server = start()

    def leave(number: int) -> None:
        server.leave({**LONG, "stream": bool(number % 2)}, chunks=3 * (number % 2))

    def leave_all(count: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(count)))
        server.wait_for(server.settled, seconds=60)

    counters, lines = server.counters(), len(server.lines)
    leave_all(60)
    before = server.resident
    for _ in range(2):
        leave_all(120)
    after = server.counters()

    def grown(reason: str) -> float:
        return ended_of(after, reason) - ended_of(counters, reason)

    # One that left before its request was read may never begin, or begin only when all seems
    # settled; a few were faster than we.
    assert grown("cancelled") + grown("length") <= 300
    assert grown("cancelled") >= 225
    assert sum("left" in line for line in server.lines[lines:]) >= 225
    assert server.resident - before < 16 * 2**20
    assert server.completion("x").status == 200
