# SPDX-License-Identifier: Apache-2.0
"""The folder of a job: what it is of, rows in Parquet, and what has been finished.

out/job.json        what the rows are of: another corpus, model or policy is refused
out/rows/           Parquet files; each has all documents of the groups that are in it
out/checkpoint/     of Ray Data: which of these files are whole
out/summary.json    once every document is there
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.cluster.corpus import Corpus, id_digest, load_parquet
from utio_jax.core.files import load_json, replacing, save_json

GROUP = "group"
"""Column that says which documents shared passes; Ray Data's checkpoint goes by it."""

_PENDING = ".pending.parquet"


@dataclasses.dataclass(frozen=True)
class JobFolder:
    """Where a job keeps what it has done."""

    path: Path

    @property
    def rows(self) -> Path:
        """Folder of the rows."""
        return self.path / "rows"

    @property
    def checkpoint(self) -> Path:
        """Folder of Ray Data's checkpoint."""
        return self.path / "checkpoint"

    @property
    def summary(self) -> Path:
        """File of what all rows come to."""
        return self.path / "summary.json"

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Says what the folder is of, or checks that it is of the same.

        Raises:
          ValueError: it belongs to another corpus, model or policy, or holds something else.
        """
        file, wanted = self.path / "job.json", dict(identity)
        if not file.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise ValueError(
                    f"Wanted an empty folder as --out, or one of this job. Got {self.path}, with "
                    "files and without job.json. Name another."
                )
            save_json(file, wanted)
            return
        found = load_json(file, "what --out is of", remedy="Name another --out.")
        if not isinstance(found, dict):
            raise ValueError(f"Wanted what --out is of in {file}. Got none. Name another --out.")
        differs = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if differs:
            raise ValueError(
                "Wanted --out of this job: "
                + ", ".join(f"{name} {wanted.get(name)}" for name in differs)
                + f". Got {self.path} of "
                + ", ".join(f"{name} {found.get(name)}" for name in differs)
                + ". Name another --out, or go on with what this one was begun with."
            )

    def committed(self) -> Iterator[Path]:
        """Yields files that name finished groups: Ray Data's commits, and rows without Ray."""
        if self.checkpoint.is_dir():
            for file in self.checkpoint.iterdir():
                if file.suffix == ".parquet" and not file.name.endswith(_PENDING):
                    yield file
        elif self.rows.is_dir():
            yield from self.row_files()

    def finished(self, sizes: Sequence[int]) -> set[int]:
        """Returns the numbers of the groups that are finished.

        Args:
          sizes: documents of each group.

        Raises:
          RuntimeError: a part of a group is there, or more than it.
        """
        parquet, found = load_parquet(), Counter[int]()
        for file in self.committed():
            found.update(parquet.read_table(file, columns=[GROUP])[GROUP].to_pylist())
        wrong = [number for number, rows in found.items() if rows != sizes[number]]
        if wrong:
            raise RuntimeError(
                f"Wanted groups of documents whole in {self.path}. Got parts of groups "
                f"{wrong[:8]}, or several. Start anew with another --out."
            )
        return set(found)

    def row_files(self) -> list[Path]:
        """Returns the files of rows, in a fixed order."""
        return sorted(file for file in self.rows.glob("*.parquet"))

    def write_group(self, number: int, table: Any) -> None:
        """Writes a group's rows, without Ray: whole, or not at all."""
        parquet = load_parquet()
        with replacing(self.rows / f"group-{number:08d}.parquet") as (partial,):
            parquet.write_table(table, partial)

    def columns(self, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yields some columns, a row group at a time."""
        parquet = load_parquet()
        for file in self.row_files():
            with parquet.ParquetFile(file) as stored:
                for batch in stored.iter_batches(columns=names):
                    yield {
                        name: batch.column(name).to_numpy(zero_copy_only=False) for name in names
                    }

    def check_complete(self, corpus: Corpus) -> None:
        """Checks that every document of a corpus is there exactly once.

        Raises:
          RuntimeError: some are missing, double, or strangers.
        """
        found = [
            id_digest(name) for columns in self.columns(["id"]) for name in columns["id"].tolist()
        ]
        ids = np.sort(np.asarray(found, "S16"))
        double = int(np.sum(ids[1:] == ids[:-1]))
        missing = int(np.sum(~np.isin(corpus.ids, ids)))
        strange = int(np.sum(~np.isin(ids, corpus.ids)))
        if double or missing or strange:
            raise RuntimeError(
                f"Wanted each of {corpus.ids.size} documents once in {self.rows}. Got {missing} "
                f"missing, {double} double and {strange} of no document of the corpus. Did two "
                "runs write there at once? Start anew with another --out."
            )
