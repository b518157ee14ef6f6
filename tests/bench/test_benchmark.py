# SPDX-License-Identifier: Apache-2.0
"""Benchmarks keep what they measured, and claim no more. No figure of speed is asserted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from utio_jax.bench.environment import describe
from utio_jax.bench.parts import lossless_group, score_group
from utio_jax.bench.results import Recorder, read_results
from utio_jax.bench.rows import Group, Row, timed
from utio_jax.bench.subjects import Subject, label_of, methods_of, shares_for
from utio_jax.bench.suite import SUITES, conclude, groups_of, run_groups
from utio_jax.bench.suite import tiny as tiny_suite
from utio_jax.bench.timing import Spread, Timing
from utio_jax.cli.bench import subject_named
from utio_jax.cli.main import main
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.models.presets import SHAPES
from utio_jax.models.random_weights import fit_layers

ENVIRONMENT = {"device": "cpu:x"}
PLANNED = Row(key="score/m/full/b1", part="score", model="m", method="full", baseline="full dense")


def timing(*seconds: float, compiles: int = 0) -> Timing:
    return Timing(seconds=np.asarray(seconds), compiles=compiles)


@pytest.fixture(scope="module")
def subject(tiny: Any) -> Subject:
    return Subject(name="tiny", decoder=tiny.decoder, params=tiny.params)


# --- Rows.


def test_times_become_ratios_round_by_round() -> None:
    row = timed(
        PLANNED,
        timing(1.0, 2.0, 4.0),
        against=timing(2.0, 8.0, 4.0),
        speedup_ideal=4.0,
        tokens=10,
    )
    assert row.seconds == Spread(median=2.0, low=1.5, high=3.0, rounds=3)
    assert row.speedup == Spread(median=2.0, low=1.5, high=3.0, rounds=3)
    assert row.efficiency == 0.5
    assert row.tokens_per_second == 5.0
    steps = timed(PLANNED, timing(8.0), against=timing(16.0), calls=4)
    assert steps.seconds is not None
    assert steps.baseline_seconds is not None
    assert steps.speedup is not None
    assert (steps.seconds.median, steps.baseline_seconds.median) == (2.0, 4.0)
    assert steps.speedup.median == 2.0


def test_a_program_that_compiled_while_timed_has_no_speedup() -> None:
    row = timed(PLANNED, timing(1.0, compiles=2), against=timing(2.0), speedup_ideal=2.0)
    assert row.speedup is row.efficiency is None
    assert row.fallbacks == {"compiled after the warm-up": 2}
    assert row.seconds is not None, "what was measured stays"


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"part": "magic"}, "part 'magic' is none of"),
        ({"ran": False, "note": "no"}, "did not run, or fell back"),
        ({"fallbacks": {"full depth": 1}}, "did not run, or fell back"),
        ({"ran": False, "speedup": None}, "without a note that says why"),
        ({"baseline": None}, "a speed-up over no baseline"),
        ({"speed_only": True, "quality": {}}, "quality of a row that is about speed only"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")  # As in a user's process.
def test_rows_that_claim_too_much_are_refused(changed: dict[str, Any], match: str) -> None:
    good = timed(PLANNED, timing(1.0), against=timing(2.0))
    assert Row.from_dict(json.loads(json.dumps(good.to_dict()))) == good
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(good, **changed)


def test_rows_about_speed_have_no_quality() -> None:
    full = dict.fromkeys(("nll_full", "nll", "nll_increase_pct", "agreement"))
    with pytest.raises(ValueError, match="about speed only"):
        dataclasses.replace(PLANNED, speed_only=True, quality=full)


@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_have_every_key_and_no_other() -> None:
    stored = PLANNED.to_dict()
    for broken in ({**stored, "more": 1}, {k: v for k, v in stored.items() if k != "note"}, []):
        with pytest.raises(ValueError, match="every key of schema 3"):
            Row.from_dict(broken)
    with pytest.raises(ValueError, match="Wanted a spread in seconds"):
        Row.from_dict({**stored, "seconds": {"median": 1.0}})


# --- Files: kept, resumed, interrupted.


def recorder_at(folder: Path, *, resume: bool = False, **settings: Any) -> Recorder:
    return Recorder(
        folder / "results.json",
        suite="quick",
        settings=settings,
        environment=ENVIRONMENT,
        resume=resume,
    )


def group(name: str, calls: list[str], error: BaseException | None = None) -> Group:
    row = dataclasses.replace(PLANNED, key=name, method=name)

    def measure() -> list[Row]:
        calls.append(name)
        if error is not None:
            raise error
        return [timed(row, timing(1.0), against=timing(2.0))]

    return Group(title=name, rows=(row,), measure=measure)


def run(groups: list[Group], recorder: Recorder, **options: Any) -> bool:
    return run_groups(groups, recorder, started=0.0, say=lambda _: None, **options)


def test_an_interrupted_run_keeps_what_it_measured_and_resumes_there(tmp_path: Path) -> None:
    calls: list[str] = []
    recorder = recorder_at(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(
            [group("a", calls), group("b", calls), group("c", calls, KeyboardInterrupt())], recorder
        )
    recorder.close(complete=False, seconds=0.0)
    kept = read_results(tmp_path / "results.json")  # As the interruption left it.
    assert [row["key"] for row in kept["rows"]] == ["a", "b"]
    assert not kept["complete"]
    assert not [*tmp_path.glob("*.partial")]
    again = recorder_at(tmp_path, resume=True)
    assert run([group(name, calls) for name in "abcd"], again)
    assert again.close(complete=True, seconds=1.0)["started"] == kept["started"]
    assert calls == ["a", "b", "c", "c", "d"], "what was there is not measured again"
    done = read_results(tmp_path / "results.json")
    assert [row["key"] for row in done["rows"]] == [*"abcd"]
    assert done["complete"]
    assert done["rows"][:2] == kept["rows"]
    recorder_at(tmp_path)
    assert read_results(tmp_path / "results.json")["rows"] == [], "replaced unless resumed"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    first = recorder_at(tmp_path)
    first.add([timed(PLANNED, timing(1.0))], seconds=1.0)
    for resume in (False, True):
        with pytest.raises(ValueError, match="results.json is being written by one. Wait for it"):
            recorder_at(tmp_path, resume=resume)
    assert len(read_results(tmp_path / "results.json")["rows"]) == 1, "nothing is lost"
    other = "from filelock import FileLock; FileLock({!r}, timeout=0).acquire()"
    lock = str(tmp_path / "results.json.lock")
    process = [sys.executable, "-c", other.format(lock)]
    assert subprocess.run(process, capture_output=True, check=False).returncode == 1, "nor there"
    first.close(complete=True, seconds=1.0)
    assert subprocess.run(process, capture_output=True, check=False).returncode == 0
    recorder_at(tmp_path, resume=True).close(complete=True, seconds=2.0)


@pytest.mark.check
def test_a_group_leaves_no_compiled_programs_behind(tmp_path: Path) -> None:
    program: Any = jax.jit(lambda x: x + 1.0)

    def measure() -> list[Row]:
        program(1.0)
        held.append(program._cache_size())
        return [dataclasses.replace(PLANNED, key="a")]

    held: list[int] = []
    planned = Group(title="a", rows=(dataclasses.replace(PLANNED, key="a"),), measure=measure)
    run([planned], recorder_at(tmp_path))
    assert (held, program._cache_size()) == ([1], 0)


def test_a_run_is_resumed_on_the_same_terms_alone(tmp_path: Path) -> None:
    recorder_at(tmp_path, rounds=3)
    recorder_at(tmp_path, rounds=3, resume=True)
    with pytest.raises(ValueError, match="--resume of a run with the same settings"):
        recorder_at(tmp_path, rounds=4, resume=True)
    for text, match in (("{", "It is not JSON"), ("[]", "schema None"), ("{}", "schema None")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            recorder_at(tmp_path, resume=True)
    (tmp_path / "results.json").write_text('{"command": "bench", "schema": 3, "rows": []}')
    with pytest.raises(ValueError, match="missing: .*'suite'"):
        read_results(tmp_path / "results.json")
    with pytest.raises(ValueError, match="There is none. Measure again"):
        read_results(tmp_path / "nowhere.json")


def test_what_cannot_run_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    calls: list[str] = []
    recorder = recorder_at(tmp_path)
    groups = [group("a", calls, ValueError("too long\nby far")), group("b", calls)]
    assert run(groups, recorder, note="dry run")
    failed, fine = recorder.rows.values()
    assert (failed.ran, failed.note, failed.speedup) == (False, "too long; dry run", None)
    assert (fine.ran, fine.note) == (True, "dry run")
    # Out of time: nothing is recorded, so that --resume measures it.
    assert not run([group("c", calls)], recorder, minutes=1e-9)
    assert [*recorder.rows] == ["a", "b"]


def test_the_verdict_names_no_way_whose_loss_is_not_known() -> None:
    def row(method: str, speedup: float, lost: float | None, part: str = "decode") -> Any:
        quality = None if lost is None else {"nll_increase_pct": lost}
        fixed = {"fallbacks": 0, "speed_only": False, "baseline": "plain", "key": method}
        spread = {"median": speedup}
        return fixed | {"method": method, "part": part, "quality": quality, "speedup": spread}

    plain, unknown, slow = row("plain", 1.0, 0.0), row("gate", 1.5, None), row("other", 0.9, 0.1)
    assert conclude({"rows": [plain, slow]}).startswith("Nothing that was measured here is faster")
    said = conclude({"rows": [plain, slow, unknown, row("dear", 1.7, 3.0)]})
    assert "1 ways at a loss that was not measured" in said
    drafts = row("drafts", 1.2, None, part="lossless")
    assert "drafts, 1.20 times as fast" in conclude({"rows": [plain, unknown, drafts]})


def test_the_environment_says_on_what_it_ran() -> None:
    found = describe(dtype="float32")
    assert found["device"] == f"{jax.devices()[0].platform}:{jax.devices()[0].device_kind}"
    assert {"cores", "commit", "versions", "xla_flags", "dtype", "persistent_cache"} <= set(found)


# --- What is measured.


@pytest.mark.check
def test_policies_stand_next_to_controls_at_their_flops(subject: Subject) -> None:
    methods = {method.label: method for method in methods_of(subject, ["learned@0.6"], width=64)}
    assert [*methods] == ["learned@0.6", "random@0.6", "uniform:2"]
    assert methods["learned@0.6"].policy is None
    assert "no calibration" in methods["learned@0.6"].missing
    shares = methods["random@0.6"].fractions
    assert shares is not None
    cost = token_cost(subject.decoder, subject.params)
    flops = [
        expected_flops(cost, batch=1, width=64, min_bucket=1, depths=depths, fractions=fractions)
        for depths, fractions in (((1, 2, 4), shares), ((4,), (1.0,)))
    ]
    assert flops[0] / flops[1] == pytest.approx(0.6, abs=1e-6)
    # At a low budget the exits on both sides of it.
    low = [method.label for method in methods_of(subject, ["uniform@0.4"], width=64)]
    assert low == ["uniform:1", "uniform:2"]
    with pytest.raises(ValueError, match="Wanted a budget of at least"):
        shares_for(subject.decoder, subject.params, 0.1, width=64)
    assert label_of("learned") == "learned@0.75"
    for name in ("@0.6", "learned@2", "learned@x"):
        with pytest.raises(ValueError, match="NAME or NAME@BUDGET"):
            label_of(name)


@pytest.mark.check
def test_a_method_that_fell_back_or_is_missing_has_no_speedup(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    # What the library asks before it routes says no to all that has a boundary.
    monkeypatch.setattr(
        "utio_jax.bench.parts.check_worthwhile",
        lambda *arguments, **_: "routing would cost" if len(arguments[2].depths) > 1 else None,
    )

    def measure(_: Any, __: Any, ___: Any, methods: Any, **____: Any) -> dict[str, Any]:
        ran.extend(method.label for method in methods)
        return dict.fromkeys(ran)

    monkeypatch.setattr("utio_jax.bench.scoring.measure_policies", measure)
    monkeypatch.setattr("utio_jax.bench.parts._scored", lambda row, _: row)
    rows = {row.key: row for row in score_group(subject, (1, 8), ["learned@0.95"], 2).measure()}
    assert ran == ["full", "uniform:2"]
    fell_back = rows["score/tiny/random@0.95/b1/p8/c8"]
    assert (fell_back.ran, fell_back.fallbacks) == (False, {"full depth": 1})
    assert "routing would cost" in fell_back.note
    missing = rows["score/tiny/learned@0.95/b1/p8/c8"]
    assert (missing.ran, missing.fallbacks) == (False, {})


@pytest.mark.check
def test_shapes_have_real_widths_and_as_many_layers_as_fit() -> None:
    seven = SHAPES["llama-7b"]
    fit: Callable[..., int] = lambda config, memory, **more: fit_layers(  # noqa: E731
        config, **{"dtype": "bfloat16", "memory": memory, "cache_tokens": 128, **more}
    )
    assert fit(seven, 80e9) == 32
    # Of 0.6 x 80 GB, after two tables of 32,000 x 8,192: layers of 0.856e9 weights, 1.71 GB each.
    assert fit(SHAPES["llama-70b"], 80e9) == int((48e9 - 2 * 2 * 32_000 * 8192) / 1.7117e9)
    # What the suite for accelerators decodes from fits 80 GB.
    suite = SUITES["accelerator"]
    (name,) = suite.models
    assert suite.cache_tokens == 256 * 128
    assert fit(SHAPES[name], 80e9, cache_tokens=suite.cache_tokens) >= 30
    assert fit(seven, 20e9, dtype="float32") < fit(seven, 20e9)
    assert fit(seven, 40e9, cache_tokens=256 * 512) < fit(seven, 40e9), "the cache needs room"
    with pytest.raises(ValueError, match="memory for at least two layers"):
        fit(seven, 1e9)


@pytest.mark.check
def test_random_parameters_leave_no_layer_idle() -> None:
    small = subject_named("tiny", dtype="bfloat16")
    decoder: Any = small.decoder
    like = jax.eval_shape(decoder.init, jax.random.key(0))
    assert jax.tree.structure(small.params) == jax.tree.structure(like)
    for leaf, shape in zip(jax.tree.leaves(small.params), jax.tree.leaves(like), strict=True):
        assert leaf.shape == shape.shape
        assert leaf.dtype == "bfloat16"
        assert np.asarray(leaf, np.float32).any(), "a fresh model's output projections are 0"
    assert small.speed_only
    assert small.decoder.config.exits == (1, 2, 3, 4)
    assert "random weights, 4 of 4 layers" in small.note
    with pytest.raises(ValueError, match="130 tokens exceed the context of 128"):
        small.batch(2, 130)


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(SUITES))
def test_every_suite_is_planned_without_two_rows_of_one_key(name: str, subject: Subject) -> None:
    for suite in (SUITES[name], tiny_suite(SUITES[name])):
        keys = [row.key for each in groups_of(suite, subject) for row in each.rows]
        assert len(keys) == len({*keys})


# --- The command.


@pytest.mark.check
def test_the_command_measures_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--dry-run", "--models", "tiny", "--rounds", "1", "--out", str(tmp_path)]
    arguments += ["--parts", "score", "--policies", "uniform@0.1"]
    arguments += ["--batch-sizes", "1", "--prompt-lengths", "16"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["command"] == "bench"
    assert found["complete"]
    stored = read_results(Path(found["out"]))
    rows = {row["key"]: row for row in stored["rows"]}
    assert found["row_count"] == len(rows) == 2
    full, cut = (rows[f"score/tiny/{name}/b1/p16/c16"] for name in ("full", "uniform:1"))
    assert full["baseline"] == cut["baseline"]
    assert max(full["speedup"]["median"], 0) <= 1.0 + 1e-6
    assert cut["flops_ratio"] < full["flops_ratio"] == 1
    assert cut["quality"] is None, "random weights"
    assert "dry run" in cut["note"]
    assert full["compiles"] == cut["compiles"] == 0
    # Again: nothing is left to measure.
    monkeypatch.setattr("utio_jax.bench.scoring.measure_policies", None)
    assert main([*arguments, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["row_count"] == 2
    assert read_results(Path(found["out"]))["rows"] == stored["rows"]


@pytest.mark.check
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--suite", "accelerator"], "Wanted a GPU or TPU"),
        (["--parts", "engine"], "Wanted --parts of suite quick"),
        (["--batch-sizes", "0"], "sizes and rounds of at least 1"),
        (["--policies", "learned@7"], "NAME or NAME@BUDGET"),
        (["--models", "nowhere", "--dry-run"], "nothing at nowhere"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--out", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert match in captured.err


def test_drafts_at_exits_stand_beside_those_of_the_text_itself(tiny: Any) -> None:
    """Their control, also where a model has no exits, or random weights."""
    rows = lambda subject: {  # noqa: E731
        row.method for row in lossless_group(subject, (1, 8, 4), 2).rows
    }
    known = Subject(name="tiny", decoder=tiny.decoder, params=tiny.params)
    (*exits, last) = tiny.decoder.config.exits
    drafts = {f"lossless:{exit_}" for exit_ in exits[1:3] or exits}
    assert rows(known) == {"plain", *drafts, "lossless:ngram"}
    config = dataclasses.replace(tiny.decoder.config, exits=(last,))
    bare = dataclasses.replace(known, decoder=dataclasses.replace(tiny.decoder, config=config))
    assert rows(bare) == {"plain", "lossless", "lossless:ngram"}


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.parametrize("suite", sorted(SUITES))
def test_every_suite_runs_dry(suite: str, tmp_path: Path) -> None:
    """As a user would run it: in a process of its own."""
    arguments = ["bench", "--suite", suite, "--dry-run", "--rounds", "1", "--out", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "utio_jax", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["complete"]
    rows = read_results(tmp_path / "results.json")["rows"]
    odd = [row["key"] for row in rows if not row["ran"]]
    assert all("lossless" in key for key in odd), odd
