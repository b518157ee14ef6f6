# SPDX-License-Identifier: Apache-2.0
"""`utio-jax report`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

import tyro

from utio_jax.cli.options import check_out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Writes what `utio-jax bench` measured as one HTML page, with tables and pictures.

    Attributes:
      file: of results.
      out: folder for report.html.
    """

    EXAMPLES: ClassVar = (
        "report out/bench/results.json",
        "report other/results.json",
        "report out/bench/results.json --out out/page",
    )

    file: tyro.conf.Positional[Path]
    out: Path = Path("out/report")

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.bench.report import write_report

        check_out(self.out)
        written = write_report(self.file, self.out)
        print(f"written: {written}", file=sys.stderr)
        return {"command": "report", "files": [str(written)]}
