# SPDX-License-Identifier: Apache-2.0
"""What `score`, `evaluate` and `generate` share where a corpus goes to a folder, also by Ray."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from utio_jax.cli.options import check_out, progress_bar

if TYPE_CHECKING:
    from utio_jax.cluster.job import Finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfCorpus:
    """Where the rows of a corpus go, and which machines work on it.

    Attributes:
      out: folder for a row per document, in Parquet. Files are then a corpus: .jsonl and .parquet
        hold records with an id, any other file is one document. What is finished is kept, and an
        interrupted run goes on from there.
      ray: with --out: a Ray cluster, HOST:PORT, auto, or local for this machine. By default this
        process does the work.
      concurrency: actors of --ray, each with a device and the model. By default 1.
      actor_cpus: processors of each, where there are no GPUs or TPUs. By default all, shared out.
      id_column: of records: a text or an integer, each once.
      text_column: of records: a text, or a list of token ids.
      group: documents that share passes, at most.
    """

    out: Path | None = None
    ray: str | None = None
    concurrency: int | None = None
    actor_cpus: int | None = None
    id_column: str = "id"
    text_column: str = "text"
    group: int = 256

    def check_corpus(self, **others: Any) -> None:
        """Checks that options fit together: before any work.

        Args:
          **others: options that --out has no use for, by name; None or False where not given.

        Raises:
          ValueError: names the options.
        """
        if self.out is None:
            fields = {field.name: field.default for field in dataclasses.fields(OfCorpus)}
            given = [name for name, value in fields.items() if getattr(self, name) != value]
            if given:
                raise ValueError(
                    f"Wanted --out DIR with {', '.join(map(_option, given))}: a folder for a row "
                    "per document. Got none. Add --out, or leave these out."
                )
            return
        check_out(self.out)
        wrong = [_option(name) for name, value in others.items() if value]
        if wrong:
            raise ValueError(
                f"Wanted --out without {', '.join(wrong)}. Rows of a corpus are written group by "
                "group, and --ray takes care of the devices. Leave out one or the other."
            )
        if self.ray is None and (self.concurrency is not None or self.actor_cpus is not None):
            raise ValueError(
                "Wanted --ray ADDRESS or --ray local with --concurrency and --actor-cpus. Got "
                "none. Add it, or leave these out."
            )
        if self.ray is not None:
            import jax

            # Devices of this machine are the actors'. Ray sends them the command, not this.
            jax.config.update("jax_platforms", "cpu")

    def run_corpus(
        self, files: tuple[Path, ...], identity: Mapping[str, Any], make: Callable[[], Any]
    ) -> Finished:
        """Returns what has come of a corpus. `make` returns the worker, here and in each actor."""
        from utio_jax.cluster.corpus import Columns
        from utio_jax.cluster.job import Job, Ray, run_job

        assert self.out is not None
        ray = None
        if self.ray is not None:
            count = 1 if self.concurrency is None else self.concurrency
            ray = Ray(address=self.ray, concurrency=count, cpus=self.actor_cpus)
        found = run_job(
            Job(
                out=self.out.absolute(),
                files=tuple(file.absolute() for file in files),
                columns=Columns(id=self.id_column, text=self.text_column),
                group=self.group,
                identity={**identity, "columns": [self.id_column, self.text_column]},
            ),
            make=make,
            progress=progress_bar,
            ray=ray,
        )
        print(
            f"{found.documents:,} documents in {found.folder.rows}"
            + (f", {found.kept:,} of them from before" if found.kept else ""),
            file=sys.stderr,
        )
        return found


Command = TypeVar("Command")


def anywhere(command: Command) -> Command:
    """Returns a command whose files are named in full: actors run in folders of their own."""
    found: Any = command
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Path):
            changed[field.name] = value.absolute()
        elif field.name in ("model", "lens") and Path(value).exists():
            changed[field.name] = str(Path(value).absolute())
    return dataclasses.replace(found, **changed)


def maker(function: Callable[[Command], Any], command: Command) -> Callable[[], Any]:
    """Returns what makes a worker in an actor: a function of a command, which can be sent."""
    return functools.partial(function, anywhere(command))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
