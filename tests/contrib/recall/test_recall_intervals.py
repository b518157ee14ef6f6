# SPDX-License-Identifier: Apache-2.0
"""Exact intervals of binary answers: textbook values, and how often they hold the truth."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from utio_jax.contrib.recall.intervals import paired_interval, rate_interval


def answers(count: int, rows: int) -> np.ndarray:
    return np.arange(rows) < count


def pairs(first_alone: int, second_alone: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(rows)
    return at < first_alone, (at >= first_alone) & (at < first_alone + second_alone)


def test_a_rate_has_clopper_and_pearsons_interval() -> None:
    # None of eight: 1 - 0.025 ** (1 / 8). Ten of 20: Clopper & Pearson's table.
    assert rate_interval(answers(0, 8)) == pytest.approx((0, 0.36942), abs=1e-5)
    assert rate_interval(answers(10, 20)) == pytest.approx((0.27196, 0.72804), abs=1e-5)
    assert rate_interval(answers(2, 4)) is None


def test_what_did_not_change_has_an_interval_all_the_same() -> None:
    same = answers(3, 8)
    edge = 1 - 0.0125 ** (1 / 8)
    assert paired_interval(same, same) == pytest.approx((-edge, edge))
    assert paired_interval(same[:4], same[:4]) is None
    low, high = paired_interval(*pairs(9, 1, 32)) or (0, 0)
    assert -0.07 < low < 8 / 32 < high < 0.55
    mirrored = paired_interval(*pairs(1, 9, 32))
    assert mirrored == pytest.approx((-high, -low))
    # Rows with the same answer twice count by their number alone.
    first, second = pairs(3, 1, 12)
    assert paired_interval(first, second) == paired_interval(
        first | (np.arange(12) > 8), second | (np.arange(12) > 8)
    )


@pytest.mark.parametrize("rows", [5, 8, 29])
def test_intervals_hold_the_truth_as_often_as_they_say(rows: int) -> None:
    rng, draws = np.random.default_rng(0), 4000
    rate = functools.cache(lambda k: rate_interval(answers(k, rows)) or (2.0, 2.0))
    paired = functools.cache(lambda b, c: paired_interval(*pairs(b, c, rows)) or (2.0, 2.0))
    for truth in (0.02, 0.1, 0.3, 0.5, 0.9):
        counts = rng.binomial(rows, truth, draws)
        held = np.mean([low <= truth <= high for low, high in map(rate, counts.tolist())])
        assert held > 0.94, truth  # 0.95, less three standard errors of the simulation.
    for gained, lost in ((0.02, 0.02), (0.05, 0.2), (0.0, 0.1), (0.3, 0.3), (0.6, 0.1)):
        counts = rng.multinomial(rows, [gained, lost, 1 - gained - lost], draws)
        ends = [paired(b, c) for b, c, _ in counts.tolist()]
        assert np.mean([low <= gained - lost <= high for low, high in ends]) > 0.94
