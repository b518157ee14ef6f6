# SPDX-License-Identifier: Apache-2.0
"""The layer rule: a module imports only from lower floors, and the core never loads Flax."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "utio_jax"

# Modules of one floor do not import each other.
FLOORS = (
    {"decoder", "ledger", "documents", "launch"},
    {"plan", "parallel"},  # The words of routing, in terms of a decoder's.
    {
        "importance",
        "buckets",
        "cost",
        "attention",
        "artifacts",
        "thresholds",
        "bootstrap",
        "risk",
        "sampling",
        "step_profit",
    },
    {"history", "lens", "processes"},
    {"vertical_slash", "views"},
    {"query_blocks", "cache", "fused_slash"},
    {"executors"},
    {"dense", "heat", "readout", "emission"},
    {
        "microbatches",
        "capacity",
        "controller",
        "decode",
        "signals",
        "sparse",
    },
    {"layers", "policies", "learned", "wrappers", "chance", "lens_fitting", "throttled"},
    {"forward", "timing", "calibration", "mode", "descent", "prefill", "profit"},
    {"guardrails", "exits", "throttle", "quality"},
    {"evaluate", "gates", "adaptive", "lossless", "loop"},
    {"search", "oracles", "benchmark.scoring", "benchmark.schema", "generate", "online"},
    {"goals", "comparison", "benchmark.results", "report.grouping"},
    {"calibrate", "plots", "advice", "report.results", "report.growth"},
    {"generation_ledger", "prompt_ledger", "text", "terminal", "report.regressions"},
    {"benchmark.decoding", "benchmark.environment", "request_ledger", "report.tables"},
    {"demo", "lm_eval", "benchmark.subjects", "report.speed_plots", "report.work_plots"},
    {"benchmark.rows", "report.sections"},
    {"benchmark.passes", "benchmark.startup", "benchmark.texts", "benchmark.throttling"},
    {
        "benchmark.sparse",
        "benchmark.growth",
        "benchmark.execution",
        "benchmark.profitability",
        "benchmark.predictions",
    },
    {"benchmark.suite", "report.writing"},
    {"commands.shared", "commands.bench_subjects"},
    {"commands.scoring"},
    {
        "commands.demo",
        "commands.generate",
        "commands.score",
        "commands.evaluate",
        "commands.finetune",
        "commands.bench",
        "commands.calibrate",
        "commands.compare",
        "commands.first_call",
        "commands.lm_eval",
        "commands.report",
    },
    {"commands.train"},
    {"cli"},
    {
        "__init__",
        "__main__",
        "commands.__init__",
        "benchmark.__init__",
        "benchmark.__main__",
        "report.__init__",
    },
)
# Folders of modules; importing a name from one names a module.
PACKAGES = ("commands", "benchmark", "report")
FLOOR_OF_MODULE = {module: floor for floor, names in enumerate(FLOORS) for module in names}
# The models use the core up to its studies, and have floors of their own.
MODELS = (
    {"corpus", "tokenizer", "rope", "exit_losses"},
    {"transformer", "config_reader"},
    {"presets", "train", "families", "tensor_parallel"},
    {"huggingface"},
    {"checkpoint"},
    {"recipe", "finetune"},
    {"__init__"},
)
FLOOR_OF_MODEL = {module: floor for floor, names in enumerate(MODELS) for module in names}
MAX_LINES = 335


def imports_of(source: str) -> list[tuple[str, bool]]:
    """Returns each imported module's full name, and whether the import runs with the module."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            # `from utio_jax import buckets` names a module, `from utio_jax.plan import x` does not.
            package = node.module in ("utio_jax", "utio_jax.models")
            names = [f"{node.module}.{a.name}" if package else str(node.module) for a in node.names]
        else:
            continue
        found += [(name, id(node) not in lazy) for name in names]
    return found


def modules_of(folder: Path) -> dict[str, str]:
    """Returns the source of every module in a folder and its `PACKAGES`, by dotted name."""
    files = sorted(
        [*folder.glob("*.py"), *(f for package in PACKAGES for f in folder.glob(f"{package}/*.py"))]
    )
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts): file.read_text(encoding="utf-8")
        for file in files
    }


def test_every_module_has_a_floor():
    assert set(modules_of(CORE)) <= set(FLOOR_OF_MODULE)
    assert set(modules_of(ROOT / "models")) <= set(FLOOR_OF_MODEL)


@pytest.mark.parametrize("module", sorted(modules_of(CORE)))
def test_a_module_imports_only_from_lower_floors(module):
    for name, runs_on_import in imports_of(modules_of(CORE)[module]):
        package, _, rest = name.partition(".")
        assert package not in ("flax", "models"), f"{module} imports {name}"
        if package != "utio_jax" or not rest:
            continue
        if rest.split(".")[0] == "models":
            assert module.startswith("commands."), f"{module} imports {name}; only commands may"
            assert not runs_on_import, f"{module} imports {name} at once; import it in a function"
            continue
        first, *others = rest.split(".")
        target = f"{first}.{others[0]}" if first in PACKAGES and others else first
        assert target in FLOOR_OF_MODULE, f"{module} imports the unknown {name}"
        assert FLOOR_OF_MODULE[target] < FLOOR_OF_MODULE[module], f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(modules_of(ROOT / "models")))
def test_models_stand_on_the_core(module):
    for name, _ in imports_of(modules_of(ROOT / "models")[module]):
        package, _, rest = name.partition(".")
        assert package != "models", f"say utio_jax.models, not models: {module} imports {name}"
        if name.startswith("utio_jax.models."):
            target = rest.split(".")[1]
            assert FLOOR_OF_MODEL[target] < FLOOR_OF_MODEL[module], f"{module} imports {name}"
        elif package == "utio_jax":
            assert FLOOR_OF_MODULE[rest] < FLOOR_OF_MODULE["cli"], f"{module} imports {name}"


@pytest.mark.parametrize("folder", [CORE, ROOT / "models"])
def test_modules_stay_short(folder):
    long = {
        name: source.count("\n")
        for name, source in modules_of(folder).items()
        if source.count("\n") > MAX_LINES
    }
    assert not long, f"split these, they have more than {MAX_LINES} lines: {long}"


def run_python(code: str) -> str:
    """Returns what a fresh interpreter prints; its errors fail the test."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_loads_neither_flax_nor_what_the_command_line_needs():
    face = {"__init__", "__main__", "cli", "demo", "plots", "terminal", "calibrate", "lm_eval"}
    face |= {f"report.{name}" for name in ("speed_plots", "work_plots", "sections", "writing")}
    modules = {name for name in modules_of(CORE) if not name.startswith("commands")} - face
    modules -= {"benchmark.__init__", "benchmark.__main__", "report.__init__"}
    core = [f"utio_jax.{name}" for name in sorted(modules)]
    heavy = (
        "flax",
        "optax",
        "orbax",
        "tokenizers",
        "tyro",
        "rich",
        "matplotlib",
        "tqdm",
        "lm_eval",
        "datasets",
    )
    code = (
        f"import sys, utio_jax, {', '.join(core)}\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_the_models_are_one_package_with_one_name():
    code = (
        "import utio_jax.models.presets as presets, utio_jax, pathlib\n"
        "print(presets.TINY.num_layers, pathlib.Path(presets.__file__).resolve().parts[-2:])"
    )
    assert run_python(code).strip() == "4 ('models', 'presets.py')"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import utio_jax.plan", [("utio_jax.plan", True)]),
        ("from utio_jax import plan, cost", [("utio_jax.plan", True), ("utio_jax.cost", True)]),
        ("def f():\n    from utio_jax.models import presets", [("utio_jax.models.presets", False)]),
        ("if True:\n    from utio_jax.cost import x", [("utio_jax.cost", True)]),
    ],
)
def test_the_reader_of_imports_reads_all_forms(source, wanted):
    assert imports_of(source) == wanted
