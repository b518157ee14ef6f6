# SPDX-License-Identifier: Apache-2.0
"""Profitability against sums by hand and synthetic times. No figure of speed is asserted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.models import gated
from helpers.texts import EXECUTOR

from utio_jax import MicroBatches
from utio_jax.accounting.guardrails import check_worthwhile
from utio_jax.accounting.profit import (
    Profit,
    Rates,
    break_even,
    expected_stages,
    fit_rates,
    predict_seconds,
    routing_pays,
    splitting_overhead,
)
from utio_jax.accounting.step_profit import StepRates
from utio_jax.core.files import conditions
from utio_jax.core.flops import TokenCost, token_cost
from utio_jax.evaluation.evaluate import score_documents

COST = TokenCost(query=10.0, keys_values=2.0, attention_per_key=1.0, head=5.0)
SMALL = MicroBatches(min_bucket=4, block=4, query_block=4, key_step=8)
SHAPE: dict[str, Any] = {"batch": 2, "context": 8, "executor": SMALL}
FREE = Rates(products=1.0, product_rests=1.0, attention=1.0, attention_rests=1.0)
SLOW = Rates(products=1e-9, product_rests=1e-9, attention=1e-9, attention_rests=1e-9)


def profit_of(routed: Rates, full: Rates = FREE) -> Profit:
    return Profit(
        cost=COST, num_layers=4, routed=routed, full=full, device="cpu:cpu", dtype="float32"
    )


def test_stages_are_those_counted_by_hand() -> None:
    found = expected_stages(COST, {1: 0.5, 4: 0.5}, **SHAPE)
    # 16 tokens in the first layer, 8 in the other three; half a bucket wasted, or per row.
    assert found.products == 16 * 10 + 16 * 5 + 16 * 4 * 2
    assert found.product_rests == 3 * (8 + 2) * 10
    assert found.attention == 16 * 8
    assert found.attention_rests == 3 * (8 + 2 * 2) * 8
    # What whole blocks leave over: of 24 tokens 4; of about 21 half a block, and half a bucket.
    larger = MicroBatches(min_bucket=4, block=20, query_block=4, key_step=8)
    found = expected_stages(COST, {1: 0.25, 4: 0.75}, batch=3, context=8, executor=larger)
    assert found.product_rests == 4 * 10 + 3 * (18 + 2) * 10
    found = expected_stages(COST, {1: 0.1, 4: 0.9}, batch=3, context=8, executor=larger)
    assert found.product_rests == pytest.approx(4 * 10 + 3 * (10 + 2) * 10)
    found = expected_stages(COST, {1: 0.5, 4: 0.5}, **SHAPE)
    assert found.row_layers == 4 * 2
    assert (found.passes, found.splits, found.split_tokens) == (1, 1, 16)
    # Nobody goes on: the layers behind are not run, nor their keys and values.
    shallow = expected_stages(COST, {1: 1.0, 4: 0.0}, **SHAPE)
    assert shallow.products == 16 * 10 + 16 * 5 + 16 * 2
    assert shallow.row_layers == 2
    # Gates of live tokens, and a second head for those that go on after it looked at logits.
    gates = expected_stages(COST, {1: 0.5, 4: 0.5}, **SHAPE, gates=[3.0], reads=[True])
    assert gates.products - found.products == 16 * 3 + 8 * 5


def test_a_split_that_everyone_passes_costs_the_overhead_of_splitting() -> None:
    rates = dataclasses.replace(FREE, passes=3.0, splits=7.0, split_tokens=0.5)
    profit = profit_of(rates, dataclasses.replace(FREE, passes=3.0))
    split, full = predict_seconds(profit, {1: 0.0, 4: 1.0}, **SHAPE)
    assert split - full == pytest.approx(7 + 0.5 * 16)
    # The stages alone: `c` is what they take together beyond the full pass.
    assert splitting_overhead(0.25 * full, 0.75 * full + split - full, full) == split - full
    assert break_even(10.0, 30.0, 35.0) == pytest.approx(5 / 30)


def test_routing_pays_where_what_is_skipped_takes_longer_than_splitting() -> None:
    histogram = {1: 0.5, 4: 0.5}
    routed, full = predict_seconds(profit_of(FREE), histogram, **SHAPE)
    assert full == 4 * 16 * (10 + 2 + 8) + 16 * 5
    saved = full - routed
    for overhead, pays in ((saved - 1, True), (saved + 1, False)):
        profit = profit_of(dataclasses.replace(FREE, splits=overhead))
        assert routing_pays(profit, 2, 8, histogram, executor=SMALL) is pays
    # The same overhead per pass pays at a larger batch.
    profit = profit_of(dataclasses.replace(FREE, splits=saved + 1))
    assert routing_pays(profit, 4, 8, histogram, executor=SMALL)
    # And at the same batch where more stop.
    assert routing_pays(profit, 2, 8, {1: 0.9, 4: 0.1}, executor=SMALL)
    with pytest.raises(ValueError, match="shares sum to 1"):
        routing_pays(profit, 2, 8, {1: 0.9, 4: 0.3}, executor=SMALL)


def test_rates_are_found_again_in_synthetic_times() -> None:
    wanted = Rates(passes=2e-3, products=3e-6, attention=5e-6, splits=1e-4, split_tokens=2e-6)
    points = [
        expected_stages(COST, {1: share, 2: 0.2, 4: 0.8 - share}, batch=b, context=n)
        for b in (1, 3, 8)
        for n in (64, 256, 512)
        for share in (0.0, 0.3, 0.8)
    ]
    points += [expected_stages(COST, {4: 1.0}, batch=b, context=128) for b in (1, 2, 5)]
    times = [wanted.seconds(stages) for stages in points]
    found = fit_rates(points, times)
    np.testing.assert_allclose([found.seconds(p) for p in points], times, rtol=1e-6)
    assert found.products == pytest.approx(wanted.products, rel=1e-4)
    # A negative rate would be cheaper with every split: none is allowed.
    cheaper = [t - 1e-4 * p.split_tokens**0.5 for t, p in zip(times, points, strict=True)]
    assert min(dataclasses.asdict(fit_rates(points, cheaper)).values()) >= 0
    with pytest.raises(ValueError, match="a time above 0 for each"):
        fit_rates(points, [0.0] * len(points))


def test_coefficients_are_kept_in_a_file(tmp_path: Path) -> None:
    steps = (StepRates(batch=2, seconds=-0.5, seconds_per_layer=1.5, plain_seconds=3.0),)
    profit = dataclasses.replace(profit_of(dataclasses.replace(FREE, splits=0.1)), steps=steps)
    profit.save(tmp_path / "profit.json")
    assert Profit.load(tmp_path / "profit.json") == profit
    with pytest.raises(ValueError, match="nowhere.json. There is none"):
        Profit.load(tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text('{"cost": 3}')
    with pytest.raises(ValueError, match="cannot be read"):
        Profit.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("routed", "splits"), "0.1", "of another kind: routed.splits='0.1'"),
        (("full", "passes"), -1.0, "full.passes=-1.0"),
        (("cost", "head"), None, "cost.head=None"),
        (("num_layers",), 4.0, "num_layers=4.0"),
        (("num_layers",), True, "num_layers=True"),
        (("device",), 3, "device=3"),
        (("steps", 0, "seconds"), [1.0], "steps\\[0\\].seconds=\\[1.0\\]"),
        (("steps", 0), 3, "cannot be read"),
        (("routed",), [], "cannot be read"),
    ],
)
def test_coefficients_of_another_kind_are_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, match: str, unchecked_shapes: None
) -> None:
    steps = (StepRates(batch=2, seconds=-0.5, seconds_per_layer=1.5, plain_seconds=3.0),)
    profit = dataclasses.replace(profit_of(dataclasses.replace(FREE, splits=0.1)), steps=steps)
    profit.save(tmp_path / "profit.json")
    stored = part = json.loads((tmp_path / "profit.json").read_text())
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    (tmp_path / "profit.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=match):
        Profit.load(tmp_path / "profit.json")


def test_passes_that_do_not_pay_run_at_full_depth_and_say_so(tiny: Any) -> None:
    where = conditions(tiny.params)
    dear = Profit(
        cost=token_cost(tiny.decoder, tiny.params),
        num_layers=4,
        routed=dataclasses.replace(SLOW, splits=1.0),
        full=SLOW,
        device=where["device"],
        dtype=where["dtype"],
    )
    policy = gated(tiny)
    shape: dict[str, Any] = {"batch": 4, "width": 64, "executor": EXECUTOR}
    ask = lambda profit: check_worthwhile(  # noqa: E731
        tiny.decoder, tiny.params, policy, **shape, profit=profit
    )
    assert ask(None) is None
    assert "of the full pass' time, by measured rates" in str(ask(dear))
    assert ask(dataclasses.replace(dear, routed=dear.full)) is None
    with pytest.raises(ValueError, match="measured of this model on this device"):
        ask(dataclasses.replace(dear, device="tpu:v9"))
    documents = [np.arange(1, 33) % 64] * 2
    found = score_documents(
        tiny.decoder, tiny.params, documents, policy, rows=2, executor=EXECUTOR, profit=dear
    )
    assert [*found.fallbacks.values()] == [1]
    assert found.quality.histogram == {4: 64}
    assert [each.log_likelihood.size for each in found.documents] == [31, 31]
