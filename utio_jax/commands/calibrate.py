# SPDX-License-Identifier: Apache-2.0
"""`utio-jax calibrate`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from utio_jax.commands.shared import read_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Fits the policies to a model on a text, and writes them into a folder.

    Attributes:
      model: a model folder, or the shipped model's name.
      text: text files; by default the calibrate split of this Python's standard library.
      budgets: target flops_ratios.
      seed: of the gates.
      out: folder to write policies.json and policies.safetensors to; the model's own by default.
    """

    model: str = "stdlib-16"
    text: tuple[Path, ...] = ()
    budgets: tuple[float, ...] = (0.5, 0.6, 0.75, 0.9)
    seed: int = 0
    out: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.calibrate import calibrate
        from utio_jax.documents import batches_of, windows_of
        from utio_jax.models import load

        started = time.perf_counter()
        model = load(self.model)
        config = model.decoder.config
        documents, described = read_documents(self.text, "calibrate")
        windows = windows_of(model.encode([d.text for d in documents]), width=config.context_length)
        batches = list(
            batches_of(
                windows, rows=16, widths=[config.context_length], vocab_size=config.vocab_size
            )
        )
        fitted = calibrate(
            model.decoder,
            model.params,
            batches,
            model_sha256=model.sha256,
            text=described,
            budgets=self.budgets,
            seed=self.seed,
            progress=lambda what: print(
                f"{time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr
            ),
        )
        out = self.out if self.out is not None else model.folder
        fitted.save(out)
        return {
            "command": "calibrate",
            "seconds_total": round(time.perf_counter() - started, 1),
            "out": str(out),
            "info": dict(fitted.info),
            "entries": {
                name: {str(budget): entry.to_json() for budget, entry in entries.items()}
                for name, entries in fitted.entries.items()
            },
        }
