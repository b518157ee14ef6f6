# SPDX-License-Identifier: Apache-2.0
"""`utio-jax bench`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from utio_jax.cli.bench_subjects import subject_named
from utio_jax.cli.options import check_out, progress_lines

if TYPE_CHECKING:
    from utio_jax.bench.suite import Suite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measures speed and cost on this machine, next to full depth and to controls.

    Writes results.json, a row at a time.

    Attributes:
      suite: quick takes under two minutes on two idle cores; cpu measures all parts; accelerator
        scoring and decoding at sizes for a GPU or TPU, in under ten minutes.
      parts: of the suite; all by default.
      models: shipped, a model folder, or llama-7b, llama-13b, mistral-7b, llama-70b: real widths
        with random weights, and as many layers as fit, for speed only.
      batch_sizes: rows.
      prompt_lengths: tokens per row, of scoring and of prompts.
      output_lengths: new tokens per prompt.
      policies: NAME@BUDGET each; controls at the same FLOPs join them by themselves.
      dtype: of the parameters; by default float32 on CPUs, bfloat16 elsewhere.
      rounds: timed turns of each program, instead of the suite's.
      out: folder of the results, which are replaced.
      resume: keep what is there, and measure the rest.
      dry_run: the same code at tiny sizes: shows that it runs, not how fast.
    """

    suite: Literal["quick", "cpu", "accelerator"] = "quick"
    parts: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    output_lengths: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    rounds: int | None = None
    out: Path = Path("out/bench")
    resume: bool = False
    dry_run: bool = False

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        import jax
        from rich.console import Console

        from utio_jax.bench.environment import describe
        from utio_jax.bench.results import Recorder
        from utio_jax.bench.suite import groups_of, run_groups, summarise
        from utio_jax.bench.terminal import bench_table

        started = time.perf_counter()
        platform = jax.default_backend()
        if self.suite == "accelerator" and platform == "cpu" and not self.dry_run:
            raise ValueError(
                "Wanted a GPU or TPU for --suite accelerator. Got a CPU. --dry-run shows on tiny "
                "sizes that it runs; --suite cpu measures this machine."
            )
        suite = self.sized()
        check_out(self.out)
        dtype = self.dtype or ("float32" if platform == "cpu" else "bfloat16")
        say = progress_lines(started)
        file = self.out / "results.json"
        recorder = Recorder(
            file,
            suite=self.suite,
            settings={
                name: list(value) if isinstance(value, tuple) else value
                for name, value in dataclasses.asdict(self).items()
                if name not in ("out", "resume")
            },
            environment=describe(dtype=dtype),
            resume=self.resume,
        )
        note = "dry run at tiny sizes: no figure of speed" if self.dry_run else ""
        complete = True
        try:
            for name in suite.models:
                subject = subject_named(name, dtype=dtype, cache_tokens=suite.cache_tokens)
                complete &= run_groups(
                    groups_of(suite, subject),
                    recorder,
                    started=started,
                    say=say,
                    note=note,
                    minutes=suite.minutes,
                )
        except KeyboardInterrupt:
            say(f"interrupted: --resume goes on from {file}")
            complete = False
        results = recorder.close(complete=complete, seconds=time.perf_counter() - started)
        Console(stderr=True, width=118).print(bench_table(results))
        print(f"Results: {file}", file=sys.stderr)
        return {
            "command": "bench",
            "suite": self.suite,
            "complete": complete,
            "seconds": results["seconds"],
            "out": str(file),
            "environment": results["environment"],
            **summarise(results),
        }

    def sized(self) -> Suite:
        """Returns the suite with the options that were given.

        Raises:
          ValueError: a part that the suite does not have, or a size below 1.
        """
        from utio_jax.bench.subjects import label_of
        from utio_jax.bench.suite import SUITES, tiny

        suite = SUITES[self.suite]
        if self.dry_run:
            suite = tiny(suite)
        unknown = [part for part in self.parts if part not in suite.parts]
        if unknown:
            raise ValueError(
                f"Wanted --parts of suite {self.suite}: {', '.join(suite.parts)}. "
                f"Got {', '.join(unknown)}."
            )
        numbers = (*self.batch_sizes, *self.prompt_lengths, *self.output_lengths)
        if min((*numbers, self.rounds or 1)) < 1:
            raise ValueError(f"Wanted sizes and rounds of at least 1. Got {min(numbers)}.")
        chosen: dict[str, Any] = {}
        if self.batch_sizes or self.prompt_lengths:
            batches = self.batch_sizes or tuple(dict.fromkeys(b for b, _ in suite.score))
            lengths = self.prompt_lengths or tuple(dict.fromkeys(n for _, n in suite.score))
            chosen["score"] = tuple((b, n) for b in batches for n in lengths)
        if numbers:
            decode = suite.decode
            batches = self.batch_sizes or tuple(dict.fromkeys(b for b, _, _ in decode))
            lengths = self.prompt_lengths or tuple(dict.fromkeys(n for _, n, _ in decode))
            outputs = self.output_lengths or tuple(dict.fromkeys(n for _, _, n in decode))
            chosen["decode"] = tuple((b, n, o) for b in batches for n in lengths for o in outputs)
        return dataclasses.replace(
            suite,
            parts=self.parts or suite.parts,
            models=self.models or suite.models,
            policies=tuple(label_of(name) for name in self.policies or suite.policies),
            rounds=self.rounds or suite.rounds,
            **chosen,
        )
