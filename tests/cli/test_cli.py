# SPDX-License-Identifier: Apache-2.0
"""The command line's contract: a line of JSON last on stdout, all else on stderr, honest errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.cli import ran, refused
from helpers.folders import edit_json, save_small_model
from helpers.texts import SOURCES, source

from utio_jax.cli import generate as streaming
from utio_jax.cli.main import main
from utio_jax.decoding.generate import generate_text
from utio_jax.evaluation.ledger import Ledger

pytestmark = pytest.mark.check

TEXTS = ("sched", "stat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder with tokenizer and calibration."""
    out = tmp_path_factory.mktemp("model")
    save_small_model(out)
    edit_json(out / "config.json", exits=[1, 4])
    files = [str(source(name)) for name in ("bisect", "colorsys")]
    arguments = ["calibrate", *files, "--policy", "learned", "--budget", "0.8"]
    assert main([*arguments, "--model", str(out)]) == 0
    return out


def test_a_calibration_of_its_own_is_made_compared_and_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    model = ["--model", folder]
    # Intervals are taken over at least five documents.
    others = [name for name in SOURCES if name != "colorsys"]
    read = [source(name) for name in others]
    arguments = ["calibrate", source("colorsys"), "--policy", "position", "--out", out]
    fitted, _ = ran(capsys, *arguments, *model, "--max-nll-increase-pct", "1")
    assert fitted["out"] == str(out)
    ((budget, entry),) = fitted["entries"]["position"].items()
    assert entry["depths"][-1] <= 4
    arguments = ["compare", *read, "--calibration", out, "--draws", "20"]
    result, _ = ran(capsys, *arguments, *model, "--batches", "1", "--out", tmp_path)
    policies = {row["policy"] for row in result["rows"]}
    assert policies >= {"uniform", "full", "position"}
    (row,) = [row for row in result["rows"] if row["policy"] == "position"]
    assert row["budget"] == float(budget)
    assert "hull_margin_pct" in row
    assert all(Path(picture).stat().st_size > 1000 for picture in result["pictures"])
    arguments = ["evaluate", *read, "--policy", "position", "--calibration", out]
    result, _ = ran(capsys, *arguments, *model)
    assert result["budget"] == float(budget), "the only one"


def test_evaluate_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(source(name)) for name in TEXTS]
    per_token = tmp_path / "tokens.json"
    arguments = ["evaluate", *files, "--model", folder, "--budget", "0.8", "--batch", "4"]
    result, _ = ran(capsys, *arguments, "--per-token", per_token)
    assert (result["policy"], result["budget"], result["documents"]) == ("learned", 0.8, 2)
    tokens = json.loads(per_token.read_text())
    assert [*tokens] == files
    predicted = [value for entry in tokens.values() for value in entry["log_likelihood"]]
    assert result["loss"] == pytest.approx(-np.mean(predicted), abs=1e-4)
    size = sum(Path(file).stat().st_size for file in files)
    assert result["bits_per_byte"] == pytest.approx(-np.sum(predicted) / np.log(2) / size, abs=1e-4)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]), rel=1e-3)
    for entry in tokens.values():
        assert len(entry["token_ids"]) == len(entry["depths"]) + 1


def test_evaluated_token_ids_are_taken_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()  # Ids need no tokenizer.
    ids = np.random.default_rng(0).integers(0, 300, 90).tolist()
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([ids, ids[:7]]))
    losses, fewer = {}, "tokens are fewer than the minimum of 256"
    for policy, more in {
        "full": [],
        "uniform": ["--depth", "2"],
        "learned": ["--budget", "0.8"],
        "random": ["--budget", "0.8"],
    }.items():
        arguments = ["evaluate", "--token-ids", file, "--model", bare]
        result, _ = ran(capsys, *arguments, "--policy", policy, *more)
        assert (result["documents"], result["bits_per_byte"]) == (2, None)
        losses[policy] = result["nll"]
        if policy == "full":
            assert result["nll"] == pytest.approx(result["nll_full"])
        # By themselves, short passes are not routed; what is truncated is no pass that routes.
        assert any(fewer in reason for reason in result["fallbacks"]) == (
            policy in ("learned", "random")
        )
    assert losses["random"] == losses["learned"] == pytest.approx(losses["full"])
    assert losses["uniform"] != losses["full"]


@pytest.mark.slow
def test_two_devices_share_the_rows_of_a_pass(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "ids.json"
    file.write_text(json.dumps([rng.integers(0, 64, n).tolist() for n in rng.integers(2, 64, 24)]))
    arguments = ["evaluate", "--model", folder, "--token-ids", file, "--policy", "uniform"]
    arguments = [*map(str, arguments), "--depth", "2", "--batch", "4"]
    expected, _ = ran(capsys, *arguments)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "utio_jax", *arguments, "--data-parallel"],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for name in ("documents", "tokens", "depth_histogram"):
        assert result[name] == expected[name]
    for name in ("loss", "nll_full", "kl_full", "agreement"):
        assert result[name] == pytest.approx(expected[name], abs=1e-5)
    # Each of the two devices packs its own rows.
    assert result["flops_ratio"] == pytest.approx(expected["flops_ratio"], rel=0.05)


def test_demo_measures_what_it_shows_and_draws(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Those of `try`, whose test then finds its programs compiled.
    monkeypatch.setattr("utio_jax.cli.demo._PROMPTS", 4)
    out = tmp_path / "demo"
    arguments = ["demo", *map(source, TEXTS), "--model", folder, "--batches", "1", "--rounds", "1"]
    result, shown = ran(capsys, *arguments, "--out", out)
    rows = result["rows"]
    names = [row["policy"] for row in rows]
    assert names[0] == "full"
    assert names.count("uniform") == 1
    assert {*names} == {"full", "uniform", "learned"}, "what is not shown is not run"
    for row in rows:
        assert row["involuntary_exits"] == 0
        assert row["tokens"] == 4 * 64
        assert (row["speedup"] is None) == (row["policy"] == "uniform"), "a loss alone"
    written = [(row["mode"], row["batch"]) for row in result["generation"]]
    modes = ("plain", "lossless", "ngram", "adaptive")
    assert written == [(mode, 1) for mode in modes]
    for row in result["generation"]:
        if row["mode"] in ("lossless", "ngram"):
            assert row["agreement"] > 0.99, "the same tokens, up to ties"
        assert row["budget"] == (0.8 if row["mode"] == "adaptive" else None)
        assert row["tokens"] == 32 * 3
        assert set(Ledger(policy="").to_dict()) <= set(row)
        assert row["speedup"] > 0
        assert row["compiles"] == 0
    prompt = result["prompt"]
    assert (prompt["prompt_tokens"], prompt["continuation"]) == (56, 8)
    assert prompt["flops_ratio"] < 1
    assert prompt["speedup"] > 0
    assert prompt["nll_increase_pct"] != 0
    message = " ".join(shown.split())
    for words in ("full depth 1.00 1.00x 0", "against truncation", "writing: drafter exit"):
        assert words in message
    assert shown.endswith(f"{result['verdict']}\n")
    assert result["verdict"].startswith("Next: `utio-jax ")
    assert "prompts: 56 tokens, most to layer 1" in message
    assert shown.count("\n") < 24, "less than a screen"
    assert json.loads((out / "demo.json").read_text()).items() <= result.items()
    for picture in result["pictures"]:
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
        assert Path(picture).stat().st_size > 10_000


def test_a_model_with_exits_is_tried(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = list[tuple[int, int]]()

    @contextmanager
    def counted(total: int, _: str) -> Iterator[Any]:
        steps = list[int]()
        yield SimpleNamespace(update=lambda: steps.append(1))
        bars.append((total, len(steps)))

    monkeypatch.setattr("utio_jax.cli.trial.progress_bar", counted)
    before = sorted(path.name for path in folder.iterdir())
    result, shown = ran(capsys, "try", *map(source, TEXTS), "--model", folder)
    assert [total for total, _ in bars] == [steps for _, steps in bars]
    assert result["verdict"] in shown
    rows = {row["what"]: row for row in result["rows"]}
    assert [*rows] == [
        "in full",
        "reading: all to layer 1",
        "reading: learned@0.8",
        "writing: drafter exit",
        "writing: drafter ngram",
        "writing: budget 0.8",
        "prompts: 56 tokens, most to layer 1",
    ]
    for what, row in rows.items():
        assert row["times"] > 0
        if "drafter" in what:
            assert row["loss_pct"] == 0
            assert row["same"] > 0.99, "up to ties"
        assert (row["acceptance"] is not None) == ("drafter" in what)
    assert rows["writing: budget 0.8"]["loss_pct"] == rows["reading: learned@0.8"]["loss_pct"]
    assert sorted(path.name for path in folder.iterdir()) == before, "nothing is written"


PROMPT = "def mean(values):\n    return"


def test_generate_is_the_plain_model_unless_told_otherwise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", PROMPT, "import", "--model", folder, "--max-new-tokens", "20"]
    arguments += ["--rounds", "1"]
    rows = {}
    for mode, more in {
        "plain": [],
        "lossless": ["--mode", "lossless"],
        "adaptive": ["--budget", "0.8"],
        "utio": ["--enable-utio", "--budget", "0.8"],
    }.items():
        result, shown = ran(capsys, *arguments, *more)
        rows[mode] = result
        assert result["command"] == "generate"
        assert result["mode"] == {"utio": "adaptive"}.get(mode, mode)
        assert result["prompts"] == [PROMPT, "import"]
        assert [len(ids) for ids in result["token_ids"]] == [len(d) for d in result["depths"]]
        assert result["tokens"] == sum(len(ids) for ids in result["token_ids"])
        assert result["tokens_per_second"] == pytest.approx(
            result["tokens"] / result["seconds"], rel=1e-2
        )
        assert PROMPT in shown
        assert set(Ledger(policy="").to_dict()) <= set(result)
        assert result["involuntary_exits"] == result["compiles"] == 0
        assert ("layers of each token" in shown) == (mode != "plain")
        assert shown.endswith(".\n"), "a sentence to act on"
    assert rows["plain"]["policy"] == rows["lossless"]["policy"] == "full"
    assert rows["plain"]["flops_ratio"] == rows["plain"]["speedup"] == 1
    assert rows["plain"]["acceptance"] is None
    assert rows["plain"]["kv_bytes_ratio"] == 1
    assert rows["utio"]["token_ids"] == rows["adaptive"]["token_ids"], "the seed project's flag"
    read = rows["adaptive"]["prompt"]
    assert (read["exact"], read["flops_ratio"], read["cache_ratio"]) == (True, 1.0, 1.0)
    assert rows["lossless"]["token_ids"] == rows["plain"]["token_ids"]
    assert rows["lossless"]["texts"] == rows["plain"]["texts"]
    assert 0 <= rows["lossless"]["acceptance"] <= 1
    assert (rows["adaptive"]["policy"], rows["adaptive"]["budget"]) == ("learned", 0.8)
    # A stop string: text of the plain run from the inside of a token to that of another.
    text = rows["plain"]["texts"][0]
    stop = text[len(text) // 2 :][:3]
    result, _ = ran(capsys, *arguments, "--stop", "nowhere", "--stop", stop)
    assert result["texts"][0] == text[: text.index(stop)]
    assert result["finish_reasons"][0] == "stop"
    assert len(result["token_ids"][0]) < 20


def test_generate_streams_one_prompt_to_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    shown, decoded = list[str](), list[str]()

    def counted(*given: Any, **options: Any) -> Any:
        decoded.append(options["mode"].name)
        if (show := options.pop("on_event", None)) is not None:
            options["on_event"] = lambda event: show(event) or shown.append(capsys.readouterr().out)
        return generate_text(*given, **options)

    monkeypatch.setattr(streaming, "generate_text", counted)
    options = ["--model", str(folder), "--max-new-tokens", "20", "--mode", "adaptive"]
    options += ["--policy", "uniform", "--depth", "2", "--json"]
    records = list[Any]()
    for rounds, modes in (("1", ["plain", "plain", "adaptive", "adaptive"]), ("0", ["adaptive"])):
        assert main(["generate", PROMPT, *options, "--rounds", rounds]) == 0
        captured = capsys.readouterr()
        records.append(json.loads(captured.out.splitlines()[-1]))
        assert len(shown) >= 4
        # A block may hold a part of a character alone.
        assert any(shown[1:-1]), "text comes while there is more to come"
        assert "".join(shown).startswith(PROMPT)
        assert records[-1]["texts"][0] in "".join(shown) + captured.out
        assert "layers of each token:" in captured.out
        fast = re.search(r"[\d.]+ times as fast as plain decoding[:,.]", captured.err)
        assert (fast is None) == (rounds == "0")
        assert sorted(decoded) == sorted(modes), "what is shown is not decoded again"
        shown.clear()
        decoded.clear()
    names = ("texts", "token_ids", "depths", "finish_reasons", "prompt", "kv_bytes_held", "loss")
    timed, once = ([record.get(name) for name in names] for record in records)
    assert once == timed


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("evaluate", "Wanted text files or --token-ids FILE, one of the two"),
        ("evaluate SOURCE --policy magic", "Wanted a policy of full, uniform"),
        ("evaluate SOURCE --budget 0.8 --batch 0", "at least 1 row"),
        ("evaluate --token-ids FOREIGN", "ids from 0 to 299, the model's vocabulary. Got 1 to 300"),
        ("demo SHORT", "text of at least 256 tokens"),
        ("calibrate SOURCE --budget 0.01 --policy position", "a goal that some policy reaches"),
        ("calibrate SOURCE --model shared-16 --budget 75", "Wanted budgets above 0, at most 1"),
        (
            "calibrate SOURCE --model shared-16 --policy lerned",
            "Got 'lerned'. A signal of your own",
        ),
        (
            "calibrate --budget 0.5 --max-nll-increase-pct 1",
            "one of budget, max_nll_increase_pct and max_disagreement",
        ),
        (
            "calibrate SOURCE --max-disagreement 0.05",
            "77 documents of more than 32 tokens for max_disagreement=0.05",
        ),
        ("calibrate SOURCE --confidence 0.9", "Wanted max_disagreement with a confidence"),
        ("compare SOURCE --budget 0.8 0.123", "some of the budgets [0.8], as calibrated"),
        ("compare SOURCE --draws 0", "Wanted at least 1 of draws"),
        ("generate --prompt hello", "Wanted at least one prompt: utio-jax generate TEXT"),
        ("generate " + "x=1;" * 40, "within the model's context of 64. Got prompt 0 of"),
        ("generate x --prompt hello", "Texts to continue have no option: utio-jax generate TEXT"),
        ("generate x --rounds -1", "Wanted --rounds of at least 0. Got -1"),
        ("generate x --mode lossless --drafter magic", "a drafter of exit, ngram"),
        ("generate x --mode adaptive --policy full --budget 0.5", "with budget. Got policy full"),
        ("generate x --mode lossless --prompt-budget 0.9", "keys and values are the full model's"),
        (
            "generate x --temperature -1",
            "Wanted a temperature of 0, which is greedy, or a positive number",
        ),
        ("fit-prompt SOURCE --stop 2", "within the model's context of 64"),
        ("bench --batch-sizes 0", "sizes and rounds of at least 1"),
        ("bench --policies learned@7", "NAME or NAME@BUDGET"),
        ("bench --models nowhere", "nothing at nowhere"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_input_that_cannot_be_used_is_named(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOREIGN").write_text("[[1, 300]]")
    Path("SHORT").write_text("x = 1\n")
    Path("SOURCE").write_text(source("colorsys").read_text())
    name, *words = arguments.split()
    words += [] if name == "bench" else ["--model", str(folder)]
    words += ["--out", "fitted"] if name == "calibrate" else []
    assert match in refused(capsys, name, *words)
