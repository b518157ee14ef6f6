# SPDX-License-Identifier: Apache-2.0
"""Which prompt tokens go deep: ranks, shares, signals, and prompts too short to save anything."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model, with_random_maps

from utio_jax import score, uniform
from utio_jax.policies.signals import ScoreTable
from utio_jax.prompts.choice import SIGNALS, PromptChoice
from utio_jax.staircase import MicroBatches, staircase
from utio_jax.staircase.prompts import PromptImportance, Recency, rank_of

EXECUTOR = MicroBatches(min_bucket=4, block=16, query_block=8, key_step=16)


@partial(jax.jit, static_argnums=0)
def run_depths(decoder: Any, params: Any, ids: Any, lengths: Any, policy: Any) -> jax.Array:
    """Decisions alone: what only later layers compute falls away."""
    return staircase(decoder, params, ids, lengths, policy, executor=EXECUTOR).depths


def depths_of(model: Model, policy: Any, lengths: list[int], width: int = 24) -> np.ndarray:
    ids = model.tokens(len(lengths), width)
    return np.asarray(run_depths(model.decoder, model.params, ids, jnp.asarray(lengths), policy))


def importance(signal: Any, deep: float, **options: Any) -> PromptImportance:
    options = {"at_least": 0, "sinks": 2, "depths": (2, 4)} | options
    return PromptImportance(signal=signal, deep=jnp.asarray([deep]), **options)


def test_ranks_begin_with_the_highest_score_and_the_later_of_equals() -> None:
    scores = np.random.default_rng(0).integers(0, 5, (20, 33)).astype(np.float32)
    order = np.lexsort((-np.arange(33) * np.ones((20, 1)), -scores))
    expected = np.zeros_like(order)
    np.put_along_axis(expected, order, np.arange(33) * np.ones((20, 1), int), axis=1)
    np.testing.assert_array_equal(rank_of(jnp.asarray(scores)), expected)


def test_a_share_of_each_prompt_goes_deep(tiny: Model) -> None:
    """The most important ones; the first two and the last count among them, whatever they score."""
    scores = np.random.default_rng(1).normal(size=(4, 24)).astype(np.float32)
    lengths = [24, 11, 3, 1]
    depths = depths_of(tiny, importance(ScoreTable(scores=jnp.asarray(scores)), 0.5), lengths)
    for row, length in enumerate(lengths):
        count = int(np.ceil(0.5 * length))
        always = {0, 1, length - 1} & set(range(length))
        ranked = sorted(set(range(length)) - always, key=lambda i: -scores[row, i])
        expected = always | set(ranked[: max(0, count - len(always))])
        assert set(np.flatnonzero(depths[row] == 4)) == expected
        assert (depths[row, :length] >= 2).all()
        assert not depths[row, length:].any()


def test_short_prompts_run_in_full(tiny: Model) -> None:
    depths = depths_of(tiny, importance(Recency(), 0.1, at_least=7), [24, 8, 7, 1])
    assert [int((row == 4).sum()) for row in depths] == [7, 7, 7, 1]
    assert [int((row == 2).sum()) for row in depths] == [17, 1, 0, 0]
    # Two sinks, and the five latest.
    assert np.flatnonzero(depths[0] == 4).tolist() == [0, 1, 19, 20, 21, 22, 23]


def test_scores_that_are_not_numbers_go_deep(tiny: Model) -> None:
    scores = jnp.zeros((1, 24)).at[0, 9].set(jnp.nan)
    depths = depths_of(tiny, importance(ScoreTable(scores=scores), 4 / 24), [24])
    assert np.flatnonzero(depths[0] == 4).tolist() == [0, 1, 9, 23]


def test_what_follows_a_prompt_runs_in_full(tiny: Model) -> None:
    policy = importance(Recency(), 0.0, prompt_tokens=10, sinks=0)
    depths = depths_of(tiny, policy, [24, 10, 6])
    assert np.flatnonzero(depths[0] == 4).tolist() == [*range(9, 24)]
    assert np.flatnonzero(depths[1] == 4).tolist() == [9]
    assert np.flatnonzero(depths[2] == 4).tolist() == [5]


@pytest.mark.usefixtures("unchecked_shapes")  # Shares as a list.
def test_two_boundaries_thin_a_prompt_twice(tiny: Model) -> None:
    shares: Any = [0.5, 0.25]
    policy = PromptImportance(signal=Recency(), deep=shares, at_least=0, sinks=1, depths=(1, 2, 4))
    depths = depths_of(tiny, policy, [24, 12])
    assert [int((row > 1).sum()) for row in depths] == [12, 6]
    assert [int((row > 2).sum()) for row in depths] == [6, 3]
    assert depths[0, 0] == depths[0, 23] == 4
    assert jax.tree.map(lambda leaf: (leaf, "more"), policy).deep == (policy.deep, "more")
    with pytest.raises(ValueError, match="a share of deeper tokens for each of depths"):
        depths_of(tiny, dataclasses.replace(policy, deep=jnp.asarray([0.5])), [24, 12])


@pytest.mark.parametrize("share", [50, -1, float("nan")])
def test_shares_beyond_a_whole_are_refused(share: float, unchecked_shapes: None) -> None:
    shares: Any = [0.5, share]
    with pytest.raises(ValueError, match=r"shares of prompt tokens .* from 0 to 1. Got deep=\[0.5"):
        PromptImportance(signal=Recency(), deep=shares, depths=(1, 2, 4))


@pytest.mark.check
def test_all_of_a_prompt_is_the_plain_program_bit_by_bit(tiny: Model, no_compiles: Any) -> None:
    model = with_random_maps(tiny, (2,))
    ids, lengths = tiny.tokens(3, 24), jnp.asarray([24, 9, 1])
    run = jax.jit(score, static_argnums=0, static_argnames=("kv", "executor"))
    plain = run(tiny.decoder, tiny.params, ids, lengths, uniform(4), executor=EXECUTOR)
    policy = PromptChoice(stop=2, deep=1.0).policy(model.decoder)
    same = run(model.decoder, model.params, ids, lengths, policy, kv="mapped", executor=EXECUTOR)
    np.testing.assert_array_equal(same.log_likelihood, plain.log_likelihood)
    np.testing.assert_array_equal(same.depths, plain.depths)
    work = jax.tree.map(lambda leaf: np.asarray(np.asarray(leaf).sum()), same.work)
    assert work.kv_maps == 0
    assert work.queries == np.asarray(plain.work.queries).sum()
    with no_compiles():  # Another share is another number.
        policy = PromptChoice(stop=2, deep=0.3).policy(model.decoder)
        result = run(
            model.decoder, model.params, ids, lengths, policy, kv="mapped", executor=EXECUTOR
        )
    assert np.asarray(result.work.kv_maps).sum() > 0


@pytest.mark.parametrize("by", SIGNALS)
def test_every_choice_spends_its_share(tiny: Model, by: str) -> None:
    choice = PromptChoice(stop=2, deep=0.5, by=by, kv="propagate")
    model = with_random_maps(tiny, (2,))
    depths = depths_of(model, choice.policy(model.decoder), [64, 40], width=64)
    expected = [1, 1] if by == "none" else [32, 20]
    assert [int((row == 4).sum()) for row in depths] == expected
    assert depths[0, 63] == depths[1, 39] == 4
    if by != "none":
        assert (depths[:, :4] == 4).all()
