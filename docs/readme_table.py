# SPDX-License-Identifier: Apache-2.0
"""Writes the table of results/README.md from the rows of results/figures.json.

    python docs/readme_table.py            # writes it
    python docs/readme_table.py --check    # fails where it is not what the rows say

A row is one claim: `figure` stands in the study `results/<study>.md` (with `parts`, each of the
numbers between slashes does), `command` printed it on `date`, `at` says on what.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- figures: written by docs/readme_table.py -->"
END = "<!-- end of figures -->"

Row = Mapping[str, Any]


def rows() -> list[Row]:
    """Returns all claims, in the order in which they are shown."""
    return json.loads((ROOT / "results" / "figures.json").read_text())


def missing(row: Row) -> list[str]:
    """Returns what of a row its study does not say: the figure, or parts of it."""
    study = (ROOT / "results" / f"{row['study']}.md").read_text()
    parts = row["figure"].split(" / ") if row.get("parts") else [row["figure"]]
    flat = re.sub(r"\s+", " ", study)
    return [part for part in parts if part not in flat]


def table(chosen: Sequence[Row], *, studies: str) -> str:
    """Returns a Markdown table: claim, figure, command, date.

    Args:
      chosen: the rows.
      studies: where the studies lie, as seen from the file that holds the table.
    """
    lines = ["| claim | figure | command | date |", "|---|---|---|---|"]
    for row in chosen:
        figure = row["figure"].replace("**", "")
        where = f"[{row['date']}]({studies}{row['study']}.md)"
        lines.append(f"| {row['claim']} | {figure} ({row['at']}) | `{row['command']}` | {where} |")
    return "\n".join(lines)


def written(file: Path, chosen: Sequence[Row], *, studies: str) -> str:
    """Returns the file's text with the table between its two comments made anew.

    Raises:
      ValueError: the file lacks the comments.
    """
    text = file.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"Wanted one pair of comments {BEGIN!r}, {END!r}. Got none in {file}.")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(chosen, studies=studies)}\n\n{END}{rest.split(END)[1]}"


def files() -> dict[Path, str]:
    """Returns the file with the text that it should have."""
    index = ROOT / "results" / "README.md"
    return {index: written(index, rows(), studies="")}


def main(arguments: Sequence[str]) -> int:
    """Writes, or checks; returns the exit status."""
    unsaid = {row["claim"]: gone for row in rows() if (gone := missing(row))}
    if unsaid:
        print(f"Wanted figures that stand in their study. Got {unsaid}.", file=sys.stderr)
        return 1
    for file, text in files().items():
        if file.read_text() == text:
            continue
        if "--check" in arguments:
            name = file.relative_to(ROOT)
            print(f"{name} is not what results/figures.json says: make figures", file=sys.stderr)
            return 1
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
