# SPDX-License-Identifier: Apache-2.0
"""What `utio-jax bench` measured, read back from its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utio_jax.benchmark.results import read_results
from utio_jax.benchmark.schema import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """One run of `utio-jax bench`.

    Attributes:
      file: where it was read.
      suite: which rows were asked for.
      complete: whether the run came to its end.
      seconds: that it took.
      started: when.
      settings: the options.
      environment: device, versions, and the machine's measured ceilings.
      rows: in the order of the file.
    """

    file: Path
    suite: str
    complete: bool
    seconds: float
    started: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]


def load_results(file: Path) -> Results:
    """Reads a file of `utio-jax bench`.

    Raises:
      ValueError: there is no such file, or it is not what `utio-jax bench` of this version writes.
    """
    stored = read_results(file)
    names = {field.name for field in dataclasses.fields(Results)} - {"file", "rows"}
    return Results(
        file=file,
        rows=tuple(Row.from_dict(row) for row in stored["rows"]),
        **{name: stored[name] for name in names},
    )
