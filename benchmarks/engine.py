# SPDX-License-Identifier: Apache-2.0
"""Many requests of different lengths: by continuous batching, and by batches of `generate`.

    python benchmarks/engine.py --slots 8 32 --budgets 0.6 0.75

The shipped model, plainly and with its learned gate. Requests
want from an eighth of the new tokens to all of them, twelve for each slot: at the end slots stay
empty, which counts, too. One line of JSON per program: seconds, and its speed-up with quartiles
over its baseline, all programs taking turns. The plain engine is compared with static batches,
each until its last row ends; adaptive ones with the plain engine. `allowed` is what lengths allow
the plain engine: no step of a row that has ended, while reading the prompts takes its own time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import utio_jax
from utio_jax.bench.decoding import middles
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate
from utio_jax.engine import Engine
from utio_jax.models.training import standard_library

TURNS = 12
"""Requests for each slot; prompts that are read together."""


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.6])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=120, help="new tokens, at most")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = utio_jax.load(branches=False)
    documents = model.encode([document.text for document in standard_library("test")])
    for slots in args.slots:
        for row in measure(model, documents, slots, args):
            print(json.dumps(row), flush=True)


def measure(model: Any, documents: Any, slots: int, args: Any) -> list[dict[str, Any]]:
    """Returns a row per program."""
    run = partial(generate, model.decoder, model.params, eos_ids=())
    output, rng = args.output, np.random.default_rng(0)
    expected = rng.integers(max(1, output // 8), output + 1, TURNS * slots).tolist()
    longest = [max(expected[i : i + slots]) for i in range(0, len(expected), slots)]
    prompts = middles(documents, tokens=args.prompt, count=len(expected))
    modes: dict[str, Mode] = {"engine": Plain()}
    for budget in args.budgets:
        policy = model.calibration.policy("learned", budget)
        modes[f"learned@{budget:g}"] = Adaptive(policy=policy)

    def batches(new_tokens: Sequence[int]) -> None:
        for number, new in enumerate(new_tokens):
            run(prompts[number * slots : (number + 1) * slots], max_new_tokens=new)

    def serve(engine: Engine) -> None:
        for prompt, new in zip(prompts, expected, strict=True):
            engine.submit(prompt, max_new_tokens=new, eos_ids=())
        engine.drain()

    programs: dict[str, Callable[[], Any]] = {
        "batches": partial(batches, longest),
        "prompts": partial(batches, [1] * len(longest)),
    }
    for label, mode in modes.items():
        engine = Engine(
            model.decoder,
            model.params,
            slots=slots,
            capacity=args.prompt + output + mode.block,
            mode=mode,
        )
        engine.warmup()
        programs[label] = partial(serve, engine)
    times = time_programs(programs, rounds=args.rounds)
    reading = min(1.0, times["prompts"].median / times["batches"].median)
    allowed = 1.0 / (reading + (1.0 - reading) * sum(expected) / (slots * sum(longest)))
    rows = []
    for label in ("batches", *modes):
        baseline = "batches" if label in ("batches", "engine") else "engine"
        speedup = quartiles(times[label].ratios_over(times[baseline]))
        rows.append(
            {
                "slots": slots,
                "program": label,
                "seconds": round(times[label].median, 4),
                "tokens_per_second": round(sum(expected) / times[label].median, 1),
                "baseline": baseline,
                "speed_up": [round(value, 3) for value in speedup],
                "allowed": round(allowed, 3) if label == "engine" else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
