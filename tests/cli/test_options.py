# SPDX-License-Identifier: Apache-2.0
"""Options become what they say, and none is taken without a use: no model is run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from utio_jax import Adaptive, Lossless, Plain
from utio_jax.bench.run import Subject
from utio_jax.cli.bench import Bench
from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.chat import Chat
from utio_jax.cli.evaluate import Evaluate
from utio_jax.cli.generate import Generate
from utio_jax.cli.main import parsed
from utio_jax.cli.options import OfDecoding, read_token_ids, repeat_reading
from utio_jax.cli.serve import Serve
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine.depths import thresholds_of
from utio_jax.models import Model
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies.store import check_policy_name
from utio_jax.serving import Limits
from utio_jax.serving.requests import Reader

MODEL = Model(decoder=Transformer(TINY), params={}, folder=Path("none"))
"""What options need of a model to name a depth."""


def test_a_mode_is_the_one_that_was_asked_for() -> None:
    assert isinstance(OfDecoding().decoding_mode(MODEL)[0], Plain)
    asked = OfDecoding(mode="adaptive", policy="uniform", depth=2)
    mode, prefill, budget = asked.decoding_mode(MODEL)
    assert isinstance(mode, Adaptive)
    assert (mode.policy.depths, mode.kv, prefill, budget) == ((2,), "propagate", None, None)
    drafts, _, _ = OfDecoding(mode="lossless").decoding_mode(MODEL)
    copies, _, _ = OfDecoding(mode="lossless", drafter="ngram").decoding_mode(MODEL)
    assert drafts == Lossless(exit=1)
    assert copies == Lossless(drafter="ngram")
    twice = Generate(prompt="full", prompt_budget=0.5)
    for wrong in (OfDecoding(drafter="ngram"), OfDecoding(depth=2), twice):
        with pytest.raises(ValueError, match="Wanted (mode|one way of reading)"):
            wrong.decoding_mode(MODEL)


def test_a_budget_alone_means_a_depth_per_token() -> None:
    for command in (OfDecoding, Serve):
        assert command(budget=0.6).named_mode() == "adaptive"
        assert command().named_mode() == "plain"
        assert command(mode="lossless").named_mode() == "lossless"
    modes: tuple[Any, ...] = ("plain", "lossless")
    for mode in modes:
        match = f"Got budget=0.6 and {mode}. Name that mode, or leave out the budget."
        with pytest.raises(ValueError, match=match):
            Serve(mode=mode, budget=0.6).served()
        with pytest.raises(ValueError, match=match):
            OfDecoding(mode=mode, budget=0.6).decoding_mode(MODEL)
    assert Evaluate(budget=0.6).policy_name == "learned"
    assert Evaluate().policy_name == "full"


def test_a_server_runs_the_model_in_full_unless_asked() -> None:
    """Of a model that comes with fitted depths, too."""
    assert isinstance(Serve().served().mode, Plain)
    assert isinstance(Serve(budget=0.75).served().mode, Adaptive)


def test_a_server_has_other_budgets_of_a_policy_and_full_depth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of one that remembers earlier exits, those that fit; chance has no budgets of its own."""
    served = Serve(policy="utio_surrogate", budget=0.7).served()
    policies: tuple[Any, ...] = (served.budgets[0.7], served.budgets[0.75], "full")
    rows = [thresholds_of(policy, served.mode, served.text.decoder) for policy in policies]
    assert len({row.tobytes() for row in rows if row is not None}) == 3
    capsys.readouterr()
    for budget, others in ((0.7, [0.8]), (0.8, [0.7, 0.75])):
        served = Serve(policy="utio_surrogate", budget=budget).served()
        assert budget in served.budgets
        assert not {*others} & {*served.budgets}
        for policy in (*served.budgets.values(), "full"):
            thresholds_of(policy, served.mode, served.text.decoder)
        record = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert record["event"] == "budgets_left_out"
        assert {*record["budgets"], *served.budgets} == {0.7, 0.75, 0.8, 0.9}
    for name in ("random", "uniform"):
        match = f"Wanted a policy to serve, of learned, .* Got '{name}'. Controls"
        with pytest.raises(ValueError, match=match):
            Serve(mode="adaptive", policy=name).served()


def test_log_probabilities_after_an_exact_prefill_are_the_full_models() -> None:
    served = Serve(prompt_budget=0.75).served()
    assert served.prefill.is_exact(served.text.decoder)
    whole = dataclasses.replace(served, prefill=Prefill(), prompt_budget=None)
    for model in (served, whole):
        _, about = Reader(model, capacity=64, limits=Limits())._engine_options(None)
        assert (about["prompt_budget"], about["logprobs_of"]) == (1, "full")


def test_tokens_are_drawn_as_asked() -> None:
    assert OfDecoding().sampling() == SamplingParams()
    assert OfDecoding(temperature=0.5).sampling() == SamplingParams(temperature=0.5)
    expected = SamplingParams(temperature=0.5, top_p=0.9)
    assert OfDecoding(temperature=0.5, top_p=0.9).sampling() == expected


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("full", {"budget": 0.5}, "policy learned, or another fitted one, with budget"),
        ("full", {"kv": "drop"}, "with kv. Got policy full"),
        ("uniform", {"calibration": Path("c"), "depth": 2}, "with calibration"),
        ("uniform", {}, "Wanted a depth with policy uniform"),
        ("learned", {"depth": 3}, "Wanted policy uniform with depth. Got policy learned"),
    ],
)
def test_an_option_without_a_use_is_named(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_policy_name(name, **options)
    check_policy_name("uniform", depth=2)
    check_policy_name("learned", budget=0.5, calibration=Path("c"), kv="drop")


@pytest.mark.parametrize(
    ("chosen", "lost", "warns"),
    [(None, 8.09, True), ({"stop": 8}, 1.5, True), ({"stop": 8}, 0.4, False)],
)
def test_maps_that_did_not_pay_say_so_where_they_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: Any, lost: float, warns: bool
) -> None:
    stored = {"chosen": chosen, "max_nll_increase_pct": 1.0, "test": [{"nll_increase_pct": lost}]}
    (tmp_path / "prompt.json").write_text(json.dumps(stored))
    repeat_reading(tmp_path)
    shown = capsys.readouterr().err
    assert (f"did not pay when they were fitted: {lost:+.2f} % loss" in shown) == warns


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "serve --mode losless",
            "--mode of plain, lossless, adaptive. Got 'losless'. Did you mean lo",
        ),
        ("serve --mode=losless", "Got 'losless'. Did you mean lossless?"),
        ("serve --mode", "Wanted --mode of plain, lossless, adaptive. Got ''."),
        ("serve --buget 0.75", "an option of utio-jax serve. Got --buget. Did you mean --budget?"),
        ("chat --max_tokens 4", "Got --max-tokens. Did you mean --max-new-tokens?"),
        ("serve --slots eight", "Wanted --slots as an integer. Got 'eight'."),
        ("generate x --temperature hot", "Wanted --temperature as a number. Got 'hot'."),
        ("serve --prompt full", "Wanted an option of utio-jax serve. Got --prompt."),
        ("chat --prompt full", "Wanted an option of utio-jax chat. Got --prompt."),
        ("bench --parts scores", "Wanted --parts of score, decode, lossless. Got 'scores'."),
    ],
)
def test_a_word_that_no_option_has_is_named(line: str, match: str) -> None:
    """In the style of all other errors, before a model is read."""
    name, *words = line.split()
    with pytest.raises(ValueError, match=re.escape(match)):
        parsed(name, words)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exits": (1, 2), "weights": "int8"},
        {"branches": "my branches.json", "weights": "bfloat16"},
        {"lens": "none", "out": Path("my out.json")},
    ],
)
def test_compare_reads_the_model_that_was_calibrated(options: dict[str, Any]) -> None:
    """By the command that `calibrate` ends with."""
    fitted = Calibrate(model="my model", **options)
    line = fitted._next(dataclasses.replace(MODEL), Path("my out.json"))
    command: Any = parsed("compare", shlex.split(line)[2:])
    names = ("model", "exits", "weights", "lens", "branches")
    assert [getattr(command, name) for name in names] == [getattr(fitted, name) for name in names]
    assert (command.files, command.calibration) == ((Path("OTHER_FILES"),), options.get("out"))
    line = fitted._next(dataclasses.replace(MODEL, lens=Path("l.json")), Path("my out.json"))
    command = parsed("compare", shlex.split(line)[2:])
    expected = "l.json" if "out" in options else fitted.lens
    assert (command.lens, command.exits) == (expected, ()), "its exits are the lens'"


def test_options_are_read_as_typed() -> None:
    words = ["a", "--b", "--max_new_tokens=3", "--temperature", "0.5", "--mode", "plain", "--chat"]
    with pytest.raises(ValueError, match="Got --b"):
        parsed("generate", words)
    read = parsed("generate", [word for word in words if word != "--b"] + ["--stop=--b"])
    assert (read.prompts, read.max_new_tokens, read.stop) == (("a",), 3, ("--b",))
    assert (read.temperature, read.mode, read.chat) == (0.5, "plain", True)
    texts = ("--find", "--rounds", "--help")
    assert parsed("generate", ["--rounds", "0", "--", *texts]).prompts == texts


def test_what_needs_no_model_is_checked_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was read")

    monkeypatch.setattr("utio_jax.models.load", read)
    twice = (Path("a.txt"), Path("b.txt"), Path("./a.txt"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command, match in (
            (Serve(port=port), f"127.0.0.1:{port} cannot be had"),
            (Serve(port=0, api_key_file=tmp_path / "none"), "Wanted a key in"),
            (Serve(port=0, prefix_cache="some"), "must be bytes"),
            (Serve(port=0, drain_seconds=0), "limits of at least 1"),
            (Serve(port=0, drain_seconds=math.inf), "Wanted finite drain_seconds"),
            (Serve(port=0, prompt_maps=tmp_path / "n.json", prompt_budget=0.5), "n.json"),
            (Serve(port=0, prompt_maps=tmp_path / "n.json"), "--prompt-budget with --prompt-maps"),
            (Generate(prompts=("x",), temperature=-1.0), "Wanted a temperature of 0"),
            (Chat(top_p=0.5), "Wanted --temperature above 0"),
            (Chat(max_new_tokens=0), "Wanted --max-new-tokens of at least 1. Got 0"),
            (Chat(seed=10**20), "Wanted seeds as integers of at most 64 bits"),
            (Evaluate(files=twice, per_token=tmp_path / "t.json"), "Got a.txt more than once"),
            (Evaluate(files=twice[:1], per_token=tmp_path / "b.txt"), "Wanted a file NAME.json"),
            (Bench(models=("a/m", "b/m", "a/m"), out=tmp_path), "Wanted each of --models once"),
        ):
            with pytest.raises(ValueError, match=match):
                command.run()


def test_models_of_folders_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes write to `.../model`."""

    def fails(*_: Any) -> Any:
        raise ValueError("It does not run.")

    def subject(name: str, **_: Any) -> Subject:
        of: Any = {"decoder": MODEL.decoder, "params": {}, "documents": []}
        return Subject(name=Path(name).name, **of)

    monkeypatch.setattr(Subject, "measure", fails)
    monkeypatch.setattr("utio_jax.cli.bench.subject_named", subject)
    models = ("a/model", "b/model", "c/other")
    Bench(models=models, parts=("score",), out=tmp_path).run()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["a/model", "b/model", "other"]


def test_token_ids_are_lists_of_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[[1, 2], [3]]")
    assert [ids.tolist() for ids in read_token_ids(file)] == [[1, 2], [3]]
    for wrong in ("[]", "[[]]", "[1]", "[[1.0]]", "[[true]]", '{"a": [1]}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="one list per document, none of them empty"):
            read_token_ids(file)
