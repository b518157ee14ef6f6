# SPDX-License-Identifier: Apache-2.0
"""Two checkouts of this repository against each other on this machine, in turns.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before [--turns 5] [--out out/compiled/cpu.json]

Each turn runs a process of either checkout, which times the shipped model's programs; a figure is
the median over turns of the ratio of their times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]

TIMED = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp
from utio_jax.bench.timing import time_programs
from utio_jax.cli.bench import subject_named
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.staircase.score import score, score_dense

subject = subject_named("shipped", dtype="float32", cache_tokens=4096)
decoder, params = subject.decoder, subject.params
policies = {b: subject.calibration.policy("learned", b) for b in (0.5, 0.6, 0.75)}
dense = jax.jit(score_dense, static_argnums=0)
run = jax.jit(score, static_argnums=0)
programs = {}
for rows in (1, 16):
    batch = subject.batch(rows, 512)
    ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
    programs[f"score {rows} x 512, full"] = lambda i=ids, n=lengths: dense(decoder, params, i, n)
    for budget, policy in policies.items():
        programs[f"score {rows} x 512, {budget:g}"] = (
            lambda i=ids, n=lengths, p=policy: run(decoder, params, i, n, p)
        )
modes = {"plain": Plain(), "adaptive .6": Adaptive(policy=policies[0.6])}
modes["lossless"] = Lossless(exit=6)
for rows in (1, 8):
    prompts = subject.prompts(rows, 64)
    for name, mode in modes.items():
        write = partial(generate, decoder, params, prompts, mode=mode, max_new_tokens=56)
        programs[f"decode {rows} rows, {name}"] = lambda write=write: write().token_ids
timed = time_programs(programs, rounds=int(sys.argv[1]))
print("TIMED" + json.dumps({name: each.median for name, each in timed.items()}))
"""


def seconds(tree: Path, rounds: int) -> dict[str, float]:
    """Returns median seconds by program, of one process of a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED, str(rounds)],
        env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    line = next(each for each in done.stdout.splitlines() if each.startswith("TIMED"))
    return json.loads(line.removeprefix("TIMED"))


def main() -> None:
    """Times both in turns, prints a table, and keeps it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "out/compiled/cpu.json")
    options = parser.parse_args()
    turns: list[dict[str, Any]] = []
    for turn in range(options.turns):
        trees = {"before": options.before.resolve(), "after": ROOT}
        order = [*trees] if turn % 2 == 0 else [*trees][::-1]
        turns.append({name: seconds(trees[name], options.rounds) for name in order})
    found = {}
    for name in turns[0]["before"]:
        before, after = (np.asarray([turn[way][name] for turn in turns]) for way in trees)
        ratio = np.quantile(before / after, [0.5, 0, 1]).round(3).tolist()
        found[name] = {"ms": round(1e3 * float(np.median(after)), 3), "before_over_after": ratio}
        print(
            f"{name:32} {found[name]['ms']:9.2f} ms ",
            "{:.2f} [{:.2f}, {:.2f}]".format(*ratio),
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
