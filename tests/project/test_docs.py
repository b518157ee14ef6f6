# SPDX-License-Identifier: Apache-2.0
"""Guides run from top to bottom, links lead somewhere, and pages about the code are true."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import exit_branches
import jax
import pytest
from helpers.marks import slow

import utio_jax.serving
from utio_jax.bench.rows import KEYS, save_rows

pytestmark = pytest.mark.usefixtures("short_programs")

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/contrib/*.md", "results/*.md", "models/*/*.md")
    for file in ROOT.glob(pattern)
)
NOTEBOOKS = sorted(f"notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.py"))
FIELD = sorted(f"docs/field/{file.name}" for file in (ROOT / "docs" / "field").glob("*.py"))
OWN = sorted(f"docs/own/{file.name}" for file in (ROOT / "docs" / "own").glob("*.py"))
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
LAYERS = next(
    contract["layers"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    if contract["type"] == "layers"
)


CONTRIB_GUIDES = ("edge", "encoders", "rows", "stopping")


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.check
@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("docs/prompts.md", 1),
        ("docs/roles.md", 1),
        *slow(("docs/decode.md", 2), ("docs/utio.md", 3), ("docs/bring_your_own.md", 4)),
        *slow(("docs/engine.md", 2), ("docs/branches.md", 2), ("docs/coming_from.md", 4)),
        *slow(*((f"docs/contrib/{name}.md", 1) for name in CONTRIB_GUIDES)),
    ],
)
def test_a_guide_runs_from_top_to_bottom(
    page: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = blocks_of(page, "python")
    scope: dict[str, Any] = {"__name__": "__main__"}
    assert len(blocks) == number
    with jax.numpy_rank_promotion("allow"):  # As it is for a reader.
        for index, block in enumerate(blocks):
            exec(compile(block, f"{page}[{index}]", "exec"), scope)
    if page == "docs/roles.md":  # A model that learned to count goes on counting.
        assert scope["losses"][-1] < 0.1 * scope["losses"][0]
        assert scope["result"].token_ids[0].tolist() == [*range(37, 45)]
        assert scope["result"].prompt_depths[0].tolist() == [2] * 31 + [6]


@pytest.mark.slow
@pytest.mark.check
@pytest.mark.parametrize("program", OWN)
def test_a_model_of_another_library_runs(program: str) -> None:
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(ROOT / program), run_name="__main__")


@pytest.mark.check
def test_a_calibrated_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = (block for block in blocks_of("docs/serving.md", "py") if "Server(" in block)
    monkeypatch.setattr(utio_jax.serving.Server, "run", lambda server: None)
    scope: dict[str, Any] = {"text": utio_jax.load(branches=False)}
    exec(compile(program, "serving.md", "exec"), scope)
    assert {*scope["model"].budgets} == {0.6, 0.75, 0.9}


def programs_of(page: str) -> list[str]:
    """Returns the programs of a page: a block that does not begin with imports goes on."""
    programs = list[str]()
    for block in blocks_of(page, "python"):
        if block.startswith(("import ", "from ")):
            programs.append(block)
        else:
            programs[-1] += block
    return programs


@pytest.mark.check
@pytest.mark.parametrize(
    "number",
    # Slow: a calibration, a comparison, training, a score, all devices, texts of many lengths.
    [pytest.param(n, marks=() if n in (3, 7) else pytest.mark.slow) for n in range(9)],
)
def test_each_program_runs_by_itself_anywhere(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = programs_of("docs/extending.md")
    assert len(programs) == 9
    with jax.numpy_rank_promotion("allow"):
        exec(compile(programs[number], f"extending.md[{number}]", "exec"), {"__name__": "__main__"})


def test_programs_to_begin_with_are_short() -> None:
    for block in blocks_of("docs/extending.md", "python"):
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 15, block


@pytest.mark.check
def test_the_benchmark_of_other_utios_is_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("utio_jax.benchmark", run_name="__main__")
    assert "--batch-sizes" in capsys.readouterr().out


def test_a_part_of_a_benchmark_is_one_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exit_branches.main(["loses", "no-such-model"])
    assert "invalid choice: 'loses'" in capsys.readouterr().err


@pytest.mark.check
def test_the_rows_of_a_benchmark_are_printed_by_one_line(tmp_path: Path) -> None:
    (line,) = blocks_of("docs/coming_from.md", "bash")
    row = dict(zip(KEYS, "abcdefghijk", strict=True)) | {"seconds": 0.5, "speedup": 1.25}
    save_rows(tmp_path / "out/bench/results.json", {}, [row | {"nll": 2}] * 2, complete=True)
    command = [sys.executable, *shlex.split(line)[1:]]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout == "a b c d e f g 0.5 1.25\n" * 2


def test_examples_are_python() -> None:
    for page in PAGES:
        for block in (*blocks_of(page, "python"), *blocks_of(page, "py")):
            compile(block, page, "exec")


def public_names(package: str) -> set[str]:
    """Returns what the `__init__` of a package lists; nothing for a module inside one."""
    file = ROOT.joinpath(*package.split("."), "__init__.py")
    for node in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@pytest.mark.parametrize(
    "page",
    ["README.md", *(page for page in PAGES if page.startswith("docs/")), *NOTEBOOKS, *FIELD, *OWN],
)
def test_examples_import_public_names_alone(page: str) -> None:
    is_notebook = page.endswith(".py")
    blocks = [*blocks_of(page, "python"), *blocks_of(page, "py")]
    for block in [(ROOT / page).read_text()] if is_notebook else blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names} - {"utio_jax"}
                assert not [name for name in modules if name.startswith("utio_jax")], page
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("utio_jax"):
                names = {alias.name for alias in node.names}
                assert not names - public_names(str(node.module)), (page, node.module, names)


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
        defined = re.findall(r"^\[([^\]]+)\]: ([^#:\s]*)(?:#\S*)?$", text, flags=re.MULTILINE)
        for target in (*targets, *(target for _, target in defined)):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_files_that_are_named_exist() -> None:
    for page in PAGES:
        if page in ("CHANGELOG.md", "docs/migration.md"):  # They name what is gone, too.
            continue
        text = (ROOT / page).read_text()
        for name in re.findall(
            r"`((?:utio_jax|tests|docs|benchmarks|models)/[\w/.-]+\.\w+)`", text
        ):
            there = (ROOT / name).exists() or (ROOT / "utio_jax" / name).exists()
            assert there, f"{page}: {name}"


def test_benchmarks_of_results_exist_or_are_history() -> None:
    """Each is there at HEAD, or its row or paragraph names the commit that has it."""
    for page in sorted(page for page in PAGES if page.startswith("results/")):
        for part in re.split(r"\n(?=\s*\n|\||- )", (ROOT / page).read_text()):
            named = re.findall(r"(?:benchmarks|models/recipes|docs)/[\w/]+\.py", part)
            gone = [name for name in named if not (ROOT / name).exists()]
            is_history = re.search(r"\btag\b|\bcommit\b|\bhistory\b", part)
            assert not gone or is_history, (page, gone)


def test_the_packages_are_those_of_the_contract() -> None:
    named = [re.sub(r"[()\s]", "", name) for layer in LAYERS for name in layer.split("|")]
    built = [name for name in named if (ROOT / "utio_jax" / name).is_dir()]
    table = re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, flags=re.MULTILINE)
    assert sorted(table) == sorted(built)
    assert table[:2] == ["contrib", "cli"]
    assert table[-1] == "core"
    listed = re.findall(r"^_api/(\w+)$", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted({*built, "utio_jax"} - {"cli"})


def test_the_reading_path_is_short() -> None:
    rows = re.findall(r"^\| \d \| `([\w/.]+)` \| `(\w+)", ARCHITECTURE, flags=re.MULTILINE)
    assert len(rows) == 5
    assert rows[0][0] == "utio_jax/staircase/score.py"
    for name, symbol in rows:
        text = (ROOT / name).read_text()
        assert len(text.splitlines()) <= 400, name
        assert re.search(rf"(def|class) {symbol}\b", text), (name, symbol)


def test_touched_files_of_the_map_exist() -> None:
    rows = ARCHITECTURE[ARCHITECTURE.index("## What to touch") :].splitlines()
    named = [name for row in rows for name in re.findall(r"`([a-z_]+/[\w/]+\.py)`", row)]
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "utio_jax" / name).exists(), name


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_study_is_listed() -> None:
    studies = {file.stem for file in (ROOT / "results").glob("*.md")} - {"README"}
    page = (ROOT / "results" / "README.md").read_text()
    listed = set(re.findall(r"^\| \[(\w+)\]\(", page, flags=re.MULTILINE))
    assert listed == studies
    rows = json.loads((ROOT / "results" / "figures.json").read_text())
    assert {row["study"] for row in rows} <= studies
