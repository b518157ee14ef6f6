# SPDX-License-Identifier: Apache-2.0
"""`utio-jax report`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import Files, check_out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Writes what `utio-jax bench` measured as one HTML page, with tables and pictures.

    Attributes:
      files: one file of results, or two: the second is held against the first, row by row.
      out: folder for report.html.
    """

    EXAMPLES: ClassVar = (
        "report out/bench/results.json",
        "report before/results.json after/results.json",
        "report out/bench/results.json --out out/page",
    )

    files: Files
    out: Path = Path("out/report")

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.bench.report import write_report

        if len(self.files) not in (1, 2):
            raise ValueError(
                f"Wanted one file of `utio-jax bench`, or two to compare. Got {len(self.files)}. "
                "Compare more in pairs."
            )
        check_out(self.out)
        written, worse = write_report(self.files, self.out)
        for change in worse:
            print(f"regression: {change['key']}, {change['measure']}", file=sys.stderr)
        print(f"written: {written}", file=sys.stderr)
        return {
            "command": "report",
            "files": [str(written)],
            "regressions": worse,
        }
