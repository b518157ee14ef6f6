# SPDX-License-Identifier: Apache-2.0
"""What HTTP costs: a server beside the same engine without one, under a load of many clients.

    python benchmarks/serving.py [--model M] [--modes plain adaptive lossless] [--clients 32]

The server is a process of its own; the clients, and the engine that it is compared with, are this
one. In turns: the engine in this process, the server with whole answers, the server with streams.
All take the same requests, `--clients` at a time. Rates are new tokens per second; the ratio of
each round is over the engine's of that round. What clients see is shown as percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.cli.serve import Serve
from utio_jax.core.files import versions
from utio_jax.engine import Engine


def requests_of(options: argparse.Namespace, vocab: int) -> list[tuple[list[int], int]]:
    """Returns prompts and numbers of new tokens, the same in every round."""
    draw = np.random.default_rng(0)
    new = draw.integers(options.new // 4, options.new + 1, options.requests)
    prompts = draw.integers(1, vocab, (options.requests, options.prompt))
    return [(prompt.tolist(), int(count)) for prompt, count in zip(prompts, new, strict=True)]


def run_engine(engine: Engine, asked: list[tuple[list[int], int]], clients: int) -> float:
    """Returns new tokens per second of an engine that has at most so many requests at once."""
    waiting, tokens = list(reversed(asked)), 0
    began = time.perf_counter()
    for _ in range(min(clients, len(waiting))):
        _submit(engine, *waiting.pop())
    while not engine.idle:
        for event in engine.advance():
            tokens += event.token_ids.size
            if event.finished is not None and waiting:
                _submit(engine, *waiting.pop())
    return tokens / (time.perf_counter() - began)


def _submit(engine: Engine, prompt: list[int], new: int) -> None:
    engine.submit(prompt, max_new_tokens=new, eos_ids=())


async def run_clients(
    port: int,
    asked: list[tuple[list[int], int]],
    *,
    clients: int,
    stream: bool,
    budget: float | None,
) -> dict[str, Any]:
    """Returns the rate of a server, and what its clients saw."""
    waiting, first, between, whole = list(reversed(asked)), [], [], []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while waiting:
            prompt, new = waiting.pop()
            body = {
                "model": "m",
                "prompt": prompt,
                "max_tokens": new,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
                # Or the server might find that it does not pay.
                "utio": {} if budget is None else {"budget": budget},
            }
            data = json.dumps(body).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            began = time.perf_counter()
            writer.write(head.encode() + data)
            times = await _answer(reader, stream=stream)
            whole.append(time.perf_counter() - began)
            tokens += new
            if stream:
                first.append(times[0] - began)
                between.append((times[-1] - times[0]) / (new - 1))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    rate = tokens / (time.perf_counter() - began)
    return {"rate": rate, "first": first, "between": between, "whole": whole}


async def _answer(reader: asyncio.StreamReader, *, stream: bool) -> list[float]:
    """Reads an answer; returns when its events with text came."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise SystemExit(f"The server answered {head!r}.")
    if not stream:
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(size)
        return []
    times = []
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return times
        if b'"choices":[{' in data:
            times.append(time.perf_counter())


@contextlib.contextmanager
def server(arguments: list[str], folder: Path) -> Iterator[int]:
    """Runs a server in a process of its own; yields its port once it is ready."""
    log = folder / "serve.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "utio_jax", "serve", "--port", "0", *arguments],
            stderr=errors,
            stdout=subprocess.DEVNULL,
        )
        try:
            while True:
                results = [
                    json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"
                ]
                ready = [event for event in results if event.get("event") == "ready"]
                if ready:
                    break
                if process.poll() is not None:
                    raise SystemExit(log.read_text()[-2000:])
                time.sleep(0.2)
            yield int(ready[0]["url"].rsplit(":", 1)[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns the median and the 95th percentile, in milliseconds."""
    p50, p95 = np.percentile(values, (50, 95)) * 1e3
    return {"p50_ms": round(float(p50), 2), "p95_ms": round(float(p95), 2)}


def measure(mode: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one mode."""
    arguments = ["--model", options.model, "--mode", mode, "--slots", str(options.slots)]
    # The bare engine has no prefix cache, and prompts are the same in every round.
    arguments += ["--capacity", str(options.capacity), "--name", "m", "--prefix-cache", "0"]
    if mode == "adaptive":
        arguments += ["--budget", str(options.budget)]
    drafter = options.drafter if mode == "lossless" else None
    if drafter is not None:
        arguments += ["--drafter", drafter]
    budget = options.budget if mode == "adaptive" else None
    command = Serve(model=options.model, mode=mode, budget=budget, drafter=drafter, name="m")
    served = command.served()
    engine = Engine.of(
        served.text, slots=options.slots, capacity=options.capacity, mode=served.mode
    )
    engine.warmup()
    asked = requests_of(options, served.text.decoder.config.vocab_size)
    ratios: dict[str, list[float]] = {"whole": [], "stream": []}
    rates: dict[str, list[float]] = {"engine": [], "whole": [], "stream": []}
    seen: dict[str, list[float]] = {"first": [], "between": [], "whole": []}
    with server(arguments, options.out) as port:
        for round_number in range(options.rounds + 1):
            output = {"engine": run_engine(engine, asked, options.clients)}
            for name in ("whole", "stream"):
                result = asyncio.run(
                    run_clients(
                        port,
                        asked,
                        clients=options.clients,
                        stream=name == "stream",
                        budget=budget,
                    )
                )
                output[name] = result["rate"]
                if round_number:
                    for what in ("first", "between"):
                        seen[what] += result[what]
                    seen["whole"] += result["whole"] if name == "whole" else []
            if not round_number:
                continue  # The first warms up.
            for name, rate in output.items():
                rates[name].append(rate)
            for name in ratios:
                ratios[name].append(output[name] / output["engine"])
    return {
        "mode": mode,
        "budget": budget,
        "tokens_per_second": {name: round(float(np.median(v)), 1) for name, v in rates.items()},
        "over_engine": {
            name: [round(float(value), 3) for value in np.percentile(v, (50, 25, 75))]
            for name, v in ratios.items()
        },
        "time_to_first_token": percentiles(seen["first"]),
        "time_between_tokens": percentiles(seen["between"]),
        "time_of_whole_answers": percentiles(seen["whole"]),
    }


def main() -> None:
    """Writes serving.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shared-16")
    parser.add_argument("--modes", nargs="+", default=["plain", "adaptive", "lossless"])
    parser.add_argument("--budget", type=float, default=0.75)
    parser.add_argument("--drafter", default="exit")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/serving"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    steal = _steal()
    rows = [measure(mode, options) for mode in options.modes]
    setting = {name: str(value) for name, value in vars(options).items()}
    result = {
        "options": setting,
        "versions": versions(),
        "cores": os.cpu_count(),
        "steal_ticks": _steal() - steal,
        "rows": rows,
    }
    (options.out / "serving.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _steal() -> int:
    """Returns the time that other machines took from this one, in hundredths of a second."""
    try:
        return int(Path("/proc/stat").read_text().split("\n")[0].split()[8])
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
