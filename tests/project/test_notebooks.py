# SPDX-License-Identifier: Apache-2.0
"""The notebooks as they are kept: a .py for each .ipynb, run from top to bottom, fit to be read.

That they run at all, `--nbmake` tests, which pytest is given in pyproject.toml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted({file.stem for file in FOLDER.iterdir() if file.suffix in (".py", ".ipynb")})
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|work|usr|opt|var|mnt|Users)/")

for_each_notebook = pytest.mark.parametrize("name", NAMES)


def cells_of(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]


def text_of(parts: str | list[str]) -> str:
    return parts if isinstance(parts, str) else "".join(parts)


def outputs_of(name: str) -> Iterator[dict[str, Any]]:
    for cell in cells_of(name):
        yield from cell.get("outputs", ())


def texts_of(output: dict[str, Any]) -> Iterator[str]:
    """Yields everything that an output says in words."""
    yield text_of(output.get("text", ""))
    for kind, value in output.get("data", {}).items():
        if not kind.startswith("image/"):
            yield text_of(value)


@for_each_notebook
def test_both_files_hold_the_same_cells(name: str) -> None:
    source = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    kept = [(cell["cell_type"], text_of(cell["source"])) for cell in cells_of(name)]
    assert kept == [(cell.cell_type, cell.source) for cell in source.cells], "make notebooks"


@for_each_notebook
def test_every_cell_was_run_once_in_order_without_errors(name: str) -> None:
    code = [cell for cell in cells_of(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for output in outputs_of(name)} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert not [out["text"] for out in outputs_of(name) if out.get("name") == "stderr"]


@for_each_notebook
def test_no_machine_is_named(name: str) -> None:
    for cell in cells_of(name):
        assert not MACHINE_PATH.findall(text_of(cell["source"]))
    for output in outputs_of(name):
        for text in texts_of(output):
            assert not MACHINE_PATH.findall(text), text


@for_each_notebook
def test_only_what_is_public_is_used(name: str) -> None:
    """What they import, test_docs.py looks at."""
    text = (FOLDER / f"{name}.py").read_text()
    assert not re.findall(r"\._(?!_)\w*", text)
