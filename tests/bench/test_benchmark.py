# SPDX-License-Identifier: Apache-2.0
"""Benchmarks keep what they measured, and claim no more. No figure of speed is asserted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import gated
from helpers.texts import EXECUTOR

from utio_jax.bench.methods import Method, controls_of, label_of, methods_of
from utio_jax.bench.rows import describe, name_of, timed_row
from utio_jax.bench.run import Subject
from utio_jax.bench.scoring import full_rows, measure_policies
from utio_jax.bench.timing import Timed, Timing, time_programs, timed_ledger
from utio_jax.cli.bench import Bench, subject_named
from utio_jax.cli.main import main
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.core.platform import compiling_for
from utio_jax.evaluation.ledger import Ledger
from utio_jax.evaluation.quality import Quality
from utio_jax.models.presets import SHAPES
from utio_jax.models.random_weights import fit_layers
from utio_jax.policies import random_depths
from utio_jax.staircase import CapacityPrefix, MicroBatches
from utio_jax.staircase.capacity import choose_executor

SIZES = {"batch": 1, "prompt": 8, "output": 4}


def timing(*seconds: float, compiles: int = 0) -> Timing:
    return Timing(seconds=np.asarray(seconds), compiles=compiles)


def compared(own: Timing, other: Timing) -> Timed:
    return timed_ledger(Ledger(policy="x"), own, against=other, baseline="full", ideal=None)


@pytest.fixture(scope="module")
def subject(tiny: Any) -> Subject:
    ids = np.random.default_rng(0).integers(0, tiny.decoder.config.vocab_size, 4096)
    return Subject(
        name="tiny", decoder=tiny.decoder, params=tiny.params, documents=[ids], speed_only=True
    )


def test_timed_programs_are_those_of_quality(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A gate, and truncation with chance and full depth: two programs, none for the timed turns."""
    exits = tiny.decoder.config.exits
    shares = jnp.full(len(exits), 1 / len(exits))
    methods = [
        *controls_of(tiny.decoder),
        Method(label="learned", policy=gated(tiny)),
        Method(
            label="random",
            policy=random_depths(shares, key=jax.random.key(0), depths=exits),
        ),
    ]
    ids = np.random.default_rng(0).integers(0, 64, 200)
    read = full_rows([ids], rows=3, width=23, batches=1, vocab_size=64)  # A shape of its own.
    with jax.log_compiles():
        measure_policies(tiny.decoder, tiny.params, read, methods, executor=EXECUTOR, rounds=1)
    assert sum("Compiling jit(score) " in record.getMessage() for record in caplog.records) == 2


def test_accelerators_time_the_executor_that_score_chooses(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators that is a static prefix where row shares are known; on CPUs micro-batches."""
    ran: list[Any] = []

    def note(*_: Any, policy: Any, executor: Any, **__: Any) -> None:
        ran.append(choose_executor(executor, policy, 23))

    monkeypatch.setattr("utio_jax.bench.scoring.run_score", note)
    monkeypatch.setattr("utio_jax.bench.scoring.score_dense", lambda *_: 0)
    sums = dict.fromkeys(("nll", "nll_full", "flops", "flops_full", "flops_ideal"), 1.0)
    quality = Quality(tokens=2, predicted=1, histogram={4: 2}, **sums)
    fake = lambda *_, policies, **__: dict.fromkeys(policies, quality)  # noqa: E731
    monkeypatch.setattr("utio_jax.bench.scoring.evaluate", fake)
    fitted = dataclasses.replace(gated(tiny), row_shares=(1.0, 0.5, 0.5))
    methods = [controls_of(tiny.decoder)[0], Method(label="learned", policy=fitted)]
    ids = np.random.default_rng(0).integers(0, 64, 200)
    read = full_rows([ids], rows=3, width=23, batches=1, vocab_size=64)
    for platform, expected in (("cuda", CapacityPrefix), ("cpu", MicroBatches)):
        ran.clear()
        with compiling_for(platform):
            measure_policies(tiny.decoder, tiny.params, read, methods, rounds=1)
        full, routed = ran[:2]
        assert type(full) is type(routed) is expected
        if isinstance(full, CapacityPrefix):
            assert full.certain, "no program but full depth's own"


# --- Rows.


def test_times_become_ratios_round_by_round() -> None:
    own, other = timing(1.0, 2.0, 4.0), timing(2.0, 8.0, 4.0)
    row = timed_row(compared(own, other))
    assert row["seconds"] == 2.0
    assert (row["speedup"], row["speedup_quartiles"]) == (2.0, [1.5, 3.0])
    assert (own.speedup_over(other), other.median) == (2, 4)


def test_a_program_that_compiled_late_has_no_speedup() -> None:
    row = timed_row(compared(timing(1.0, compiles=2), timing(2.0)), note="random")
    assert row["speedup"] is row["speedup_quartiles"] is None
    assert row["note"] == "random; compiled after the warm-up, 2 times"
    assert row["seconds"] == 1.0, "measured times stay"


def test_the_environment_says_on_what_it_ran() -> None:
    result = describe(dtype="float32")
    assert result["device"] == f"{jax.devices()[0].platform}:{jax.devices()[0].device_kind}"
    assert {"cores", "versions", "xla_flags", "dtype"} <= set(result)


# --- Methods and models.


@pytest.mark.check
def test_policies_stand_next_to_chance_at_their_flops(subject: Subject) -> None:
    of_model = subject.decoder, subject.params
    missing, dealt = methods_of(*of_model, None, ["learned@0.6"], width=64)
    assert (missing.label, dealt.label) == ("learned@0.6", "random@0.6")
    assert missing.policy is None
    assert "no calibration" in missing.missing
    assert dealt.fractions is not None
    cost = token_cost(*of_model)
    flops = [
        expected_flops(cost, batch=1, width=64, min_bucket=1, depths=depths, fractions=fractions)
        for depths, fractions in (((1, 2, 4), dealt.fractions), ((4,), (1.0,)))
    ]
    assert flops[0] / flops[1] == pytest.approx(0.6, abs=1e-6)
    assert label_of("learned") == "learned@0.75"


@pytest.mark.check
def test_a_policy_that_cannot_pay_is_a_row_with_the_reason(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("utio_jax.bench.run.check_worthwhile", lambda *_, **__: "too few tokens")

    def measure(_: Any, __: Any, ___: Any, methods: Any, **____: Any) -> dict[str, Any]:
        ran.extend(method.label for method in methods)
        return dict.fromkeys(ran, compared(timing(1.0), timing(1.0)))

    monkeypatch.setattr("utio_jax.bench.run.measure_policies", measure)
    rows = subject.measure("score", SIZES, ["learned@0.95"], 2)
    assert ran == ["full", "uniform:1", "uniform:2"]
    notes = {row["method"]: row["note"] for row in rows if row["seconds"] is None}
    assert "no calibration" in notes.pop("learned@0.95")
    assert notes == {"random@0.95": "full depth runs instead: too few tokens"}


@pytest.mark.check
def test_drafts_at_exits_stand_beside_those_of_the_text_itself(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights accept drafts at random: only plain decoding runs."""
    ran: list[str] = []

    def measure(*arguments: Any, **_: Any) -> dict[str, Any]:
        ran.extend(arguments[3])
        return {}

    monkeypatch.setattr("utio_jax.bench.run.measure_modes", measure)
    rows = subject.measure("lossless", SIZES, [], 2)
    assert [row["method"] for row in rows] == ["plain", "lossless:2", "lossless:ngram"]
    assert ran == ["plain"]


@pytest.mark.check
def test_shapes_have_real_widths_and_as_many_layers_as_fit() -> None:
    seven = SHAPES["llama-7b"]
    fit: Callable[..., int] = lambda config, memory, **more: fit_layers(  # noqa: E731
        config, **{"dtype": "bfloat16", "memory": memory, "cache_tokens": 128, **more}
    )
    assert fit(seven, 80e9) == 32
    # Of 0.6 x 80 GB, after two tables of 32,000 x 8,192: layers of 0.856e9 weights, 1.71 GB each.
    assert fit(SHAPES["llama-70b"], 80e9) == int((48e9 - 2 * 2 * 32_000 * 8192) / 1.7117e9)
    assert fit(SHAPES["mistral-7b"], 80e9, cache_tokens=256 * 128) >= 30
    assert fit(seven, 20e9, dtype="float32") < fit(seven, 20e9)
    assert fit(seven, 40e9, cache_tokens=256 * 512) < fit(seven, 40e9), "the cache needs room"


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
        small.measure("score", {"batch": 2, "prompt": 130, "output": 0}, [], 1)


# --- The command.


@pytest.mark.check
def test_the_command_measures_and_says_what_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second length exceeds the model's context."""
    monkeypatch.setitem(SHAPES, "tiny", dataclasses.replace(SHAPES["tiny"], exits=(1, 4)))
    arguments = ["bench", "--models", "tiny", "--rounds", "1", "--out", str(tmp_path)]
    arguments += ["--parts", "score", "--policies", "learned@0.9"]
    arguments += ["--batch-sizes", "1", "--prompt-lengths", "16", "130"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    kept = json.loads(Path(result["out"]).read_text())
    assert kept["complete"]
    rows = {name_of(row): row for row in kept["rows"]}
    assert (result["row_count"], result["did_not_run"]) == (
        len(rows),
        len(rows) - len(result["speedups"]),
    )
    full, cut = (rows[f"score/tiny/{name}/batch1/prompt16"] for name in ("full", "uniform:1"))
    assert full["baseline"] == cut["baseline"]
    assert full["speedup"] <= 1.0 + 1e-6
    assert cut["flops_ratio"] < 1.0 == full["flops_ratio"]
    assert "nll" not in cut, "random weights"
    failed = rows["score/tiny/all/batch1/prompt130"]
    assert (failed["seconds"], failed["speedup"]) == (None, None)
    assert "exceed the context" in failed["note"]


@pytest.mark.parametrize("option", ["parts", "models", "batch_sizes", "prompt_lengths"])
def test_an_option_without_values_is_named(option: str) -> None:
    asked: dict[str, Any] = {option: ()}
    with pytest.raises(ValueError, match=f"at least one value of --{option.replace('_', '-')}."):
        Bench(**asked).run()


def test_an_interrupted_run_keeps_what_it_measured(
    tmp_path: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = timed_row(compared(timing(1.0), timing(2.0)), part="score", model="m", method="a")
    turns = iter([[row]])

    def measure(*_: Any) -> Any:
        rows = next(turns, None)
        if rows is None:
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(Subject, "measure", measure)
    monkeypatch.setattr("utio_jax.cli.bench.subject_named", lambda *_, **__: subject)
    main(["bench", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "results.json").read_text())
    assert ([row["method"] for row in kept["rows"]], kept["complete"]) == (["a"], False)


# --- Timing takes turns.


def test_programs_take_turns_and_the_order_rotates() -> None:
    calls: list[str] = []
    timed = time_programs({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert all(len(timing.seconds) == 3 and timing.compiles == 0 for timing in timed.values())


def test_late_compilations_are_counted() -> None:
    sizes = iter(range(1, 100))
    timed = time_programs(
        {
            "grows": lambda: jax.jit(lambda x: x * 3 + 1)(jnp.zeros(next(sizes))),
            "steady": lambda: None,
        },
        rounds=2,
    )
    assert timed["grows"].compiles >= 2
    assert timed["steady"].compiles == 0
