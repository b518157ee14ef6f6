# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens stop early: K/V from maps, exits through a lens, depth by importance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import (
    PROMPTS,
    DepthAt,
    depth_table,
    lively_model,
    run,
    true_logits,
)
from helpers.models import Model, with_random_maps

from utio_jax.accounting.prompt import prompt_cost
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import Lens, lensed
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.policies.depth import uniform
from utio_jax.staircase.microbatches import MicroBatches

DEPTHS = (1, 2, 4)
LONG = [[*PROMPTS[0], *range(10, 24)], PROMPTS[1] * 3, PROMPTS[2]]
"""17, 21 and 1 tokens, padded to 24."""
SMALL_BLOCKS = MicroBatches(min_bucket=2, block=8, query_block=4, key_step=8)


def with_lens(model: Model) -> Model:
    """Returns the model read through a lens that changes every prediction at its exits."""
    exits, dim = model.decoder.config.exits[:-1], model.decoder.config.embed_dim
    matrix = 0.3 * jax.random.normal(jax.random.key(3), (len(exits), dim, dim))
    lens = Lens(matrix=matrix, bias=jnp.ones((len(exits), dim)), exits=exits)
    return Model(*lensed(model.decoder, model.params, lens))


def check_against_the_oracle(
    model: Model, found: Any, kv: str, table: jax.Array, *, decided: bool = True
) -> None:
    """Compares every new token's log-probability with the reference at the decided depths."""
    for row, prompt in enumerate(LONG):
        wanted = np.asarray(table)[row, : len(prompt)]
        np.testing.assert_array_equal(found.prompt_depths[row], wanted)
        new, depths = found.token_ids[row], np.array(found.decided[row])
        if not decided:  # New tokens run in full; the first one is the prompt's last token's.
            depths[1:] = model.decoder.config.num_layers
            depths[0] = wanted[-1]
        logits = true_logits(model, prompt, new, depths, kv, prompt_depths=wanted)
        expected = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(found.log_probabilities[row], expected, atol=1e-4)


@pytest.mark.parametrize("deepest", [4, 2], ids=["all depths", "none to the end"])
@pytest.mark.parametrize("through_lens", [False, True], ids=["plain", "lens"])
@pytest.mark.parametrize("kv", ["mapped", "propagate"])
def test_new_tokens_see_what_the_reference_shows_of_a_prompt(
    kv: Any, through_lens: bool, deepest: int
) -> None:
    """States that maps and projections start from are the tokens' own, not those of a lens."""
    model = with_lens(lively_model()) if through_lens else lively_model()
    model = with_random_maps(model, (1, 2))
    table = jnp.minimum(depth_table(DEPTHS, shape=(3, 96)), deepest)
    reading = DepthAt(table=table, depths=DEPTHS)
    how = Prefill(policy=reading, kv=kv, executor=SMALL_BLOCKS)
    found = run(model, LONG, mode=Plain(), prefill=how)
    check_against_the_oracle(model, found, kv, table, decided=False)


@pytest.mark.parametrize("through_lens", [False, True], ids=["plain", "lens"])
def test_prompts_and_new_tokens_alike_are_mapped(through_lens: bool) -> None:
    model = with_lens(lively_model()) if through_lens else lively_model()
    model = with_random_maps(model, (1, 2))
    table = depth_table(DEPTHS, shape=(3, 96))
    policy = DepthAt(table=table, depths=DEPTHS)
    how = Prefill(policy=policy, executor=SMALL_BLOCKS)
    found = run(model, LONG, mode=Adaptive(policy=policy, kv="mapped"), prefill=how)
    check_against_the_oracle(model, found, "mapped", table)
    # One map for each skipped layer of every row, in steps in which any row stops there.
    assert (found.mapped_layers > 0).all()
    assert not found.frozen_layers.any()


def test_maps_of_prompts_are_charged() -> None:
    model = with_random_maps(lively_model(), (1, 2))
    cost = token_cost(model.decoder, model.params)

    def cost_of(kv: Any) -> Any:
        how = Prefill(policy=uniform(2), kv=kv, executor=SMALL_BLOCKS)
        found = run(model, LONG, prefill=how, max_new_tokens=1)
        return prompt_cost(model.decoder, model.params, how, LONG, found), found.prompt_work

    copied, _ = cost_of("propagate")
    mapped, work = cost_of("mapped")
    # 39 tokens in blocks of 2, two skipped layers each.
    np.testing.assert_array_equal(work.kv_maps, [[2 * 40]] * 3)
    # Instead of projections of all 3 x 24 slots.
    spared = 2 * 72 * cost.keys_values
    assert mapped.flops == copied.flops - spared + 2 * 40 * cost.kv_map


def test_what_does_not_fit_together_is_refused() -> None:
    model = lively_model()
    with pytest.raises(ValueError, match='KV maps for kv="mapped".*fit-prompt'):
        run(model, prefill=Prefill(policy=uniform(2), kv="mapped"))
    few = with_random_maps(model, (2,))
    with pytest.raises(ValueError, match=r"stops at depths \(2,\).*Got \[1\]"):
        run(few, prefill=Prefill(policy=uniform(1), kv="mapped"))
    with pytest.raises(ValueError, match='the same kv for prompts and new tokens.*"drop"'):
        run(model, prefill=Prefill(policy=uniform(2), kv="drop"))
