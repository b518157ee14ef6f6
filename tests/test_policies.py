# SPDX-License-Identifier: Apache-2.0
"""Policies: what each decides, what it charges, and that thresholds move it one way."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_staircase import gated, surrogate

from utio_jax import (
    Boundary,
    GivenDepths,
    Learned,
    Random,
    Uniform,
    UtioSurrogate,
    full_depth,
    predictive_entropy,
    staircase,
)


def depths_of(
    model: Any, policy: Any, seed: int = 4, batch: int = 3, token: int = 17
) -> np.ndarray:
    ids = model.tokens(batch, token, seed=seed)
    lengths = jnp.full(batch, token, jnp.int32)
    found = cases.run_staircase(
        model.decoder,
        model.params,
        ids,
        lengths,
        policy,
        kv="propagate",
        executor=cases.SHAPES[1].executor,
    )
    return np.asarray(found.depths)


def test_random_deals_out_its_fractions_by_token_and_position_alone(tiny: Any) -> None:
    policy = Random(
        fractions=jnp.asarray([0.5, 0.25, 0.25]), key=jax.random.key(5), depths=(1, 2, 4)
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (64, 64)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), ids.shape)
    draws = np.asarray(policy.start(ids, positions))
    shares = [(draws < 0.5).mean(), ((draws >= 0.5) & (draws < 0.75)).mean()]
    np.testing.assert_allclose(shares, [0.5, 0.25], atol=0.03)
    np.testing.assert_array_equal(draws[:1], policy.start(ids[:1], positions[:1]))
    other = dataclasses.replace(policy, key=jax.random.key(6))
    assert (np.asarray(other.start(ids, positions)) != draws).mean() > 0.9
    mine = policy_draws(policy, tiny)
    wanted = np.select([mine < 0.5, mine < 0.75], [1, 2], 4)
    np.testing.assert_array_equal(depths_of(tiny, policy), wanted)
    assert set(wanted.ravel()) == {1, 2, 4}


def policy_draws(policy: Random, model: Any) -> np.ndarray:
    ids = model.tokens(3, 17, seed=4)
    return np.asarray(
        policy.start(ids, jnp.broadcast_to(jnp.arange(17, dtype=jnp.int32), ids.shape))
    )


@pytest.mark.parametrize("make", [gated, surrogate])
def test_higher_thresholds_never_run_a_token_deeper_at_the_first_boundary(
    tiny: Any, make: Any
) -> None:
    policy = make(tiny)
    stays = []
    for shift in (-2.0, -0.5, 0.0, 0.5, 2.0):
        moved = dataclasses.replace(policy, thresholds=policy.thresholds + shift)
        stays.append(depths_of(tiny, moved) == policy.depths[0])
    for shallower, deeper in zip(stays[1:], stays, strict=False):
        assert (shallower | ~deeper).all()
    assert stays[-1].sum() > stays[0].sum()


def test_infinite_thresholds_and_nan_scores(tiny: Any) -> None:
    policy = gated(tiny)
    everyone = dataclasses.replace(policy, thresholds=jnp.full(2, jnp.inf))
    nobody = dataclasses.replace(policy, thresholds=jnp.full(2, -jnp.inf))
    assert (depths_of(tiny, everyone) == 1).all()
    assert (depths_of(tiny, nobody) == 4).all()
    broken = dataclasses.replace(policy.gates[0], output=jnp.full(8, jnp.nan))
    nan = dataclasses.replace(everyone, gates=(broken, broken))
    assert (depths_of(tiny, nan) == 4).all(), "a score that is not a number goes deepest"


def constant(model: Any) -> tuple[Learned, float]:
    """Gates that say a quarter of every token."""
    policy = gated(model)
    gates = tuple(
        dataclasses.replace(gate, output=jnp.zeros(8), output_bias=jnp.float32(0.25))
        for gate in policy.gates
    )
    return dataclasses.replace(policy, gates=gates), 0.25


def weightless(model: Any) -> tuple[UtioSurrogate, float]:
    """A surrogate that is 0 of every token."""
    return dataclasses.replace(surrogate(model), weights=(0.0, 0.0)), 0.0


@pytest.mark.parametrize("make", [constant, weightless])
def test_a_token_stops_where_its_score_is_at_the_threshold(tiny: Any, make: Any) -> None:
    policy, score = make(tiny)
    below = score - 1e-6
    for thresholds, depth in (((score, score), 1), ((below, score), 2), ((below, below), 4)):
        moved = dataclasses.replace(policy, thresholds=jnp.asarray(thresholds, jnp.float32))
        assert (depths_of(tiny, moved) == depth).all()


def test_a_surrogate_that_is_not_a_number_goes_deepest(tiny: Any) -> None:
    everyone = dataclasses.replace(surrogate(tiny), thresholds=jnp.full(2, jnp.inf))
    assert (depths_of(tiny, everyone) == 1).all()
    # The exit's logits are not numbers; the states are.
    norm = {"scale": jnp.full_like(tiny.params["norm"]["scale"], jnp.nan)}
    broken = dataclasses.replace(tiny, params=tiny.params | {"norm": norm})
    assert (depths_of(broken, everyone) == 4).all()


def test_who_has_stopped_stays_out_though_a_later_boundary_would_let_everybody_on(
    tiny: Any,
) -> None:
    policy, shape = gated(tiny), cases.SHAPES[1]
    eager = dataclasses.replace(policy, thresholds=policy.thresholds.at[1].set(-jnp.inf))
    ids, lengths = tiny.tokens(3, 17, seed=4), np.asarray([17, 9, 4], np.int32)
    real = np.arange(17) < lengths[:, None]
    found, before = (
        cases.run_staircase(
            tiny.decoder,
            tiny.params,
            ids,
            lengths,
            policy,
            kv="propagate",
            executor=shape.executor,
        )
        for policy in (eager, policy)
    )
    stopped = np.asarray(before.depths) == 1
    assert stopped.any()
    wanted = np.where(stopped, 1, np.where(real, 4, 0))
    np.testing.assert_array_equal(found.depths, wanted)
    # Neither those who stopped nor padding ran any further, and their states are as they were.
    slots = -(-(wanted == 4).sum() // shape.executor.min_bucket) * shape.executor.min_bucket
    np.testing.assert_array_equal(found.work.queries[1:], [slots, 2 * slots])
    np.testing.assert_allclose(found.x[stopped], before.x[stopped], atol=1e-5)


def test_a_boundary_says_where_it_is(tiny: Any) -> None:
    seen: list[tuple[int, int, tuple[int, ...]]] = []

    class Watching(GivenDepths):
        def go_deeper(
            self, index: int, boundary: Boundary, memory: Any
        ) -> tuple[jax.Array, jax.Array]:
            seen.append((index, boundary.depth, boundary.x.shape))
            return super().go_deeper(index, boundary, memory)

    policy = Watching(depth_of_token=jnp.full((2, 5), 4), depths=(1, 2, 4))
    jax.eval_shape(  # Traced, not run.
        lambda ids: staircase(tiny.decoder, tiny.params, ids, jnp.full(2, 5), policy).x,
        tiny.tokens(2, 5),
    )
    shape = (2, 5, tiny.decoder.config.embed_dim)
    assert seen == [(0, 1, shape), (1, 2, shape)]


def test_gates_see_the_direction_of_a_state_and_not_its_length(tiny: Any) -> None:
    gate = gated(tiny).gates[0]
    x = jax.random.normal(jax.random.key(3), (5, tiny.decoder.config.embed_dim))
    np.testing.assert_allclose(gate(100 * x), gate(x), rtol=1e-4)
    assert np.ptp(np.asarray(gate(x))) > 0.1


def test_the_surrogate_is_entropy_and_outlier_at_the_floor(tiny: Any) -> None:
    policy = surrogate(tiny)
    ids, lengths = tiny.tokens(2, 9), jnp.full(2, 9, jnp.int32)
    run = lambda policy: cases.run_staircase(  # noqa: E731
        tiny.decoder,
        tiny.params,
        ids,
        lengths,
        policy,
        kv="propagate",
        executor=cases.SHAPES[1].executor,
    )
    x = run(Uniform(depth=1)).x
    mean = np.asarray(policy.mean_state)
    cosine = np.asarray(x) @ mean / np.linalg.norm(x, axis=-1) / np.linalg.norm(mean)
    entropy = np.asarray(predictive_entropy(tiny.decoder.unembed(tiny.params, x)))
    wanted = 2 / 3 * entropy + 1 / 3 * (1 - cosine)
    states = x.reshape(-1, x.shape[-1])
    found = policy.score(tiny.decoder.unembed(tiny.params, states), states).reshape(2, 9)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    decided = np.asarray(run(policy).depths)
    low, high = np.asarray(policy.thresholds)
    np.testing.assert_array_equal(decided, np.select([wanted <= low, wanted <= high], [1, 2], 4))


def with_wide_gate(policy: Learned) -> Learned:
    """Returns the policy with a second gate three times as wide, of the same values."""
    first, second = policy.gates
    wide = dataclasses.replace(
        second,
        hidden=jnp.tile(second.hidden, (1, 3)),
        hidden_bias=jnp.tile(second.hidden_bias, 3),
        output=jnp.tile(second.output, 3) / 3,
    )
    return dataclasses.replace(policy, gates=(first, wide))


def test_gates_are_charged(tiny: Any) -> None:
    config = tiny.decoder.config
    policy = with_wide_gate(gated(tiny))
    for index, hidden in enumerate((8, 24)):
        charged = policy.flops(index, tiny.decoder, tiny.params)
        assert charged == 2 * config.embed_dim * hidden + 2 * hidden
    # The state's product with the mean, and with itself.
    assert surrogate(tiny).flops(0, tiny.decoder, tiny.params) == 2 * 2 * config.embed_dim
    assert surrogate(tiny).flops(1, tiny.decoder, tiny.params) == 0
    # Its heads are counted where they run: see tests/test_readout.py.
    assert [surrogate(tiny).reads_logits(index) for index in (0, 1)] == [True, False]
    assert not gated(tiny).reads_logits(0)
    assert full_depth(tiny.decoder).depths == (config.num_layers,)
    assert Uniform(depth=2).flops(0, tiny.decoder, tiny.params) == 0


def test_policies_are_pytrees_whose_leaves_are_what_calibration_changes(tiny: Any) -> None:
    for policy in (gated(tiny), surrogate(tiny), Uniform(depth=2)):
        leaves, treedef = jax.tree.flatten(policy)
        again = jax.tree.unflatten(treedef, leaves)
        assert again.depths == policy.depths
        assert again.name == policy.name
        assert again.causal
