# SPDX-License-Identifier: Apache-2.0
"""Predicted time of programs compiled for TPUs; `results/accelerators.md` has their ratios.

    make tpu-predict            # or: JAX_PLATFORMS=cpu .venv-tpu/bin/python benchmarks/compiled.py

Nothing runs on a device. Each program's numbers are kept in `results/compiled.json` as soon as they
are known, and not made again: remove them there to make them anew.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ahead import NARROW, Programs, on_tpu
from hlo import Instruction, Program

from utio_jax.bench.methods import shares_for
from utio_jax.core.arrays import head_blocks
from utio_jax.core.platform import compiling_for
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.staircase.capacity import CapacityPrefix, choose_executor, fit_row_shares
from utio_jax.staircase.microbatches import MicroBatches

FILE = Path(__file__).parents[1] / "results" / "compiled.json"
CHIPS = {  # Clocks from the peak: 197 and 918 TFLOP/s in bfloat16.
    "v5e": {"hertz": 1.5e9, "bandwidth": 819e9},
    "v6e": {"hertz": 1.75e9, "bandwidth": 1640e9},
}
MODELS = {"llama-7b": (0.75, 0.6, 0.5), "mistral-7b": (0.75, 0.6, 0.5), "shipped": (0.9, 0.75, 0.6)}
"""Budgets by model: the first exit of the shipped one costs more than half."""

LAYERS = 8
DECODED = (1, 8)
ROWS, WIDTH, SLOTS = 16, 512, 512

Turns = Callable[[Instruction], float]
Shares = Callable[[Instruction], list[float]]


def scope(instruction: Instruction) -> str:
    """Returns the innermost scope that a loop or a conditional was traced in."""
    parts = [part for part in instruction.path.split("/") if part != "eval_jaxpr"]
    return parts[-2] if len(parts) > 1 else ""


def deal(made: Programs, budget: float, seed: int) -> np.ndarray:
    """Returns depths `[row, token]` that cost a budget, each drawn for itself."""
    exits, shape = np.asarray(made.decoder.config.exits), (ROWS, WIDTH)
    shares = np.asarray(shares_for(made.decoder, made.params, budget, width=WIDTH))
    return exits[np.random.default_rng(seed).choice(len(exits), shape, p=shares / shares.sum())]


def capacities(made: Programs, budget: float) -> tuple[float, ...]:
    """Returns shares of a row's slots, fitted to other batches of the same budget."""
    other = np.concatenate([deal(made, budget, seed) for seed in range(1, 9)])
    return fit_row_shares(other, depths=made.decoder.config.exits, rows=ROWS)


def of_pass(made: Programs, executor: Any, depths: np.ndarray) -> tuple[Turns, Shares]:
    """Returns how often a pass over tokens of these depths turns its loops and takes branches."""
    exits = made.decoder.config.exits
    live = {stop: depths > start for start, stop in zip((0, *exits), exits, strict=False)}
    blocks: dict[int, Any] = {}
    if isinstance(executor, MicroBatches):
        with compiling_for("tpu"):
            packed = [executor.pack(k, jnp.asarray(live[stop])) for k, stop in enumerate(exits)]
        blocks = {stop: slots.query_blocks for stop, slots in zip(exits, packed, strict=True)}
    begins = dict(zip(exits, (0, *exits), strict=False))

    def stop_of(path: str) -> int | None:
        scopes = [p for p in path.split("/") if p.startswith(("segment_", "dispatch_"))]
        return int(scopes[-1].rsplit("_", 1)[1]) if scopes else None

    def turns(instruction: Instruction) -> float:
        kind, *sizes = scope(instruction).split("_")
        stop = stop_of(instruction.path)
        total = depths.size if stop is None else int(live[stop].sum())
        numbers = [int(size) for size in sizes if size.isdigit()]
        match kind:
            case "layers" if stop is not None:
                return (stop - begins[stop]) * bool(total)
            case "attend" if stop is not None:
                return int(blocks[stop][numbers[0]].count)
            case "by":
                return math.ceil(total / numbers[0])
            case "whole":
                return total // numbers[0]
            case "rest":
                return math.ceil(total % numbers[0] / numbers[1])
        if "/head/" in instruction.path:  # The head of all tokens, in blocks.
            with compiling_for("tpu"):
                return head_blocks(depths.size)[0]
        raise ValueError(f"Wanted loops in known scopes. Got one in {instruction.path!r}.")

    def shares(instruction: Instruction) -> list[float]:
        stop = stop_of(instruction.path)
        parts = [part for part in instruction.path.split("/") if part.startswith("attend_")]
        if parts and stop is not None:
            block = blocks[stop][int(parts[-1].split("_")[1])]
            reach = np.bincount(np.asarray(block.reach)[: int(block.count)], minlength=99)
            return [float(n) / max(1, reach.sum()) for n in reach[: len(instruction.branches)]]
        if stop is None or not isinstance(executor, CapacityPrefix):
            return [1.0] + [0.0] * (len(instruction.branches) - 1)
        slots = executor.capacities[exits.index(stop)]
        fits = bool(live[stop].sum(axis=1).max() <= slots)
        return [float(fits), float(not fits)]

    return turns, shares


def of_step(made: Programs, budget: float, rows: int) -> tuple[Turns, Shares]:
    """Returns the same of one step of decoding, of rows that stop independently of each other."""
    config = made.decoder.config
    tails = np.ones(len(config.exits))
    if budget < 1:
        shares = shares_for(made.decoder, made.params, budget, width=SLOTS // 2)
        tails = np.cumsum(np.asarray(shares)[::-1])[::-1].clip(0, 1)
    runs = {
        stop: (stop - start) * (1 - (1 - tail) ** rows)
        for start, stop, tail in zip((0, *config.exits), config.exits, tails, strict=False)
    }

    made_kv = len(config.kv_made(0, config.num_layers))

    def turns(instruction: Instruction) -> float:
        name = scope(instruction)
        if name.startswith("segment_"):
            return runs[int(name.rsplit("_", 1)[1])]
        return made_kv - min(made_kv, sum(runs.values())) if name == "frozen" else 1

    return turns, lambda instruction: [1 / len(instruction.branches)] * len(instruction.branches)


class Predictions:
    """Records of programs by name; each is made once and kept in a file."""

    def __init__(self) -> None:
        self.records = json.loads(FILE.read_text()) if FILE.exists() else {}

    def of(self, name: str, chip: str, lower: Callable[[], Any], ways: dict[str, Any]) -> None:
        """Keeps a program's milliseconds, by the name of each way that its loops may turn.

        Next to them megabytes of its arguments and temporaries, and its structure.
        """
        if name in self.records:
            return
        compiled = lower().compile()
        program, memory = Program(compiled.as_text()), compiled.memory_analysis()
        spent = {way: program.seconds(*of_way, **CHIPS[chip]) for way, of_way in ways.items()}
        kinds = {
            way: {kind: round(1e3 * seconds, 3) for kind, seconds in of_way.items()}
            for way, of_way in spent.items()
        }
        self.records[name] = {
            "date": str(datetime.date.today()),
            "jax": jax.__version__,
            "libtpu": version("libtpu"),
            "arguments_mb": round(memory.argument_size_in_bytes / 1e6, 1),
            "temporaries_mb": round(memory.temp_size_in_bytes / 1e6, 1),
            "structure": program.structure,
            "ms": {way: round(sum(of_kind.values()), 3) for way, of_kind in kinds.items()},
            "kinds": kinds,
        }
        lines = [f" {json.dumps(key)}: {json.dumps(of)}" for key, of in self.records.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        jax.clear_caches()
        print(name, self.records[name]["ms"], flush=True)


def scoring(known: Predictions, made: Programs, chip: str) -> None:
    """Predicts scoring 16 x 512 tokens: dense, by the default executor, by micro-batches."""
    key, full = f"{chip} {made.name}", np.full((ROWS, WIDTH), made.decoder.config.num_layers)
    budgets = (0.75,) if made.name in NARROW else MODELS[made.name]
    ways = {"1": of_pass(made, None, full)}
    known.of(f"{key} dense", chip, lambda: made.dense(ROWS, WIDTH), ways)
    for budget in budgets:
        shares = capacities(made, budget)
        with compiling_for("tpu"):
            chosen = choose_executor("auto", made.policy(shares), WIDTH)
        ways = {"": of_pass(made, chosen, deal(made, budget, 0))}
        lower = partial(made.score, ROWS, WIDTH, shares=shares)
        known.of(f"{key} auto {budget}", chip, lower, ways)
    if made.name not in NARROW:
        executor = MicroBatches()
        ways = {str(b): of_pass(made, executor, deal(made, b, 0)) for b in budgets}
        known.of(f"{key} micro", chip, lambda: made.score(ROWS, WIDTH, executor=executor), ways)


def decoding(known: Predictions, made: Programs, chip: str, rows: int) -> None:
    """Predicts one step, plain and adaptive."""
    key, mode = f"{chip} {made.name} {rows}", Adaptive(policy=made.policy())
    ways = {"1": of_step(made, 1.0, rows)}
    known.of(f"{key} plain", chip, lambda: made.decode(Plain(), rows, SLOTS), ways)
    ways = {str(b): of_step(made, b, rows) for b in MODELS[made.name]}
    known.of(f"{key} adaptive", chip, lambda: made.decode(mode, rows, SLOTS), ways)


def main() -> None:
    """Predicts what is not known yet: narrow models on one chip alone."""
    known = Predictions()
    for chip in CHIPS:
        for name in (*MODELS, *(NARROW if chip == "v5e" else ())):
            scoring(known, on_tpu(name, LAYERS, chip), chip)
        for name in MODELS:
            for rows in DECODED:
                decoding(known, on_tpu(name, LAYERS, chip), chip, rows)


if __name__ == "__main__":
    main()
