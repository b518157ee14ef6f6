# SPDX-License-Identifier: Apache-2.0
"""Online thresholds: against plain loops, on a stream that drifts, and on a real model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.models import Model, assert_equal, live_params
from helpers.policies import DEPTHS, SIGNALS, scores_of

from utio_jax import Thresholded
from utio_jax.calibration.thresholds import leave_at
from utio_jax.contrib.online import (
    OnlineThresholds,
    adapt,
    observe,
    observed,
    start_online,
    thresholds,
)
from utio_jax.core.documents import Batch
from utio_jax.models.transformer import Transformer
from utio_jax.policies import SoftmaxGap
from utio_jax.staircase import full_depth
from utio_jax.staircase.score import compare_states, run_score


def draw(
    seed: int, *, rows: int = 4, width: int = 50, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, agreement and which tokens count. P(agree) falls with the score; shift is drift."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(3, rows, width)).astype(np.float32)
    hard = scores + shift + np.asarray([1, 0, -1])[:, None, None]
    agrees = rng.random(scores.shape) < 1 / (1 + np.exp(2 * hard - 4))
    return scores, agrees, rng.random((rows, width)) < 0.9


def wrong_stops(scores: np.ndarray, agrees: np.ndarray, where: np.ndarray, cuts: np.ndarray) -> int:
    """Returns how many tokens stop at an exit that disagrees with full depth."""
    agreed = np.concatenate([agrees, np.ones_like(agrees[:1])])
    left = leave_at(scores, cuts)
    return int((where & ~np.take_along_axis(agreed, left[None], axis=0)[0]).sum())


def slow_thresholds(state: OnlineThresholds, wrong: list[float], seen: float) -> np.ndarray:
    if seen < float(state.memory) / 2:
        return np.asarray(state.start)
    meets = [(count + 1) / (seen + 1) <= 1 - float(state.agreement) for count in wrong[1:]]
    return np.asarray(state.candidates)[[*meets, False].index(False)]


def started(agreement: float = 0.9, memory: int = 1000, **kwargs: Any) -> OnlineThresholds:
    scores = draw(0)[0].reshape(3, -1)
    start = np.asarray([-0.5, 0.0, 0.5])
    return start_online(scores, start, agreement=agreement, memory=memory, **kwargs)


def test_the_state_is_that_of_plain_loops() -> None:
    state = started()
    candidates = np.asarray(state.candidates)
    wrong, seen = [0.0] * len(candidates), 0.0
    differing = set()
    for step in range(8):
        scores, agrees, where = draw(step + 1, shift=0.3 * step)
        scores[0, 0, :4] = [np.nan, np.inf, -np.inf, candidates[70, 0]]
        where[0, :4] = True
        kept = np.exp(-where.sum() / 1000)
        for row, cuts in enumerate(candidates):
            wrong[row] = kept * wrong[row] + wrong_stops(scores, agrees, where, cuts)
        seen = kept * seen + where.sum()
        state = observe(state, scores, agrees, where)
        np.testing.assert_allclose(state.wrong, wrong, rtol=1e-5)
        np.testing.assert_allclose(state.seen, seen, rtol=1e-5)
        expected = slow_thresholds(state, wrong, seen)
        np.testing.assert_array_equal(thresholds(state), expected)
        differing.add(tuple(expected.tolist()))
    assert len(differing) > 4  # Else the comparison shows little.


def test_candidates_lead_from_none_over_the_policys_own_to_all() -> None:
    scores = draw(0)[0].reshape(3, -1)
    start = np.asarray([-0.5, 0.0, 0.5], np.float32)
    result = np.asarray(started(candidates=9).candidates)
    assert result.shape == (9, 3)
    assert (result[0] == -np.inf).all()
    np.testing.assert_array_equal(result[4], start)
    np.testing.assert_array_equal(result[-1], scores.max(axis=1))
    assert (np.diff(result[1:], axis=0) >= 0).all()
    shares = (scores[None] <= result[:, :, None]).mean(axis=2)
    own = shares[4]
    np.testing.assert_allclose(shares[2], own / 2, atol=0.01)
    np.testing.assert_allclose(shares[6], (own + 1) / 2, atol=0.01)


def test_forgetting_is_per_token_not_per_batch() -> None:
    """Observed in one batch or in ten: tokens observed before weigh the same after it."""
    scores, agrees, where = draw(1)
    before = observe(started(), scores, agrees, where)
    more = draw(2, rows=1, width=400)
    at_once = observe(before, *more)
    in_parts = before
    for part in range(10):
        in_parts = observe(in_parts, *(leaf[..., 40 * part : 40 * part + 40] for leaf in more))
    new = float(more[2].sum())
    old = float(before.seen) * np.exp(-new / 1000)
    assert float(at_once.seen) == pytest.approx(old + new, rel=1e-5)
    assert old < float(in_parts.seen) < old + new
    nothing = observe(before, scores, agrees, np.zeros_like(where))
    assert_equal(jax.tree.leaves(nothing), jax.tree.leaves(before))


def test_a_choice_ends_before_the_first_candidate_that_misses() -> None:
    """Even if one beyond it happens to meet the target."""
    state = dataclasses.replace(
        started(candidates=5), wrong=jnp.asarray([0.0, 1.0, 500.0, 2.0, 2.0]), seen=jnp.asarray(1e3)
    )
    np.testing.assert_array_equal(thresholds(state), state.candidates[1])


@pytest.mark.slow
def test_the_thresholds_follow_a_drifting_text_without_compiling(no_compiles: Any) -> None:
    """Text gets harder at step 20, easier at step 40: agreement is back within five batches."""
    state = start_online(
        draw(0, rows=40)[0].reshape(3, -1), np.asarray([-0.5, 0, 0.5]), agreement=0.9, memory=5000
    )
    now, agreement, stopped = np.asarray(thresholds(state)), [], []
    thresholds(observe(state, *draw(0, rows=40)))
    with no_compiles():
        for step in range(60):
            scores, agrees, where = draw(step, rows=40, shift=1.5 if 20 <= step < 40 else 0.0)
            # What the tokens of this batch meet, before it is observed.
            agreement.append(1 - wrong_stops(scores, agrees, where, now) / where.sum())
            stopped.append((leave_at(scores, now) < len(now))[where].mean())
            state = observe(state, scores, agrees, where)
            now = np.asarray(thresholds(state))
    assert agreement[20] < 0.75  # The drift hurts, or the rest would show nothing.
    for settled in (slice(5, 20), slice(28, 40), slice(50, 60)):
        assert 0.89 < np.mean(agreement[settled]) < 0.92
    assert np.mean(stopped[50:]) > np.mean(stopped[28:40]) + 0.1  # Caution ends when it may.


LENGTHS = np.asarray([17, 9, 1], np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax_gap", "learned"])
def test_what_is_observed_is_a_full_pass_and_its_exits(tiny: Any, name: str) -> None:
    ids, lengths, signal = tiny.tokens(3, 17, seed=4), jnp.asarray(LENGTHS), SIGNALS[name](tiny)
    result, scores, agrees = observed(
        tiny.decoder, tiny.params, ids, lengths, signal, depths=DEPTHS
    )
    full = run_score(tiny.decoder, tiny.params, ids, lengths, policy=full_depth(tiny.decoder))
    np.testing.assert_allclose(result.log_likelihood, full.log_likelihood, atol=1e-5)
    np.testing.assert_array_equal(result.predicted, full.predicted)
    np.testing.assert_array_equal(result.depths, full.depths)
    real = np.arange(17) < LENGTHS[:, None]
    np.testing.assert_allclose(result.x[real], full.x[real], atol=1e-4)
    expected = scores_of(tiny, signal, ids)
    np.testing.assert_allclose(np.asarray(scores)[:, real], expected[:, real], atol=1e-5)
    states = cases.run_dense(tiny.decoder, tiny.params, ids, lengths, depths=DEPTHS)
    for index, x in enumerate(states[:-1]):
        comparison = compare_states(tiny.decoder, tiny.params, ids, lengths, x, states[-1])
        predicted = np.asarray(result.predicted)
        np.testing.assert_array_equal(
            np.asarray(agrees[index])[predicted], np.asarray(comparison.agree)[predicted]
        )
    assert 0 < np.asarray(agrees).mean() < 1
    heads = 2 if name == "softmax_gap" else 1
    np.testing.assert_array_equal(result.work.heads, [51 * heads, 51 * heads, 51])
    np.testing.assert_array_equal(result.work.queries, [51, 51, 102])
    np.testing.assert_array_equal(result.work.key_slots, [51 * 17, 51 * 17, 102 * 17])
    np.testing.assert_array_equal(result.work.decisions, [51, 51, 0])


EXECUTOR = cases.SHAPES[1].executor


def adapted(model: Any, policy: Any, batches: Any, **kwargs: Any) -> list[Any]:
    options = {"agreement": 0.8, "every": 3, "memory": 500, "executor": EXECUTOR, **kwargs}
    return list(adapt(model.decoder, model.params, batches, policy, **options))


@pytest.mark.slow
@pytest.mark.parametrize("depths", [DEPTHS, (1, 2)])
def test_adapting_end_to_end(tiny: Any, no_compiles: Any, depths: tuple[int, ...]) -> None:
    """Every third batch is full depth, the others are `score` at the thresholds of the state."""
    own = jnp.full(len(depths) - 1, 0.9)
    policy = Thresholded(signal=SoftmaxGap(), thresholds=own, depths=depths)
    rows = {"lengths": np.full(8, 33, np.int32), "window": np.arange(8)}
    texts = [np.asarray(tiny.tokens(8, 33, seed=seed)) for seed in range(9)]
    batches = [Batch(token_ids=text, **rows) for text in texts]
    adapted(tiny, policy, batches[:2])
    with no_compiles():
        output = adapted(tiny, policy, batches)
    assert all(a is b for (a, _, _), b in zip(output, batches, strict=True))
    start = np.append(own, np.inf)[:2].astype(np.float32)  # Full depth is added as an exit.
    state, now, wrong, total = None, start, 0, 0
    for number, (batch, result, used) in enumerate(output):
        assert used.depths == DEPTHS
        ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        full, scores, agrees = observed(
            tiny.decoder, tiny.params, ids, lengths, SoftmaxGap(), depths=DEPTHS
        )
        if number % 3 == 0:
            assert np.isneginf(used.thresholds).all()
            np.testing.assert_array_equal(result.log_likelihood, full.log_likelihood)
            if state is None:
                first = np.asarray(scores)[:, np.asarray(full.predicted)]
                state = start_online(first, start, agreement=0.8, memory=500)
            state = observe(state, scores, agrees, full.predicted)
            now = np.asarray(thresholds(state))
            continue
        np.testing.assert_array_equal(used.thresholds, now)
        again = run_score(
            tiny.decoder, tiny.params, ids, lengths, policy=used, kv="propagate", executor=EXECUTOR
        )
        np.testing.assert_array_equal(result.log_likelihood, again.log_likelihood)
        np.testing.assert_array_equal(result.depths, again.depths)
        comparison = compare_states(tiny.decoder, tiny.params, ids, lengths, result.x, full.x)
        wrong += int((full.predicted & ~comparison.agree).sum())
        total += int(full.predicted.sum())
    assert not np.array_equal(now, start)
    assert 0.1 < wrong / total < 0.3  # The target is 0.2, of exits that see full depth's K/V.


def test_a_model_with_branches_is_refused(tiny: Any) -> None:
    """Branches are chosen where they begin: by other states than they end with."""
    shared: dict[str, Any] = {"kv_source": ((0,), (1,), (1,), (1,)), "branches": (1,)}
    decoder = Transformer(dataclasses.replace(tiny.decoder.config, **shared))
    given = decoder, live_params(decoder), tiny.tokens(3, 17), jnp.asarray(LENGTHS), SoftmaxGap()
    policy = Thresholded(signal=SoftmaxGap(), thresholds=jnp.zeros(1), depths=(3, 4))
    for call in (
        lambda: adapted(Model(*given[:2]), policy, []),
        lambda: observed(*given, depths=(3, 4)),
    ):
        with pytest.raises(ValueError, match="a model without exit branches, for thresholds"):
            call()
