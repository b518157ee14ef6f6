# SPDX-License-Identifier: Apache-2.0
"""Small corpora of token ids with names, and a model that reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.models import Model
from utio_jax.models import save


def save_tiny(folder: Path, model: Model) -> str:
    """Writes a model in float32; returns its folder's name."""
    save(folder / "model", model.decoder, model.params, dtype="float32")
    return str(folder / "model")


def named_documents(
    count: int, *, longest: int, shortest: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Returns documents of random token ids below 64, by id."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return {f"d{n}": rng.integers(0, 64, size).tolist() for n, size in enumerate(lengths)}


def write_jsonl(file: Path, documents: dict[str, Any]) -> Path:
    """Writes a document a line."""
    rows = (json.dumps({"id": name, "text": text}) for name, text in documents.items())
    file.write_text("".join(f"{row}\n" for row in rows))
    return file


def write_parquet(file: Path, documents: dict[str, Any], *, row_group_size: int = 7) -> Path:
    """Writes a document a row."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": [*documents], "text": [*documents.values()]})
    pyarrow.parquet.write_table(table, file, row_group_size=row_group_size)
    return file


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Returns all rows of a job's folder."""
    import pyarrow.parquet

    files = sorted((folder / "rows").glob("*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def ledger_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what a command found, without where it is and what was there before."""
    return {name: value for name, value in record.items() if name not in ("out", "kept")}


def assert_near(
    found: dict[str, Any], wanted: dict[str, Any], *, names: Sequence[str] = ()
) -> None:
    """Asserts that two records agree: numbers within 1e-5, all else exactly."""
    import pytest

    for name in names or sorted({*found, *wanted}):
        if isinstance(wanted[name], float):
            assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-9), name
        else:
            assert found[name] == wanted[name], name
