# SPDX-License-Identifier: Apache-2.0
"""`utio-jax compare`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import (
    OfCalibration,
    OfText,
    OfWindows,
    Rare,
    check_out,
    progress_lines,
    read_documents,
)
from utio_jax.evaluation.ledger import uniform_hull


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(OfWindows, OfCalibration, OfText):
    """Compares calibrated policies with truncation, chance and hindsight on unseen text.

    The text is to be one that nothing was fitted to, of at least five files; without files, the
    test split of this Python's standard library.

    Attributes:
      budget: FLOPs over full depth's, one or several; all that were calibrated by default.
      batches: of 16 windows, drawn over all documents; 0 takes the whole text. Time grows with it,
        but for the programs, which are compiled once each; intervals narrow with documents rather
        than with batches.
      draws: number of draws of documents, for intervals; the verdict needs 20 for each policy and
        budget.
      out: folder for the picture.
    """

    EXAMPLES: ClassVar = (
        "compare",
        "compare FILES --model DIR",
        "compare FILES --model DIR --budget 0.5 0.75 --batches 0",
    )

    budget: tuple[float, ...] = ()
    batches: int = 6
    draws: Rare[int] = 2000
    out: Path = Path("out/compare")

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        from utio_jax.bench.terminal import comparison_table

        check_out(self.out)
        mesh = self.mesh()
        model = self.load()
        # Before the work: files that are not this model's are refused.
        _, plain = model.calibration, model.plain_controls
        documents, described = read_documents(model, self.files, self.token_ids, "test")
        rows = model.compare(
            documents,
            budget=self.budget or None,
            batches=self.batches or None,
            context=self.context,
            draws=self.draws,
            mesh=mesh,
            progress=progress_lines(),
        )
        # Matplotlib, which can take seconds: after what is refused.
        from utio_jax.bench.plots import plot_pareto

        title = f"{rows[0].ledger.tokens or 0:,} tokens of {rows.documents} documents"
        picture = self.out / "pareto.png"
        Console(stderr=True, width=118).print(comparison_table(rows, title=title))
        ledgers = [row.ledger for row in rows]
        hull = uniform_hull(ledgers)
        plot_pareto(ledgers, picture, title=title, hull=hull, plain=plain)
        print(rows.verdict, file=sys.stderr)
        return {
            "text": described,
            "verdict": rows.verdict,
            "pictures": [str(picture)],
            "rows": [
                row.to_dict() | {"plain_hull_nll_increase_pct": plain(row.ledger.flops_ratio)}
                for row in rows
            ],
        }
