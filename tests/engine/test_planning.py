# SPDX-License-Identifier: Apache-2.0
"""Packing, rows together or plain decoding: what is foretold, and what an engine does about it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from helpers.engine import alone, assert_as_alone, engine_of, modes, pool
from helpers.generation import lively_model

from utio_jax.decoding.base import Plain
from utio_jax.engine import measure_rates, planning
from utio_jax.engine.planning import RowRates, plan_rebatching

RATES = RowRates(
    seconds=0.5, seconds_per_layer={2: 0.3, 4: 0.5, 6: 0.6, 8: 1.0}, plain_seconds=15.0
)


@pytest.mark.parametrize("widths", [(), (2,), (2, 4, 6)])
@pytest.mark.parametrize(
    "histogram", [{16: 1.0}, {6: 0.8, 16: 0.2}, {8: 0.32, 10: 0.36, 12: 0.07, 16: 0.25}]
)
def test_predictions_are_the_means_of_drawn_steps(
    histogram: dict[int, float], widths: tuple[int, ...]
) -> None:
    """Eight rows draw their depths; segment by segment, those that go on are counted and paid."""
    rng, draws = np.random.default_rng(0), 4000
    drawn = rng.choice([*histogram], size=(draws, 8), p=[*histogram.values()])
    packed, together = np.full(draws, 0.5), np.full(draws, 0.5)
    for start, stop in itertools.pairwise((0, *histogram)):
        for number, needed in enumerate(np.sum(drawn > start, axis=1)):
            width = next(each for each in (*widths, 8) if each >= needed)
            packed[number] += (stop - start) * RATES.seconds_per_layer[width] * (needed > 0)
            together[number] += (stop - start) * RATES.seconds_per_layer[8] * (needed > 0)
    plan = plan_rebatching(RATES, histogram, rows=8, widths=widths)
    assert plan.seconds["together"] == pytest.approx(together.mean(), rel=0.01)
    if widths:
        assert plan.seconds["pack"] == pytest.approx(packed.mean(), rel=0.01)
    assert ("pack" in plan.seconds) == bool(widths)
    assert plan.seconds["plain"] == 15.0
    assert plan.seconds[plan.choice] == min(plan.seconds.values())
    assert plan.speed_up == 15.0 / min(plan.seconds.values())


def test_what_cannot_be_foretold_is_refused() -> None:
    for histogram in ({6: 0.7, 16: 0.2}, {6: -0.1, 16: 1.1}, {}):
        with pytest.raises(ValueError, match="shares sum to 1"):
            plan_rebatching(RATES, histogram, rows=8, widths=(2,))
    with pytest.raises(ValueError, match=r"all widths \(3, 8\). Got those of .*Measure \[3\], too"):
        plan_rebatching(RATES, {16: 1.0}, rows=8, widths=(3, 9))
    for mode, message in (
        (modes()["lossless"][0], "Got Lossless. Warm up without"),
        (modes()["propagate"][0], r"Got depths=\(1, 2, 4\) and a histogram of \[3, 4\]"),
    ):
        engine = engine_of(lively_model(), mode)
        with pytest.raises(ValueError, match=message):
            engine.warmup(histogram={3: 0.5, 4: 0.5})
    engine = engine_of(lively_model(), modes()["propagate"][0], steps=60)
    with pytest.raises(ValueError, match="7 blocks of 60 steps, which are timed"):
        engine.warmup(histogram={1: 0.5, 4: 0.5})


def step_seconds(packed: float, together: float, plain: float) -> Any:
    """Returns what takes the place of a clock: a layer's seconds, whatever runs."""

    def seconds(slots: Any, served: Any, mode: Any, rows: int) -> float:
        if isinstance(mode, Plain):
            return plain
        deep = bool(np.all(np.asarray(mode.policy.thresholds) == -np.inf))
        assert deep or np.all(np.asarray(mode.policy.thresholds) == np.inf)
        return 0.1 + (4 if deep else 1) * (together if rows == 3 else packed)

    return seconds


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        pytest.param((1.0, 2.0, 9.0), "pack", marks=pytest.mark.check),
        pytest.param((2.1, 2.0, 9.0), "together", marks=pytest.mark.check),
        ((1.0, 2.0, 3.0), "plain"),
    ],
)
def test_an_engine_does_what_its_plan_says(
    seconds: tuple[float, float, float],
    choice: str,
    monkeypatch: pytest.MonkeyPatch,
    count_compiles: Any,
) -> None:
    monkeypatch.setattr(planning, "_seconds", step_seconds(*seconds))
    model, mode = lively_model(), modes()["packed"][0]
    engine = engine_of(model, mode)
    engine.warmup(histogram={1: 0.5, 2: 0.2, 4: 0.3})
    assert engine.plan is not None
    assert engine.plan.choice == choice
    rates = engine.plan.rates
    assert rates.seconds == pytest.approx(0.1)
    assert dict(rates.seconds_per_layer) == pytest.approx(
        {1: seconds[0], 2: seconds[0], 3: seconds[1]}
    )
    assert rates.plain_seconds == seconds[2]
    chosen = Plain() if choice == "plain" else mode
    if choice == "together":
        chosen = dataclasses.replace(mode, pack=())
    assert engine.stats().mode == chosen.name
    assert getattr(engine.mode, "pack", None) == getattr(chosen, "pack", None)
    requests = pool(6, seed=8)
    with count_compiles() as compiles:
        numbers = [each.submit(engine) for each in requests]
        found = engine.drain()
    assert compiles.count == 0
    for number, each in zip(numbers, requests, strict=True):
        assert_as_alone(found[number], alone(model, chosen, None, each))


def test_boundaries_that_are_reached_are_paid() -> None:
    """At a second each, and layers that take none worth naming: the mean number of boundaries."""
    rates = dataclasses.replace(RATES, seconds_per_boundary=1.0)
    histogram = {6: 0.8, 10: 0.1, 16: 0.1}
    for way in ("together", "pack"):
        free, paid = (
            plan_rebatching(each, histogram, rows=8, widths=(2,)).seconds[way]
            for each in (RATES, rates)
        )
        assert paid - free == pytest.approx(1.0 + (1 - 0.8**8))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"seconds": -4.0}, "a step without its layers takes -4e+03 ms"),
        ({"plain_seconds": -1e-3}, "a plain step takes -1 ms"),
        ({"seconds_per_layer": {2: -2e-3, 8: 1.0}}, "a layer on 2 rows takes -2 ms"),
        ({"seconds_per_layer": {2: 1.0, 4: float("nan")}}, "a layer on 4 rows takes nan ms"),
        ({"seconds_per_layer": {8: 0.5, 2: 1.0}}, "a layer on 2 rows takes longer than on 8"),
    ],
)
def test_times_that_cannot_be_are_seen(changed: dict[str, Any], reason: str) -> None:
    assert RATES.nonsense is None
    assert dataclasses.replace(RATES, seconds=-0.5).nonsense is None, "a line through noisy times"
    assert dataclasses.replace(RATES, **changed).nonsense == reason


def test_a_plan_is_not_made_of_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may say that deep steps take less than shallow ones: twice, and a third."""
    tries = []

    def seconds(slots: Any, served: Any, mode: Any, rows: int) -> float:
        tries.append(rows)
        return 1.0 / len(tries)

    monkeypatch.setattr(planning, "_seconds", seconds)
    engine = engine_of(lively_model(), modes()["packed"][0])
    with pytest.raises(ValueError, match="in 3 tries.*1 rows takes -.* worth nothing.*without a"):
        engine.warmup(histogram={1: 0.5, 4: 0.5})
    assert len(tries) == 3 * (2 * 3 + 1)
    assert engine.plan is None


def test_rates_of_a_signal_tell_boundaries_from_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 0.5, 0.25 for a boundary, and layers that take their number of rows."""
    signal = modes()["packed"][0].policy.signal

    def seconds(slots: Any, served: Any, mode: Any, rows: int) -> float:
        if isinstance(mode, Plain):
            return 9.0
        policy = mode.policy
        assert mode.pack == (1, 2)
        assert policy.signal is signal
        deep = bool(np.all(np.asarray(policy.thresholds) == -np.inf))
        layers = policy.depths[-1] if deep else policy.depths[0]
        return 0.5 + 0.25 * (len(policy.depths) - 1) + layers * rows

    monkeypatch.setattr(planning, "_seconds", seconds)
    model = lively_model(exits=(1, 2, 3, 4))
    rates = measure_rates(model.decoder, model.params, signal, slots=3, pack=(1, 2))
    assert dict(rates.seconds_per_layer) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert (rates.seconds, rates.seconds_per_boundary) == pytest.approx((0.5, 0.25))
    assert rates.plain_seconds == 9.0


@pytest.mark.check
def test_blocks_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mode = lively_model(), modes()["packed"][0]
    # Here other programs may run: whatever was measured counts.
    monkeypatch.setattr(planning, "_sane", lambda measured, remedy: measured())
    rates = measure_rates(
        model.decoder, model.params, mode.policy.signal, slots=3, pack=(1, 2), capacity=64
    )
    assert rates.plain_seconds > 0
    assert sorted(rates.seconds_per_layer) == [1, 2, 3]
