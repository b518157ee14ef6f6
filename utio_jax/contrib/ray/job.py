# SPDX-License-Identifier: Apache-2.0
"""Runs a corpus into a folder, group by group, and goes on with what is missing after any end.

    out/job.json                    what the rows are of: another corpus, model or policy is refused
    out/corpus/group-00000007.parquet  documents, in groups that the corpus alone decides
    out/rows/group-00000007.parquet one row per document; written whole or not at all
    out/summary.json                once every document is there

A group has one file name, so a group that is run twice, after a failure or by two actors, replaces
its rows with the same rows. With or without Ray, rows are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.contrib.ray.corpus import (
    Columns,
    Corpus,
    Document,
    group_file,
    hash_files,
    id_digest,
    load_parquet,
    prepare,
)
from utio_jax.core.files import load_json, replacing, save_json

Worker = Callable[[Sequence[Document]], tuple[Any, list[dict[str, Any]]]]
"""Runs documents through a model; returns the schema of rows, and a row per document, in order."""

Progress = Callable[[int | None, str], AbstractContextManager[Any]]
"""Given a total and what is done, a context whose value advances by so many."""

Runner = Callable[["Job", Corpus, Sequence[int], Callable[[int], Any]], None]
"""Runs groups of a corpus, and reports the documents of each that is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done.

    Attributes:
      out: the job's folder.
      files: of the corpus.
      columns: of its records.
      group: documents that share passes, at most.
      identity: all else that rows depend on, ready for JSON: the model's hash, the policy, shapes.
    """

    out: Path
    files: tuple[Path, ...]
    columns: Columns
    group: int
    identity: Mapping[str, Any]

    def row_file(self, number: int) -> Path:
        """Returns the file of a group's rows."""
        return group_file(self.out / "rows", number)

    def columns_of(self, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yields some columns of all rows, a file at a time."""
        parquet = load_parquet()
        for file in sorted((self.out / "rows").glob("*.parquet")):
            table = parquet.read_table(file, columns=names)
            yield {name: table[name].to_numpy(zero_copy_only=False) for name in names}


def run_job(job: Job, run: Runner, *, progress: Progress) -> int:
    """Runs all documents of a corpus that are not finished; checks that each is there once.

    Args:
      job: what is to be done.
      run: `run_here`, or a Ray cluster's way.
      progress: of documents.

    Returns:
      Documents that were found finished.

    Raises:
      ValueError: the corpus cannot be read, or the folder belongs to another job.
      RuntimeError: rows are missing or double in the end.
    """
    if not job.files:
        raise ValueError("Wanted files of a corpus. Got none.")
    with progress(None, "reading files"):
        corpus = _claimed(job)
    missing = [n for n in range(len(corpus.sizes)) if not job.row_file(n).exists()]
    kept = sum(corpus.sizes) - sum(corpus.sizes[number] for number in missing)
    if missing:
        with progress(sum(corpus.sizes), "documents") as step:
            step(kept)
            run(job, corpus, missing, step)
    _check_complete(job, corpus)
    return kept


def run_here(make: Callable[[], Worker]) -> Runner:
    """Returns what runs groups in this process; `make` loads the model."""

    def run(job: Job, corpus: Corpus, missing: Sequence[int], step: Callable[[int], Any]) -> None:
        worker = make()
        for number in missing:
            run_group(job, corpus, number, worker)
            step(corpus.sizes[number])

    return run


def run_group(job: Job, corpus: Corpus, number: int, worker: Worker) -> None:
    """Runs a group's documents and writes their rows."""
    import pyarrow

    schema, rows = worker(corpus.read(number))
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    with replacing(job.row_file(number)) as (partial,):
        load_parquet().write_table(table, partial)


def _claimed(job: Job) -> Corpus:
    """Returns the corpus, once the folder is known to be of this job, or is made so."""
    file, sha256 = job.out / "job.json", hash_files(job.files)
    wanted = {
        **job.identity,
        "columns": [job.columns.id, job.columns.text],
        "corpus": sha256[:16],
        "group": job.group,
    }
    if file.exists():
        found = load_json(file, "what --out is of", remedy="Name another --out.")
        found = found if isinstance(found, dict) else {}
        differs = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if differs:
            raise ValueError(
                "Wanted --out of this job: "
                + ", ".join(f"{name} {wanted.get(name)}" for name in differs)
                + f". Got {job.out} of "
                + ", ".join(f"{name} {found.get(name)}" for name in differs)
                + ". Name another --out, or go on with what this one was begun with."
            )
    elif job.out.exists() and any(each.stem != "corpus" for each in job.out.iterdir()):
        raise ValueError(
            f"Wanted an empty folder as --out, or one of this job. Got {job.out}, with files and "
            "without job.json. Name another."
        )
    into: Any = {"folder": job.out / "corpus", "sha256": sha256, "documents": job.group}
    corpus = prepare(job.files, job.columns, **into)
    if not file.exists():
        save_json(file, wanted)
    return corpus


def _check_complete(job: Job, corpus: Corpus) -> None:
    """Checks that every document of a corpus is there exactly once."""
    found = [id_digest(name) for each in job.columns_of(["id"]) for name in each["id"].tolist()]
    ids, wanted = np.sort(np.asarray(found, "S16")), corpus.ids()
    if ids.size != wanted.size or (ids != wanted).any():
        missing = int(np.sum(~np.isin(wanted, ids)))
        double = int(np.sum(ids[1:] == ids[:-1]))
        raise RuntimeError(
            f"Wanted each of {wanted.size} documents once in {job.out / 'rows'}. Got {ids.size} "
            f"rows, {missing} missing and {double} double. Start anew with another --out."
        )
