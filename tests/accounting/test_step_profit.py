# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding: expected depths against every outcome, lines found again, and who is asked."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from helpers.models import gated

from utio_jax.accounting.guardrails import check_decoding
from utio_jax.accounting.profit import Profit, Rates
from utio_jax.accounting.step_profit import StepRates, expected_step_depth, fit_steps, predict_step
from utio_jax.core.files import conditions
from utio_jax.core.flops import token_cost

HISTOGRAM = {2: 0.5, 3: 0.2, 7: 0.3}
RATES = (
    StepRates(batch=1, seconds=1.0, seconds_per_layer=2.0, plain_seconds=10.0),
    StepRates(batch=5, seconds=3.0, seconds_per_layer=4.0, plain_seconds=20.0),
)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_step_runs_as_deep_as_its_deepest_row(batch: int) -> None:
    outcomes = itertools.product(HISTOGRAM.items(), repeat=batch)
    wanted = sum(
        max(depth for depth, _ in rows) * np.prod([share for _, share in rows]) for rows in outcomes
    )
    assert expected_step_depth(HISTOGRAM, batch) == pytest.approx(wanted)


def test_a_histogram_needs_all_its_shares() -> None:
    assert expected_step_depth({2: 1.0, 7: 0.0}, 3) == 2
    assert expected_step_depth({2: 0.0, 7: 1.0}, 3) == 7
    for wrong in ({}, {2: 0.5}, {2: 1.5, 7: -0.5}):
        with pytest.raises(ValueError, match="shares sum to 1"):
            expected_step_depth(wrong, 2)


def test_steps_take_a_line_per_batch_and_lie_between_measured_batches() -> None:
    assert predict_step(RATES, {3: 1.0}, 1) == (1 + 2 * 3, 10)
    assert predict_step(RATES, HISTOGRAM, 5) == (3 + 4 * expected_step_depth(HISTOGRAM, 5), 20)
    between = predict_step(RATES[::-1], HISTOGRAM, 3)
    assert between == (2 + 3 * expected_step_depth(HISTOGRAM, 3), 15)
    with pytest.raises(
        ValueError, match=r"measured, \[1, 5\]. Got 6. .* --batch-sizes 1 5 6 --out"
    ):
        predict_step(RATES, HISTOGRAM, 6)
    with pytest.raises(ValueError, match="Got 0"):
        predict_step(RATES, HISTOGRAM, 0)
    with pytest.raises(ValueError, match=r"measured, \[\]. Got 1"):
        predict_step((), HISTOGRAM, 1)


def test_lines_are_found_again_and_one_depth_is_none() -> None:
    points = [
        (each.batch, depth, each.seconds + each.seconds_per_layer * depth)
        for each in RATES
        for depth in (2.0, 3.0, 7.0)
    ]
    plain = {each.batch: each.plain_seconds for each in RATES} | {9: 1.0}
    found = fit_steps([*points, (9, 4.0, 1.0), (9, 4.0, 1.1), (7, 2.0, 1.0), (7, 4.0, 1.0)], plain)
    assert [each.batch for each in found] == [1, 5]
    for one, other in zip(found, RATES, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other))
    assert fit_steps([], plain) == ()


def test_rows_that_wait_for_each_other_stop_paying_and_the_reason_says_so(tiny: Any) -> None:
    where, policy = conditions(tiny.params), gated(tiny)
    line = {"seconds": 1.0, "seconds_per_layer": 1.0, "plain_seconds": 4.5}
    profit = Profit(
        cost=token_cost(tiny.decoder, tiny.params),
        num_layers=4,
        routed=Rates(),
        full=Rates(),
        device=where["device"],
        dtype=where["dtype"],
        # Boundaries take half a layer's time: going on to the end does not pay.
        steps=(StepRates(batch=1, **line), StepRates(batch=8, **line)),
    )
    shares = [1.0 / len(policy.depths)] * len(policy.depths)

    def ask(batch: int, profit: Profit = profit) -> str | None:
        return check_decoding(
            tiny.decoder, tiny.params, policy, batch=batch, fractions=shares, profit=profit
        )

    alone, together = (
        expected_step_depth(dict(zip(policy.depths, shares, strict=True)), batch)
        for batch in (1, 8)
    )
    assert 1 + alone < 4.5 < 1 + together
    assert ask(1) is None
    reason = f"8 rows that step together would run {together:.1f} of 4 layers, and take "
    assert str(ask(8)).startswith(reason + f"{(1 + together) / 4.5:.2f} of the plain")
    with pytest.raises(ValueError, match="measured of this model on this device"):
        ask(1, dataclasses.replace(profit, device="tpu:v9"))
    with pytest.raises(ValueError, match="Got 9. Measure all"):
        ask(9)
