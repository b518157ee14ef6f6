# SPDX-License-Identifier: Apache-2.0
"""Predicted time of programs compiled for TPUs, and the page `results/compiled.md` that says it.

    make tpu-predict            # or: JAX_PLATFORMS=cpu .venv-tpu/bin/python benchmarks/compiled.py

Nothing runs on a device. Each program's numbers are kept in `out/compiled/` as soon as they are
known, and not made again; `--fresh` forgets them.
"""

from __future__ import annotations

import argparse
import collections
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
from accelerator import BUDGET, EXPERIMENTS, split
from ahead import Programs, on_tpu
from hlo import Instruction, Program

from utio_jax.bench.subjects import shares_for
from utio_jax.core.arrays import head_blocks
from utio_jax.core.platform import compiling_for
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.staircase.capacity import CapacityPrefix, choose_executor, fit_row_shares
from utio_jax.staircase.microbatches import MicroBatches

CHIPS = {  # Clocks from the peak: 197 and 918 TFLOP/s in bfloat16.
    "v5e": {"hertz": 1.5e9, "bandwidth": 819e9},
    "v6e": {"hertz": 1.75e9, "bandwidth": 1640e9},
}
MODELS = {"llama-7b": 8, "mistral-7b": 8, "shipped": 16}
BUDGETS = (0.75, 0.6, 0.5)
ROWS, WIDTH, SLOTS = 16, 512, 512

Turns = Callable[[Instruction], float]
Shares = Callable[[Instruction], list[float]]


def scope(each: Instruction) -> str:
    """Returns the innermost scope that a loop or a conditional was traced in."""
    parts = [part for part in each.path.split("/") if part != "eval_jaxpr"]
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
        with compiling_for("tpu", **made.choices):
            packed = [executor.pack(k, jnp.asarray(live[stop])) for k, stop in enumerate(exits)]
        blocks = {stop: each.query_blocks for stop, each in zip(exits, packed, strict=True)}
    begins = dict(zip(exits, (0, *exits), strict=False))

    def stop_of(path: str) -> int | None:
        found = [p for p in path.split("/") if p.startswith(("segment_", "dispatch_"))]
        return int(found[-1].rsplit("_", 1)[1]) if found else None

    def turns(each: Instruction) -> float:
        kind, *sizes = scope(each).split("_")
        stop = stop_of(each.path)
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
        if "/head/" in each.path:  # The head of all tokens, in blocks.
            with compiling_for("tpu"):
                return head_blocks(depths.size)[0]
        raise ValueError(f"Wanted loops in known scopes. Got one in {each.path!r}.")

    def shares(each: Instruction) -> list[float]:
        stop = stop_of(each.path)
        parts = [part for part in each.path.split("/") if part.startswith("attend_")]
        if parts and stop is not None:
            block = blocks[stop][int(parts[-1].split("_")[1])]
            reach = np.bincount(np.asarray(block.reach)[: int(block.count)], minlength=99)
            return [float(n) / max(1, reach.sum()) for n in reach[: len(each.branches)]]
        if stop is None or not isinstance(executor, CapacityPrefix):
            return [1.0] + [0.0] * (len(each.branches) - 1)
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

    def turns(each: Instruction) -> float:
        name = scope(each)
        if name.startswith("segment_"):
            return runs[int(name.rsplit("_", 1)[1])]
        return config.num_layers - sum(runs.values()) if name == "frozen" else 1

    return turns, lambda each: [1 / len(each.branches)] * len(each.branches)


class Predictions:
    """Predicted milliseconds by name; each made once and kept in a file.

    Attributes:
      folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, name: str, chip: str, lower: Callable[[], Any], ways: dict[str, Any]) -> Any:
        """Returns milliseconds of one program, by the name of each way that its loops may turn."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            compiled = lower().compile()
            program, found = Program(compiled.as_text()), {}
            for way, (turns, shares) in ways.items():
                spent = program.seconds(turns, shares, **CHIPS[chip])
                kinds: collections.Counter[str] = collections.Counter()
                for (kind, *_), seconds in spent.items():
                    kinds[kind] += 1e3 * seconds
                top = [[1e3 * t, *key] for key, t in spent.most_common(12)]
                found[way] = {"ms": sum(kinds.values()), "kinds": dict(kinds), "top": top}
            memory = compiled.memory_analysis()
            found["temp_mb"] = memory.temp_size_in_bytes / 1e6
            found["structure"] = program.structure
            path.write_text(json.dumps(found, indent=1))
            jax.clear_caches()
            print(name, {w: round(found[w]["ms"], 2) for w in ways}, flush=True)
        return json.loads(path.read_text())


def by_default(known: Predictions, made: Programs, chip: str, budget: float) -> Any:
    """Returns predictions of scoring 16 x 512 tokens at a budget by the default executor."""
    shares = capacities(made, budget)
    depths, policy = deal(made, budget, 0), made.policy(shares)
    with compiling_for("tpu"):
        chosen = choose_executor("auto", policy, WIDTH)
    way = {str(budget): of_pass(made, chosen, depths)}
    name = f"{chip}-{made.name}-auto-{budget}"
    return known.of(name, chip, lambda: made.score(ROWS, WIDTH, shares=shares), way)


def scoring(known: Predictions, made: Programs, chip: str) -> dict[str, Any]:
    """Returns predictions of the same: dense, by the default, by micro-batches."""
    key, full = f"{chip}-{made.name}", np.full((ROWS, WIDTH), made.decoder.config.num_layers)
    dense = {"1": of_pass(made, None, full)}
    found = {"dense": known.of(f"{key}-dense", chip, lambda: made.dense(ROWS, WIDTH), dense)}
    executor = MicroBatches()
    ways = {str(b): of_pass(made, executor, deal(made, b, 0)) for b in BUDGETS}
    found["micro"] = known.of(
        f"{key}-micro", chip, lambda: made.score(ROWS, WIDTH, executor=executor), ways
    )
    return found | {f"auto {b}": by_default(known, made, chip, b) for b in BUDGETS}


def decoding(known: Predictions, made: Programs, chip: str, rows: int) -> dict[str, Any]:
    """Returns predictions of one step."""
    key = f"{chip}-{made.name}-{rows}"
    mode = Adaptive(policy=made.policy())
    ways = {str(b): of_step(made, b, rows) for b in BUDGETS}
    return {
        "plain": known.of(
            f"{key}-plain",
            chip,
            lambda: made.decode(Plain(), rows, SLOTS),
            {"1": of_step(made, 1.0, rows)},
        ),
        "adaptive": known.of(f"{key}-adaptive", chip, lambda: made.decode(mode, rows, SLOTS), ways),
    }


def experiments(known: Predictions) -> dict[str, list[float]]:
    """Returns milliseconds of both ways of the experiments that a v5e would run first."""
    found: dict[str, list[float]] = {}
    for number, each in enumerate(EXPERIMENTS):
        for order, way in enumerate(each.ways):
            executor, choices = split(way)
            made = on_tpu("llama-7b", MODELS["llama-7b"])
            made.choices = choices
            if each.kind == "decode":
                lower = partial(made.decode, Plain(), each.rows, 256)
                turns = of_step(made, 1.0, each.rows)
            else:
                shares = capacities(made, BUDGET)
                lower = partial(made.score, each.rows, WIDTH, shares=shares, executor=executor)
                with compiling_for("tpu", **choices):
                    chosen = choose_executor(executor, made.policy(shares), WIDTH)
                turns = of_pass(made, chosen, deal(made, BUDGET, 0))
            name = f"v5e-experiment-{number}-{order}"
            spent = known.of(name, "v5e", lower, {"": turns})[""]["ms"]
            found.setdefault(each.title, []).append(round(spent, 3))
    return found


HEAD = """# Compiled for TPU and GPU

**Nothing below ran on a device.** Programs were compiled ahead of time on a machine with two CPU
cores, and every time is *predicted*. What tests pin, `make tpu-compile` and `make gpu-compile`, is
structure: that programs compile and fit, their loops, branches, collectives and copies. The times
are for the day when there is hardware, to be wrong about.

Printed by `make tpu-predict` (`benchmarks/compiled.py`); {versions}.

## Method, and its limits

The TPU's compiler writes `estimated_cycles` beside most instructions of a scheduled program. These
are summed, at 1.5 GHz (v5e) and 1.75 GHz (v6e), a loop's body as often as it turns: turns are those
that packing gives for 16 rows of 512 tokens, each of whose depths is drawn for itself so that the
pass costs the budget. Gathers, scatters and updates in place have no cycles: their bytes over the
memory's bandwidth stand in. Asynchronous copies are taken to overlap. A product of 4096 x 4096 x
4096 comes out at 97 % of the peak; beyond that nothing is known of how good the estimates are.
Waiting, launches and the host are not in them.

Llama-7B and Mistral-7B have 8 layers here, with exits at their quarters, in bfloat16; the shipped
model its 16 layers, in float32 (of which a TPU multiplies bfloat16 parts by default). Capacities
are fitted (`fit_row_shares`) to eight other batches. Depths of a text are not independent of each
other as these are: its rows differ more, and capacities have to be wider.
"""

TAIL = """
## What is chosen by platform, and why

All of it stands in `utio_jax/core/platform.py`. `score(executor="auto")` takes micro-batches on a
CPU, where a loop of traced length costs nothing, and a static prefix on accelerators where a
policy's `row_shares` are known: `calibrate` fits them for each budget and keeps them with the
policy. A batch that outgrows them runs that segment at full width, with the same results, and the
ledger counts it (`overflows`). Prompts at half depth (`exact_prefill`) have static shapes by
nature: one token of each runs the upper layers, whatever the text says.

A product of float32 is one pass of bfloat16 on a TPU unless told otherwise: laws at 1e-4 need
`jax_default_matmul_precision="highest"`. On a tensor-parallel mesh, all-reduces stand inside loops
of traced counts: devices whose states differ by a bit could disagree on a count, and hang.

## When there is hardware

`make bench-accelerator` runs these in this order, under ten minutes, each beside its prediction
(Llama-7B's widths, 8 layers, v5e); then CUDA graphs of loops, of which nothing is predicted.
Without `XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE` a GPU waits for the host at every turn of
a loop of unknown length.

"""


def table(header: list[str], lines: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def page(found: dict[Any, Any], tried: dict[str, list[float]], cpu: dict[str, Any]) -> str:
    """Returns the page."""
    versions = f"jax {jax.__version__}, libtpu {version('libtpu')}"
    parts = [HEAD.format(versions=versions)]
    lines = []
    for chip, name in (key for key in found if len(key) == 2):
        known = found[chip, name]
        full = known["dense"]["1"]["ms"]
        micro = [f"{full / known['micro'][str(b)]['ms']:.2f}" for b in BUDGETS]
        auto = [f"{full / known[f'auto {b}'][str(b)]['ms']:.2f}" for b in BUDGETS]
        lines.append([chip, name, f"{full:.2f}", " / ".join(auto), " / ".join(micro)])
    header = ["chip", "model", "full depth, ms", "default (static prefix)", "micro-batches"]
    ideal = " / ".join(f"{1 / b:.2f}" for b in BUDGETS)
    parts.append(
        "\n## Scoring 16 x 512 tokens: predicted speed-up over full depth at budgets of "
        f".75 / .6 / .5 (ideal {ideal})\n\n" + table(header, lines)
    )
    lines = []
    for chip, name, rows in (key for key in found if len(key) == 3):
        known = found[chip, name, rows]
        plain = known["plain"]["1"]["ms"]
        ratios = [f"{plain / known['adaptive'][str(b)]['ms']:.2f}" for b in BUDGETS]
        lines.append([chip, name, str(rows), f"{plain:.2f}", " / ".join(ratios)])
    header = ["chip", "model", "rows", "plain step, ms", "adaptive, speed-up"]
    parts.append(
        "\n## Decoding: predicted step from 512 slots, and speed-up at the same budgets\n\n"
        "Rows stop independently of each other, and step together: with 32, some row needs every "
        "layer.\n\n" + table(header, lines)
    )
    if cpu:
        lines = [
            [
                name,
                f"{each['ms']:.2f}",
                "{:.2f} [{:.2f}, {:.2f}]".format(*each["before_over_after"]),
            ]
            for name, each in cpu.items()
        ]
        header = ["program", "ms", "time before / after [range]"]
        parts.append(
            "\n## On a CPU: measured, before and after\n\n"
            "The shipped model, before and after this page: `benchmarks/before_after.py`, "
            "processes in turns, on a shared machine.\n\n" + table(header, lines)
        )
    lines = [
        [f"{n}. {title}", f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}"]
        for n, (title, (a, b)) in enumerate(tried.items(), start=1)
    ]
    lines.append(
        [f"{len(lines) + 1}. adaptive decoding, 8 rows: loops in CUDA graphs", "-", "-", "-"]
    )
    header = ["experiment", "first, ms", "then, ms", "predicted ratio"]
    return "".join([*parts, TAIL, table(header, lines)])


def main() -> None:
    """Predicts what is not known yet, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="forget what is known")
    parser.add_argument("--chips", nargs="+", default=[*CHIPS])
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--kept", type=Path, default=Path("out/compiled"))
    parser.add_argument("--out", type=Path, default=Path("results/compiled.md"))
    options = parser.parse_args()
    cpu = options.kept / "cpu.json"
    for path in options.kept.glob("v*.json") if options.fresh else ():
        path.unlink()
    known, found = Predictions(options.kept), dict[Any, Any]()
    for name in options.models if "v5e" in options.chips else ():  # What is asked first.
        made = on_tpu(name, MODELS[name])
        dense = {"1": of_pass(made, None, np.zeros((ROWS, WIDTH)))}
        known.of(f"v5e-{name}-dense", "v5e", partial(made.dense, ROWS, WIDTH), dense)
        by_default(known, made, "v5e", BUDGET)
    for chip in options.chips:
        for name in options.models:
            made = on_tpu(name, MODELS[name], chip)
            found[chip, name] = scoring(known, made, chip)
            for rows in (1, 8, 32):
                found[chip, name, rows] = decoding(known, made, chip, rows)
    tried = experiments(known)
    measured = json.loads(cpu.read_text()) if cpu.exists() else {}
    options.out.write_text(page(found, tried, measured))
    options.out.with_suffix(".json").write_text(json.dumps({"experiments": tried}, indent=1) + "\n")


if __name__ == "__main__":
    main()
