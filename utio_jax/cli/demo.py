# SPDX-License-Identifier: Apache-2.0
"""`utio-jax demo`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from utio_jax.cli.options import check_out, progress_bar, read_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Reads the standard library's test documents under every policy, and continues passages.

    Attributes:
      model: a model folder with a calibration, or the shipped model's name.
      text: text files; by default the test split of this Python's standard library.
      batches: batches of 16 x 512 tokens for quality; the first is also timed.
      rounds: timed turns of each program.
      seed: which windows of the text are read.
      out: folder for the pictures.
    """

    model: str = "shared-16"
    text: tuple[Path, ...] = ()
    batches: int = 3
    rounds: int = 3
    seed: int = 0
    out: Path = Path("out/demo")

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.cli.demonstration import run_demo
        from utio_jax.models import load

        started = time.perf_counter()
        check_out(self.out)
        model = load(self.model)
        documents, described = read_documents(model, self.text, None, "test")
        found = run_demo(
            model,
            documents,
            batches=self.batches,
            rounds=self.rounds,
            seed=self.seed,
            out=self.out,
            bar=progress_bar,
        )
        total = round(time.perf_counter() - started, 1)
        return {"command": "demo", "seconds_total": total, "text": described, **found}
