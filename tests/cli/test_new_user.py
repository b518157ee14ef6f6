# SPDX-License-Identifier: Apache-2.0
"""What a new user runs into: nothing is ignored, nothing overwritten, every failure is one line."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.cli import ran, refused
from helpers.folders import changed_copy, save_small_model
from helpers.texts import SOURCES, source

import utio_jax
from utio_jax.calibration.advice import conclude, may_pay
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import ComparisonRow
from utio_jax.calibration.lens import LensConfig
from utio_jax.cli.evaluate import Evaluate
from utio_jax.cli.generate import Generate
from utio_jax.cli.main import COMMANDS, GROUPS, main, parsed
from utio_jax.core.files import check_writable
from utio_jax.core.lens import Lens
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate, generate_text
from utio_jax.evaluation.ledger import Ledger
from utio_jax.models import load
from utio_jax.policies.depth import uniform
from utio_jax.policies.signals import Position
from utio_jax.policies.store import Calibration, Thresholds
from utio_jax.staircase.score import score

pytestmark = pytest.mark.check

HARMED = {
    "exit_nll_increase_pct": {"1": 80.0, "2": 60.0},
    "exit_agreement": {"1": 0.01, "2": 0.02},
    "goals": {"position": {"nll_increase_pct_by_budget": {"0.8": 50.0}}},
}
"""What a calibration has found that it had better say: exits that lose more than most bear."""


def position_only(sha256: str, **info: Any) -> Calibration:
    entry = Thresholds(depths=(1, 4), thresholds=(-5.0,), fractions=(0.2, 0.8))
    return Calibration(
        entries={"position": {0.8: entry}},
        signals={"position": Position()},
        info={"model_sha256": sha256, "goals": {}, **info},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with exits 1, 2, 4 and a calibration that says it does not pay."""
    out = tmp_path_factory.mktemp("model")
    save_small_model(out)
    position_only(load(out).sha256, **HARMED).save(out)
    return out


@pytest.fixture
def bare(folder: Path, tmp_path: Path) -> Path:
    """The same without a calibration, read at its last layer alone, as a stock model is."""
    out = changed_copy(folder, tmp_path / "stock", exits=[4])
    for file in out.glob("policies.*"):
        file.unlink()
    return out


# Nothing is overwritten.


def test_the_shipped_calibration_is_never_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = load().folder / "policies.json"
    before = own.read_bytes()
    monkeypatch.setattr("utio_jax.cli.calibrate.read_documents", None)  # No work before.
    for name in ("shared-16", load().folder):
        message = refused(capsys, "calibrate", "--model", name, "--policy", "all")
        assert "Wanted --out FILE" in message
        assert "belongs to the installed package" in message
    assert own.read_bytes() == before


def fake_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits nothing: returns a policy of each name."""

    @functools.wraps(calibrate)  # Which has its options.
    def fit(*_: Any, policies: Any, model_sha256: str, **__: Any) -> Any:
        new = position_only(model_sha256, **HARMED)
        return dataclasses.replace(
            new,
            entries=dict.fromkeys(policies, new.entries["position"]),
            signals=dict.fromkeys(policies, Position()),
            info=dict(new.info) | {"verdict": may_pay(new.info)},
        )

    monkeypatch.setattr("utio_jax.models.model.calibrate", fit)


def test_a_calibration_is_replaced_where_nothing_of_it_is_lost(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calibrate(monkeypatch)
    own = bare / "policies.json"
    arguments = ["calibrate", str(source("colorsys")), "--model", str(bare), "--exits", "1", "2"]
    for names in (["position"], ["entropy", "position"]):
        _, shown = ran(capsys, *arguments, "4", "--policy", *names)
        assert f"Written: {', '.join(names)}: {own}" in shown
        assert {*json.loads(own.read_text())["entries"]} == {*names}
    before = own.read_bytes()
    message = refused(capsys, *arguments, "4", "--policy", "position")
    assert "also holds entropy" in message
    assert "fit all of them: position entropy" in message
    assert own.read_bytes() == before
    # The command that is recommended works, but for its placeholder.
    assert f"utio-jax compare --exits 1 2 4 --model {bare} OTHER_FILES" in shown


def test_a_lens_is_kept_and_never_replaced_by_another(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fake_calibrate(monkeypatch)
    out = tmp_path / "fitted" / "mine.json"
    fitted: list[LensConfig] = []

    def fit(*_: Any, progress: Any, **__: Any) -> Lens:
        fitted.append(_[3])
        return Lens(matrix=jnp.zeros((1, 32, 32)), bias=jnp.zeros((1, 32)), exits=(2,))

    monkeypatch.setattr("utio_jax.calibration.lens.fit_lens", fit)
    texts = [str(source(name)) for name in SOURCES]
    arguments = ["calibrate", *texts, "--model", str(bare), "--exits", "2", "4"]
    arguments += ["--fit-lens", "--out", str(out), "--policy", "position"]
    assert main(arguments) == 0
    lens = out.parent / "lens.json"
    assert f"--lens {lens} --calibration {out} OTHER_FILES" in capsys.readouterr().err
    stored = lens.read_bytes()
    assert main(arguments) == 0
    assert len(fitted) == 1, "the same one is there"
    # Without exits, some are named; what is written belongs to these.
    asked = [
        argument for argument in arguments if argument not in ("--exits", "2", "4", "--fit-lens")
    ]
    assert "Wanted a lens of {'exits': [2, 3]}" in refused(capsys, *asked)
    fewer = [argument for argument in arguments if argument != texts[0]]
    assert "Wanted a lens of {'text':" in refused(capsys, *fewer)
    assert lens.read_bytes() == stored
    # Without it the calibration is another model's; the error says what may be missing.
    message = refused(capsys, "compare", *texts, "--model", bare, "--calibration", out)
    assert "This model is read without a lens. Was it fitted so? See --lens" in message


# Places that cannot be written are found before the work.


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("calibrate X --out FILE/a.json", "--out"),
        ("compare X --out FILE", "--out"),
        ("evaluate X --per-token FILE/tokens.json", "--per-token"),
        ("demo X --out FILE/demo", "--out"),
        ("fit-prompt X --out FILE/a.json", "--out"),
        ("bench --out FILE/bench", "--out"),
    ],
)
def test_a_place_that_takes_no_files_is_found_before_the_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    option: str,
) -> None:
    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("work")

    for place in ("models.load", "cli.bench.describe"):
        monkeypatch.setattr(f"utio_jax.{place}", worked)
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    Path("DIR.json").mkdir()
    Path("X").write_text("x = 1")
    assert option in refused(capsys, *arguments.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DIR.json", "FILE", "X"]


@pytest.mark.parametrize("command", ["evaluate", "compare", "try", "calibrate", "fit-prompt"])
def test_files_that_cannot_be_read_are_found_before_the_model_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("utio_jax.models.load", None)
    message = refused(capsys, command, "nowhere.txt", Path(__file__).parent)
    assert "Got nowhere.txt: No such file or directory; " in message
    assert f"{Path(__file__).parent}: Is a directory." in message


def test_what_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    expected = tmp_path / "new" / "deeper" / "out.json"
    assert check_writable(expected, "--out") == expected
    assert not [*tmp_path.iterdir()]


# Every failure is one line.


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "\nutio-jax: interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (
            OSError(28, "No space left on device", "out.json"),
            1,
            "utio-jax: Wanted files that can be read and written. Got out.json: No space left on "
            "device. Free space, or name another place.\n",
        ),
        (
            OSError("Couldn't deserialize thrift"),  # Of Parquet: a library's, not the system's.
            1,
            "utio-jax: Wanted files that can be read and written. Got: Couldn't deserialize "
            "thrift. Is it damaged? Remove it, or name another place.\n",
        ),
        (
            ModuleNotFoundError("No module named 'orbax'", name="orbax.checkpoint"),
            2,
            "utio-jax: Wanted orbax, which this command needs. It is not installed. It comes with "
            "the extra train: pip install '.[train]' in a checkout of utio_jax, or else pip "
            "install 'utio-jax[train]'.\n",
        ),
    ],
)
def test_what_ends_a_command_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    status: int,
    message: str,
) -> None:
    def run(_: Any) -> None:
        raise raised

    monkeypatch.setattr("utio_jax.cli.evaluate.Evaluate.run", run)
    assert main(["evaluate", "x"]) == status
    assert capsys.readouterr() == ("", message)


def process(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    # Buffered, as it is for users: what cannot be written is noticed late.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**given, "PYTHONPATH": str(Path(utio_jax.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_reader_that_leaves_and_a_full_disk_leave_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # As `head` does, once it has seen enough.
    piped = process("-m", "utio_jax", "--version", stdout=writer)
    os.close(writer)
    with Path("/dev/full").open("w") as full:
        disk = process("-m", "utio_jax", "--version", stdout=full)
    assert piped.communicate() == (None, "")
    assert piped.returncode == 141
    _, message = disk.communicate()
    assert message.startswith("utio-jax: Wanted files that can be read and written. Got: No space")
    assert (disk.returncode, message.count("\n")) == (1, 1)


def test_closed_outputs_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert (main(["--version"]), main(["nothing"])) == (0, 2)
    sys.stdout.close()
    sys.stderr.close()


def test_a_base_install_says_what_to_install() -> None:
    code = "import sys\n"
    for missing, statement in (
        ("tokenizers", "from utio_jax.models import load"),
        ("tyro", "import utio_jax.cli.main"),
    ):
        code += f"sys.modules[{missing!r}] = None\ntry: {statement}\n"
        code += "except (ImportError, SystemExit) as error: print(error, file=sys.stderr)\n"
    code += "print([m for m in sys.modules if m.startswith('scipy')], file=sys.stderr)"
    lines = process("-c", code).communicate()[1].strip().splitlines()
    both = "pip install '.[cli]' in a checkout of utio_jax, or else pip install 'utio-jax[cli]'"
    assert lines[0].endswith(
        "Wanted tokenizers, which utio_jax.models needs. It is not installed. It comes with the "
        f"extra cli: {both}."
    )
    assert lines[1] == f"utio-jax: the command line needs the extra cli: {both}."
    assert lines[2] == "[]", "scipy takes a second to import, as long as all of JAX"


def test_arguments_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "generate", os.fsdecode(b"caf\xe9"))
    assert message == "utio-jax: Wanted arguments in UTF-8. Got 'caf\\udce9'.\n"


def test_help_lists_every_command_and_the_version_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    for name in (*GROUPS, *COMMANDS, "--version", "--help-all"):
        assert name in shown
    assert "Did you mean generate?" in refused(capsys, "generat", "x")
    assert "That is `evaluate --per-token FILE` now." in refused(capsys, "score", "x")
    assert "That is the table that `bench` prints now." in refused(capsys, "bench", "--report=x")
    assert main(["--version"]) == 0
    assert re.fullmatch(r"utio-jax \S+ \(python .*, jax .*\)\n", capsys.readouterr().out)


# No message recommends what does not exist.

ELSEWHERE = {
    "environment.py": {"--always", "--dirty", "--abbrev", "--exclude"},  # git's
    "architectures.py": {"--merge"},  # llama.cpp's
    "actors.py": {"--head", "--xla"},  # Ray's and XLA's
    # Taken out before a command reads its own.
    "main.py": {"--json", "--help-all", "--enable-utio"},
    "options.py": {"--help-all"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_begins_with_examples_that_work(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    brief = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([name, "--help-all"])
    whole = capsys.readouterr().out
    assert brief.count("\n") <= 45
    examples = re.findall(rf"^  (utio-jax {name}.*)", brief, flags=re.MULTILINE)
    assert len(examples) == len(COMMANDS[name].EXAMPLES) == 3
    for example in COMMANDS[name].EXAMPLES:
        parsed(name, shlex.split(example)[1:])
    hidden = {option for option in options_of(name) if option in whole and option not in brief}
    assert ("--help-all" in brief) == bool(hidden)
    flat = re.sub(r"[\s│]+", "", whole)
    for value in {of.default for of in dataclasses.fields(COMMANDS[name])}:
        if type(value) in (int, float):
            assert f"(default:{value})" in flat, "0 is a default like any other"


def test_the_page_of_commands_has_every_option_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("docs_conf", docs / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    for name in ("COLUMNS", "NO_COLOR"):  # Which it sets.
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(conf, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    conf.write_commands(None)
    page = (tmp_path / "docs" / "_api" / "commands.rst").read_text()
    assert "\x1b" not in page
    for name in COMMANDS:
        section = page.partition(f"\n{name}\n~~~")[2].partition("\n~~~")[0]
        fields = dataclasses.fields(COMMANDS[name])
        for option in options_of(name):
            positional = option[2:].upper() in (field.name.upper() for field in fields)
            assert option in section or positional, (name, option)
    assert "_api/commands" in (docs / "index.md").read_text()


WHOLE_COMMAND = r"utio-jax ([a-z-]+)((?:(?!utio-jax|\. |`|: |; ).)*)"


def options_of(name: str) -> set[str]:
    fields = dataclasses.fields(COMMANDS[name])
    return {"--help", *(f"--{field.name.replace('_', '-')}" for field in fields)}


def test_no_message_recommends_an_option_that_does_not_exist() -> None:
    every = {"--version", *(option for name in COMMANDS for option in options_of(name))}
    package, wrong, commands = Path(utio_jax.__file__).parent, [], 0
    for file in sorted(package.rglob("*.py")):
        if package / "contrib" in file.parents:  # These have commands of their own.
            continue
        known = every | ELSEWHERE.get(file.name, set())
        for text in texts_of(ast.parse(file.read_text())):
            wrong += [(file.name, o) for o in re.findall(r"--[a-z][a-z-]+", text) if o not in known]
            # Of a whole command: that command's own options.
            for name, options in re.findall(WHOLE_COMMAND, text):
                if name in COMMANDS:
                    result = re.findall(r"--[a-z][a-z-]+", options)
                    commands += len(result) > 0
                    own = options_of(name)
                    wrong += [(file.name, f"{name} {o}") for o in result if o not in own]
    assert not wrong
    assert commands > 8


def texts_of(tree: ast.AST) -> list[str]:
    """Returns every string of a module, with what is filled in left out."""
    hits, inside = list[str](), list[ast.AST]()
    for node in ast.walk(tree):  # A string with gaps comes before its parts.
        if isinstance(node, ast.JoinedStr):
            inside += node.values
            parts = [p.value if isinstance(p, ast.Constant) else "FILLED" for p in node.values]
            hits.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            hits.append(node.value)
    return hits


@pytest.mark.parametrize("arguments", ["generate x --mode lossless --drafter exit", "compare X"])
def test_a_stock_model_is_told_how_to_get_exits(
    bare: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("X").write_text(source("colorsys").read_text())
    message = refused(capsys, *arguments.split(), "--model", bare)
    assert "--exits 2 3 4 (load(..., exits=(2, 3, 4)))" in message
    assert "--lens FILE, which utio-jax calibrate --exits 2 3 4 --fit-lens writes" in message


# Verdicts are repeated, and readable.


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_verdict_is_repeated_where_the_policy_is_used(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    model = load(folder)
    options: Any = {"model": str(folder), "policy": "position"}
    if command == "generate":
        Generate(mode="adaptive", **options).decoding_mode(model)
    else:
        Evaluate(files=(source("keyword"),), context=32, **options).run()
    message = capsys.readouterr().err
    assert (
        "utio-jax: Adaptive depth will not pay here: the loss at depth 2 is 60 % above" in message
    )
    if command == "evaluate":
        assert re.search(r"at full depth [\d.]+, perplexity [\d.]+: [+-][\d.]+ % loss at", message)
        assert "more than the budget" not in message


def test_more_work_than_the_budget_is_pointed_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = position_only(load(folder).sha256)
    entries = {"position": {0.3: fitted.entries["position"][0.8]}}
    dataclasses.replace(fitted, entries=entries).save(tmp_path / "low.json")
    options: Any = {"model": str(folder), "calibration": tmp_path / "low.json", "context": 32}
    Evaluate(files=(source("keyword"),), policy="position", **options).run()
    assert "That is more than the budget of 0.3" in capsys.readouterr().err


def row(
    policy: str, budget: float | None, margin: Any, p_value: float | None = None, **fields: Any
) -> ComparisonRow:
    ledger = Ledger(policy=policy, budget=budget, **fields)
    return ComparisonRow(ledger=ledger, hull_margin_pct=margin, hull_margin_p_value=p_value)


def test_a_comparison_ends_with_a_sentence_and_names_each_row_apart() -> None:
    controls = [
        row("uniform", None, None, depth_histogram={"1": 1.0}),
        row("uniform", None, None, depth_histogram={"2": 1.0}),
        row("full", None, None, depth_histogram={"4": 1.0}),
        row("oracle_kl", 0.5, (5.0, 6.0, 7.0)),
        row("random", 0.5, (1.0, 2.0, 3.0)),
    ]
    doubtful = row("learned", 0.5, (-0.1, 0.2, 0.5), 0.2, flops_ratio=0.5, nll_increase_pct=2.0)
    better = row("learned", 0.6, (0.1, 0.15, 0.3), 0.02, flops_ratio=0.6, nll_increase_pct=1.0)
    rows = [*controls, doubtful, better]
    names = [row.to_dict()["name"] for row in rows]
    assert names[:3] == ["uniform 1", "uniform 2", "full"]
    assert len({*names}) == len(rows)
    message = conclude(rows)
    assert "1 of 2 policies are better than truncating the model" in message
    assert "learned at 0.6, with 0.15 % [0.10, 0.30] less loss" in message
    assert message.endswith("+1.00 % over full depth.")
    costly = dataclasses.replace(better.ledger, nll_increase_pct=50.0)
    message = conclude([*controls, dataclasses.replace(better, ledger=costly)])
    assert message.endswith("but +50.00 % over full depth, which is more than most uses bear.")
    message = conclude([*controls, doubtful])
    assert "no policy is better than truncating the model, at a level of 5 % for all 1" in message
    message = conclude([*rows, doubtful])  # 0.02 is above 0.05 / 3.
    assert "no policy is better than truncating the model, at a level of 5 % for all 3" in message
    assert "the best, learned at 0.5, has +0.20 % [-0.10, +0.50] less loss" in message
    assert "all of them are cheaper" in conclude(controls)


# Text comes first, and is decoded no more often than needed.


def test_generate_decodes_once_for_the_text_and_once_a_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoded: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        decoded.append(options["mode"].name)
        return generate_text(*arguments, **options)

    monkeypatch.setattr("utio_jax.cli.generate.generate_text", counted)
    texts = ["def mean(values):", "import"]
    arguments = ["generate", *texts, "--model", str(folder), "--max-new-tokens", "4"]
    once, _ = ran(capsys, *arguments, "--rounds", "0")
    assert decoded == ["plain"]
    assert (once["seconds"], once["speedup"], once["tokens_per_second"]) == (None, None, None)
    assert once["flops_ratio"] == 1
    model = load(folder)
    expected = model.generate(texts, max_new_tokens=4, mode="plain")
    assert once["token_ids"] == [row.tolist() for row in expected.token_ids]
    decoded.clear()
    timed, _ = ran(capsys, *arguments)
    assert decoded == ["plain", "plain"], "one of them timed"
    assert timed["token_ids"] == once["token_ids"]
    assert timed["tokens_per_second"] > 0
    decoded.clear()
    mode = ["--mode", "adaptive", "--policy", "uniform", "--depth", "2"]
    assert main([*arguments, *mode, "--rounds", "0"]) == 0
    assert decoded == ["adaptive"], "plain decoding is for timing alone"


# The library.


def test_names_where_things_are_wanted_are_refused(tiny: Any, unchecked_shapes: None) -> None:
    ids = tiny.tokens(2, 8)
    with pytest.raises(TypeError, match="Wanted a policy, such as uniform.*Got str 'learned'"):
        score(tiny.decoder, tiny.params, ids, jnp.asarray([8, 8]), "learned")  # type: ignore[arg-type]
    for mode, message in (
        ("lossless", "Got str 'lossless'"),
        (Plain, r"Got the class Plain. Make one: Plain\("),
        (uniform(2), r"Got a policy, .*Make a mode of it: Adaptive\("),
    ):
        with pytest.raises(TypeError, match=f"Wanted a mode, such as Plain.*{message}"):
            generate(tiny.decoder, tiny.params, [[1]], mode=mode, max_new_tokens=2)  # type: ignore[arg-type]
