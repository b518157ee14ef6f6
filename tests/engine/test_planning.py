# SPDX-License-Identifier: Apache-2.0
"""A depth per token or plain decoding: both are timed, at the depths that tokens exit at."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from helpers.engine import CAPACITY, SHAPES, SLOTS, STEPS, modes
from helpers.generation import lively_model

from utio_jax.engine import planning
from utio_jax.engine.planning import DepthPlan, plan_mode
from utio_jax.engine.slots import Served, Slots


def served(name: str, **changes: Any) -> Served:
    model, sizes = lively_model(), {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS}
    own = {"decoder": model.decoder, "params": model.params, "mode": modes()[name][0]}
    options: dict[str, Any] = {**own, "shapes": SHAPES, **sizes, **changes}
    return Served(**options)


def test_plain_and_early_exit_steps_are_timed_at_the_depths_of_a_histogram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depths, alive, run = list[Any](), weakref.WeakSet[Slots](), Slots.run

    def noted(slots: Slots, *, steps: int) -> Any:
        report = run(slots, steps=steps)
        columns, last = slots.state.columns, slots.state.lengths - 1
        if steps:
            depths.append(np.asarray(columns.decided)[range(SLOTS), last])
        assert slots.prefix is None
        if slots not in alive:  # Collecting at each of hundreds of steps takes minutes.
            alive.add(slots)
            gc.collect()
        assert len(alive) == 1, "a server has the engine's own cache and pool besides"
        return report

    monkeypatch.setattr(Slots, "run", noted)
    monkeypatch.setattr(planning, "_TRIES", 2)
    counts = list[tuple[int, int]]()
    plan_mode(
        served("propagate", prefix_cache=2**20),
        {1: 0.5, 4: 0.25, 2: 0.25},
        progress=lambda done, kinds: counts.append((done, kinds)),
    )
    assert counts == [(0, 2), (1, 2), (2, 2)]
    *adaptive, plain, _ = np.reshape(depths, (4, -1, SLOTS))
    for tried in adaptive:
        timed = tried[2:]
        assert len(timed) == planning._STEPS
        shares = [np.mean(timed == depth) for depth in (1, 2, 4)]
        np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=1 / timed.size)
        assert len({*map(tuple, timed)}) > 9, "rows exit independently of each other"
    assert (plain == 4).all()


def test_a_plan_compares_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(served: Served, shares: Any) -> float:
        return 3.0 if shares is None else 2.0

    monkeypatch.setattr(planning, "_seconds", seconds)
    plan = plan_mode(served("propagate"), {1: 0.5, 4: 0.5})
    assert plan == DepthPlan(seconds=2.0, plain_seconds=3.0)
    assert plan.speedup == 1.5


@pytest.mark.parametrize(
    ("name", "changes", "histogram", "why"),
    [
        ("plain", {}, {1: 1.0}, "thresholds at two depths or more.*Got Plain"),
        ("propagate", {}, {3: 1.0}, r"shares of tokens at these.*histogram of \[3\]"),
        ("propagate", {}, {1: 0.5, 4: 0.4}, "shares sum to 1"),
        ("propagate", {}, {1: 1.5, 4: -0.5}, "shares sum to 1"),
        ("propagate", {"capacity": 40}, {1: 1.0}, "51 new tokens.*Got a capacity of 40"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    name: str, changes: Any, histogram: dict[int, float], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        plan_mode(served(name, **changes), histogram)
