# SPDX-License-Identifier: Apache-2.0
"""What the README shows runs, and what it says exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "number"),
    [("README.md", 6), ("docs/bring_your_own.md", 3)],
)
def test_the_examples_run(file: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / file).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == number
    for block in blocks:
        exec(compile(block, file, "exec"), {"__name__": "__main__"})


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
