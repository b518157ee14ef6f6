# SPDX-License-Identifier: Apache-2.0
"""What the Makefile's tests leave out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mutants import read_list

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", [("test", "TESTS=tests/core"), ("check-rest",)])
def test_slow_tests_and_other_environments_are_left_out(target: tuple[str, ...]) -> None:
    """A test may be one of `make check` and slow at once, as one case of many."""
    ran = subprocess.run(
        ["make", "--dry-run", *target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (tests,) = [line for line in ran.stdout.splitlines() if " -m pytest" in line]
    (chosen,) = re.findall(r'-m "([^"]+)"', tests)
    assert {"not slow", "not llm", "not browser", "not clients", "not ray"} <= set(
        chosen.split(" and ")
    )


def test_packages_are_installed_one_after_the_other(tmp_path: Path) -> None:
    """In a fresh clone, before lint, types and docs run at once."""
    ran = subprocess.run(
        ["make", "--dry-run", "check-rest", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    first, _, _ = ran.stdout.partition("--jobs 2")
    assert re.findall(r"--editable '\.\[(\w+)\]'", first) == ["test", "docs"]


def test_each_mutant_fits_the_source() -> None:
    assert read_list()
