# SPDX-License-Identifier: Apache-2.0
"""README examples run, and its figures are those of the results pages."""

from __future__ import annotations

import re
from pathlib import Path

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
