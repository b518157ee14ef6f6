# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU or TPU: what each choice of the platform does, and speed-up over full depth.

    make bench-accelerator      # or: .venv/bin/python benchmarks/accelerator.py [--dry-run]

Pairs of programs in turns, on Llama-7B's widths in bfloat16 with random weights and random depths.
Six differ in one choice of `utio_jax.core.platform` or in the executor, at 8 layers; then all 32
layers against the fastest program at full depth: scoring, decoding, and both prompts and decoding
with keys and values shared above layer 16. Programs are compiled side by side first; under ten
minutes. `--dry-run` shows that it runs, on any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ahead import Programs

from utio_jax.bench.methods import shares_for
from utio_jax.bench.timing import time_programs
from utio_jax.core.layer import split_layers
from utio_jax.core.platform import compiling_for
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import DecodeContext, Plain
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.prefill import fastest_prefill
from utio_jax.decoding.state import eos_array
from utio_jax.policies.depth import Thresholded, random_depths
from utio_jax.staircase.capacity import fit_row_shares
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import full_depth, score, score_dense

ROOT = Path(__file__).parents[1]
GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Two ways of one program, of which the second is expected to be faster.

    Attributes:
      title: what is tried.
      kind: `"decode"`, `"score"` or `"prompt"`.
      rows: of the batch.
      model: `"part"`, `"whole"`, or `"shared"`.
      first: choices of the first way, see `Platform`; `executor` apart.
      second: of the other.
    """

    title: str
    kind: str
    rows: int
    model: str = "part"
    first: dict[str, Any]
    second: dict[str, Any]

    @property
    def ways(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.first, self.second


_SMALL = {"executor": "micro", "min_bucket": 32, "projection_bucket": 32}
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
OF_GPUS = (
    Experiment(
        title="decoding, 8 rows: layers in the stack, then a copy of each apart",
        kind="decode",
        rows=8,
        first={"stack_in_place": True},
        second={"stack_in_place": False},
    ),
    Experiment(
        title="adaptive decoding, 8 rows: loops in CUDA graphs",
        kind="decode",
        rows=8,
        first={"mode": "adaptive"},
        second={},
    ),
)
"""The last one's second way is a flag of a process of its own."""

AGAINST_FULL_DEPTH = (
    *(
        Experiment(
            title=f"scoring 16 x 512 tokens at {budget:g}: full depth, then by depth",
            kind="score",
            rows=16,
            model="whole",
            first={"executor": "dense"},
            second={"budget": budget},
        )
        for budget in (0.75, 0.6, 0.5)
    ),
    *(
        Experiment(
            title=f"decoding {rows} rows, {model}: plain, then adaptive at {budget:g}",
            kind="decode",
            rows=rows,
            model=model,
            first={},
            second={"mode": "adaptive", "budget": budget},
        )
        for model, budget in (("whole", 0.6), ("shared", 0.75))
        for rows in (1, 8, 32)
    ),
    *(
        Experiment(
            title=f"{rows} prompts of 448 tokens, shared: in full, then to layer 16 alone",
            kind="prompt",
            rows=rows,
            model="shared",
            first={"mode": "full prompts"},
            second={},
        )
        for rows in (1, 8)
    ),
)
"""The same question as everywhere in this repository: what is gained over the whole model."""

BUDGET = 0.6
_OURS = ("executor", "budget", "mode")


def split(way: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a way's executor, and its choices of the platform."""
    choices = {key: value for key, value in way.items() if key not in _OURS}
    return (MicroBatches() if way.get("executor") == "micro" else "auto"), choices


class Model:
    """Random weights on this machine's accelerator, and depths that cost a budget.

    `shared` is how many layers keep keys and values of their own.
    """

    def __init__(self, name: str, layers: int, width: int, *, shared: int | None = None) -> None:
        made = Programs(name=name, layers=layers, sharding=None, platform=None, shared=shared)
        self.decoder, self.width = made.decoder, width
        self.params = jax.jit(lambda key: self.decoder.init(key, jnp.bfloat16))(jax.random.key(0))

    def policy(self, budget: float) -> Thresholded:
        """Returns random depths that cost a share of full depth."""
        exits = self.decoder.config.exits
        shares = np.asarray(shares_for(self.decoder, self.params, budget, width=self.width))
        drawn = np.random.default_rng(1).choice(exits, (128, self.width), p=shares / shares.sum())
        policy = random_depths(jnp.asarray(shares), key=jax.random.key(0), depths=exits)
        assert isinstance(policy, Thresholded)
        fitted = fit_row_shares(drawn, depths=exits)
        return dataclasses.replace(policy, row_shares=fitted)

    def ids(self, rows: int, width: int) -> np.ndarray:
        vocabulary = self.decoder.config.vocab_size
        return np.random.default_rng(0).integers(1, vocabulary, (rows, width)).astype(np.int32)

    def lower(self, experiment: Experiment, way: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """Returns one way of an experiment, lowered, and what it is called with."""
        make = {"score": self._scoring, "decode": self._decoding, "prompt": self._prompt}
        with compiling_for(**split(way)[1]):
            program, arguments = make[experiment.kind](experiment.rows, way)
            return jax.jit(program).lower(*arguments), arguments

    def _scoring(self, rows: int, way: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
        """A pass over rows."""
        ids, lengths = self.ids(rows, self.width), np.full(rows, self.width, np.int32)
        if way.get("executor") == "dense":
            dense = lambda params, *arrays: score_dense(self.decoder, params, *arrays)  # noqa: E731
            return dense, (self.params, ids, lengths)
        executor, _ = split(way)

        def program(params: Any, ids: Any, lengths: Any, policy: Any) -> Any:
            result = score(self.decoder, params, ids, lengths, policy, executor=executor)
            return result.log_likelihood

        return program, (self.params, ids, lengths, self.policy(way.get("budget", BUDGET)))

    def _context(self, rows: int, way: dict[str, Any]) -> DecodeContext:
        mode: Any = Plain()
        if way.get("mode") == "adaptive":
            mode = Adaptive(policy=self.policy(way.get("budget", BUDGET)))
        if way.get("mode") == "full prompts":  # A token under "drop" is seen as deep as it ran.
            mode = Adaptive(policy=full_depth(self.decoder), kv="drop")
        return DecodeContext(
            decoder=self.decoder,
            params=self.params,
            mode=mode,
            sampling=None,
            eos_ids=jnp.asarray(eos_array([()] * rows)),
            layers=split_layers(self.decoder, self.params),
        )

    def _decoding(self, rows: int, way: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
        """32 steps behind prompts of 64 tokens, with a copy of the cache before."""
        context, limits = self._context(rows, way), np.full(rows, 200, np.int32)
        arrays = self.ids(rows, 64), np.full(rows, 64, np.int32), limits, np.zeros(rows, np.uint32)
        state = begin(context, *arrays, slots=256)

        def program(context: DecodeContext, state: Any) -> Any:
            run = inspect.unwrap(advance)  # Traced anew, with these choices.
            return run(context, state, jnp.int32(33), widths=(256,)).token_ids

        return program, (context, state)

    def _prompt(self, rows: int, way: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
        """Reads prompts, to the first token behind them."""
        width = min(448, self.width - 8)
        ends, limits = np.full(rows, width, np.int32), np.full(rows, 8, np.int32)
        arrays = self.ids(rows, width), ends, limits, np.zeros(rows, np.uint32)

        kv = "drop" if "mode" in way else "propagate"
        prefill = fastest_prefill(self.decoder, rows, width, kv=kv, filled=1.0)

        def program(context: DecodeContext, prefill: Any, *arrays: Any) -> Any:
            return inspect.unwrap(begin)(context, *arrays, slots=width + 64, prefill=prefill)

        return program, (self._context(rows, way), prefill, *arrays)


def report(title: str, first: float, second: float) -> dict[str, Any]:
    """Prints an experiment's line, and returns it."""
    print(f"{title}: {first:.2f} -> {second:.2f} ms, {first / second:.2f}", flush=True)
    return {"title": title, "ms": [first, second]}


def run_pairs(
    models: dict[str, Model], experiments: Sequence[Experiment], rounds: int
) -> list[dict[str, Any]]:
    """Compiles both ways of all experiments side by side, then times and reports each pair."""
    lowered = [[models[e.model].lower(e, way) for way in e.ways] for e in experiments]
    with ThreadPoolExecutor() as pool:
        compiled = [[pool.submit(program.compile) for program, _ in pair] for pair in lowered]
    lines = []
    for experiment, programs, pair in zip(experiments, compiled, lowered, strict=True):
        ways = {
            str(n): functools.partial(program.result(), *arguments)
            for n, (program, (_, arguments)) in enumerate(zip(programs, pair, strict=True))
        }
        timed, steps = time_programs(ways, rounds=rounds), 32 if experiment.kind == "decode" else 1
        first, second = (1e3 * timed[n].median / steps for n in ways)
        lines.append(report(experiment.title, first, second))
    return lines


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
    models = {"part": Model("tiny", 4, 64) if tiny else Model("llama-7b", 8, 512)}
    apart, adaptive = OF_GPUS
    if options.only_adaptive:
        lowered, arguments = models["part"].lower(adaptive, adaptive.first)
        run = functools.partial(lowered.compile(), *arguments)
        print(1e3 * time_programs({"": run}, rounds=rounds)[""].median)
        return
    lines = run_pairs(models, EXPERIMENTS, rounds)
    if jax.default_backend() == "gpu" or tiny:
        lines += run_pairs(models, [apart], rounds)
        lowered, arguments = models["part"].lower(adaptive, adaptive.first)
        run = functools.partial(lowered.compile(), *arguments)
        without = 1e3 * time_programs({"": run}, rounds=rounds)[""].median / 32
        lines.append(report(adaptive.title, without, graphs(options) / 32))
    else:
        print("layers apart, loops in CUDA graphs: of GPUs alone")
    models.clear()
    models["whole"] = Model("tiny", 4, 64) if tiny else Model("llama-7b", 32, 512)
    lines += run_pairs(models, [e for e in AGAINST_FULL_DEPTH if e.model == "whole"], rounds)
    models.clear()
    models["shared"] = (
        Model("tiny", 4, 64, shared=2) if tiny else Model("llama-7b", 32, 512, shared=16)
    )
    lines += run_pairs(models, [e for e in AGAINST_FULL_DEPTH if e.model == "shared"], rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "lines": lines}
    options.out.write_text(json.dumps(result, indent=1))
    print(f"{options.out}, after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
