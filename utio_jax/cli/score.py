# SPDX-License-Identifier: Apache-2.0
"""`utio-jax score`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tyro

from utio_jax.cli.options import is_first
from utio_jax.cli.scoring import Scoring
from utio_jax.core.files import check_writable, save_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Scoring):
    """Prints log-likelihood and depth of documents, every token predicted once.

    Attributes:
      files: text files.
      policy: full, uniform, random, or one that the calibration holds.
      per_token: a JSON file to write every token's log-likelihood and depth to.
    """

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    policy: str = "learned"
    per_token: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from rich.console import Console

        from utio_jax.bench.terminal import documents_table

        if self.per_token is not None:
            check_writable(self.per_token, "--per-token")
        found, read = self.score(self.files)
        scored = list(zip(read.names, read.documents, found.documents, strict=True))
        if self.per_token is not None and is_first():
            tokens = {
                name: {
                    "token_ids": ids.tolist(),
                    "log_likelihood": result.log_likelihood.round(5).tolist(),
                    "depths": result.depths.tolist(),
                }
                for name, ids, result in scored
            }
            save_text(self.per_token, json.dumps(tokens) + "\n")
        if is_first():
            Console(stderr=True).print(documents_table(scored, read.row))
        return {
            "command": "score",
            **read.row.to_dict(),
            "fallbacks": dict(found.fallbacks),
            "documents": [
                {
                    "name": name,
                    "tokens": len(ids),
                    "log_likelihood": round(float(result.log_likelihood.sum()), 4),
                    "depth_decided_mean": round(float(result.depths.mean()), 4),
                }
                for name, ids, result in scored
            ],
        }
