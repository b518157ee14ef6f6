# SPDX-License-Identifier: Apache-2.0
"""A depth per token beside plain decoding: measured at a grid, beside what the plan predicts.

    python benchmarks/packing_plan.py [--model M] [--rows 4 8 16 32] [--shares 0.3 0.6 0.8 0.95]

All slots run, half filled; of each token it is drawn whether it stops at the first depth, with the
share's probability. Programs take turns, a block each. The plan knows only what `plan_mode`
measures: blocks in which all rows stop, or none. A shape of
`utio_jax.models.presets.SHAPES` gets random weights, as many layers as are asked for:

    python benchmarks/packing_plan.py --model llama-7b --layers 4 --depth 2 --rows 8 --shares 0.8
"""

from __future__ import annotations

import argparse
import json
import os
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np

import utio_jax
from utio_jax.core.files import versions
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.engine import Engine, Shapes, plan_mode
from utio_jax.engine.slots import Served
from utio_jax.models import Transformer
from utio_jax.models.presets import SHAPES, with_layers
from utio_jax.models.random_weights import random_params
from utio_jax.policies import random_depths


def measure(model: Any, rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a line of the grid for each share, of so many rows."""
    layers = model.decoder.config.num_layers
    depths = (options.depth, layers)
    key = jax.random.key(0)
    policies = {
        share: random_depths([share, 1 - share], key=key, depths=depths) for share in options.shares
    }
    modes = {"plain": Plain(), "adaptive": Adaptive(policy=policies[options.shares[0]])}
    shapes = Shapes(prompt_widths=(options.prompt,), groups=(1,))
    blocks = options.rounds + 2
    capacity = options.prompt + blocks * options.steps + 2
    engines = {
        name: Engine.of(
            model, slots=rows, capacity=capacity, mode=mode, steps=options.steps, shapes=shapes
        )
        for name, mode in modes.items()
    }
    for engine in engines.values():
        engine.warmup()
    plans = {}
    for share in options.shares:
        served = Served(
            decoder=model.decoder,
            params=model.params,
            slots=rows,
            capacity=capacity,
            mode=modes["adaptive"],
            steps=options.steps,
            shapes=shapes,
        )
        plans[share] = plan_mode(served, {options.depth: share, layers: 1 - share})
    lines = []
    for share, policy in policies.items():
        seconds = _turns(engines, policy, rows, options)
        plan = plans[share]
        best = min(np.median(each) for each in seconds.values())
        choice = "adaptive" if plan.speedup > 1 else "plain"
        foretold = {"plain": plan.rates.plain_seconds, "adaptive": plan.seconds}
        chosen = np.median(seconds[choice])
        lines.append(
            {
                "rows": rows,
                "share": share,
                "ms": {name: round(1e3 * float(np.median(v)), 3) for name, v in seconds.items()},
                "predicted_ms": {name: round(1e3 * v, 3) for name, v in foretold.items()},
                "over_plain": {
                    name: round(float(np.median(seconds["plain"] / v)), 3)
                    for name, v in seconds.items()
                    if name != "plain"
                },
                "choice": choice,
                "choice_over_best": round(float(best / chosen), 3),
            }
        )
    return lines


def _turns(
    engines: dict[str, Engine], policy: Any, rows: int, options: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Returns each engine's seconds of a step, `[round]`: a block of each, turn by turn."""
    new = (options.rounds + 2) * options.steps + 1
    prompt = np.arange(1, options.prompt + 1, dtype=np.int32)
    for name, engine in engines.items():
        for row in range(rows):
            own = {} if name == "plain" else {"policy": policy}
            engine.submit(prompt + row, max_new_tokens=new, seed=row, eos_ids=(), **own)
        while engine.stats().running < rows:
            engine.advance()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(options.rounds):
        for name in names[turn % 2 :] + names[: turn % 2]:
            began = time.perf_counter()
            engines[name].advance()
            seconds[name].append((time.perf_counter() - began) / options.steps)
    for engine in engines.values():
        engine.drain()
    return {name: np.asarray(each) for name, each in seconds.items()}


def main() -> None:
    """Writes packing_plan.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shared-16")
    parser.add_argument("--layers", type=int, default=0, help="of a shape with random weights")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("out/packing"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.layers:
        decoder = Transformer(with_layers(SHAPES[options.model], options.layers))
        params = random_params(decoder, dtype="float32")
        model: Any = types.SimpleNamespace(decoder=decoder, params=params, tokenizer=None)
    else:
        exits = () if options.model == "shared-16" else (options.depth,)
        model = utio_jax.load(options.model, exits=exits)
    rows = [line for rows in options.rows for line in measure(model, rows, options)]
    off = [
        abs(line["predicted_ms"][name] / line["ms"][name] - 1)
        for line in rows
        for name in line["ms"]
    ]
    result = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": versions(),
        "cores": os.cpu_count(),
        "within_10_pct": round(float(np.mean(np.asarray(off) <= 0.1)), 3),
        "worst_choice_over_best": min(line["choice_over_best"] for line in rows),
        "rows": rows,
    }
    (options.out / "packing_plan.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
