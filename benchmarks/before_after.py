# SPDX-License-Identifier: Apache-2.0
"""Two checkouts of this repository against each other on this machine, in turns.

    git worktree add ../before 8b4c4c0  # v0.3-before-lean
    python benchmarks/before_after.py ../before [--turns 3] [--out out/before_after.json]

Each turn runs a process of either checkout, which times the same model's programs, and in the
first turn its demo; a figure is the median over turns of the ratio of their times. The model is the
one that came with the older checkout, whatever either of them comes with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]

TIMED = """
import argparse, json, statistics, sys, time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.models import load
from utio_jax.staircase.score import score, score_dense

model = load(sys.argv[1])
decoder, params = model.decoder, model.params
policies = {b: model.calibration.policy("learned", b) for b in (0.5, 0.6, 0.75)}
dense, run = jax.jit(score_dense, static_argnums=0), jax.jit(score, static_argnums=0)
(tokens,) = model.encode([open(argparse.__file__).read()])
programs = {}
for rows in (1, 16):
    ids = jnp.asarray(np.resize(tokens, (rows, 512)).astype(np.int32))
    args = decoder, params, ids, jnp.full(rows, 512, jnp.int32)
    programs[f"score {rows} x 512, full"] = partial(dense, *args)
    for budget, policy in policies.items():
        programs[f"score {rows} x 512, {budget:g}"] = partial(run, *args, policy)
modes = {"plain": Plain(), "adaptive .6": Adaptive(policy=policies[0.6])}
modes["lossless"] = Lossless(exit=6)
for rows in (1, 8):
    prompts = np.resize(tokens, (rows, 64)).tolist()
    for name, mode in modes.items():
        write = partial(generate, decoder, params, prompts, mode=mode, max_new_tokens=56)
        programs[f"decode {rows} rows, {name}"] = lambda write=write: write().token_ids
for program in programs.values():
    jax.block_until_ready(program())
spent = {name: [] for name in programs}
for _ in range(int(sys.argv[2])):
    for name, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program())
        spent[name].append(time.perf_counter() - start)
print("TIMED" + json.dumps({name: statistics.median(each) for name, each in spent.items()}))
"""

DEMO = ["-m", "utio_jax", "demo", "--batches", "1", "--rounds", "3", "--out", "out/before-after"]


def seconds(tree: Path, model: Path, rounds: int, *, demo: bool) -> dict[str, float]:
    """Returns median seconds by program, and those of the demo, of processes of a checkout."""

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
            cwd=tree,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    lines = run("-c", TIMED, str(model), str(rounds)).splitlines()
    found = json.loads(next(x for x in lines if x.startswith("TIMED")).removeprefix("TIMED"))
    start = time.perf_counter()
    if demo:
        run(*DEMO, "--model", str(model))
        found["the demo, whole, once"] = time.perf_counter() - start
    return found


def commit(tree: Path) -> str:
    """Returns what a checkout is at."""
    command = ["git", "-C", str(tree), "describe", "--tags", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Times both in turns, prints a table, and keeps it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--model", type=Path, help="default: the folder stdlib_16 of before")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "out/before_after.json")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": ROOT}
    model = (options.model or trees["before"] / "models" / "stdlib_16").resolve()
    turns: list[dict[str, Any]] = []
    for turn in range(options.turns):
        order = [*trees] if turn % 2 == 0 else [*trees][::-1]
        turns.append(
            {name: seconds(trees[name], model, options.rounds, demo=not turn) for name in order}
        )
    commits = {name: commit(tree) for name, tree in trees.items()}
    found: dict[str, Any] = {
        "how": f"`benchmarks/before_after.py`, {datetime.date.today()}: {commits['before']} "
        f"against {commits['after']}, {options.turns} processes of each in turns, jax "
        f"{version('jax')} on {os.cpu_count()} cores, the model `{model.name}` of the former."
    }
    for name in turns[0]["before"]:
        before, after = (
            np.asarray([turn[way][name] for turn in turns if name in turn[way]]) for way in trees
        )
        ratio = np.quantile(before / after, [0.5, 0, 1]).round(3).tolist()
        found[name] = {"ms": round(1e3 * float(np.median(after)), 3), "before_over_after": ratio}
        print(f"{name:32} {found[name]['ms']:9.2f} ms ", "{:.2f} [{:.2f}, {:.2f}]".format(*ratio))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
