# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding: expected depths against every outcome, lines found again, and who is asked."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from test_staircase import gated

from utio_jax.artifacts import conditions
from utio_jax.cost import token_cost
from utio_jax.guardrails import check_decoding
from utio_jax.profit import Profit, Rates
from utio_jax.step_profit import StepRates, expected_step_depth, fit_steps, predict_step

HISTOGRAM = {2: 0.5, 3: 0.2, 7: 0.3}
RATES = (
    StepRates(batch=1, seconds=1.0, seconds_per_layer=2.0),
    StepRates(batch=5, seconds=3.0, seconds_per_layer=4.0),
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
    assert predict_step(RATES, {3: 1.0}, 1) == 1 + 2 * 3
    assert predict_step(RATES, HISTOGRAM, 5) == 3 + 4 * expected_step_depth(HISTOGRAM, 5)
    assert predict_step(RATES[::-1], HISTOGRAM, 3) == 2 + 3 * expected_step_depth(HISTOGRAM, 3)
    for batch in (0, 6):
        with pytest.raises(ValueError, match=rf"measured, \[1, 5\]. Got {batch}. Measure it: utio"):
            predict_step(RATES, HISTOGRAM, batch)
    with pytest.raises(ValueError, match=r"measured, \[\]. Got 1"):
        predict_step((), HISTOGRAM, 1)


def test_lines_are_found_again_and_one_depth_is_none() -> None:
    points = [
        (each.batch, depth, each.seconds + each.seconds_per_layer * depth)
        for each in RATES
        for depth in (2.0, 3.0, 7.0)
    ]
    found = fit_steps([*points, (9, 4.0, 1.0), (9, 4.0, 1.1)])
    assert [each.batch for each in found] == [1, 5]
    for one, other in zip(found, RATES, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other))
    assert fit_steps([]) == ()


def test_deeper_batches_stop_paying_and_the_reason_says_so(tiny: Any) -> None:
    where, policy = conditions(tiny.params), gated(tiny)
    profit = Profit(
        cost=token_cost(tiny.decoder, tiny.params),
        num_layers=4,
        routed=Rates(),
        full=Rates(),
        device=where["device"],
        dtype=where["dtype"],
        # Not as devices are: at 8 rows a layer less takes longer, so that nothing pays.
        steps=(
            StepRates(batch=1, seconds=1.0, seconds_per_layer=1.0),
            StepRates(batch=8, seconds=1.0, seconds_per_layer=-0.5),
        ),
    )
    shares = [1.0 / len(policy.depths)] * len(policy.depths)

    def ask(batch: int, profit: Profit = profit) -> str | None:
        return check_decoding(
            tiny.decoder, tiny.params, policy, batch=batch, fractions=shares, profit=profit
        )

    assert ask(1) is None
    assert "8 rows that step together would run" in str(ask(8))
    with pytest.raises(ValueError, match="measured of this model on this device"):
        ask(1, dataclasses.replace(profit, device="tpu:v9"))
    with pytest.raises(ValueError, match=r"Got 9. Measure it"):
        ask(9)
