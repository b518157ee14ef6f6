# SPDX-License-Identifier: Apache-2.0
"""Full depth beside the engines that people use, one stock model, each in its own process.

    python benchmarks/engines/compare.py FILE.gguf PYTHON [--rounds 3] [--engines utio_jax vllm]

`PYTHON` is the interpreter that has the others; `make benchmark-engines` sets both up. All run on
the same cores and take turns; the others are stopped (SIGSTOP), so that no thread of them spins.
Prompts are random tokens, new ones in each round: a prefix cache, which utio_jax and vLLM have on,
helps in `chats` alone. There 16 conversations have a common beginning, and each turn's prompt is
all that came before; it is left out where an engine answers in text.

With the interpreter of `make test-vllm`, and `--maps FILE` by `utio-jax fit-prompt --model
out/engines/model/float32`, there is an engine "vllm, maps", whose prompts stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.models.gguf.tokenizer import tokenizer_of

WORKER = Path(__file__).with_name("worker.py")


def requests(seed: int) -> dict[str, dict[str, list[Any]]]:
    """Returns the prompts and numbers of new tokens of each case, by its name."""
    rng = np.random.default_rng(seed)

    def words(lengths: list[int]) -> list[list[int]]:
        return [rng.integers(100, 49_000, length).tolist() for length in lengths]

    mixed, new = rng.integers(32, 257, 32).tolist(), rng.integers(16, 97, 32).tolist()
    return {
        "first token, 448": {"prompts": words([448]), "new": [1]},
        "first token, 1,900": {"prompts": words([1900]), "new": [1]},
        "decode 1 x (32 + 64)": {"prompts": words([32]), "new": [64]},
        "decode 8 x (32 + 64)": {"prompts": words([32] * 8), "new": [64] * 8},
        "32 requests": {"prompts": words(mixed), "new": new},
        "16 requests, 448": {"prompts": words([448] * 16), "new": rng.integers(8, 25, 16).tolist()},
        "16 chats of 4 turns": {
            "prompts": words([256]) * 16,
            "turns": [words([16] * 16) for _ in range(4)],
            "new": rng.integers(16, 33, 16).tolist(),
        },
    }


class Worker:
    """A process with one engine, stopped except while it answers."""

    def __init__(
        self, options: argparse.Namespace, python: str, engine: str, model: Path, *more: str
    ) -> None:
        threads, log = str(options.threads), "-".join([engine, model.stem, *map(_stem, more)])
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        self._process = subprocess.Popen(
            [python, WORKER, engine, model, threads, str(options.slots), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(options.out / f"{log}.log").open("w"),
            env={**os.environ, **single, "JAX_PLATFORMS": "cpu"},
            text=True,
            start_new_session=True,
        )
        self.versions: dict[str, str] = self._read()
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, list[Any]]) -> dict[str, Any]:
        """Returns the answer to a request."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def converse(self, request: dict[str, list[Any]]) -> dict[str, Any]:
        """Returns the answer to a request of several turns, each of which follows all before it."""
        texts, seconds, peak = request["prompts"], 0.0, 0.0
        for turn in request["turns"]:
            prompts = [text + new for text, new in zip(texts, turn, strict=True)]
            answer = self.ask({"prompts": prompts, "new": request["new"]})
            texts = [old + new for old, new in zip(prompts, answer["tokens"], strict=True)]
            seconds, peak = seconds + answer["seconds"], answer["peak"]
        return {"seconds": seconds, "tokens": texts, "peak": peak}

    def close(self) -> None:
        """Ends the process and what it has started."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended. Its log says why.")
        return json.loads(line)


def _stem(option: str) -> str:
    return Path(option).stem


@contextmanager
def workers(options: argparse.Namespace) -> Iterator[dict[str, Worker]]:
    """Yields the workers by the names of their columns."""
    looped = options.turns > 1
    made = options.out / (f"model-{options.turns}-turns" if looped else "model")
    if not ((made / "float32").exists() and (made / "int8.gguf").exists()):
        command = [sys.executable, WORKER, "convert", options.model, made, str(options.turns)]
        subprocess.run(command, check=True)
    model = made / "float32.gguf" if looped else options.model
    columns = {
        "utio_jax": (sys.executable, "utio_jax", model),
        "utio_jax, int8": (sys.executable, "utio_jax", model, "int8"),
        "utio_jax, bfloat16": (sys.executable, "utio_jax", model, "bfloat16"),
        "vllm": (options.python, "vllm", made / "float32"),
        "vllm, bfloat16": (options.python, "vllm", made / "float32", "bfloat16"),
        "vllm, maps": (options.python, "vllm", made / "float32", "float32", str(options.maps)),
        "transformers": (options.python, "transformers", made / "float32"),
        "llama.cpp": (options.python, "llama.cpp", made / "float32.gguf"),
        "llama.cpp, 8 bits": (options.python, "llama.cpp", made / "int8.gguf"),
    }
    if not looped:
        columns["llama.cpp, 4 bits"] = (options.python, "llama.cpp", options.model)
    running: dict[str, Worker] = {}
    try:
        for name in options.engines or [name for name in columns if name != "vllm, maps"]:
            print(f"starting {name}", file=sys.stderr)
            try:
                running[name] = Worker(options, *columns[name])
            except RuntimeError as error:  # The others are compared without it.
                print(error, file=sys.stderr)
        yield running
    finally:
        for worker in running.values():
            worker.close()


def same(tokenizer: Any, ours: list[list[int]], theirs: list[Any]) -> float:
    """Returns the share of rows that agree, in tokens or in the text of an engine that has it."""
    if isinstance(theirs[0], str):
        ours = [tokenizer.decode(ids) for ids in ours]
    return float(np.mean([a == b for a, b in zip(ours, theirs, strict=True)]))


def measure(
    running: dict[str, Worker], tokenizer: Any, rounds: int, cases: list[str] | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns, by case and engine, seconds of each round, and the rows as the first engine's."""
    result: dict[str, dict[str, Any]] = {}
    for turn in range(rounds + 1):  # The first one compiles.
        for case, request in requests(turn).items():
            if case not in (cases or [case]):
                continue
            turns = len(request.get("turns", ())) or 1
            if turns > 1 and any(name.startswith("llama.cpp") for name in running):
                continue
            order = [*running][turn % len(running) :] + [*running][: turn % len(running)]
            answers = {}
            for name in order:
                try:
                    worker = running[name]
                    answers[name] = (worker.ask if turns == 1 else worker.converse)(request)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    running.pop(name).close()
            reference = answers[next(iter(running))]["tokens"]
            for name, answer in answers.items():
                kept = result.setdefault(case, {}).setdefault(name, {"seconds": [], "same": []})
                kept["peak"] = answer["peak"]
                kept["tokens"] = turns * sum(request["new"])
                if turn:
                    kept["seconds"].append(answer["seconds"])
                    kept["same"].append(same(tokenizer, reference, answer["tokens"]))
            print(case, {k: round(v["seconds"], 3) for k, v in answers.items()}, file=sys.stderr)
    return {case: {name: columns[name] for name in running} for case, columns in result.items()}


def table(result: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown: a row per case, a column per engine."""
    names = [*next(iter(result.values()))]
    yield "| | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for case, columns in result.items():
        cells = []
        for name in names:
            seconds = np.asarray(columns[name]["seconds"])
            ratio = np.median(seconds / columns[names[0]]["seconds"])
            value = columns[name]["tokens"] / np.median(seconds)
            first = case.startswith("first")
            shown = f"{1e3 * np.median(seconds):,.0f} ms" if first else f"{value:,.0f} /s"
            cells.append(f"{shown} ({ratio:.2f})")
        yield f"| {case} | " + " | ".join(cells) + " |"
    last = next(reversed(result.values()))
    yield "| peak memory, MiB | " + " | ".join(f"{last[n]['peak']:,.0f}" for n in names) + " |"
    agree = [
        np.mean([np.mean(result[name]["same"]) for result in result.values()]) for name in names
    ]
    yield f"| rows equal to {names[0]}'s | " + " | ".join(f"{s:.0%}" for s in agree) + " |"


def main() -> None:
    """Prints the table, and keeps what it is made of."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("python", help="interpreter with the other engines")
    parser.add_argument("--engines", nargs="*", help="the first one is what others are compared to")
    parser.add_argument("--cases", nargs="*", choices=requests(0), help="rows of the table")
    parser.add_argument("--turns", type=int, default=1, help="of a looped model of its layers")
    parser.add_argument("--maps", type=Path, help="for the engine 'vllm, maps'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="requests that run at once")
    parser.add_argument("--out", type=Path, default=Path("out/engines"))
    options = parser.parse_args()
    if "vllm, maps" in (options.engines or ()) and not (options.maps and options.maps.is_file()):
        parser.error("wanted --maps FILE, made by `utio-jax fit-prompt`, with engine 'vllm, maps'")
    options.out.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with workers(options) as running:
        versions = {name: engine.versions for name, engine in running.items()}
        result = measure(running, tokenizer_of(options.model), options.rounds, options.cases)
    kept = {"versions": versions, "rounds": options.rounds, "cases": result}
    (options.out / "results.json").write_text(json.dumps(kept, indent=1))
    print("\n".join(table(result)))
    print(json.dumps(versions))


if __name__ == "__main__":
    main()
