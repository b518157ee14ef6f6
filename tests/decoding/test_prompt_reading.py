# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens stop early: K/V from maps, exits through a lens, depth by importance."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import (
    LONG,
    SMALL_BLOCKS,
    DepthAt,
    assert_read_as,
    depth_table,
    lively_model,
    run,
)
from helpers.marks import slow
from helpers.models import assert_equal, with_random_lens, with_random_maps

from utio_jax.decoding.base import Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.policies.depth import uniform
from utio_jax.prompts.budget import prompt_choice, prompt_prefill
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.evaluate import prompt_cost
from utio_jax.staircase import staircase
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.microbatches import MicroBatches

pytestmark = pytest.mark.check

DEPTHS = (1, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["mapped", "propagate"])
def test_full_depth_sees_what_the_reference_shows_of_a_prompt(kv: Any) -> None:
    model = with_random_maps(lively_model(), (1, 2))
    table = jnp.minimum(depth_table(DEPTHS, shape=(3, 96)), 2)
    how = Prefill(policy=DepthAt(table=table, depths=DEPTHS), kv=kv, executor=SMALL_BLOCKS)
    assert_read_as(model, run(model, LONG, mode=Plain(), prefill=how), table, kv=kv)


RAGGED = [[7, *range(59)], [*range(50, 10, -1), 3], [4], [9] * 18]
"""60, 41, 1 and 18 tokens, padded to 64."""


@pytest.mark.parametrize(
    ("kv", "by"), [("mapped", "none"), *slow(("propagate", "random"), ("mapped", "sinks_recent"))]
)
def test_static_shapes_read_small_batches_as_the_staircase_does(kv: Any, by: str) -> None:
    """The same depths, tokens and probabilities, with as many slots as tokens can go deep."""
    model = with_random_maps(lively_model(context_length=128), (2,))
    choice = PromptChoice(stop=2, deep=0.4, by=by, kv=kv)
    how = Prefill(policy=choice.policy(model.decoder), kv=kv)
    shaped = how.for_shape(4, 64)
    deep = 1 if by == "none" else 26 + 5
    slots = -(-deep // 8) * 8
    expected = CapacityPrefix(capacities=(64, slots), min_bucket=8, certain=True)
    assert shaped.executor == expected
    result = run(model, RAGGED, prefill=how, max_new_tokens=12)
    for named in (MicroBatches(), SMALL_BLOCKS):  # An executor that is named stays.
        other = dataclasses.replace(how, executor=named)
        assert other.for_shape(4, 64) is other
    blocks = run(model, RAGGED, prefill=other, max_new_tokens=12)
    for field in ("prompt_depths", "token_ids", "decided"):
        assert_equal(getattr(result, field), getattr(blocks, field), err_msg=field)
    for ours, theirs in zip(result.log_probabilities, blocks.log_probabilities, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert result.prompt_work is not None
    np.testing.assert_array_equal(result.prompt_work.queries[0], [2 * 4 * 64, 2 * 4 * slots])
    # Behind the stop maps have made what the others show: only those that run project their own.
    own = slots if kv == "mapped" else 64
    np.testing.assert_array_equal(result.prompt_work.keys_values[0], [2 * 4 * 64, 2 * 4 * own])
    spent = prompt_cost(model.decoder, model.params, result)
    assert spent.flops_ratio < 1


@partial(jax.jit, static_argnums=0)
def read_depths(decoder: Any, params: Any, ids: Any, lengths: Any, policy: Any) -> jax.Array:
    """Decisions alone: what only later layers compute falls away."""
    return staircase(decoder, params, ids, lengths, policy, executor=SMALL_BLOCKS).depths


@pytest.mark.parametrize("deep", [0.0, 0.13, 0.5, 1.0])
def test_no_prompt_sends_more_tokens_deep_than_foretold(deep: float) -> None:
    model = lively_model(context_length=128)
    policy = PromptChoice(stop=2, deep=deep, kv="propagate").policy(model.decoder)
    foretold = policy.most_deep(64)
    assert foretold is not None
    (most,) = foretold
    lengths = np.asarray([1, 4, 5, 15, 16, 17, 33, 63], np.int32)
    ids = np.broadcast_to(np.arange(64, dtype=np.int32), (8, 64))
    counts = (np.asarray(read_depths(model.decoder, model.params, ids, lengths, policy)) == 4).sum(
        axis=1
    )
    assert counts.max() <= most
    assert most <= counts.max() + 5, "and not many fewer"


def test_what_has_no_fixed_share_is_read_by_the_staircase(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(context_length=128)
    choice = PromptChoice(stop=2, deep=0.4, kv="propagate")
    how = Prefill(policy=choice.policy(model.decoder))
    assert how.for_shape(8, 448) is how, "many scores: blocks are faster on CPU"
    behind = Prefill(policy=choice.policy(model.decoder, prompt_tokens=40))
    assert behind.for_shape(1, 64) is behind, "what follows the prompt runs in full"
    plain = Prefill(policy=uniform(2))
    assert plain.for_shape(1, 64) is plain
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isinstance(how.for_shape(8, 448).executor, CapacityPrefix)


def test_a_budget_takes_the_least_loss_that_fits() -> None:
    model = with_random_maps(lively_model(), (2,))
    known = [
        PromptChoice(stop=2, deep=deep, flops_ratio=ratio, nll_increase_pct=loss)
        for deep, ratio, loss in ((0.1, 0.60, 2.0), (0.2, 0.68, 1.0), (0.3, 0.75, 0.4))
    ]
    choose = partial(prompt_choice, model.decoder, model.params, choices=known)
    assert choose(0.65).deep == pytest.approx(0.1)
    assert choose(0.7).deep == pytest.approx(0.2)
    assert choose(0.99).deep == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"a prompt budget of at least 0.600.*Got 0.5"):
        choose(0.5)
    how = prompt_prefill(model.decoder, model.params, 0.7, choices=known)
    assert how is not None
    assert how.kv == "mapped"
    assert how.policy is not None
    assert how.policy.name == "prompt_sinks_recent"
    assert float(how.policy.deep[0]) == pytest.approx(0.2)  # type: ignore[attr-defined]
    for budget in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            prompt_prefill(model.decoder, model.params, budget, choices=known)


def test_a_model_with_exits_needs_nothing_measured() -> None:
    model = lively_model()
    assert prompt_prefill(model.decoder, model.params, 1.0) is None
    shallow = prompt_choice(model.decoder, model.params, 0.5)
    deep = prompt_choice(model.decoder, model.params, 0.8)
    assert (shallow.stop, deep.stop) == (1, 2)
    assert shallow.kv == deep.kv == "propagate"
    how = prompt_prefill(model.decoder, model.params, 0.8)
    prompts = [[*range(1, 49)], [5, 6, 7], [8]]
    result = run(model, prompts, prefill=how, max_new_tokens=2)
    assert [int((depths == 4).sum()) for depths in result.prompt_depths] == [16, 3, 1]
    through_lens = with_random_lens(model)
    with pytest.raises(ValueError, match="trained to stop early.*fit-prompt"):
        prompt_prefill(through_lens.decoder, through_lens.params, 0.8)
    maps_only = [PromptChoice(stop=2, deep=0.1, flops_ratio=0.5)]
    with pytest.raises(ValueError, match="trained to stop early.*fit-prompt"):
        prompt_prefill(through_lens.decoder, through_lens.params, 0.8, choices=maps_only)
