# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of replicas by Ray Serve beside one server process, and the pause of a migration.

    python benchmarks/replicas.py                  # in an environment with utio-jax[ray]

Serves the shipped model in turn from one process, from one replica and from two, all with the same
slots in total, and asks for `--streams` streams at once, `--rounds` times each. Then a replica of
two is killed with -9 under the same streams, and the longest silence of each stream is noted.
Prints a line of JSON. Clients take time of the same processors. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "UTIO_JAX_REPLICAS"
WAYS = {
    "process": (1, ()),
    "one replica": (1, ("--ray", "local", "--replicas", "1")),
    "two replicas": (2, ("--ray", "local", "--replicas", "2")),
}


@contextlib.contextmanager
def served(slots: int, options: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields the port of a server that is ready, and what marks its processes."""
    mark = secrets.token_hex(8)
    words = ["serve", "--port", "0", "--slots", str(slots), *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "utio_jax", *words],
            env=os.environ | {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            port = 0
            while not port or not counters(port).get("utio_replicas"):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read())
                time.sleep(0.2)
                log.seek(0)
                lines = [json.loads(line) for line in log if line.startswith("{")]
                ready = [line for line in lines if line["event"] == "ready"]
                port = int(ready[0]["url"].rpartition(":")[2]) if ready else 0
            yield port, mark
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def counters(port: int) -> dict[str, float]:
    """Returns the server's `/metrics`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def stream(port: int, number: int, tokens: int) -> dict[str, Any]:
    """Returns a stream's text, its longest silence after the first token, and its migrations."""
    body = {
        "model": "stdlib-16",
        "prompt": f"def function_{number}(",
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    text, gap, last, usage = "", 0.0, None, {}
    with contextlib.closing(connection):
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), kind)
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            found, now = json.loads(line[6:]), time.perf_counter()
            gap, last = max(gap, 0.0 if last is None else now - last), now
            text += "".join(each["text"] for each in found["choices"])
            usage = found.get("usage") or usage
    return {"text": text, "gap": gap, "migrations": usage["utio"].get("migrations", 0)}


def all_streams(port: int, count: int, tokens: int, victim: int | None = None) -> list[dict]:
    """Returns what so many streams at once have brought; a victim is killed at a third."""
    before = counters(port)["utio_new_tokens_total"]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        found = [pool.submit(stream, port, number, tokens) for number in range(count)]
        if victim is not None:
            third = before + count * tokens / 3
            while counters(port)["utio_new_tokens_total"] < third:
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)
        return [each.result() for each in found]


def replicas(mark: str) -> list[int]:
    """Returns the processes of replicas; Linux."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            ours = entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes()
            if ours and b"ray::ServeReplica" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def death(port: int, mark: str, streams: int, tokens: int, wanted: list[dict]) -> dict[str, Any]:
    """Returns what clients notice where one of two replicas dies, and how long it is away."""
    found = all_streams(port, streams, tokens, replicas(mark)[0])
    ended = time.perf_counter()
    moved = sorted(each["gap"] for each in found if each["migrations"])
    time.sleep(5)  # Until it is seen that one is missing.
    while counters(port)["utio_replicas"] < 2 or len(replicas(mark)) < 2:
        time.sleep(0.2)
    same = sum(a["text"] == b["text"] for a, b in zip(wanted, found, strict=False))
    return {
        "streams": streams,
        "migrations": len(moved),
        "same_texts": same,
        "seconds_silent_median": round(statistics.median(moved), 3),
        "seconds_silent_longest": round(moved[-1], 3),
        "seconds_silent_others": round(max(e["gap"] for e in found if not e["migrations"]), 3),
        "seconds_until_replaced": round(time.perf_counter() - ended, 1),
    }


def processor_times() -> dict[str, float]:
    """Returns jiffies of the machine since it was started, by kind; Linux."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = Path("/proc/stat").read_text().splitlines()[0]
    return dict(zip(names, map(float, line.split()[1:9]), strict=True))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--slots", type=int, default=16, help="of all replicas together")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    before = processor_times()
    rates: dict[str, list[float]] = {}
    killed: dict[str, Any] = {}
    for way, (count, options) in WAYS.items():
        with served(asked.slots // count, options) as (port, mark):
            wanted = all_streams(port, asked.streams, asked.tokens)  # Warm.
            for _ in range(asked.rounds):
                began = time.perf_counter()
                all_streams(port, asked.streams, asked.tokens)
                seconds = time.perf_counter() - began
                rates.setdefault(way, []).append(asked.streams * asked.tokens / seconds)
            if count > 1:
                for name, streams in (("busy", asked.streams), ("half_empty", asked.slots // 2)):
                    killed[name] = death(port, mark, streams, asked.tokens, wanted)
    spent = {kind: after - before[kind] for kind, after in processor_times().items()}
    print(
        json.dumps(
            {
                "tokens_per_second": {
                    way: round(statistics.median(each), 1) for way, each in rates.items()
                },
                "rounds": {way: [round(rate, 1) for rate in each] for way, each in rates.items()},
                "killed": killed,
                "steal": round(spent["steal"] / sum(spent.values()), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
