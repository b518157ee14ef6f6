# SPDX-License-Identifier: Apache-2.0
"""Timing takes turns, and rows of a benchmark hold together. No figure of speed is asserted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import gated
from helpers.texts import EXECUTOR, batches

from utio_jax.bench.methods import Method, controls_of
from utio_jax.bench.scoring import measure_policies
from utio_jax.bench.timing import Timing, count_compiles, time_programs
from utio_jax.evaluation import Ledger
from utio_jax.evaluation.ledger import uniform_hull
from utio_jax.policies import random_depths


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
    with count_compiles() as compiles:
        jax.jit(lambda x: x * 5 + 2)(1.0)
    assert compiles.count >= 1


def test_speedups_are_paired_ratios() -> None:
    a, b = (
        Timing(seconds=np.asarray(seconds), compiles=0)
        for seconds in ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    )
    assert a.speedup_over(b) == 2
    assert b.median == 4


@pytest.mark.slow
def test_a_benchmark_has_every_control_and_every_row_is_whole(tiny: Any) -> None:
    policy = gated(tiny)
    dealt = random_depths(jnp.asarray([0.4, 0.3, 0.3]), key=jax.random.key(0), depths=(1, 2, 4))
    methods = [
        *controls_of(tiny.decoder),
        Method(label="learned@0.7", policy=policy, budget=0.7),
        Method(label="random@0.7", policy=dealt, budget=0.7),
    ]
    steps = []
    read = batches(tiny)[:2]
    result = measure_policies(
        tiny.decoder,
        tiny.params,
        read,
        methods,
        executor=EXECUTOR,
        rounds=2,
        progress=lambda: steps.append(1),
    )
    # Five methods on two batches; these and the plain program in a warm-up and two rounds.
    assert len(steps) == 5 * 2 + (5 + 1) * (2 + 1)
    assert [*result] == ["full", "uniform:1", "uniform:2", "learned@0.7", "random@0.7"]
    for timing in result.values():
        row = timing.ledger
        missing = {key for key, value in row.to_dict().items() if value is None}
        assert missing <= {"budget", "kv_bytes_ratio"}, missing
        assert row.compiles == 0
        assert row.speedup is not None
        assert row.speedup_ideal is not None
        assert row.efficiency == pytest.approx(row.speedup / row.speedup_ideal)


def test_the_hull_is_the_lower_envelope_of_the_exits() -> None:
    points = [(0.3, 30.0), (0.5, 6.0), (0.6, 5.9), (0.8, 1.0)]
    rows = [Ledger(policy="full", flops_ratio=1.0, nll_increase_pct=0.0)] + [
        Ledger(policy="uniform", flops_ratio=x, nll_increase_pct=y) for x, y in points
    ]
    hull = uniform_hull(rows)
    assert hull(0.2) is None
    assert hull(0.3) == 30.0
    assert hull(0.4) == pytest.approx(18.0)
    assert hull(0.6) == pytest.approx(6 - 5 / 3), "an exit above the hull does not bend it"
    assert hull(0.9) == pytest.approx(0.5)
    assert hull(1.0) == 0.0
