# SPDX-License-Identifier: Apache-2.0
"""A depth per token or plain decoding: what is predicted, of which times."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
from helpers.engine import CAPACITY, SHAPES, SLOTS, STEPS, modes
from helpers.generation import lively_model

from utio_jax.decoding.base import Plain
from utio_jax.engine import planning
from utio_jax.engine.planning import RowRates, plan_mode, predict_seconds
from utio_jax.engine.slots import Served, Slots
from utio_jax.models.presets import SHARED_16

RATES = RowRates(
    seconds=0.5, seconds_per_layer={2: 0.3, 4: 0.5, 6: 0.6, 8: 1.0}, plain_seconds=15.0
)


@pytest.mark.parametrize("widths", [(8,), (2, 8), (2, 4, 6, 8)])
@pytest.mark.parametrize(
    "histogram", [{16: 1.0}, {6: 0.8, 16: 0.2}, {8: 0.32, 10: 0.36, 12: 0.07, 16: 0.25}]
)
def test_predictions_are_the_means_of_drawn_steps(
    histogram: dict[int, float], widths: tuple[int, ...]
) -> None:
    """Eight rows draw their depths; segment by segment, those that go on are counted and paid."""
    rng, draws = np.random.default_rng(0), 4000
    drawn = rng.choice([*histogram], size=(draws, 8), p=[*histogram.values()])
    seconds, layer = np.full(draws, 0.5), RATES.seconds_per_layer
    for start, stop in itertools.pairwise((0, *histogram)):
        for number, needed in enumerate(np.sum(drawn > start, axis=1)):
            width = next(width for width in widths if width >= needed)
            seconds[number] += (stop - start) * layer[width] * (needed > 0)
    rates = dataclasses.replace(RATES, seconds_per_layer={width: layer[width] for width in widths})
    result = predict_seconds(rates, histogram, rows=8)
    assert result == pytest.approx(seconds.mean(), rel=0.01)


def test_predictions_of_branches_count_each_branch_alone() -> None:
    rng, draws, histogram = np.random.default_rng(0), 4000, {10: 0.5, 12: 0.2, 16: 0.3}
    drawn = rng.choice([*histogram], size=(draws, 8), p=[*histogram.values()])
    layer = RATES.seconds_per_layer
    seconds = np.full(draws, 0.5 + 8 * layer[8])
    for depth in histogram:
        for number, needed in enumerate(np.sum(drawn == depth, axis=1)):
            width = next(width_ for width_ in layer if width_ >= needed)
            seconds[number] += (depth - 8) * layer[width] * (needed > 0)
    config = dataclasses.replace(SHARED_16, branches=(2, 4), exits=())
    result = predict_seconds(RATES, histogram, rows=8, config=config)
    assert result == pytest.approx(seconds.mean(), rel=0.01)


def served(name: str, **changes: Any) -> Served:
    model, sizes = lively_model(), {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS}
    own = {"decoder": model.decoder, "params": model.params, "mode": modes()[name][0]}
    options: dict[str, Any] = {**own, "shapes": SHAPES, **sizes, **changes}
    return Served(**options)


def test_a_plan_is_made_of_timed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, width = 9.0, {1: 1.0, 2: 1.5, 3: 2.0}

    def seconds(slots: Any, served: Served, rows: int, threshold: float = 0.0) -> float:
        if isinstance(served.mode, Plain):
            return plain
        return 0.1 + {np.inf: 1, -np.inf: 4}[threshold] * width[rows]

    monkeypatch.setattr(planning, "_seconds", seconds)
    plan = plan_mode(served("propagate"), {1: 0.5, 2: 0.2, 4: 0.3})
    assert plan.rates.seconds == pytest.approx(0.1)
    assert plan.rates.plain_seconds == plain
    assert dict(plan.rates.seconds_per_layer) == pytest.approx({3: 2.0})
    expected = 0.1 + 2 * (1 + (1 - 0.5**3) + 2 * (1 - 0.7**3))
    assert plan.seconds == pytest.approx(expected)
    assert plan.speedup == pytest.approx(plain / expected)
    # Where layers above make no keys and values, rows are packed.
    model = lively_model(num_kv_heads=1, kv_source=((0,), (1,), (0, 1), (0, 1)))
    plan = plan_mode(served("propagate", decoder=model.decoder, params=model.params), {4: 1.0})
    assert dict(plan.rates.seconds_per_layer) == pytest.approx({1: 1.0, 2: 1.5, 3: 2.0})


def test_times_that_cannot_be_are_seen() -> None:
    assert RATES.is_plausible
    below = dataclasses.replace(RATES, seconds=-0.5)
    assert below.is_plausible, "a line through noisy times"
    # Nothing takes less than no time: neither in a log nor in a prediction.
    assert below.to_json()["ms"] == 0.0
    none = dataclasses.replace(RATES, seconds=0.0)
    histogram = {1: 0.5, 4: 0.5}
    assert predict_seconds(below, histogram, rows=8) == predict_seconds(none, histogram, rows=8)
    for changed in (
        {"seconds": -4.0},
        {"plain_seconds": -1e-3},
        {"seconds_per_layer": {2: -2e-3, 8: 1.0}},
        {"seconds_per_layer": {2: 1.0, 4: float("nan")}},
    ):
        assert not dataclasses.replace(RATES, **changed).is_plausible


def test_a_plan_is_not_made_of_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may say that deep steps take less than shallow ones: twice, and a third."""
    tries = []

    def seconds(slots: Any, served: Any, rows: int, threshold: float = 0.0) -> float:
        tries.append(rows)
        return 1.0 / len(tries)

    monkeypatch.setattr(planning, "_seconds", seconds)
    with pytest.raises(ValueError, match="in 3 tries.* worth nothing"):
        plan_mode(served("propagate"), {1: 0.5, 4: 0.5})
    assert len(tries) == 3 * (2 + 1)


@pytest.mark.check
def test_one_cache_is_held_while_blocks_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has the engine's own cache and pool besides."""
    alive, counts = weakref.WeakSet[Slots](), []

    def seconds(slots: Slots, served: Any, rows: int, threshold: float = 0.0) -> float:
        assert slots.prefix is None
        gc.collect()
        alive.add(slots)
        counts.append(len(alive))
        return 1.0 + len(counts)

    monkeypatch.setattr(planning, "_seconds", seconds)
    monkeypatch.setattr(RowRates, "is_plausible", True)
    plan_mode(served("propagate", prefix_cache=2**20), {1: 0.5, 4: 0.5})
    assert counts == [1, 1, 1]


@pytest.mark.check
def test_blocks_are_timed_as_deep_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    depths, run = [], Slots.run

    def noted(slots: Slots) -> Any:
        report = run(slots)
        depths.append(int(np.max(slots.state.work.queries / slots.state.work.steps)))
        return report

    monkeypatch.setattr(Slots, "run", noted)
    # Here other programs may run: whatever was measured counts.
    monkeypatch.setattr(RowRates, "is_plausible", True)
    rates = plan_mode(served("propagate", steps=2), {1: 0.5, 4: 0.5}).rates
    assert rates.plain_seconds > 0
    assert depths == [1] * 7 + [4] * 7 + [4] * 7
