# SPDX-License-Identifier: Apache-2.0
"""A looped model's pass: tokens that stopped show the K/V of their last turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import cases
from helpers.looped import Oracle, looped_model, write_looped
from helpers.models import live_params

from utio_jax import score
from utio_jax.models import load
from utio_jax.policies import given_depths, own_gate
from utio_jax.staircase import CapacityPrefix
from utio_jax.staircase.frozen import frozen_kv
from utio_jax.staircase.score import full_work, run_score

DEPTHS = (4, 8, 12, 16)


def test_the_reference_is_numpys(tmp_path: Path) -> None:
    """Of rows of 20, 11 and 1 tokens, in float64; a token's state, whatever stopped before it."""
    folder = write_looped(tmp_path, "ouro")
    model, oracle, rng = load(folder), Oracle(folder), np.random.default_rng(0)
    ids, lengths = rng.integers(0, 48, (3, 20)).astype(np.int32), np.asarray([20, 11, 1])
    for _ in range(4):
        stops = rng.integers(1, 5, (3, 20))
        depths = jnp.asarray(3 * stops, jnp.int32)
        states = cases.run_oracle(model.decoder, model.params, ids, lengths, depths, kv="propagate")
        for row, size in enumerate(lengths):
            expected = oracle.states(ids[row, :size], stops[row, :size])[-1]
            np.testing.assert_allclose(states[row, :size], expected, atol=1e-4)


def test_the_own_gate_stops_tokens_at_the_turn_that_numpy_finds(tmp_path: Path) -> None:
    folder = write_looped(tmp_path, "ouro")
    model, oracle = load(folder), Oracle(folder)
    ids = np.random.default_rng(2).integers(0, 48, (1, 24)).astype(np.int32)
    policy = own_gate(model.decoder, model.params, threshold=0.7)
    scores = run_score(model.decoder, model.params, jnp.asarray(ids), jnp.asarray([24]), policy)
    decided = np.asarray(scores.depths[0]) // 3
    # Gates see what earlier tokens show: tokens are decided in order.
    stops, last = np.full(24, 4), 4
    for token in range(24):
        states = [x[token] for x in oracle.states(ids[0], stops)]
        going = np.cumprod([1 - oracle.hazards(x) for x in states[:-1]])
        stops[token] = min((t for t, p in enumerate(going, 1) if 1 - p >= 0.7), default=last)
    np.testing.assert_array_equal(decided, stops)
    assert len({*decided}) > 2


def test_nothing_is_projected_for_tokens_that_stopped() -> None:
    """Live slots alone make keys and values, turn by turn."""
    model, width = looped_model(4), 16
    ids, lengths = jnp.zeros((1, width), jnp.int32), jnp.asarray([width])
    stops = jnp.asarray([[4] * 8 + [8] * 4 + [16] * 4])
    executor = cases.EXECUTOR
    policy = given_depths(stops, depths=DEPTHS)
    work = run_score(model.decoder, model.params, ids, lengths, policy, executor=executor).work
    np.testing.assert_array_equal(work.keys_values[:4], 4 * np.asarray([16, 8, 4, 4]))
    assert not frozen_kv("propagate", model.decoder).projects
    lengths, deepest = jnp.asarray([9]), given_depths(jnp.full((1, width), 16), depths=DEPTHS)
    work = run_score(model.decoder, model.params, ids, lengths, deepest, executor=executor).work
    full = full_work(model.decoder, lengths, width=width, executor=executor)
    for name in ("queries", "keys_values", "key_slots", "heads"):
        assert np.sum(getattr(work, name)) == np.sum(getattr(full, name)), name


def test_gradients_pass_through_turns() -> None:
    """By static prefixes, where tokens stopped: those of the reference."""
    model = looped_model(2, 2)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
    lengths, depths = jnp.asarray([12, 7]), (2, 4)
    executor = CapacityPrefix(capacities=(12, 12), min_bucket=4)
    stops = jnp.broadcast_to(jnp.where(jnp.arange(12) % 3, 4, 2), ids.shape)
    predicts = np.arange(11) < np.asarray(lengths)[:, None] - 1

    def score_of(params: Any) -> jax.Array:
        policy = given_depths(stops, depths=depths)
        return jnp.sum(
            score(model.decoder, params, ids, lengths, policy, executor=executor).log_likelihood
        )

    def reference(params: Any) -> jax.Array:
        x = cases.run_oracle(model.decoder, params, ids, lengths, stops, kv="propagate")
        logps = jax.nn.log_softmax(model.decoder.unembed(params, x[:, :-1]))
        return jnp.sum(jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0], where=predicts)

    params = live_params(model.decoder, seed=3)
    gradients = (jax.jit(jax.grad(function))(params) for function in (score_of, reference))
    for ours, theirs in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
