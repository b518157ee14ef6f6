# SPDX-License-Identifier: Apache-2.0
"""Requests with depth policies of their own: each gets what it gets alone with that policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.engine import alone, assert_as_alone, engine_of, model64, modes, pool, run_schedule
from helpers.generation import lively_model
from helpers.marks import slow
from helpers.models import Model, gated

from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.policies import Entropy, Patience, SoftmaxGap, Thresholded, random_depths
from utio_jax.policies.depth import spread_thresholds
from utio_jax.policies.signals import SignalBase


@pytree
class Scaled(SignalBase):
    """A signal that holds a Python number."""

    scale: Any = 2.0
    name: str = static(default="scaled")

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        return self.scale * jnp.linalg.norm(boundary.x, axis=-1), memory


def chance(*shares: float, depths: tuple[int, ...]) -> Thresholded:
    return random_depths(jnp.asarray(shares), key=jax.random.key(1), depths=depths)


BUDGETS: dict[str, Any] = {
    "own": None,
    "full": "full",
    "shallow": chance(0.6, 0.4, depths=(1, 2)),
    "deep": chance(0.4, 0.6, depths=(2, 4)),
    "no way": chance(1.0, depths=(2,)),
    "all": chance(0.2, 0.5, 0.3, depths=(1, 2, 4)),
}
OWN = chance(0.5, 0.5, depths=(1, 4))


def serving(**options: Any) -> Adaptive:
    """Returns a mode that has the depths of all budgets."""
    depths = (1, 2, 4)
    thresholds = jnp.asarray(spread_thresholds(OWN, depths))
    policy = Thresholded(signal=OWN.signal, thresholds=thresholds, depths=depths)
    return Adaptive(policy=policy, **options)


def of_budget(name: str, **options: Any) -> Any:
    """Returns the mode in which one request gets alone what it gets in the engine."""
    policy = BUDGETS[name]
    return Plain() if policy == "full" else Adaptive(policy=policy or OWN, **options)


@pytest.mark.check
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["own", "full", "shallow"], {}),  # Each budget alone is a program.
        *slow(*(([*BUDGETS], {"kv": kv}) for kv in ("propagate", "drop"))),
    ],
)
def test_budgets_side_by_side_are_as_alone(
    names: list[str], options: Any, no_compiles: Any
) -> None:
    model, mode, asked = model64(), serving(**options), pool(9, seed=2)
    engine = engine_of(model, mode)
    engine.warmup()
    with no_compiles():
        policies = [BUDGETS[name] for name in names]
        result = run_schedule(engine, asked, np.random.default_rng(0), policies)
    seen = set[int]()
    for place, request in enumerate(asked):
        budget = of_budget(names[place % len(names)], **options)
        assert_as_alone(result[place], alone(model, budget, None, request))
        seen |= {*result[place].decided[1:].tolist()}
    assert seen == {1, 2, 4}
    full = [result[place] for place in range(len(asked)) if names[place % len(names)] == "full"]
    assert all(np.all(finished.decided == 4) for finished in full)


def test_rows_that_have_ended_ask_no_signal() -> None:
    """A request at full depth runs the heads of exits while another one runs that asks there."""
    small = lively_model()
    model = Model(Counting(small.decoder.config), small.params)
    policy = Thresholded(signal=Entropy(), thresholds=jnp.asarray([1.0, 2.0]), depths=(1, 2, 4))
    engine = engine_of(model, Adaptive(policy=policy), slots=2, steps=8, read_late=False)
    full = engine.submit([1, 2], max_new_tokens=9, eos_ids=(), policy="full")
    engine.submit([1, 2], max_new_tokens=2, eos_ids=())
    engine.advance()  # Reads prompts, and runs no step.
    read_counts()
    work = engine.drain()[full].work
    assert (work.steps, work.heads) == (8, 3 + 7)  # The other one ends with the first step.
    assert read_counts()["unembed"] == 2 * (3 + 7)


def test_more_boundaries_change_no_decision() -> None:
    policy = chance(0.5, 0.5, depths=(2, 4))
    half = float(policy.thresholds[0])
    wide = spread_thresholds(policy, (1, 2, 3, 4, 6))
    np.testing.assert_array_equal(wide, [-np.inf, half, -np.inf, np.inf])
    with pytest.raises(ValueError, match=r"among \(1, 2\). Got \(2, 4\). Take the depths of all"):
        spread_thresholds(policy, (1, 2))


def test_a_signal_that_remembers_keeps_the_boundaries_before() -> None:
    policy = Thresholded(signal=Patience(), thresholds=jnp.asarray([-1.0, -1.0]), depths=(2, 4, 6))
    longer = spread_thresholds(policy, (2, 4, 6, 8))
    np.testing.assert_array_equal(longer, [-1, -1, np.inf])
    with pytest.raises(ValueError, match=r"'patience' remembers.*Got depths=\(1, 2, 4, 6\)"):
        spread_thresholds(policy, (1, 2, 4, 6))
    with pytest.raises(ValueError, match="'patience' remembers"):
        spread_thresholds(policy, (2, 3, 4, 6))


@pytest.mark.usefixtures("unchecked_shapes")
def test_policies_that_the_mode_cannot_serve_are_refused() -> None:
    model = lively_model()

    def refused(message: str, mode: Any, policy: Any) -> None:
        engine = engine_of(model, mode)
        with pytest.raises(ValueError, match=message):
            engine.submit([1], max_new_tokens=1, policy=policy)
        assert engine.idle

    deep = BUDGETS["deep"]
    refused(r"Adaptive\(policy=...\).*Got mode 'plain'", Plain(), deep)
    refused("Got mode 'lossless'", modes()["lossless"][0], deep)
    refused(r"depths of policy 'random' among \(1, 4\). Got \(2, 4\)", Adaptive(policy=OWN), deep)
    refused("own signal, 'random'.*Got one of 'softmax_gap'", serving(),
            Thresholded(signal=SoftmaxGap(), thresholds=jnp.zeros(1), depths=(2, 4)))  # fmt: skip
    other = random_depths([0.5, 0.5], key=jax.random.key(2), depths=(2, 4))
    refused("or of other weights", serving(), other)
    refused("ends at all 4 layers.*depths=.1, 2", Adaptive(policy=BUDGETS["shallow"]), "full")
    refused('"full" or None, or a policy.*Got .half', serving(), "half")
    nan = dataclasses.replace(deep, thresholds=jnp.asarray([jnp.nan]))
    refused(r"thresholds that are numbers, -inf or inf. Got \[nan\]", serving(), nan)
    few = dataclasses.replace(BUDGETS["all"], thresholds=jnp.zeros(1))
    refused(
        r"each of depths=\(1, 2, 4\) but the last. Got thresholds of shape \(1,\)", serving(), few
    )


@pytest.mark.check
def test_full_depth_needs_no_policy_where_tokens_are_the_full_models() -> None:
    for name in ("plain", "lossless"):
        engine = engine_of(lively_model(), modes()[name][0])
        number = engine.submit([1, 2], max_new_tokens=3, eos_ids=(), policy="full")
        assert engine.drain()[number].token_ids.size == 3


def test_signals_are_the_same_by_contents() -> None:
    """A calibration that was loaded twice has other arrays of the same numbers."""
    model = lively_model()
    policy = gated(model)
    engine = engine_of(model, Adaptive(policy=policy))
    copied = dataclasses.replace(policy, signal=jax.tree.map(jnp.array, policy.signal))
    number = engine.submit([1], max_new_tokens=2, policy=copied)
    changed = dataclasses.replace(
        policy, signal=jax.tree.map(lambda leaf: leaf + 1e-3, policy.signal)
    )
    with pytest.raises(ValueError, match="or of other weights"):
        engine.submit([1], max_new_tokens=2, policy=changed)
    engine.cancel(number)


def test_a_number_in_a_signal_is_the_modes_own() -> None:
    """The engine holds its mode's numbers as arrays."""
    policy = Thresholded(signal=Scaled(), thresholds=jnp.asarray([1.0, 2.0]), depths=(1, 2, 4))
    engine = engine_of(lively_model(), Adaptive(policy=policy))
    engine.submit([1], max_new_tokens=2, policy=dataclasses.replace(policy, signal=Scaled()))
    changed = dataclasses.replace(policy, signal=Scaled(scale=3.0))
    with pytest.raises(ValueError, match="or of other weights"):
        engine.submit([1], max_new_tokens=2, policy=changed)
