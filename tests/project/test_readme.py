# SPDX-License-Identifier: Apache-2.0
"""README examples run, and its figures are those of the results pages."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("short_programs")]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_each_example_runs_by_itself(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(BLOCKS) == 3
    exec(compile(BLOCKS[number], f"README.md[{number}]", "exec"), {"__name__": "__main__"})


def test_it_fits_on_a_few_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert all(len(line) <= 120 or line.startswith("|") for line in lines)


def test_what_it_is_comes_first_and_when_not_to_use_it_before_the_details() -> None:
    marks = (
        "early-exit inference for transformers in JAX",
        "make demo",
        "## Quick start",
        "## What to expect",
        "**Do not use early exits**",
        "## How it works",
    )
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places)


def test_its_figures_stand_on_the_pages_that_they_link() -> None:
    links = re.findall(r"\[\**([\d.]+(?:(?: / | to )[\d.]+)*)\**\]\(([\w/]+\.md)", README)
    assert len(links) >= 6
    for figures, page in links:
        text = (ROOT / page).read_text()
        for figure in re.findall(r"[\d.]+", figures):
            assert figure in text, f"{page} lacks {figure}"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the tables, on a copy of what it reads and writes."""
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "docs/readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "results").mkdir()
    for file in (ROOT / "README.md", *(ROOT / "results").iterdir()):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_the_tables_are_what_the_rows_say(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0
    assert 10 <= len(tables.rows()) <= 22


def test_a_table_changed_by_hand_is_noticed_and_mended(tables: ModuleType, capsys: Any) -> None:
    file = tables.ROOT / "results" / "README.md"
    kept = file.read_text()
    file.write_text(kept.replace("0.9255 / 0.9368", "0.1255 / 0.9368"))
    assert tables.main(["--check"]) == 1
    assert "make figures" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert file.read_text() == kept


def test_a_figure_that_its_study_lacks_is_refused(tables: ModuleType, capsys: Any) -> None:
    rows = tables.ROOT / "results" / "figures.json"
    kept = json.loads(rows.read_text())
    kept[-1]["figure"] = "98.76 of 54"
    rows.write_text(json.dumps(kept))
    assert tables.main([]) == 1
    assert "98.76 of 54" in capsys.readouterr().err
