# SPDX-License-Identifier: Apache-2.0
"""CPU seconds that first calls take to compile, a fresh process with empty caches for each.

    python benchmarks/compile_time.py                        # the calls of this checkout
    python benchmarks/compile_time.py score demo --against ../other --rounds 3    # and another's
    python benchmarks/compile_time.py serve --model NAME.gguf

Per case: CPU seconds (user and system) and wall seconds of the first call, then the fewest CPU
seconds of `AGAIN` further ones, the programs compiled, and the instructions of all programs and of
the longest. With `--against` both checkouts take turns, and each column is followed by its ratio of
medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AGAIN = 10
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
_SOURCES = ("argparse", "ast", "base64", "calendar", "csv", "difflib", "fractions", "functools")
_PROMPT, _PORT = "def __repr__(self):\n    return", 8017


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Returns user and system seconds of this process so far, or of children that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def texts(characters: int) -> list[str]:
    """Returns the beginnings of eight modules: ragged in tokens."""
    return [inspect.getsource(importlib.import_module(name))[:characters] for name in _SOURCES]


def score(model: Any, **options: Any) -> Callable[[], Any]:
    """Returns a call that scores eight texts of 1,800 characters."""
    return partial(model.score, texts(1800), **options)


def score_rows(model: Any) -> Callable[[], Any]:
    """Returns a call that scores 16 x 512 tokens at a budget of 0.75, no padding."""
    stream = [token for ids in model.encode(texts(10**9)) for token in ids.tolist()]
    return partial(model.score, [stream[512 * i : 512 * i + 512] for i in range(16)], budget=0.75)


def generate(model: Any, mode: str = "plain", **options: Any) -> Callable[[], Any]:
    """Returns a call that writes 24 tokens in one row."""
    from utio_jax import Lossless

    if mode == "lossless":
        options["mode"] = Lossless(drafter="ngram")
    return partial(model.generate, _PROMPT, max_new_tokens=24, **options)


def decode(model: Any, batch: int, **options: Any) -> Callable[[], Any]:
    """Returns a call that writes 120 tokens after each of `batch` texts: depths differ by row."""
    stream = [token for ids in model.encode(texts(10**9)) for token in ids.tolist()]
    prompts = [stream[97 * row : 97 * row + 8] for row in range(batch)]
    return partial(model.generate, prompts, max_new_tokens=120, eos_ids=(), **options)


def serve_requests(model: Any, **options: Any) -> Callable[[], Any]:
    """Returns a call that answers 32 ragged requests in an engine of 16 slots."""
    from utio_jax import Engine

    stream = [token for ids in model.encode(texts(10**9)) for token in ids.tolist()]
    if "budget" in options:
        from utio_jax import Adaptive

        options = {"mode": Adaptive(policy=model.calibration.policy("learned", **options))}
    engine = Engine.of(model, slots=16, capacity=384, **options)

    def call() -> None:
        for row in range(32):
            prompt = stream[97 * row : 97 * row + 16 + 7 * row]
            engine.submit(prompt, max_new_tokens=24 + 3 * row, eos_ids=())
        engine.drain()

    return call


CALLS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "score": score,
    "score-0.75": partial(score, budget=0.75),
    "score-16x512": score_rows,
    "generate": generate,
    "generate-0.75": partial(generate, budget=0.75),
    "generate-lossless": partial(generate, mode="lossless"),
    **{f"decode-{batch}": partial(decode, batch=batch) for batch in (1, 8, 32)},
    **{f"decode-0.75-{batch}": partial(decode, batch=batch, budget=0.75) for batch in (1, 8, 32)},
    "engine": serve_requests,
    "engine-0.75": partial(serve_requests, budget=0.75),
}
"""Calls of the shipped model, by name."""

COMMANDS = ("demo", "serve", "test")
"""Whole commands, by name."""


def programs() -> dict[str, int]:
    """Returns the number of programs alive here, and of instructions: all, and of the longest."""
    import jax

    modules = [one.hlo_modules()[0] for one in jax.devices()[0].client.live_executables()]
    counts = sorted(module.to_string().count(" = ") for module in modules) or [0]
    return {"programs": len(modules), "instructions": sum(counts), "longest": counts[-1]}


def measure_call(name: str) -> dict[str, float]:
    """Returns the figures of a call."""
    import utio_jax

    call = CALLS[name](utio_jax.load())
    result: dict[str, float] = {}
    for turn in range(1 + AGAIN):
        cpu, wall = cpu_seconds(), time.perf_counter()
        call()
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
        if not turn:
            result = {"cpu": cpu, "wall": wall, **programs()}
        for key, value in {"cpu_again": cpu, "wall_again": wall}.items():
            result[key] = min(value, result.get(key, value))
    return result


def measure_demo() -> dict[str, float]:
    """Returns the figures of `utio-jax demo`, and those at its first table."""
    from utio_jax.cli.main import main

    cpu, wall, first = cpu_seconds(), time.perf_counter(), dict[str, float]()
    write = sys.stderr.write

    def note(text: str) -> int:
        if "full depth" in text and not first:
            first["cpu_first_table"] = cpu_seconds() - cpu
            first["wall_first_table"] = time.perf_counter() - wall
        return write(text)

    sys.stderr.write = note
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        main(["demo", "--out", f"{folder}/demo"])
    return {
        "cpu": cpu_seconds() - cpu,
        "wall": time.perf_counter() - wall,
        **first,
        **programs(),
    }


def measure_tests() -> dict[str, float]:
    """Returns the figures of the tests of `make test`, with its flags and an empty cache."""
    wall = time.perf_counter()
    command = "-m pytest -q -p no:cacheprovider --ignore=tests/contrib -n auto --dist loadfile"
    with tempfile.TemporaryDirectory() as folder:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        flags = _QUICK + " --xla_cpu_use_fusion_emitters=false"
        env = {**os.environ, **kept, "XLA_FLAGS": flags}
        subprocess.run([sys.executable, *command.split()], env=env, stdout=sys.stderr, check=False)
    wall = time.perf_counter() - wall
    return {"cpu": cpu_seconds(resource.RUSAGE_CHILDREN), "wall": wall}


def measure_server(model: str) -> dict[str, float]:
    """Returns the figures of `utio-jax serve` until `/ready` answers."""
    wall = time.perf_counter()
    command = ["-m", "utio_jax", "serve", "--model", model, "--port", str(_PORT)]
    server = subprocess.Popen([sys.executable, *command], stdout=sys.stderr)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/ready", timeout=5).close()
                break
            time.sleep(0.2)
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        wall = time.perf_counter() - wall
        return {"cpu": ticks / os.sysconf("SC_CLK_TCK"), "wall": wall}
    finally:
        server.terminate()
        server.wait()


def measure(name: str, model: str) -> dict[str, float]:
    """Returns the figures of a case, in this process."""
    if name in CALLS:
        return measure_call(name)
    if name == "serve":
        return measure_server(model)
    return measure_demo() if name == "demo" else measure_tests()


def measure_apart(name: str, model: str, checkout: Path) -> dict[str, float]:
    """Returns the figures of a case of a checkout, in a fresh process without caches."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHONPATH": str(checkout), "UTIO_JAX_COMPILE_CACHE": "off"}
    command = [sys.executable, __file__, name, "--here", "--model", str(Path(model).absolute())]
    done = subprocess.run(
        command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    """Prints a line per case, then one of JSON."""
    parser = argparse.ArgumentParser(description="CPU seconds of first calls, a process each.")
    parser.add_argument("cases", nargs="*", default=[*CALLS], choices=[*CALLS, *COMMANDS, []])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="out/llm/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.cases[0], options.model)))
        return 0
    checkouts = [ROOT, *([options.against.absolute()] if options.against else [])]
    table = {}
    for name in options.cases or CALLS:
        runs = [[] for _ in checkouts]
        for turn in range(options.rounds):
            for build in range(len(checkouts))[:: -1 if turn % 2 else 1]:
                runs[build].append(measure_apart(name, options.model, checkouts[build]))
        row: dict[str, float] = {}
        for key in runs[0][0]:
            values = [statistics.median(run[key] for run in of_one) for of_one in runs]
            row[key] = round(values[0], 3)
            if options.against and values[-1]:
                row[f"{key}_ratio"] = round(values[0] / values[-1], 3)
        table[name] = row
        print(name, *(f"{key}={value:g}" for key, value in row.items()), file=sys.stderr)
    print(json.dumps(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
