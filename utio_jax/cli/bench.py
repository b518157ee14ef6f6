# SPDX-License-Identifier: Apache-2.0
"""`utio-jax bench`."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from utio_jax.bench.results import describe, read_results
from utio_jax.bench.subjects import Subject, label_of
from utio_jax.bench.suite import SUITES, Suite, conclude, groups_of, run_groups, tiny
from utio_jax.cli.options import Rare, check_out, progress_lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measures speed and cost on this machine, next to full depth and to controls.

    Writes results.json, a row at a time, which --report makes a page of.

    Attributes:
      suite: quick takes under two minutes on two idle cores; cpu measures all parts; accelerator
        scoring and decoding at sizes for a GPU or TPU.
      parts: of the suite; all by default.
      models: shipped, a model folder, or llama-7b, llama-13b, mistral-7b, llama-70b: real widths
        with random weights, and as many layers as fit, for speed only.
      batch_sizes: rows.
      prompt_lengths: tokens per row, of scoring and of prompts.
      policies: NAME@BUDGET each; controls at the same FLOPs join them by themselves.
      rounds: timed turns of each program, instead of the suite's.
      out: folder of the results, which are replaced.
      dry_run: the same code at tiny sizes: shows that it runs, not how fast.
      report: measure nothing: write report.html of this results.json, tables and pictures, to
        --out.
    """

    EXAMPLES: ClassVar = (
        "bench",
        "bench --suite cpu --parts decode lossless --models shipped",
        "bench --report out/bench/results.json",
    )

    suite: Literal["quick", "cpu", "accelerator"] = "quick"
    parts: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch_sizes: Rare[tuple[int, ...]] = ()
    prompt_lengths: Rare[tuple[int, ...]] = ()
    policies: Rare[tuple[str, ...]] = ()
    rounds: Rare[int | None] = None
    out: Path = Path("out/bench")
    dry_run: bool = False
    report: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        if self.report is not None:
            from utio_jax.bench.report import write_report

            check_out(self.out)
            written = write_report(self.report, self.out)
            print(f"written: {written}", file=sys.stderr)
            return {"command": "bench", "report": str(written)}
        from rich.console import Console

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
        dtype = "float32" if platform == "cpu" else "bfloat16"
        file, asked = self.out / "results.json", dataclasses.asdict(self)
        head = {
            "suite": self.suite,
            "settings": {name: asked[name] for name in asked if name not in ("out", "report")},
            "environment": describe(dtype=dtype),
        }
        subjects = (
            subject_named(name, dtype=dtype, cache_tokens=suite.cache_tokens)
            for name in suite.models
        )
        results = run_groups(
            file,
            (group for subject in subjects for group in groups_of(suite, subject)),
            head,
            say=progress_lines(started),
            note="dry run at tiny sizes: no figure of speed" if self.dry_run else "",
        )
        rows = read_results(file)[1]
        title = f"{self.suite} suite, {results['environment']['device']}"
        Console(stderr=True, width=118).print(bench_table(rows, title=title))
        verdict = conclude(rows)
        print(verdict, file=sys.stderr)
        print(f"Results: {file}. As a page: utio-jax bench --report {file}", file=sys.stderr)
        return {
            "command": "bench",
            "suite": self.suite,
            "complete": results["complete"],
            "seconds": results["seconds"],
            "out": str(file),
            "verdict": verdict,
            "environment": results["environment"],
            "row_count": len(rows),
            "did_not_run": sum(not row.ran for row in rows),
            "fell_back": sum(bool(row.fallbacks) for row in rows),
            "speedups": {row.key: row.speedup.median for row in rows if row.speedup is not None},
        }

    def sized(self) -> Suite:
        """Returns the suite with the options that were given.

        Raises:
          ValueError: a part that the suite does not have, or a size below 1.
        """
        suite = SUITES[self.suite]
        if self.dry_run:
            suite = tiny(suite)
        unknown = [part for part in self.parts if part not in suite.parts]
        if unknown:
            raise ValueError(
                f"Wanted --parts of suite {self.suite}: {', '.join(suite.parts)}. "
                f"Got {', '.join(unknown)}."
            )
        numbers = (*self.batch_sizes, *self.prompt_lengths)
        least = min(*numbers, 1 if self.rounds is None else self.rounds, 1)
        if least < 1:
            raise ValueError(f"Wanted sizes and rounds of at least 1. Got {least}.")

        def crossed(shapes: tuple[tuple[int, ...], ...]) -> Any:
            columns = zip(*shapes, strict=True)
            batches, lengths, *outputs = (tuple(dict.fromkeys(each)) for each in columns)
            sizes = (self.batch_sizes or batches, self.prompt_lengths or lengths, *outputs)
            return tuple(itertools.product(*sizes))

        return dataclasses.replace(
            suite,
            parts=self.parts or suite.parts,
            models=self.models or suite.models,
            policies=tuple(label_of(name) for name in self.policies or suite.policies),
            rounds=self.rounds or suite.rounds,
            score=crossed(suite.score) if numbers else suite.score,
            decode=crossed(suite.decode) if numbers else suite.decode,
        )


def subject_named(name: str, *, dtype: str, cache_tokens: int = 0) -> Subject:
    """Returns a model with its text and calibration, or a shape with random weights.

    Args:
      name: "shipped", a name of `utio_jax.models.presets.SHAPES`, or a folder.
      dtype: of the parameters.
      cache_tokens: tokens of all rows of the largest cache.

    Raises:
      ValueError: there is no such model, or not even two layers fit.
    """
    from utio_jax.models import SHIPPED, Transformer, load
    from utio_jax.models.presets import SHAPES, with_layers
    from utio_jax.models.random_weights import fit_layers, free_memory, random_params
    from utio_jax.models.training.corpus import standard_library

    if name in SHAPES:
        config = SHAPES[name]
        fitting = fit_layers(config, dtype=dtype, memory=free_memory(), cache_tokens=cache_tokens)
        decoder = Transformer(with_layers(config, fitting))
        return Subject(
            name=name,
            decoder=decoder,
            params=random_params(decoder, dtype=dtype),
            note=f"random weights, {fitting} of {config.num_layers} layers: speed only",
        )
    model = load(SHIPPED if name == "shipped" else name, dtype=jnp.dtype(dtype))
    documents, notes = None, []
    try:
        documents = model.encode([document.text for document in standard_library("test")])
    except ValueError as error:
        notes.append(f"random ids: {error}")
    try:
        calibration = model.calibration
    except ValueError:
        calibration = None
        notes.append("no calibration")
    return Subject(
        name="shipped" if name == "shipped" else model.folder.name,
        decoder=model.decoder,
        params=model.params,
        documents=documents,
        calibration=calibration,
        note="; ".join(notes),
    )
