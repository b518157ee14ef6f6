# SPDX-License-Identifier: Apache-2.0
"""Prompts of a model whose upper layers read keys and values made below: same tokens, what time?

    python benchmarks/shared_kv.py out/shared/model

Continues 200 stretches of the standard library's test split, 64 to 500 tokens each, behind prompts
that stop where all keys and values are made and behind prompts that run all layers, greedy and
drawn, at batches of 1, 4 and 16, and through an engine of 5 slots, whose requests come and go, and
that reads 64 prompt tokens between two blocks. Then times the first token behind 448 tokens, at
batches of 1 and 8, against both full-depth programs, the dense one and the staircase.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import numpy as np

from utio_jax import Adaptive, SamplingParams, generate
from utio_jax.bench.timing import time_programs
from utio_jax.decoding import Prefill
from utio_jax.engine import Engine, Shapes
from utio_jax.models.checkpoint import load
from utio_jax.models.training import standard_library
from utio_jax.staircase.score import full_depth


def stretches(model: Any, count: int, low: int, high: int) -> list[np.ndarray]:
    """Returns stretches of the test split, as token ids."""
    stream = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(stream) - high, count)
    return [
        stream[start : start + size]
        for start, size in zip(starts, rng.integers(low, high, count), strict=True)
    ]


def differing(model: Any, prompts: list[np.ndarray], batch: int, options: Any) -> tuple[int, float]:
    """Returns rows whose tokens differ, and the largest difference of a log-probability."""
    rows, worst = 0, 0.0
    for first in range(0, len(prompts), batch):
        run = partial(
            generate,
            model.decoder,
            model.params,
            prompts[first : first + batch],
            max_new_tokens=12,
            eos_ids=(),
            seeds=first,
            **options,
        )
        whole, exact = run(prefill=Prefill()), run()
        for row in range(len(exact.token_ids)):
            same = np.array_equal(whole.token_ids[row], exact.token_ids[row])
            rows += not same
            if same:
                apart = whole.log_probabilities[row] - exact.log_probabilities[row]
                worst = max(worst, float(np.abs(apart).max()))
    return rows, worst


def differing_in_engine(model: Any, prompts: list[np.ndarray], sampling: SamplingParams) -> int:
    """Returns requests of an engine with chunks whose tokens are not those of prompts in full."""
    engine = Engine.of(model, slots=5, capacity=576, shapes=Shapes(chunk=64))
    asked = {
        engine.submit(
            prompt, max_new_tokens=4 + seed % 9, sampling=sampling, seed=seed, eos_ids=()
        ): (prompt, seed)
        for seed, prompt in enumerate(prompts)
    }
    rows = 0
    for number, result in engine.drain().items():
        prompt, seed = asked[number]
        (whole,) = generate(
            model.decoder, model.params, [prompt], max_new_tokens=12, eos_ids=(), seeds=seed,
            sampling=sampling, prefill=Prefill(),
        ).token_ids  # fmt: skip
        rows += not np.array_equal(whole[: 4 + seed % 9], result.token_ids)
    return rows


def first_tokens(model: Any, batch: int, rounds: int) -> dict[str, float]:
    """Returns how much sooner the first token comes than by each full-depth program."""
    prompts = [stretch[:448] for stretch in stretches(model, batch, 448, 500)]
    run = partial(generate, model.decoder, model.params, prompts, max_new_tokens=1, eos_ids=())

    # Under "drop" a token is seen as deep as it ran, so no prompt stops early.
    dense = partial(run, mode=Adaptive(policy=full_depth(model.decoder), kv="drop"))
    programs = {"exact": run, "staircase": partial(run, prefill=Prefill()), "dense": dense}
    times = time_programs(programs, rounds=rounds)
    return {name: round(times[name].median / times["exact"].median, 3) for name in programs}


def main(arguments: list[str]) -> int:
    """Prints one line of JSON."""
    model = load(arguments[0])
    prompts = stretches(model, 200, 64, 500)
    result: dict[str, Any] = {"model": arguments[0], "exact": {}, "first_token": {}}
    for name, options in (("greedy", {}), ("drawn", {"sampling": SamplingParams(temperature=1.0)})):
        for batch in (1, 4, 16):
            rows, worst = differing(model, prompts, batch, options)
            jax.clear_caches()  # A process has room for so many programs only.
            result["exact"][f"{name} {batch}"] = {
                "rows_that_differ": rows,
                "log_probability": worst,
            }
            print(name, batch, rows, worst, file=sys.stderr)
        rows = differing_in_engine(model, prompts, options.get("sampling", SamplingParams()))
        result["exact"][f"{name}, engine"] = {"rows_that_differ": rows}
        print(name, "engine", rows, file=sys.stderr)
        jax.clear_caches()
    for batch in (1, 8):
        result["first_token"][str(batch)] = first_tokens(model, batch, rounds=21)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
