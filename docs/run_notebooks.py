# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks/*.py and keeps what they show: `make notebooks`, or name some of them.

The .py file is the source, the .ipynb beside it the same cells with their outputs. Not kept:
progress bars, which a saved notebook cannot draw, and when each cell ran.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

from utio_jax.core import avoid_wrong_products

FOLDER = Path(__file__).parents[1] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(source: Path) -> None:
    """Executes one notebook in a kernel of its own and writes it.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed; nothing is written.
    """
    notebook = jupytext.read(source)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    started = time.perf_counter()
    NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": FOLDER}}
    ).execute()
    seconds = time.perf_counter() - started
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if WIDGET not in each.get("data", {})]
    file = source.with_suffix(".ipynb")
    nbformat.write(notebook, file)
    print(f"{file.name}: {seconds:.0f} s, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    avoid_wrong_products()  # Kernels inherit it.
    for each in sorted(map(Path, sys.argv[1:])) or sorted(FOLDER.glob("*.py")):
        run(each)
