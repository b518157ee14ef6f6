# SPDX-License-Identifier: Apache-2.0
"""Decoding with sets of layers: each token's distribution is the reference's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.layer_sets import reference_layer_sets
from helpers.models import random_gates

from utio_jax.contrib.layer_skipping import (
    LayerSets,
    generate_layer_sets,
    given_sets,
    skip_decode,
)
from utio_jax.policies.learned import PromptRouter
from utio_jax.staircase.reference import dense_states

DEPTHS = (1, 2, 3, 4)
PROMPTS = [[5, 9, 2, 7, 1], [3, 4], [8, 8, 1, 6, 2, 11, 30]]
NEW = 6


def distributions(model: Any, found: Any, sets: Any) -> None:
    """Checks log-probabilities and depths of new tokens against one pass of the reference a row.

    `sets(row, position)` are the segments of a token that is fed back.
    """
    for row, prompt in enumerate(PROMPTS):
        ids = np.concatenate([prompt, found.token_ids[row]])
        runs = np.ones((4, 1, len(ids)), bool)
        for position in range(len(prompt), len(ids)):
            runs[:, 0, position] = sets(row, position)
        x = jax.jit(reference_layer_sets, static_argnums=0)(
            model.decoder, model.params, jnp.asarray(ids)[None], jnp.asarray([len(ids)]), runs
        )
        logits = model.decoder.unembed(model.params, x[0]).astype(jnp.float32)
        each = jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1, len(ids) - 1)]
        wanted = np.asarray(each)[np.arange(NEW), ids[len(prompt) :]]
        np.testing.assert_allclose(found.log_probabilities[row], wanted, atol=1e-4)
        np.testing.assert_array_equal(np.argmax(each, axis=1), ids[len(prompt) :])
        layers = runs[:, 0, len(prompt) - 1 : len(ids) - 1].sum(0)
        np.testing.assert_array_equal(found.decided[row], layers)


def run(model: Any, policy: Any) -> Any:
    """Returns NEW tokens of each prompt."""
    return generate_layer_sets(model.decoder, model.params, PROMPTS, policy, max_new_tokens=NEW)


def test_rows_run_sets_of_their_own(tiny: Any) -> None:
    """Where a row skips a segment, others see the K/V of the states that pass it by."""
    sets = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 1]], bool)
    found = run(tiny, given_sets(jnp.asarray(sets)[:, :, None], depths=DEPTHS))
    distributions(tiny, found, lambda row, _: sets[:, row])


def test_later_tokens_skip_lower_layers(tiny: Any, count_compiles: Any) -> None:
    policy = skip_decode(DEPTHS, most=4, least=2, span=10)
    found = run(tiny, policy)

    def sets(_: int, position: int) -> list[bool]:
        layers = 4 - -(-2 * min(position, 10) // 10)  # Rounded down.
        return [True, layers >= 4, layers >= 3, True]

    distributions(tiny, found, sets)
    with count_compiles() as compiles:
        run(tiny, skip_decode(DEPTHS, most=4, least=3, span=7))
    assert compiles.count == 0, "the schedule is an input of the program"


def test_the_prompt_chooses_for_its_new_tokens(tiny: Any) -> None:
    """FiRST: gates on the mean state of the prompt's first tokens."""
    first, ends = 2, DEPTHS[:-1]
    rows = jnp.asarray([prompt[:first] for prompt in PROMPTS])
    gates = random_gates(tiny, ends)
    states = dense_states(tiny.decoder, tiny.params, rows, jnp.full(3, first), depths=ends)
    scores = np.stack([np.asarray(gates.at(i)(x.mean(1))) for i, x in enumerate(states)])
    cuts = np.sort(scores, axis=1)[:, :2].mean(axis=1)  # One row of three skips.
    router = PromptRouter(gates=gates, exits=ends, prompt=first)
    policy = LayerSets(signal=router, thresholds=jnp.asarray(cuts), depths=DEPTHS)
    runs = np.concatenate([np.ones((1, 3), bool), scores > cuts[:, None]])
    assert not runs.all()
    distributions(tiny, run(tiny, policy), lambda row, _: runs[:, row])


def test_what_does_not_go_with_sets_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="end at the model's last layer"):
        run(tiny, skip_decode((1, 2, 3), most=3, least=2, span=10))
    with pytest.raises(ValueError, match="Wanted a causal policy"):
        run(tiny, given_sets(jnp.ones((4, 3, 2), bool), depths=DEPTHS))
