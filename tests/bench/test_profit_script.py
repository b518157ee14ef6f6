# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/profit.py` fits one half of what it measures, and is scored on the other."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from utio_jax.evaluation.profit import Rates, expected_stages

from utio_jax.bench.rows import Row, timed
from utio_jax.bench.subjects import Subject
from utio_jax.bench.timing import Timing
from utio_jax.core.flops import token_cost

pytestmark = pytest.mark.check


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("profit")


def timing(seconds: float) -> Timing:
    return Timing(seconds=np.full(2, seconds), compiles=0)


def test_rates_are_fitted_on_one_half_and_scored_on_the_other(script: Any, tiny: Any) -> None:
    subject = Subject(name="tiny", decoder=tiny.decoder, params=tiny.params)
    points = script.grid((1, 2, 4), (1, 2, 4), (32, 64, 128, 256))
    held = [p for p in points if p.held_out and not p.is_full]
    assert len(held) == 24
    for axis in ("batch", "context"):  # Both halves hold every shape and every histogram.
        assert {getattr(p, axis) for p in held} == {getattr(p, axis) for p in points}
    assert len({tuple(p.histogram.values()) for p in held}) == 4
    cost = token_cost(subject.decoder, subject.params)
    truth = Rates(passes=1e-4, products=1e-9, attention=2e-9, splits=2e-5, row_layers=1e-6)
    times = [
        truth.seconds(expected_stages(cost, p.histogram, batch=p.batch, context=p.context))
        for p in points
    ]
    profit, score = script.fit(subject, points, [timing(each) for each in times])
    assert score == {"held_out": 24, "within": 24, "decisions": 24}
    # Points that come out otherwise than the others count as missed, and are not fitted away.
    odd = [3 * each if p in held[:5] else each for p, each in zip(points, times, strict=True)]
    again, score = script.fit(subject, points, [timing(each) for each in odd])
    assert score["within"] == 19
    assert again == profit


def test_steps_are_fitted_to_chance(script: Any) -> None:
    """Answers of 11 tokens, the first of them the prompt's own, at layer 1 of 4 or at the last."""

    def row(batch: int, method: str, stopped: float, seconds: float) -> Row:
        shares = {"1": 10 * stopped / 11, "4": (10 * (1 - stopped) + 1) / 11}
        planned = Row(
            key=f"{method}/{batch}",
            part="decode",
            model="tiny",
            method=method,
            setting={"batch": batch, "output": 11, "layers": 4},
            ledger={"depth_histogram": {depth: share for depth, share in shares.items() if share}},
        )
        return timed(planned, timing(10 * seconds))

    rows = []
    for batch in (1, 4):
        rows.append(row(batch, "plain", 0.0, 0.01 * batch + 0.0765))
        rows.append(row(batch, "learned@0.5", 0.5, 1.0))  # No chance: not in the fit.
        for name, stopped in (("random@0.5", 0.5), ("random@0.7", 0.3)):
            layers = 4 - 3 * stopped**batch
            rows.append(row(batch, name, stopped, 0.01 * batch + 0.02 * layers))
    for each, batch in zip(script.decoding_rates(rows), (1, 4), strict=True):
        wanted = (batch, 0.01 * batch, 0.02, 0.01 * batch + 0.0765)
        assert dataclasses.astuple(each) == pytest.approx(wanted)
    assert script.decoding_rates([]) == ()
