# SPDX-License-Identifier: Apache-2.0
"""Layers that run some tokens, as the recipe trains them and as it evaluates them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routed_layers
from helpers.models import live_params

from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.reference import dense_states

pytestmark = pytest.mark.check
DECODER = Transformer(dataclasses.replace(TINY, exits=(4,)))
run = jax.jit(routed_layers.run, static_argnums=0, static_argnames="count")
IDS = jax.random.randint(jax.random.key(2), (3, 17), 0, 64)


@pytest.fixture(scope="module")
def params() -> Any:
    router = jax.random.normal(jax.random.key(1), (2, 32))
    return {"model": live_params(DECODER), "router": router}


def test_the_best_of_a_batch_are_those_above_a_threshold(params: Any) -> None:
    """Packed in training, masked in evaluation: the same states, if the same tokens run."""
    packed, did = run(DECODER, params, IDS, count=20)
    # Between the last that runs and the first that does not: programs may round scores differently.
    thresholds = jnp.sort(did.scores.reshape(2, -1), axis=1)[:, -21:-19].mean(axis=1)
    masked, same = run(DECODER, params, IDS, thresholds=thresholds)
    np.testing.assert_allclose(packed, masked, atol=1e-4)
    np.testing.assert_array_equal(did.ran, same.ran)
    assert did.ran.sum(axis=(1, 2)).tolist() == [20, 20]
    none, _ = run(DECODER, params, IDS, thresholds=jnp.full(2, jnp.inf))
    assert np.abs(none - packed).max() > 0.1


@pytest.mark.slow
def test_scores_of_zero_and_all_tokens_are_the_model(params: Any) -> None:
    """The gate is 2 sigmoid(0) = 1 then."""
    plain = {**params, "router": jnp.zeros((2, 32))}
    result, _ = run(DECODER, plain, IDS, count=IDS.size)
    (expected,) = dense_states(DECODER, params["model"], IDS, jnp.full(3, 17), depths=(4,))
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_no_token_looks_ahead_in_evaluation(params: Any) -> None:
    thresholds = jnp.zeros(2)
    result, _ = run(DECODER, params, IDS, thresholds=thresholds)
    other, _ = run(DECODER, params, IDS.at[:, 9:].set(5), thresholds=thresholds)
    np.testing.assert_allclose(result[:, :9], other[:, :9], atol=1e-6)
    assert np.abs(result[:, 9:] - other[:, 9:]).max() > 0.1


@pytest.mark.slow
def test_what_it_saves(params: Any) -> None:
    """All tokens cost the model and its routers; none cost half of the layers, their K/V apart."""
    model = params["model"]
    assert 1 < routed_layers.flops_ratio(DECODER, {"model": model}, 1.0) < 1.02
    assert 0.5 < routed_layers.flops_ratio(DECODER, {"model": model}, 0.0) < 0.7
