# SPDX-License-Identifier: Apache-2.0
"""Thresholds by an engine's clock: the most tokens per second within a loss, against all there are.

Rates are given, nothing is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cases import EXECUTOR

from utio_jax import Position
from utio_jax.calibration import EngineClock, MaxLoss, advise, calibrate
from utio_jax.calibration.gates import SignalFitter
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.engine.planning import RowRates
from utio_jax.policies.store import Calibration, Thresholds, load_calibration

# A layer as dear for one row as for two, and dear boundaries: few exits, early ones, pay.
RATES = RowRates(
    seconds=0.001,
    seconds_per_layer={2: 0.001},
    plain_seconds=0.0052,
    seconds_per_boundary=0.0004,
)


def clock_of(rates: RowRates = RATES, *, slots: int = 2, pack: tuple[int, ...] = ()) -> EngineClock:
    return EngineClock(slots=slots, pack=pack, rates=lambda _: rates, machine={"cores": 2})


def step_seconds(fit: Thresholds, rates: RowRates = RATES) -> float:
    """Returns the mean over all depths that two rows may draw: an oracle of the foretold step."""
    total = 0.0
    for rows in itertools.product(zip(fit.depths, fit.fractions, strict=True), repeat=2):
        deepest = max(depth for depth, _ in rows)
        paid = rates.seconds + deepest * rates.seconds_per_layer[2]
        total += math.prod(share for _, share in rows) * (
            paid + rates.seconds_per_boundary * _asked(fit.depths, deepest)
        )
    return total


def _asked(depths: tuple[int, ...], deepest: int) -> int:
    """Returns the boundaries that are reached: that at the first depth always is."""
    return sum(depth <= deepest for depth in depths[:-1])


def fitted(depths: tuple[int, ...], *fractions: float) -> Thresholds:
    return Thresholds(
        depths=depths, thresholds=(0.5,) * (len(depths) - 1), fractions=tuple(fractions)
    )


class Table:
    """A search whose candidates, foretold and true losses, and FLOPs are given."""

    def __init__(self, rows: list[tuple[Thresholds, float, float, float]]) -> None:
        self.rows = rows
        self.passes: list[Thresholds] = []

    def candidates(self, signal: Any, *, within: float) -> Any:
        return [(fit, foretold) for fit, foretold, _, _ in self.rows if foretold <= within]

    def run(self, signal: Any, fit: Thresholds) -> Any:
        self.passes.append(fit)
        return next(row for row in self.rows if row[0] is fit)

    def ratio(self, spent: Any) -> float:
        return spent[3]

    def nll_increase_pct(self, spent: Any) -> float:
        return spent[2]


def drawn_table(seed: int) -> Any:
    rng, rows = np.random.default_rng(seed), []
    for depths in ((1, 4), (2, 4), (3, 4), (1, 2, 4), (1, 3, 4), (2, 3, 4), (1, 2, 3, 4)):
        for _ in range(4):
            shares = rng.dirichlet(np.ones(len(depths)))
            ratio = float(shares @ np.asarray(depths)) / 4
            foretold = 6 * (1 - ratio) * rng.uniform(0.5, 1.5)
            true = foretold + rng.uniform(0, 0.5)
            rows.append((fitted(depths, *shares.tolist()), foretold, true, ratio))
    return Table(rows)


@pytest.mark.parametrize("seed", range(6))
def test_the_fastest_within_the_loss_of_all_there_are(seed: int) -> None:
    table = drawn_table(seed)
    entries, record = MaxLoss(nll_increase_pct=1.5, clock=clock_of()).reach(
        table, Position(), lambda _: None
    )
    allowed = [row for row in table.rows if row[2] <= 1.5]
    best = min(allowed, key=lambda row: step_seconds(row[0]))
    cheapest = min(allowed, key=lambda row: row[3])
    ((ratio, entry),) = entries.items()
    assert entry is best[0]
    assert ratio == round(best[3], 4)
    clock = record["clock"]
    assert clock["tokens_per_second"] == pytest.approx(2 / step_seconds(entry), abs=0.1)
    assert clock["speed_up"] == pytest.approx(0.0052 / step_seconds(entry), abs=1e-4)
    assert clock["plain_tokens_per_second"] == pytest.approx(2 / 0.0052, abs=0.1)
    assert clock["passes"] == len(table.passes), "no slower one is tried"
    # By FLOPs a slower one would have been chosen, for two of these tables.
    assert (entry is cheapest[0]) == (seed not in (1, 3))
    assert step_seconds(entry) <= step_seconds(cheapest[0])


def test_packed_rows_are_chosen_by_what_packing_takes() -> None:
    """Alone, a row's layers are nearly free: then rows are packed, and depth is cheap."""
    table: Any = Table(
        [(fitted((1, 4), 0.9, 0.1), 0.1, 0.1, 0.4), (fitted((2, 4), 1, 0), 0, 0, 0.5)]
    )
    rates = dataclasses.replace(RATES, seconds_per_layer={1: 1e-5, 2: 0.001})
    goal = MaxLoss(nll_increase_pct=1, clock=clock_of(rates, pack=(1,)))
    entries, record = goal.reach(table, Position(), lambda _: None)
    assert [*entries] == [0.4]
    assert record["clock"]["way"] == "pack"
    # One row that goes on is packed; two of them, once in a hundred steps, are not.
    deep = 3 * (0.18 * 1e-5 + 0.01 * 0.001)
    seconds = 0.001 + 0.0004 + 0.001 + deep
    assert record["clock"]["tokens_per_second"] == pytest.approx(2 / seconds, abs=0.1)


def test_that_plain_decoding_wins_is_said(tiny: Any) -> None:
    table: Any = Table([(fitted((2, 4), 0.5, 0.5), 0.1, 0.2, 0.8)])
    rates = dataclasses.replace(RATES, plain_seconds=0.003)
    _, record = MaxLoss(nll_increase_pct=1, clock=clock_of(rates)).reach(
        table, Position(), lambda _: None
    )
    assert record["clock"]["speed_up"] < 1
    info = {"goals": {"position": record}, **HARMLESS}
    said = advise(tiny.decoder, tiny.params, info, lens=False)
    assert said is not None
    assert "will not pay with 2 slots" in said
    assert "667 tokens per second plainly, and 408 with position" in said
    rates = dataclasses.replace(RATES, plain_seconds=0.006)
    _, record = MaxLoss(nll_increase_pct=1, clock=clock_of(rates)).reach(
        table, Position(), lambda _: None
    )
    info = {"goals": {"position": record}, **HARMLESS}
    assert advise(tiny.decoder, tiny.params, info, lens=False) is None


HARMLESS = {
    "exit_nll_increase_pct": {"1": 9.0, "2": 1.0},
    "exit_agreement": {"1": 0.5, "2": 0.9},
}


def test_without_a_policy_within_the_loss_there_is_no_entry() -> None:
    table: Any = Table(
        [(fitted((2, 4), 0.5, 0.5), 0.1, 2.0, 0.8), (fitted((1, 4), 1, 0), 3, 3, 0.3)]
    )
    entries, record = MaxLoss(nll_increase_pct=1, clock=clock_of()).reach(
        table, Position(), lambda _: None
    )
    assert entries == {}
    assert record["clock"]["candidates"] == 1
    assert "speed_up" not in record["clock"]
    assert len(table.passes) == 1, "what is foretold to lose too much is not tried"


def test_rates_that_cannot_be_are_refused() -> None:
    goal = MaxLoss(
        nll_increase_pct=1, clock=clock_of(dataclasses.replace(RATES, seconds_per_layer={2: 0.0}))
    )
    with pytest.raises(ValueError, match="a layer on 2 rows takes 0 ms. Measure while no other"):
        goal.reach(drawn_table(0), Position(), lambda _: None)
    for slots, pack in ((0, ()), (4, (2, 1)), (4, (0, 1))):
        with pytest.raises(ValueError, match="at least one slot, and numbers of rows to pack"):
            clock_of(slots=slots, pack=pack)


def test_a_file_says_by_which_clock(tmp_path: Path) -> None:
    goal = MaxLoss(nll_increase_pct=1.5, clock=clock_of())
    entries, record = goal.reach(drawn_table(0), Position(), lambda _: None)
    empty = Calibration(
        entries={},
        signals={},
        info={"model_sha256": "a" * 64, "goals": {}, "rank_correlation_kl": {}}
        | {"goal": goal.asked()},
    )
    empty.adding("position", Position(), entries, goal=record, correlations={}).save(tmp_path)
    again = load_calibration(tmp_path, model_sha256="a" * 64)
    assert again.entries["position"] == entries
    asked = {"clock": "engine", "slots": 2, "pack": []}
    assert again.info["goal"] == {"max_nll_increase_pct": 1.5, **asked}
    clock = again.info["goals"]["position"]["clock"]
    assert clock == json.loads(json.dumps(record["clock"]))
    assert clock["machine"] == {"cores": 2}
    assert clock["rates"] == {
        "ms": 1.0,
        "ms_per_layer": {"2": 1.0},
        "ms_per_boundary": 0.4,
        "plain_ms": 5.2,
    }
    assert MaxLoss(nll_increase_pct=1.5).asked() == {"max_nll_increase_pct": 1.5}


@pytest.mark.check
def test_a_model_is_calibrated_by_the_clock(tiny: Any, text: Any) -> None:
    """Real passes over all candidates: none within the loss is faster than what is chosen."""
    studies = study_exits(tiny.decoder, tiny.params, text)
    search = ThresholdSearch(tiny.decoder, tiny.params, studies, executor=EXECUTOR)
    signal = SignalFitter(tiny.decoder, tiny.params, studies).fit("learned")
    found = calibrate(
        tiny.decoder,
        tiny.params,
        text,
        policies=("learned",),
        goal=MaxLoss(nll_increase_pct=8, clock=clock_of()),
        executor=EXECUTOR,
    )
    ((ratio, entry),) = found.entries["learned"].items()
    losses = {
        step_seconds(fit): (search.nll_increase_pct(search.run(signal, fit)), foretold, fit.depths)
        for fit, foretold in search.candidates(signal, within=8)
    }
    assert {depths for *_, depths in losses.values()} == {(1, 2), (2, 4), (1, 4), (1, 2, 4)}
    assert all(
        abs(true - foretold) < 1.5 and foretold <= 8 for true, foretold, _ in losses.values()
    )
    assert step_seconds(entry) == min(each for each, (true, *_) in losses.items() if true <= 8)
    assert 0 < ratio < 1
    entries, _ = MaxLoss(nll_increase_pct=8).reach(search, signal, lambda _: None)
    ((_, by_flops),) = entries.items()
    # Up to a step of the budgets, by which the other comes nearer to the bound.
    assert step_seconds(entry) < 1.03 * step_seconds(by_flops)
