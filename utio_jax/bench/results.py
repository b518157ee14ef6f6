# SPDX-License-Identifier: Apache-2.0
"""`results.json`: every row on disk as soon as it is known, and read back checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from utio_jax.bench.rows import SCHEMA, Row, rounded
from utio_jax.core.files import load_json, save_json


class Recorder:
    """Keeps every row on disk as soon as it is known: an interruption loses what was under way.

    One run writes a file: another that opens it meanwhile is refused, in whichever process. The
    lock ends with the run, however that ends.

    Attributes:
      rows: by key, in the order of measuring.
    """

    def __init__(
        self,
        file: Path,
        *,
        suite: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
        resume: bool = False,
    ):
        """Opens a file of results: anew, or to go on.

        Args:
          file: to write; its folder is made.
          suite: name of it.
          settings: the options as given.
          environment: what the machine is and can do.
          resume: keep the rows that are there; without it they are replaced.

        Raises:
          ValueError: another run is writing the file; or `resume`, and it is broken, or was
            measured with other settings, devices or versions.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(file.with_name(file.name + ".lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"Wanted results that no other run writes. {file} is being written by one. Wait "
                "for it, or name another --out."
            ) from None
        self._file, self._resumed = file, 0.0
        self._head: dict[str, Any] = {
            "command": "bench",
            "schema": SCHEMA,
            "suite": suite,
            "complete": False,
            "seconds": 0.0,
            "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "settings": dict(settings),
            "environment": dict(environment),
        }
        self.rows: dict[str, Row] = {}
        try:
            if resume and file.is_file():
                self._continue(read_results(file))
            self._write()
        except BaseException:
            self._lock.release()
            raise

    def _continue(self, stored: Mapping[str, Any]) -> None:
        now = rounded(self._head)
        terms = {name: (stored[name], now[name]) for name in ("suite", "settings")}
        there, here = stored["environment"], now["environment"]
        same = ("device", "dtype", "versions", "commit")
        terms |= {name: (there.get(name), here.get(name)) for name in same}
        for what, (was, ours) in terms.items():
            if was != ours:
                raise ValueError(
                    f"Wanted --resume of a run with the same {what}. {self._file} has {was!r}, "
                    f"this run {ours!r}. Leave out --resume to replace it, or name another --out."
                )
        self.rows = {row["key"]: Row.from_dict(row) for row in stored["rows"]}
        self._resumed = float(stored["seconds"])
        self._head |= {"started": stored["started"], "environment": there}

    def add(self, rows: Sequence[Row], *, seconds: float) -> None:
        """Writes rows, in place of those with the same keys; `seconds` since this run began."""
        self.rows |= {row.key: row for row in rows}
        self._head["seconds"] = round(self._resumed + seconds, 1)
        self._write()

    def close(self, *, complete: bool, seconds: float) -> dict[str, Any]:
        """Writes whether all rows are there, returns the whole, and lets others write the file."""
        self._head |= {"complete": complete, "seconds": round(self._resumed + seconds, 1)}
        self._write()
        self._lock.release()
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file holds."""
        return rounded({**self._head, "rows": [row.to_dict() for row in self.rows.values()]})

    def _write(self) -> None:
        save_json(self._file, self.to_dict())


def read_results(file: Path) -> dict[str, Any]:
    """Returns what `utio-jax bench` wrote, checked.

    Raises:
      ValueError: there is no such file, it is not JSON, or not what this version writes.
    """
    what, remedy = f"results of `utio-jax bench`, schema {SCHEMA}", "Measure again: utio-jax bench."
    stored = load_json(file, what, strict=True, remedy=remedy)
    found = stored if isinstance(stored, dict) else {}
    if found.get("command") != "bench" or found.get("schema") != SCHEMA:
        raise ValueError(
            f"Wanted {what} at {file}. Got what `utio-jax {found.get('command', '?')}` printed, "
            f"schema {found.get('schema')!r}. {remedy}"
        )
    try:
        keys = [Row.from_dict(row).key for row in found["rows"]]
        missing = {"suite", "complete", "seconds", "started", "settings", "environment"} - {*found}
        if missing or len(keys) != len({*keys}):
            raise ValueError(f"missing: {sorted(missing)}; or two rows have the same key")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Wanted {what} at {file}. Got: {error} {remedy}") from error
    return found
