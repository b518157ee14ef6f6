# SPDX-License-Identifier: Apache-2.0
"""A corpus through a model, group by group: here, or on a Ray cluster by `utio_jax.cluster.actors`.

    found = run_job(job, make=make_worker)                                  # in this process
    found = run_job(job, make=make_worker, ray=Ray(address="local"))        # an actor per device

What is finished is kept, and left out by the next run. Both ways give the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from utio_jax.cluster.corpus import (
    Columns,
    Corpus,
    Document,
    Scanned,
    corpus_of,
    read_group,
    scan_file,
)
from utio_jax.cluster.folder import GROUP, JobFolder

Progress = Callable[[int | None, str], AbstractContextManager[Any]]
"""Given a total and what is done, a context whose value advances by so many."""


@runtime_checkable
class Worker(Protocol):
    """What runs documents through a model; each actor makes one, and keeps it.

    Attributes:
      model_sha256: of the model that it has loaded.
    """

    model_sha256: str

    def schema(self) -> Any:
        """Returns the `pyarrow.Schema` of the rows, without the group's number."""
        ...

    def __call__(self, documents: Sequence[Document]) -> list[dict[str, Any]]:
        """Returns one row per document, in order."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """Where actors run.

    Attributes:
      address: of a cluster: `HOST:PORT`, `auto` for the one that this machine is part of, or
        `local` for one on this machine, for as long as the job takes.
      concurrency: actors, each with a device of its own.
      cpus: of each actor, where the cluster has neither GPUs nor TPUs. None: those of the cluster,
        shared out.
    """

    address: str
    concurrency: int = 1
    cpus: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("--concurrency", self.concurrency), ("--actor-cpus", self.cpus)):
            if value is not None and value < 1:
                raise ValueError(f"Wanted {name} of at least 1. Got {value}.")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """What a job has come to.

    Attributes:
      folder: with all rows.
      documents: in it.
      kept: of these, found finished.
    """

    folder: JobFolder
    documents: int
    kept: int


def run_job(
    job: Job, *, make: Callable[[], Worker], progress: Progress, ray: Ray | None = None
) -> Finished:
    """Runs all documents of a corpus that are not finished, and checks that each is there once.

    Args:
      job: what is to be done.
      make: loads the model; on a cluster it is sent to the actors, so it has to be picklable.
      progress: of documents.
      ray: where; None: in this process.

    Raises:
      ValueError: the corpus cannot be read, or the folder belongs to another job.
      RuntimeError: rows are missing or double in the end.
    """
    if not job.files:
        raise ValueError("Wanted files of a corpus with --out. Got none.")
    if ray is None:
        scanned = _scan_here(job, progress)
        return _finish(job, scanned, progress, partial(_run_here, make), by="one process")
    from utio_jax.cluster.actors import cluster, run_by_actors, scan_by_tasks

    with cluster(ray):
        scanned = scan_by_tasks(job, progress)
        return _finish(job, scanned, progress, partial(run_by_actors, make, ray), by="Ray")


def _finish(
    job: Job,
    scanned: Sequence[Scanned],
    progress: Progress,
    run: Callable[[Job, Corpus, Sequence[int], Any], None],
    *,
    by: str,
) -> Finished:
    """Runs what is missing; returns what there is then."""
    corpus, folder = corpus_of(scanned, job.columns, documents=job.group), JobFolder(job.out)
    of_corpus = {"corpus": corpus.sha256[:16], "documents": len(corpus.ids), "group": job.group}
    folder.claim({**job.identity, **of_corpus, "written by": by})
    done = folder.finished(corpus.sizes)
    missing = [number for number in range(len(corpus.groups)) if number not in done]
    kept = sum(corpus.sizes[number] for number in done)
    if missing:
        with progress(len(corpus.ids), "documents") as step:
            step(kept)
            run(job, corpus, missing, step)
    folder.check_complete(corpus)
    return Finished(folder=folder, documents=len(corpus.ids), kept=kept)


def _scan_here(job: Job, progress: Progress) -> list[Scanned]:
    with progress(len(job.files), "reading files") as step:
        scanned = []
        for file in job.files:
            scanned.append(scan_file(file, job.columns))
            step(1)
    return scanned


def _run_here(
    make: Callable[[], Worker], job: Job, corpus: Corpus, missing: Sequence[int], step: Any
) -> None:
    worker, folder = make(), JobFolder(job.out)
    for number in missing:
        table = rows_of(worker, number, read_group(corpus.groups[number], job.columns))
        folder.write_group(number, table)
        step(corpus.sizes[number])


def rows_of(worker: Worker, group: int, documents: Sequence[Document]) -> Any:
    """Returns a group's rows as a `pyarrow.Table`."""
    import pyarrow

    schema = worker.schema().insert(0, pyarrow.field(GROUP, pyarrow.int64()))
    rows = [{GROUP: group, **row} for row in worker(documents)]
    return pyarrow.Table.from_pylist(rows, schema=schema)
