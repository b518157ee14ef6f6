# SPDX-License-Identifier: Apache-2.0
"""The signals against float64 formulas written out token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from utio_jax.policies import predictive_entropy
from utio_jax.utio import embedding_outlier, surrogate_importance, surrogate_table

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def slow_entropy(logits) -> float:
    """Returns -sum p log p of one token, in float64, term by term."""
    logits = np.asarray(logits, np.float64)
    weights = [math.exp(x - logits.max()) for x in logits]
    return -sum(
        weight / sum(weights) * math.log(weight / sum(weights)) for weight in weights if weight > 0
    )


def slow_outlier(state, mean) -> float:
    """Returns one minus the cosine of one state and the mean."""
    state, mean = np.asarray(state, np.float64), np.asarray(mean, np.float64)
    norms = math.sqrt(sum(state**2)) * math.sqrt(sum(mean**2))
    return 1.0 if norms == 0 else 1.0 - float(sum(state * mean)) / norms


def example(*lead: int, vocab: int = 11, dim: int = 6, heads: int = 3):
    """Returns random logits, heat with a head axis, states and a mean."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(*lead, vocab)), jnp.float32),
        jnp.asarray(rng.uniform(size=(*lead[:-1], heads, lead[-1])), jnp.float32),
        jnp.asarray(rng.normal(size=(*lead, dim)), jnp.float32),
        jnp.asarray(rng.normal(size=dim), jnp.float32),
    )


@given(
    hnp.arrays(
        np.float32, st.integers(1, 9), elements=st.floats(-50, 50, width=32) | st.just(-np.inf)
    ).filter(lambda logits: np.isfinite(logits).any())
)
def test_entropy_is_minus_p_log_p_also_where_logits_are_minus_infinity(logits):
    entropy = predictive_entropy(jnp.asarray(logits))
    np.testing.assert_allclose(entropy, slow_entropy(logits), rtol=1e-5, atol=1e-5)
    assert 0 <= entropy <= math.log(logits.size) + 1e-6


def test_entropy_is_exact_at_both_ends():
    one_hot = jnp.asarray([-jnp.inf, 3.0, -jnp.inf])
    assert predictive_entropy(one_hot) == 0
    assert predictive_entropy(jnp.asarray([0.0, 1e4])) == 0
    np.testing.assert_allclose(predictive_entropy(jnp.full(1000, 7.0)), math.log(1000), rtol=1e-6)
    # Four of five possible: log 4, not NaN from 0 * -inf.
    np.testing.assert_allclose(
        predictive_entropy(jnp.asarray([1.0, 1.0, -jnp.inf, 1.0, 1.0])), math.log(4), rtol=1e-6
    )
    # Of nothing finite it is NaN, which buckets send deepest.
    assert jnp.isnan(predictive_entropy(jnp.full(3, -jnp.inf)))
    assert jnp.isfinite(jax.grad(predictive_entropy)(jnp.asarray([0.0, 1.0, -jnp.inf]))).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_inputs_are_accumulated_in_float32(dtype):
    logits, heat, states, mean = (leaf.astype(dtype) for leaf in example(2, 4, vocab=300, dim=300))
    score = surrogate_importance(logits, heat, states, batch_mean=mean)
    assert score.dtype == jnp.float32
    wide = [leaf.astype(jnp.float32) for leaf in (logits, heat, states)]
    expected = surrogate_importance(*wide, batch_mean=mean.astype(jnp.float32))
    np.testing.assert_allclose(score, expected, rtol=1e-6)


def test_outlier_of_what_is_no_number_is_none():
    states = jnp.ones((3, 4)).at[1, 2].set(jnp.nan)
    np.testing.assert_array_equal(
        np.isnan(embedding_outlier(states, batch_mean=jnp.ones(4))), [False, True, False]
    )
    assert np.isnan(embedding_outlier(jnp.ones((3, 4)), batch_mean=jnp.full(4, jnp.nan))).all()
    assert np.isnan(embedding_outlier(states)).all(), "the mean of all is no number, either"


def test_outlier_without_a_mean_compares_with_all_tokens_of_all_rows():
    _, _, states, _ = example(2, 4)
    mean = np.asarray(states, np.float64).reshape(-1, 6).mean(axis=0)
    expected = [[slow_outlier(state, mean) for state in row] for row in states]
    np.testing.assert_allclose(embedding_outlier(states), expected, rtol=1e-4, atol=1e-5)


def test_outlier_knows_same_opposite_orthogonal_and_directionless():
    mean = jnp.asarray([2.0, 0.0])
    states = jnp.asarray([[3.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    np.testing.assert_allclose(embedding_outlier(states, batch_mean=mean), [0, 2, 1, 1], atol=1e-6)
    np.testing.assert_array_equal(embedding_outlier(states, batch_mean=jnp.zeros(2)), np.ones(4))
    slopes = jax.grad(lambda x: embedding_outlier(x, batch_mean=mean).sum())(states)
    np.testing.assert_allclose(slopes, [[0, 0], [0, 0], [-0.2, 0], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("lead", [(5,), (2, 5), (2, 3, 5)])
@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (1.0, 0.0, 0.0), (0.0, 3.0, 1.0)])
def test_surrogate_is_the_weighted_sum_of_its_signals(lead, weights):
    logits, heat, states, mean = example(*lead)
    score = surrogate_importance(logits, heat, states, batch_mean=mean, weights=weights)
    assert score.shape == lead
    for index in itertools.product(*map(range, lead)):
        by_head = np.asarray(heat, np.float64)[(*index[:-1], slice(None), index[-1])]
        signals = slow_entropy(logits[index]), by_head.mean(), slow_outlier(states[index], mean)
        expected = sum(weight * signal for weight, signal in zip(weights, signals, strict=True))
        np.testing.assert_allclose(score[index], expected, rtol=1e-5, atol=1e-5)


def test_without_heat_the_other_weights_keep_their_ratio_and_the_sum():
    logits, _, states, mean = example(2, 5)
    score = surrogate_importance(logits, None, states, batch_mean=mean, weights=(0.6, 0.2, 0.2))
    entropy = predictive_entropy(logits)
    outlier = embedding_outlier(states, batch_mean=mean)
    np.testing.assert_allclose(score, 0.75 * entropy + 0.25 * outlier, rtol=1e-6)


LOGITS, HEAT, STATES, MEAN = example(2, 5)
NO_MODEL: Any = None
OF_THREE: Any = (0.5, 0.25, 0.25)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: surrogate_importance(LOGITS, HEAT, STATES[:, :4]),
            r"logits and embeddings of the same tokens.*\(2, 5\).*\(2, 4\)",
        ),
        (
            lambda: surrogate_importance(LOGITS, None, STATES, weights=(0.0, 1.0, 0.0)),
            "Wanted attention heat, the only signal with a weight.*Pass heat",
        ),
        *(
            (lambda weights=weights: surrogate_importance(LOGITS, HEAT, STATES, weights=weights), m)
            for m in ["Wanted three finite weights.*Got weights="]
            for nan, inf in [(float("nan"), float("inf"))]
            for weights in [(nan, 1, 1), (1, 1, nan), (1, inf, 1), (0, 0, 0), (1, -1, 1), (1, 1)]
        ),
        (
            lambda: surrogate_table(NO_MODEL, None, MEAN, weights=OF_THREE),
            "Wanted two weights, of entropy and outlier",
        ),
        (lambda: predictive_entropy(jnp.arange(3)), r"logits of shape \[..., vocab\].*int32"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
