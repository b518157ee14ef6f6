# SPDX-License-Identifier: Apache-2.0
"""Predicted time of programs compiled for TPUs, and their part of `results/accelerators.md`.

    make tpu-predict            # or: JAX_PLATFORMS=cpu .venv-tpu/bin/python benchmarks/compiled.py

Nothing runs on a device. Each program's numbers are kept in `results/compiled.json` as soon as they
are known, and not made again: `--fresh` forgets them, `--known` writes their tables alone.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator import BUDGET, EXPERIMENTS, split
from ahead import LOOPS_OF_HOST, NARROW, Programs, on_tpu
from hlo import Instruction, Program

from utio_jax.bench.methods import shares_for
from utio_jax.core.arrays import head_blocks
from utio_jax.core.platform import compiling_for, here
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.staircase.capacity import CapacityPrefix, choose_executor, fit_row_shares
from utio_jax.staircase.microbatches import MicroBatches

CHIPS = {  # Clocks from the peak: 197 and 918 TFLOP/s in bfloat16.
    "v5e": {"hertz": 1.5e9, "bandwidth": 819e9},
    "v6e": {"hertz": 1.75e9, "bandwidth": 1640e9},
}
MODELS = {"llama-7b": (0.75, 0.6, 0.5), "mistral-7b": (0.75, 0.6, 0.5), "shipped": (0.9, 0.75, 0.6)}
"""Budgets by model: the first exit of the shipped one costs more than half."""

SCORED = {"v5e": MODELS | dict.fromkeys(NARROW, (0.75,)), "v6e": MODELS}
"""The same of scoring: narrow models on one chip alone."""

LAYERS = 8
DECODED = (1, 8)
FITTED = {"llama-7b": 8, "mistral-7b": 32}
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
        with compiling_for("tpu", **made.choices):
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
    """What is predicted of programs, by name; each made once and kept in a file.

    Attributes:
      path: of the file.
      found: the file's contents.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.found = json.loads(path.read_text()) if path.exists() else {}
        if fresh:
            self.found["programs"] = {}

    @property
    def programs(self) -> dict[str, Any]:
        return self.found.setdefault("programs", {})

    def save(self) -> None:
        """Writes the file, with a line for each entry."""
        parts = []
        for key, value in self.found.items():
            lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
        self.path.write_text("{\n" + ",\n".join(parts) + "\n}\n")

    def of(self, name: str, chip: str, lower: Callable[[], Any], ways: dict[str, Any]) -> None:
        """Keeps a program's milliseconds, by the name of each way that its loops may turn.

        Beside them megabytes of its arguments and temporaries, and its structure.
        """
        if name not in self.programs:
            compiled = lower().compile()
            program = Program(compiled.as_text())
            memory = compiled.memory_analysis()
            made: dict[str, Any] = {
                "date": str(datetime.date.today()),
                "jax": jax.__version__,
                "libtpu": version("libtpu"),
                "arguments_mb": round(memory.argument_size_in_bytes / 1e6, 1),
                "temporaries_mb": round(memory.temp_size_in_bytes / 1e6, 1),
                "structure": program.structure,
                "ms": {},
                "kinds": {},
            }
            for way, (turns, shares) in ways.items():
                kinds: collections.Counter[str] = collections.Counter()
                spent = program.seconds(turns, shares, **CHIPS[chip])
                for (kind, *_), seconds in spent.items():
                    kinds[kind] += 1e3 * seconds
                made["ms"][way] = round(sum(kinds.values()), 3)
                made["kinds"][way] = {kind: round(ms, 3) for kind, ms in kinds.items()}
            self.programs[name] = made
            self.save()
            jax.clear_caches()
            print(name, made["ms"], flush=True)

    def ms(self, name: str, way: str) -> float | None:
        """Returns the milliseconds of a way, if they are known."""
        known = self.programs.get(name)
        return None if known is None else known["ms"].get(way)


def scoring(known: Predictions, made: Programs, chip: str, kinds: Sequence[str]) -> None:
    """Predicts scoring 16 x 512 tokens: dense, by the default executor, by micro-batches."""
    key, full = f"{chip} {made.name}", np.full((ROWS, WIDTH), made.decoder.config.num_layers)
    budgets = SCORED[chip][made.name]
    if "dense" in kinds:
        ways = {"1": of_pass(made, None, full)}
        known.of(f"{key} dense", chip, lambda: made.dense(ROWS, WIDTH), ways)
    for budget in (budget for budget in budgets if f"auto {budget}" in kinds):
        shares = capacities(made, budget)
        with compiling_for("tpu"):
            chosen = choose_executor("auto", made.policy(shares), WIDTH)
        ways = {"": of_pass(made, chosen, deal(made, budget, 0))}
        lower = partial(made.score, ROWS, WIDTH, shares=shares)
        known.of(f"{key} auto {budget}", chip, lower, ways)
    if "micro" in kinds:
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


def experiments(known: Predictions) -> None:
    """Predicts both ways of the experiments that a v5e would run first."""
    result = known.found.setdefault("experiments", {})
    for number, experiment in enumerate(EXPERIMENTS, start=1):
        spent = []
        for way, name in zip(experiment.ways, ("first", "then"), strict=True):
            executor, choices = split(way)
            made = on_tpu("llama-7b", LAYERS)
            made.choices = choices
            if experiment.kind == "decode":
                lower = partial(made.decode, Plain(), experiment.rows, 256)
                turns = of_step(made, 1.0, experiment.rows)
            else:
                shares = capacities(made, BUDGET)
                lower = partial(
                    made.score, experiment.rows, WIDTH, shares=shares, executor=executor
                )
                with compiling_for("tpu", **choices):
                    chosen = choose_executor(executor, made.policy(shares), WIDTH)
                turns = of_pass(made, chosen, deal(made, BUDGET, 0))
            known.of(f"experiment {number} {name}", "v5e", lower, {"": turns})
            spent.append(known.ms(f"experiment {number} {name}", ""))
        if None not in spent:
            result[experiment.title] = spent
    known.save()


def fitting(known: Predictions) -> None:
    """Compiles decoding with all 32 layers, which the compiler refuses where it does not fit."""
    for name, rows in FITTED.items():
        made = on_tpu(name, 32)
        ways = {"1": of_step(made, 1.0, rows)}
        known.of(f"v5e {name} 32 layers", "v5e", partial(made.decode, Plain(), rows), ways)


PAGE = Path("results/accelerators.md")
BEGIN = "<!-- predicted: written by benchmarks/compiled.py -->"
END = "<!-- end of predicted -->"


def table(header: list[str], lines: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def figure(value: float | None) -> str:
    """Returns a number with two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Returns a quotient, if both are known."""
    return None if one is None or other is None else one / other


def of_scoring(known: Predictions) -> str:
    """Returns the table of passes over 16 x 512 tokens."""
    lines = []
    for chip in CHIPS:
        for name, budgets in SCORED[chip].items():
            full = known.ms(f"{chip} {name} dense", "1")
            auto = [ratio(full, known.ms(f"{chip} {name} auto {b}", "")) for b in budgets]
            micro = [ratio(full, known.ms(f"{chip} {name} micro", str(b))) for b in budgets]
            chosen = auto if routes(name) else [1.0] * len(budgets)
            cells = [
                " / ".join(map(figure, cells_of)) for cells_of in (budgets, chosen, auto, micro)
            ]
            if full is not None:
                lines.append([chip, name, figure(full), *cells])
    header = ["chip", "model", "full depth, ms", "budgets", "default", "static prefix"]
    return (
        "\n### Scoring 16 x 512 tokens: predicted speed-up over full depth\n\n"
        + table([*header, "micro-batches"], lines)
        + "\nIdeal is 1 over the budget. The default is what `score_documents` and commands do: a\n"
        "static prefix, and full depth where a state is narrower than `Platform.least_routed`.\n"
    )


def routes(name: str) -> bool:
    """Returns whether a model is wide enough to be routed on accelerators by default."""
    with compiling_for("tpu"):
        return (
            Programs(name=name, layers=LAYERS, sharding=None).decoder.config.embed_dim
            >= here().least_routed
        )


def of_decoding(known: Predictions) -> str:
    """Returns the table of steps."""
    lines = []
    for chip in CHIPS:
        for name, budgets in MODELS.items():
            for rows in DECODED:
                plain = known.ms(f"{chip} {name} {rows} plain", "1")
                steps = [known.ms(f"{chip} {name} {rows} adaptive", str(b)) for b in budgets]
                ratios = " / ".join(figure(ratio(plain, ms)) for ms in steps)
                asked = " / ".join(map(figure, budgets))
                if plain is None:
                    continue
                lines.append([chip, name, str(rows), figure(plain), asked, ratios])
    if not lines:
        return ""
    header = ["chip", "model", "rows", "plain step, ms", "budgets", "adaptive, speed-up"]
    return (
        "\n### Decoding: predicted step at 512 slots, and speed-up\n\n"
        + table(header, lines)
        + "\nRows stop independently of each other, and step together: the more there are, the "
        "likelier some row\nneeds every layer.\n"
    )


def of_memory(known: Predictions) -> str:
    """Returns the table of what fits one chip."""
    lines = []
    for name, rows in FITTED.items():
        made = known.programs.get(f"v5e {name} 32 layers")
        sizes = [made and made[key] for key in ("arguments_mb", "temporaries_mb")]
        lines.append([name, str(rows), *("-" if mb is None else f"{mb:.0f}" for mb in sizes)])
    return (
        "\n### What fits: decoding with 32 layers and 512 slots, v5e\n\n"
        + table(["model", "rows", "arguments, MB", "temporaries, MB"], lines)
        + "\nA v5e has 15.75 GiB, which are 16,911 MB. Before heads stood apart from products "
        "(`heads_apart`), the\ncompiler asked for 17.55 and 16.99 GiB, and refused both.\n"
    )


def of_gpu() -> str:
    """Returns the table of loops at which an H100 would wait."""
    lines = [[name, *map(str, counts)] for name, counts in LOOPS_OF_HOST.items()]
    return (
        "\n### What a GPU waits for\n\nLlama-7B's widths, compiled for an H100 and pinned by "
        "`make gpu-compile`: loops at each of whose\nturns the host decides, as XLA is, and with "
        "`--xla_gpu_enable_command_buffer=+WHILE`. No program\nhas a custom call, a callback or a "
        "transfer.\n\n" + table(["program", "loops of the host", "with graphs of loops"], lines)
    )


def tables(known: Predictions) -> str:
    """Returns the part of the page between its two comments."""
    every = known.programs.values()
    dates = sorted({made["date"] for made in every})
    versions = sorted({f"jax {made['jax']}, libtpu {made['libtpu']}" for made in every})
    body = [of_scoring(known), of_decoding(known), of_memory(known), of_gpu()]
    scored = [f"{chip} {name} dense" for chip in CHIPS for name in SCORED[chip]]
    steps = [f"{c} {name} {rows} plain" for c in CHIPS for name in MODELS for rows in DECODED]
    missing = [name for name in (*scored, *steps) if name not in known.programs]
    how = f"`make tpu-predict`, {', '.join(dates)}; {'; '.join(versions)}."
    lines = [how, "A dash: not compiled."]
    if missing:
        lines.append(f"Not compiled either: {', '.join(n.rsplit(' ', 1)[0] for n in missing)}.")
    for note in sorted({made["note"] for made in every if "note" in made}):
        of = [name for name, made in known.programs.items() if made.get("note") == note]
        lines.append(f"{note}: {', '.join(of)}.")
    return textwrap.fill(" ".join(lines), 120) + "\n" + "".join(body)


def written(page: str, part: str) -> str:
    """Returns the page with the part between its two comments replaced.

    Raises:
      ValueError: the page lacks the comments.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"Wanted one pair of comments {BEGIN!r}, {END!r} in {PAGE}. Got none.")
    before, after = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{part.strip()}\n\n{END}{after.split(END)[1]}"


def main() -> None:
    """Predicts what is not known yet, what is asked first at first, and writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fresh", action="store_true", help="forget what is known")
    how.add_argument("--known", action="store_true", help="compile nothing")
    options = parser.parse_args()
    known = Predictions(PAGE.with_name("compiled.json"), fresh=options.fresh)
    if not options.known:
        predict(known)
    PAGE.write_text(written(PAGE.read_text(), tables(known)))


def predict(known: Predictions) -> None:
    """Predicts all programs of the page."""
    for chip in CHIPS:
        for kinds in (("dense", f"auto {BUDGET}"), None):
            for name, budgets in SCORED[chip].items():
                every = ("dense", *(f"auto {b}" for b in budgets), "micro")
                expected = every[:2] if name in NARROW else kinds or every
                scoring(known, on_tpu(name, LAYERS, chip), chip, expected)
        if chip == "v5e":
            experiments(known)
            fitting(known)
        for name in MODELS:
            for rows in DECODED:
                decoding(known, on_tpu(name, LAYERS, chip), chip, rows)


if __name__ == "__main__":
    main()
