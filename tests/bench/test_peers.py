# SPDX-License-Identifier: Apache-2.0
"""Comparisons with other libraries write what `bench --report` reads, and claim no more."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from utio_jax.bench.rows import name_of, read_rows
from utio_jax.bench.timing import Timing


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("side_by_side")


TIMES = {
    "theirs": Timing(seconds=np.asarray([4.0, 4.0]), compiles=0),
    "ours": Timing(seconds=np.asarray([2.0, 2.0]), compiles=0),
}


def test_rows_are_kept_as_they_come_and_read_by_the_report(
    side_by_side: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer_row, recording = side_by_side.peer_row, side_by_side.recording
    options: dict[str, Any] = {"setting": {"batch": 1, "output": 8}, "tokens": 8}
    with recording(tmp_path, suite="s", settings={"out": tmp_path}, versions={"x": "1"}) as keep:
        keep(peer_row("m", "ours", "theirs", TIMES, **options, calls=2, figures={"apart": 1 / 3}))
        assert len(read_rows(tmp_path / "results.json")["rows"]) == 1
        options |= {"figures": {}, "fallback": "8 tokens ran every layer"}
        keep(peer_row("m", "theirs", "ours", TIMES, **options))
    result = read_rows(tmp_path / "results.json")
    first, second = result["rows"]
    assert json.loads(capsys.readouterr().out) == result
    assert result["complete"]
    assert result["environment"]["versions"]["x"] == "1"
    assert name_of(first) == "peer/m/ours/batch1/output8"
    assert (first["seconds"], first["speedup"], first["tokens_per_second"]) == (1.0, 2.0, 8)
    assert first["note"] == "apart 0.333333"
    assert (second["seconds"], second["speedup"]) == (4.0, None)
    assert second["note"] == "8 tokens ran every layer"
