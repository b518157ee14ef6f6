# SPDX-License-Identifier: Apache-2.0
"""`utio-jax bench`."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.methods import label_of
from utio_jax.bench.rows import Row, describe, failed_row, name_of, save_rows
from utio_jax.bench.run import Subject
from utio_jax.cli.options import Rare, check_out, progress_lines
from utio_jax.core.quantised import check_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measures speed and cost on this machine, next to full depth and to controls.

    Writes results.json. The defaults take minutes on two cores.

    Attributes:
      parts: score reads rows; decode writes new tokens with a depth each; lossless by drafts.
      models: shipped, a model folder, or llama-7b, llama-13b, mistral-7b, llama-70b: real widths
        with random weights, and as many layers as fit, for speed only.
      batch_sizes: rows.
      prompt_lengths: tokens per row, of scoring and of prompts.
      new_tokens: per row, of decoding.
      policies: NAME@BUDGET each; truncation at every exit and chance join them by themselves.
      rounds: timed turns of each program.
      weights: int8 or bfloat16 measures models with such matrices, and policies fitted to these.
      out: folder of the results, which are replaced.
    """

    EXAMPLES: ClassVar = (
        "bench",
        "bench --parts decode lossless --batch-sizes 1 8 32 --prompt-lengths 64",
        "bench --models DIR --policies learned@0.6 learned@0.9 --out out/bench",
    )

    parts: tuple[Literal["score", "decode", "lossless"], ...] = ("score", "decode", "lossless")
    models: tuple[str, ...] = ("shipped",)
    batch_sizes: tuple[int, ...] = (1,)
    prompt_lengths: tuple[int, ...] = (448,)
    new_tokens: int = 56
    policies: tuple[str, ...] = ("learned@0.75",)
    rounds: Rare[int] = 5
    weights: Rare[str | None] = None
    out: Path = Path("out/bench")

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        from utio_jax.bench.terminal import bench_table

        for option in ("parts", "models", "batch_sizes", "prompt_lengths"):
            if not getattr(self, option):
                raise ValueError(
                    f"Wanted at least one value of --{option.replace('_', '-')}. Got none. Name "
                    "some, or leave it out for the default."
                )
        if len(set(self.models)) < len(self.models):
            raise ValueError(
                f"Wanted each of --models once. Got {' '.join(self.models)}. Name it once."
            )
        policies = [label_of(name) for name in self.policies]
        least = min(*self.batch_sizes, *self.prompt_lengths, self.new_tokens, self.rounds)
        if least < 1:
            raise ValueError(f"Wanted sizes and rounds of at least 1. Got {least}.")
        check_out(self.out)
        file = self.out / "results.json"
        check_weights(self.weights)
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        settings = {n: value for n, value in vars(self).items() if n != "out"}
        head = {"settings": settings, "environment": describe(dtype=dtype)}
        rows: list[Row] = []
        save_rows(file, head, rows, complete=False)
        report = progress_lines()
        room = max(self.batch_sizes) * (max(self.prompt_lengths) + self.new_tokens)
        ends = [Path(name).name for name in self.models]
        for name in self.models:
            kind: Any = {"dtype": dtype, "weights": self.weights}
            subject = subject_named(name, **kind, cache_tokens=room)
            if ends.count(Path(name).name) > 1:  # Recipes write to folders of one name.
                subject = dataclasses.replace(subject, name=name)
            for part, batch, prompt in itertools.product(
                self.parts, self.batch_sizes, self.prompt_lengths
            ):
                output = 0 if part == "score" else self.new_tokens
                sizes = {"batch": batch, "prompt": prompt, "output": output}
                report(f"{part} {subject.name} {batch} x {prompt} + {output}")
                try:
                    rows += subject.measure(part, sizes, policies, self.rounds)
                except (ValueError, jax.errors.JaxRuntimeError) as error:
                    values = {"part": part, "model": subject.name, "method": "all", **sizes}
                    rows.append(failed_row(str(error).strip().splitlines()[0], **values))
                save_rows(file, head, rows, complete=False)  # An interruption keeps these.
                # The programs of a long run use up a process' memory maps.
                jax.clear_caches()
        save_rows(file, head, rows, complete=True)
        title = head["environment"]["device"]
        Console(stderr=True, width=118).print(bench_table(rows, title=title))
        print(f"Results: {file}", file=sys.stderr)
        return {
            "out": str(file),
            "environment": head["environment"],
            "row_count": len(rows),
            "did_not_run": sum(row["seconds"] is None for row in rows),
            "speedups": {name_of(row): row["speedup"] for row in rows if row["speedup"]},
        }


def subject_named(
    name: str, *, dtype: str, weights: str | None = None, cache_tokens: int = 0
) -> Subject:
    """Returns a model with its text and calibration, or a shape with random weights.

    The name is "shipped", one of `utio_jax.models.presets.SHAPES`, or a folder. `cache_tokens` are
    those of all rows of the largest cache.

    Raises:
      ValueError: there is no such model, or not even two layers fit.
    """
    from utio_jax.models import SHIPPED, Transformer, load
    from utio_jax.models.presets import SHAPES, with_layers
    from utio_jax.models.random_weights import fit_layers, free_memory, random_params
    from utio_jax.models.stacking import with_weights
    from utio_jax.models.training import standard_library

    if name in SHAPES:
        config = SHAPES[name]
        fitting = fit_layers(config, dtype=dtype, memory=free_memory(), cache_tokens=cache_tokens)
        decoder, rng = Transformer(with_layers(config, fitting)), np.random.default_rng(0)
        params = random_params(decoder, dtype=dtype)
        return Subject(
            name=name,
            decoder=decoder,
            params=params if weights is None else with_weights(params, weights),
            documents=[rng.integers(0, config.vocab_size, 2**20)],
            speed_only=True,
            note=f"random weights, {fitting} of {config.num_layers} layers: speed only",
        )
    model = load(SHIPPED if name == "shipped" else name, dtype=jnp.dtype(dtype), weights=weights)
    documents = model.encode([document.text for document in standard_library("test")])
    try:
        calibration, note = model.calibration, ""
    except ValueError:
        calibration, note = None, "no calibration"
    return Subject(
        name="shipped" if name == "shipped" else model.folder.name,
        decoder=model.decoder,
        params=model.params,
        documents=documents,
        calibration=calibration,
        note=note,
    )
