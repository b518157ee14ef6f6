# SPDX-License-Identifier: Apache-2.0
"""`utio-jax try`: a table of the modes that were tried, and the commands that pay."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.cli import ran
from helpers.folders import edit_json, save_small_model
from helpers.generation import lively_model
from helpers.shared_kv import KINDS
from helpers.texts import source
from rich.console import Console

from utio_jax.bench.prompts import request_of
from utio_jax.bench.timing import Timing
from utio_jax.cli.trial import (
    Tried,
    Try,
    lower_layers,
    measured,
    prompt_row,
    read_prompts,
    recommend,
    request_rows,
    show_rows,
)
from utio_jax.prompts.budget import prompt_choice

FULL = Tried(what="in full", times=1.0, loss_pct=0.0, same=1.0)
DRAFTS = Tried(what="writing: drafts", how="--drafts", times=1.5, loss_pct=0.0, same=1.0)
MINE = Try(model="mine")


def test_the_fastest_of_what_pays_is_recommended_for_each_purpose() -> None:
    rows = [
        FULL,
        DRAFTS,
        Tried(what="writing: learned", how="--budget", times=2.0, loss_pct=1.5, same=0.97),
        Tried(what="reading: all to layer 8", how="--depth 8", times=1.9, loss_pct=0.8, same=0.9),
        Tried(what="reading: learned", how="--budget", times=1.6, loss_pct=0.2, same=0.9),
        Tried(what="prompts: no shallow way is known", how="in minutes: utio-jax fit-prompt FILES"),
    ]
    assert recommend(rows, MINE) == (
        "Next: `utio-jax evaluate FILES --model mine --depth 8` (reading: 1.90x, +0.80 % loss). "
        'Also: `utio-jax generate "PROMPT" --model mine --drafts` (writing: 1.50x, no loss). '
        "Not tried: prompts, in minutes: utio-jax fit-prompt FILES --model mine."
    )
    assert [row.pays for row in rows] == [False, True, False, True, True, False]


def test_exact_prompts_are_the_default_and_others_an_option() -> None:
    record = {"prompt_tokens": 448, "stop": 8, "speedup": 1.73, "budget": 0.65}
    commands = [
        recommend([FULL, prompt_row(record | {"exact": exact, "nll_increase_pct": lost})], MINE)
        for exact, lost in ((True, None), (False, 0.0))
    ]
    assert commands == [
        f'Next: `utio-jax generate "PROMPT" --model mine{how}` (prompts: 1.73x, no loss).'
        for how in ("", " --prompt-budget 0.65")
    ]


def test_requests_by_role_stand_first_with_a_plain_model_that_takes_as_long() -> None:
    request = {"new_tokens": 32, "speedup": 1.4, "plain_layers": 8, "equal_layers": 10.4}
    record = {"prompt_tokens": 448, "request": request}
    (row,) = request_rows(record)
    assert (row.what, row.times, row.loss_pct, row.same) == (
        "requests: 448 tokens and 32 new, by role",
        1.4,
        0.0,
        1.0,
    )
    assert row.line().endswith("as long as a plain model of 10.4 layers (time alone)")
    assert recommend([FULL, row], MINE) == (
        'Next: `utio-jax generate "PROMPT" --model mine` (requests: 1.40x, no loss).'
    )
    notes = [
        request_rows({**record, "request": request | changes})[0].note
        for changes in ({"equal_layers": 7.9}, {"plain_layers": None, "equal_layers": None})
    ]
    assert notes == ["faster than a plain model of 8 layers (time alone)", ""]
    assert request_rows(None) == request_rows({**record, "request": None}) == []


@pytest.mark.parametrize("kind", ["heads of two layers", "made once"])
def test_the_plain_control_is_the_model_below_its_upper_layers(kind: str) -> None:
    model = lively_model(**KINDS[kind])
    control = lower_layers(model)
    assert control is not None
    plain, params = control
    assert (plain.config.num_layers, plain.config.shares_kv) == (2, False)
    rows = jnp.asarray([[5, 9, 3, 3, 60, 1, 7, 2]]), jnp.asarray([8])
    (result,) = run_dense(plain, params, *rows, depths=(2,))
    (expected,) = run_dense(model.decoder, model.params, *rows, depths=(2,))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert lower_layers(lively_model()) is None


@pytest.mark.check
def test_a_shared_model_is_measured_by_role_before_anything_else() -> None:
    model = lively_model(**KINDS["heads of two layers"])
    documents = [np.random.default_rng(0).integers(0, 64, 200)]
    whole = SimpleNamespace(decoder=model.decoder, params=model.params, prompt_choices=())
    with pytest.raises(ValueError, match="Wanted text of at least .* Got 200. Add files"):
        next(measured(whole, documents, None))
    rows = measured(whole, documents * 4, None)
    assert next(rows).what == "in full"
    row = next(rows)
    assert row.what == "requests: 112 tokens and 8 new, by role"
    assert row.times is not None
    assert row.times > 0
    assert "than a plain model of 2 layers" in row.note or "as long as a plain model" in row.note


def test_a_request_at_full_depth_takes_the_same_steps_after_a_longer_prefill() -> None:
    """Prefill 10 or 30 ms, then 20 ms: 50 / 30. The plain model of two layers takes 20."""
    seconds = {"shallow": 0.01, "full": 0.03, "request": 0.03, "plain": 0.02}
    times = {
        name: Timing(seconds=np.asarray([value]), compiles=0) for name, value in seconds.items()
    }
    record = request_of(times, 4, SimpleNamespace(num_layers=2))
    assert record == {"seconds": 0.03, "speedup": 1.667, "plain_layers": 2, "equal_layers": 2.7}
    assert request_of(times, 4, None)["equal_layers"] is None
    # On a busy machine a prefill may take longer alone than a whole request.
    times["shallow"] = Timing(seconds=np.asarray([0.07]), compiles=0)
    assert request_of(times, 4, None)["speedup"] == 1.0


def test_prompts_stop_at_the_cheapest_exit_where_all_cost_more_than_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 3 of 4 layers; what is measured is a stub."""
    model = lively_model(exits=(3, 4))
    time = Timing(seconds=np.asarray([0.01]), compiles=0)
    for name, stub in {
        "time_programs": lambda *_, **__: {"full": time, "shallow": time},
        "continuations": lambda *_: SimpleNamespace(loss=1.0),
        "prompt_cost": lambda *_: SimpleNamespace(flops_ratio=0.7),
        "generate": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(f"utio_jax.bench.prompts.{name}", stub)
    whole = SimpleNamespace(decoder=model.decoder, params=model.params, prompt_choices=())
    record = read_prompts(whole, [np.arange(64)], count=1, rounds=1)
    assert record is not None
    budget = record["budget"]
    assert record["stop"] == 3
    assert 0.5 < budget < 1
    assert prompt_choice(model.decoder, model.params, budget).stop == 3
    with pytest.raises(ValueError, match=f"budget of at least {budget:.3f}, the cheapest known"):
        prompt_choice(model.decoder, model.params, budget - 0.002)


def test_what_is_not_faster_or_loses_much_is_left_out() -> None:
    slow = Tried(what="writing: drafts", how="--drafts", times=0.9, loss_pct=0.0)
    costly = Tried(what="reading: all to layer 2", how="--depth 2", times=3.0, loss_pct=40.0)
    assert recommend([FULL, slow, costly], MINE) == (
        'Next: `utio-jax generate "PROMPT" --model mine` (full depth: nothing tried is faster).'
    )


def test_commands_have_the_options_by_which_the_model_was_tried() -> None:
    tried = Try(model="my model", exits=(2, 4), weights="int8", lens="none", branches="b.json")
    words = "--exits 2 4 --model 'my model' --weights int8 --lens none --branches b.json"
    no_exits = Tried(what="reading: x", how="utio-jax calibrate FILES --exits 2 4 --fit-lens")
    no_way = Tried(what="prompts: x", how="utio-jax fit-prompt FILES")
    assert recommend([FULL, DRAFTS, no_exits, no_way], tried) == (
        f'Next: `utio-jax generate "PROMPT" {words} --drafts` (writing: 1.50x, no loss). '
        "Not tried: reading, utio-jax calibrate FILES --exits 2 4 --fit-lens --model 'my model' "
        f"--weights int8 --branches b.json; prompts, utio-jax fit-prompt FILES {words}."
    )


def test_rows_are_shown_as_soon_as_they_are_measured() -> None:
    shown = io.StringIO()

    def measured() -> Iterator[Tried]:
        for row in (FULL, DRAFTS):
            yield row
            assert row.line() in shown.getvalue()

    assert show_rows(Console(file=shown), measured()) == [FULL, DRAFTS]


@pytest.mark.slow
def test_a_model_without_exits_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_model(tmp_path)
    edit_json(tmp_path / "config.json", exits=[4])
    result, shown = ran(capsys, "try", source("sched"), source("stat"), "--model", tmp_path)
    assert result["verdict"] in shown
    assert [row["what"] for row in result["rows"]] == [
        "in full",
        "reading: the model names no exits",
        "writing: drafter ngram",
        "prompts: no shallow way is known",
    ]
