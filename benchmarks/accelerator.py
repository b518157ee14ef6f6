# SPDX-License-Identifier: Apache-2.0
"""The first experiments on a GPU or TPU, each beside the number that was predicted for it.

    make bench-accelerator      # or: .venv/bin/python benchmarks/accelerator.py [--dry-run]

Five pairs of programs that differ in one choice of `utio_jax.core.platform` or in the executor, in
turns, on Llama-7B's widths with 8 layers and random weights; under ten minutes. Predictions are
those of `benchmarks/compiled.py` for a TPU v5e. `--dry-run` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ahead import Programs

from utio_jax.bench.subjects import shares_for
from utio_jax.bench.timing import time_programs
from utio_jax.core.platform import compiling_for
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain, Setting
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.state import check_stops
from utio_jax.policies.depth import Thresholded, random_depths
from utio_jax.staircase.capacity import fit_row_shares
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import score

ROOT = Path(__file__).parents[1]
PREDICTED = ROOT / "results" / "compiled.json"
GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Two ways of one program, of which the second is expected to be faster.

    Attributes:
      title: what is tried.
      kind: `"decode"` or `"score"`.
      rows: of the batch.
      first: choices of the first way, see `Platform`; `executor` apart.
      second: of the other.
    """

    title: str
    kind: str
    rows: int
    first: dict[str, Any]
    second: dict[str, Any]

    @property
    def ways(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.first, self.second


_SMALL = {"executor": "micro", "min_bucket": 32, "rest": 32}
EXPERIMENTS = (
    Experiment(
        title="decoding, 1 row: its products padded to 2",
        kind="decode",
        rows=1,
        first={"least_rows": 1},
        second={"least_rows": 2},
    ),
    Experiment(
        title="decoding, 8 rows: heads apart from products",
        kind="decode",
        rows=8,
        first={"heads_apart": False},
        second={"heads_apart": True},
    ),
    Experiment(
        title="scoring at .6: rests of 32 slots, then of 512 and 128",
        kind="score",
        rows=16,
        first=_SMALL,
        second={"executor": "micro"},
    ),
    Experiment(
        title="scoring at .6: micro-batches, then a static prefix",
        kind="score",
        rows=16,
        first={"executor": "micro"},
        second={"executor": "auto"},
    ),
)
"""In this order; the fifth, CUDA graphs of loops, is a flag of a process of its own."""

BUDGET = 0.6


def split(way: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a way's executor, and its other choices."""
    choices = {key: value for key, value in way.items() if key != "executor"}
    return (MicroBatches() if way.get("executor") == "micro" else "auto"), choices


class Model:
    """Random weights on this machine's accelerator, and depths that cost the budget."""

    def __init__(self, name: str, layers: int, width: int) -> None:
        made = Programs(name=name, layers=layers, sharding=None, platform=None)
        self.decoder, self.width = made.decoder, width
        self.params = jax.jit(lambda key: self.decoder.init(key, jnp.bfloat16))(jax.random.key(0))
        exits = self.decoder.config.exits
        shares = np.asarray(shares_for(self.decoder, self.params, BUDGET, width=width))
        drawn = np.random.default_rng(1).choice(exits, (128, width), p=shares / shares.sum())
        policy = random_depths(shares, key=jax.random.key(0), depths=exits)
        assert isinstance(policy, Thresholded)
        fitted = fit_row_shares(drawn, depths=exits)
        self.policy = dataclasses.replace(policy, row_shares=fitted)

    def ids(self, rows: int, width: int) -> np.ndarray:
        vocabulary = self.decoder.config.vocab_size
        return np.random.default_rng(0).integers(1, vocabulary, (rows, width)).astype(np.int32)

    def scoring(self, rows: int, way: dict[str, Any]) -> Callable[[], Any]:
        """Returns a pass over rows."""
        executor, choices = split(way)
        ids, lengths = self.ids(rows, self.width), np.full(rows, self.width, np.int32)

        def program(params: Any, ids: Any, lengths: Any, policy: Any) -> Any:
            return score(self.decoder, params, ids, lengths, policy, executor=executor)

        with compiling_for(**choices):
            run = jax.jit(program).lower(self.params, ids, lengths, self.policy).compile()
        return lambda: run(self.params, ids, lengths, self.policy).log_likelihood

    def decoding(self, rows: int, way: dict[str, Any], mode: Any = Plain()) -> Callable[[], Any]:
        """Returns 32 steps behind prompts of 64 tokens, with a copy of the cache before."""
        _, choices = split(way)
        stops = check_stops((), (), rows=rows, vocab_size=self.decoder.config.vocab_size)
        limits = np.full(rows, 200, np.int32)
        ends = np.full(rows, 64, np.int32)
        setting = Setting(
            decoder=self.decoder,
            params=self.params,
            mode=mode,
            sampling=None,
            stops=jax.tree.map(jnp.asarray, stops),
        )
        arrays = self.ids(rows, 64), ends, limits, np.zeros(rows, np.uint32)
        state = begin(setting, *arrays, slots=256)

        def program(setting: Setting, state: Any) -> Any:
            run = advance.__wrapped__  # Traced anew, with these choices.
            return run(setting, state, jnp.int32(33), widths=(256,)).token_ids

        with compiling_for(**choices):
            run = jax.jit(program).lower(setting, state).compile()
        return lambda: run(setting, state)


def predicted() -> dict[str, Any]:
    """Returns milliseconds by the title of an experiment, for a v5e."""
    return json.loads(PREDICTED.read_text())["experiments"] if PREDICTED.exists() else {}


def report(title: str, first: float, second: float) -> dict[str, Any]:
    """Prints an experiment's line, and returns it."""
    known = predicted().get(title)
    said = f"predicted for v5e {known[0] / known[1]:.2f}" if known else "not predicted"
    print(f"{title}: {first:.2f} -> {second:.2f} ms, {first / second:.2f} ({said})", flush=True)
    return {"title": title, "ms": [first, second], "predicted_ms": known}


def graphs(options: argparse.Namespace) -> float:
    """Returns milliseconds of 32 adaptive steps of 8 rows in a process of its own, with graphs."""
    command = [sys.executable, __file__, "--only-adaptive", *(["--dry-run"] * options.dry_run)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS}"
    done = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": flags}, check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Runs the experiments, and keeps their times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on any machine")
    parser.add_argument("--only-adaptive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-accelerator.json")
    options = parser.parse_args()
    if jax.default_backend() == "cpu" and not options.dry_run:
        sys.exit("Wanted a GPU or TPU. Got a CPU. --dry-run shows on tiny sizes that it runs.")
    tiny, rounds, begun = options.dry_run, 2 if options.dry_run else 7, time.perf_counter()
    model = Model("tiny", 4, 64) if tiny else Model("llama-7b", 8, 512)
    adaptive = Adaptive(policy=model.policy)
    if options.only_adaptive:
        timed = time_programs({"": model.decoding(8, {}, adaptive)}, rounds=rounds)
        print(1e3 * timed[""].median)
        return
    lines = []
    for each in EXPERIMENTS:
        make = model.decoding if each.kind == "decode" else model.scoring
        pair = {str(n): make(each.rows, way) for n, way in enumerate(each.ways)}
        timed = time_programs(pair, rounds=rounds)
        steps = 32 if each.kind == "decode" else 1
        first, second = (1e3 * timed[n].median / steps for n in pair)
        lines.append(report(each.title, first, second))
    if jax.default_backend() == "gpu" or tiny:
        without = time_programs({"": model.decoding(8, {}, adaptive)}, rounds=rounds)[""].median
        title = "adaptive decoding, 8 rows: loops in CUDA graphs"
        lines.append(report(title, 1e3 * without / 32, graphs(options) / 32))
    else:
        print("adaptive decoding, 8 rows: loops in CUDA graphs: of GPUs alone")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "lines": lines}
    options.out.write_text(json.dumps(found, indent=1))
    print(f"{options.out}, after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
