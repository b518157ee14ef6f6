# SPDX-License-Identifier: Apache-2.0
"""The benchmark of depth by role: its shapes, its comparison at equal time, its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import depth_by_role as roles
import pytest

from utio_jax.models import STDLIB_16, TINY
from utio_jax.models.presets import SHARED_16


def test_shapes_are_those_of_the_trained_models() -> None:
    assert roles.config_of("8+8", STDLIB_16) == SHARED_16
    plain = roles.config_of("plain-12", STDLIB_16)
    assert (plain.num_layers, plain.kv_complete, plain.shares_kv) == (12, 11, False)
    deeper = roles.config_of("8+16", STDLIB_16)
    assert (deeper.num_layers, deeper.kv_complete, deeper.kv_layers) == (24, 7, 8)
    assert roles.config_of("1+3", TINY).kv_source == ((0,), (0,), (0,), (0,))
    for name in ("8", "plain-", "plain-8+8", "8+", "+8", "a+b", "8+8+8"):
        with pytest.raises(ValueError, match="Wanted a shape"):
            roles.config_of(name, TINY)


def test_equal_time_is_a_place_on_the_plain_models_hull() -> None:
    """The time lies halfway from two layers to four, whose losses are 2.0 and 1.0."""
    times = {"plain-1": 1.0, "plain-2": 2.0, "plain-4": 4.0, "2+2": 3.0}
    bits = {"plain-1": [4.0], "plain-2": [2.0], "plain-4": [1.0], "2+2": [1.2]}
    row = roles.beside_plain(times, "2+2", bits)
    assert row["over"] == {"plain-1": 1 / 3, "plain-2": 2 / 3, "plain-4": 4 / 3}
    assert row["layers"] == "3.0 layers"
    assert row["loss_pct"] == [pytest.approx(25.0)]
    faster = roles.beside_plain(times | {"2+2": 0.5}, "2+2", bits)
    assert faster["layers"] == "below 1.0 layers"
    assert faster["loss_pct"] == [pytest.approx(100 * (4.0 / 1.2 - 1))]
    slower = roles.beside_plain(times | {"2+2": 5.0}, "2+2", bits)
    assert slower["layers"] == "above 4.0 layers"
    assert slower["loss_pct"] == [pytest.approx(100 * (1.0 / 1.2 - 1))]
    assert roles.beside_plain(times, "2+2", {})["loss_pct"] is None


def test_lengths_that_were_not_timed_lie_on_a_line() -> None:
    seconds = {"1": 1.0, "8": 8.0, "32": 20.0}
    times = [roles.at(seconds, new) for new in (1, 8, 20, 32, 63)]
    assert times == [pytest.approx(value) for value in (1.0, 8.0, 14.0, 20.0, 39.0)]


def part(batch: int, **seconds: float) -> dict[str, Any]:
    return {
        "kind": "requests",
        "prompt": 448,
        "batch": batch,
        "seconds": {name.replace("_", "-"): {"1": value} for name, value in seconds.items()},
    }


def test_a_page_gets_its_tables_between_two_comments(tmp_path: Path) -> None:
    stored = {
        "bits": {"plain-8": [1.03, 1.02], "plain-16": [1.0, 1.0], "8+8": [1.0, 1.0]},
        "parts": [part(8, plain_8=0.2, plain_16=0.4) | {}, part(1, plain_8=0.02, plain_16=0.04)],
    }
    stored["parts"][0]["seconds"]["8+8"] = {"1": 0.16}
    stored["parts"][1]["seconds"]["8+8"] = {"1": 0.03}
    scored = {"plain-8": {"0": 0.1}, "plain-16": {"0": 0.2}, "8+8": {"0": 0.2}}
    stored["parts"] += [{"kind": "echo", "prompt": 448, "batch": 8, "seconds": scored}]
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{roles.BEGIN}\nold\n{roles.END}\n\nafter\n")
    roles.write_page(page, roles.tables(stored, (1,)))
    text = page.read_text()
    assert text.startswith(f"before\n\n{roles.BEGIN}\n")
    assert text.endswith(f"{roles.END}\n\nafter\n")
    assert [line for line in text.splitlines() if line.startswith("| ")] == [
        "| shape | prompt | batch | new | ms | over plain 8 / 16 | "
        "plain model that takes as long | its loss over this one's, seed 0 / 1 |",
        "| 8+8 | 448 | 1 | 1 | 30 | 0.67 / 1.33 | 12.0 layers | +1.50 / +1.00 % |",
        "| 8+8 | 448 | 8 | 1 | 160 | 1.25 / 2.50 | below 8.0 layers | +3.00 / +2.00 % |",
        "| 8+8 | 448 | 8 | echo | 200 | 0.50 / 1.00 | 16.0 layers | +0.00 / +0.00 % |",
    ]
    roles.write_page(page, roles.tables(stored, (1,)))
    assert page.read_text() == text


def test_other_shapes_have_fewer_lengths_of_answers() -> None:
    stored = {"bits": {}, "parts": [part(1, plain_8=0.02)]}
    seconds = stored["parts"][0]["seconds"]
    seconds |= {name: {"1": 0.01, "2": 0.02} for name in ("plain-8", "8+8", "8+16")}
    lines = roles.tables(stored, (1, 2), others=(1,)).splitlines()
    assert [line.split(" | ")[:4] for line in lines[2:] if line] == [
        ["| 8+8", "448", "1", "1"],
        ["| 8+8", "448", "1", "2"],
        ["| 8+16", "448", "1", "1"],
    ]


def test_stored_losses_are_those_of_the_results() -> None:
    folder = Path(__file__).parents[2] / "models/shared_16"
    controls = json.loads((folder / "controls.json").read_text())
    for row in controls["controls"]:
        assert roles.BITS[f"plain-{row['layers']}"][0] == row["bits_per_byte"]
    assert roles.BITS["8+8"][0] == pytest.approx(controls["bits_per_byte"], abs=1e-4)
    assert roles.BITS["8+4"][0] / roles.BITS["8+8"][0] == pytest.approx(0.9279 / 0.9134)


@pytest.mark.check
def test_all_parts_run_and_are_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "roles.json"
    shapes = ["--shapes", "plain-1", "plain-2", "1+1"]
    assert roles.main(["--dry-run", *shapes, "--out", str(file)]) == 0
    stored = json.loads(file.read_text())
    assert [entry["kind"] for entry in stored["parts"]] == ["requests", "echo", "mix"]
    for entry in stored["parts"]:
        assert [*entry["seconds"]] == shapes[1:]
    assert [*stored["parts"][0]["seconds"]["1+1"]] == ["1", "4", "8"]
    assert "| 1+1 | 24 | " in capsys.readouterr().out
    assert roles.main(["--dry-run", *shapes, "--out", str(file)]) == 0
    assert json.loads(file.read_text()) == stored
