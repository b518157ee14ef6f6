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

from utio_jax.bench.parts import lossless_group, score_group
from utio_jax.bench.results import Group, Row, describe, read_results
from utio_jax.bench.subjects import Subject, label_of, methods_of, shares_for
from utio_jax.bench.suite import SUITES, conclude, groups_of, run_groups
from utio_jax.bench.suite import tiny as tiny_suite
from utio_jax.bench.timing import Spread, Timed, Timing
from utio_jax.cli.bench import subject_named
from utio_jax.cli.main import main
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.evaluation.ledger import Ledger
from utio_jax.models.presets import SHAPES
from utio_jax.models.random_weights import fit_layers

PLANNED = Row(part="score", model="m", method="full", baseline="full dense")
TWICE = np.asarray([2.0])
"""How many times as fast a program was, in one round."""


def timing(*seconds: float, compiles: int = 0) -> Timing:
    return Timing(seconds=np.asarray(seconds), compiles=compiles)


@pytest.fixture(scope="module")
def subject(tiny: Any) -> Subject:
    return Subject(name="tiny", decoder=tiny.decoder, params=tiny.params)


# --- Rows.


def test_times_become_ratios_round_by_round() -> None:
    own = timing(1.0, 2.0, 4.0)
    row = PLANNED.timed(own, ratios=own.ratios_over(timing(2.0, 8.0, 4.0)), tokens=10)
    assert row.seconds == row.speedup == Spread(median=2.0, low=1.5, high=3.0, rounds=3)
    assert row.tokens_per_second == 5.0
    steps = PLANNED.timed(timing(8.0), ratios=TWICE, calls=4)
    assert steps.seconds is not None
    assert (steps.seconds.median, steps.gain) == (2.0, 2.0)


def test_a_program_that_compiled_while_timed_has_no_speedup() -> None:
    row = PLANNED.timed(timing(1.0, compiles=2), ratios=TWICE, speedup_ideal=2.0)
    assert row.speedup is None
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
    good = PLANNED.timed(timing(1.0), ratios=TWICE)
    assert Row.from_dict(json.loads(json.dumps(good.to_dict()))) == good
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(good, **changed)


# --- Files: kept, replaced, interrupted.

HEAD = {"suite": "quick", "settings": {}, "environment": {"device": "cpu:x"}}


def group(name: str, error: BaseException | None = None) -> Group:
    row = dataclasses.replace(PLANNED, method=name)

    def measure() -> list[Row]:
        if error is not None:
            raise error
        return [row.timed(timing(1.0), ratios=TWICE)]

    return Group(title=name, rows=(row,), measure=measure)


def run(folder: Path, groups: list[Group], **options: Any) -> list[Row]:
    """Returns the rows that the file holds in the end."""
    file = folder / "results.json"
    found = run_groups(file, groups, HEAD, say=lambda _: None, **options)
    kept, rows = read_results(file)
    assert kept == found
    return rows


def test_an_interrupted_or_killed_run_keeps_what_it_measured(tmp_path: Path) -> None:
    first, file = [group("a"), group("b")], tmp_path / "results.json"
    assert len(run(tmp_path, [*first, group("c", KeyboardInterrupt())])) == 2
    assert not read_results(file)[0]["complete"]
    assert len(run(tmp_path, first[:1])) == 1, "replaced"
    assert read_results(file)[0]["complete"]
    with pytest.raises(SystemExit):  # Nothing is written after what ends the process.
        run(tmp_path, [*first, group("c", SystemExit())])
    kept, rows = read_results(file)
    assert [row.method for row in rows] == ["a", "b"]
    assert not kept["complete"]


@pytest.mark.check
def test_a_group_leaves_no_compiled_programs_behind(tmp_path: Path) -> None:
    program: Any = jax.jit(lambda x: x + 1.0)

    def measure() -> list[Row]:
        program(1.0)
        held.append(program._cache_size())
        return [PLANNED]

    held: list[int] = []
    run(tmp_path, [Group(title="a", rows=(PLANNED,), measure=measure)])
    assert (held, program._cache_size()) == ([1], 0)


def test_what_cannot_run_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    groups = [group("a", ValueError("too long\nby far")), group("b")]
    failed, fine = run(tmp_path, groups, note="dry run")
    assert (failed.ran, failed.note, failed.speedup) == (False, "too long; dry run", None)
    assert (fine.ran, fine.note) == (True, "dry run")


def test_the_verdict_names_no_way_whose_loss_is_not_known() -> None:
    def row(method: str, speedup: float, lost: float | None, part: str = "decode") -> Row:
        quality = None if lost is None else {"nll_increase_pct": lost}
        named = dataclasses.replace(PLANNED, part=part, method=method, baseline="plain")
        return dataclasses.replace(named, quality=quality, speedup=Spread.of(np.asarray([speedup])))

    plain, unknown, slow = row("plain", 1.0, 0.0), row("gate", 1.5, None), row("other", 0.9, 0.1)
    assert conclude([plain, slow]).startswith("Nothing that was measured here is faster")
    said = conclude([plain, slow, unknown, row("dear", 1.7, 3.0)])
    assert "1 ways at a loss that was not measured" in said
    drafts = row("drafts", 1.2, None, part="lossless")
    assert "drafts, 1.20 times as fast" in conclude([plain, unknown, drafts])


def test_the_environment_says_on_what_it_ran() -> None:
    found = describe(dtype="float32")
    assert found["device"] == f"{jax.devices()[0].platform}:{jax.devices()[0].device_kind}"
    assert {"cores", "versions", "xla_flags", "dtype"} <= set(found)


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
        found = Timed(
            ledger=Ledger(policy="x"), timing=timing(1.0), ratios=np.ones(1), baseline="full"
        )
        return dict.fromkeys(ran, found)

    monkeypatch.setattr("utio_jax.bench.scoring.measure_policies", measure)
    group = score_group(subject, (1, 8), ["learned@0.95"], 2)
    rows = {row.method: row for row in group.measure()}
    assert ran == ["full", "uniform:2"]
    fell_back = rows["random@0.95"]
    assert (fell_back.ran, fell_back.fallbacks) == (False, {"full depth": 1})
    assert "routing would cost" in fell_back.note
    missing = rows["learned@0.95"]
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
def test_the_command_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--dry-run", "--models", "tiny", "--rounds", "1", "--out", str(tmp_path)]
    arguments += ["--parts", "score", "--policies", "uniform@0.1"]
    arguments += ["--batch-sizes", "1", "--prompt-lengths", "16"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["command"] == "bench"
    assert found["complete"]
    rows = {row.key: row for row in read_results(Path(found["out"]))[1]}
    assert found["row_count"] == len(rows) == 2
    full, cut = (rows[f"score/tiny/{name}/batch1/prompt16"] for name in ("full", "uniform:1"))
    assert full.baseline == cut.baseline
    assert full.speedup is not None
    assert full.speedup.median <= 1.0 + 1e-6
    assert (cut.flops_ratio or 1.0) < 1.0 == full.flops_ratio
    assert cut.quality is None, "random weights"
    assert "dry run" in cut.note
    assert not full.fallbacks


def test_drafts_at_exits_stand_beside_those_of_the_text_itself(tiny: Any, subject: Subject) -> None:
    """Their control, also where a model has no exits, or random weights."""
    rows = lambda subject: {  # noqa: E731
        row.method for row in lossless_group(subject, (1, 8, 4), 2).rows
    }
    (*exits, last) = tiny.decoder.config.exits
    drafts = {f"lossless:{exit_}" for exit_ in exits[1:3] or exits}
    assert rows(subject) == {"plain", *drafts, "lossless:ngram"}
    config = dataclasses.replace(tiny.decoder.config, exits=(last,))
    bare = dataclasses.replace(subject, decoder=dataclasses.replace(tiny.decoder, config=config))
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
    odd = [row.key for row in read_results(tmp_path / "results.json")[1] if not row.ran]
    assert all("lossless" in key for key in odd), odd
