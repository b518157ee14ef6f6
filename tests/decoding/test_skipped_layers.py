# SPDX-License-Identifier: Apache-2.0
"""Decoding with sets of layers: each token's distribution is the reference's, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax import Adaptive, Entropy, History, Position, Prefill, Throttle, generate
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.layer_sets import LayerSets, given_sets, skip_decode
from utio_jax.policies.signals import KnownBefore
from utio_jax.staircase.reference import reference_layer_sets

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


def run(model: Any, policy: Any, **options: Any) -> Any:
    """Returns NEW tokens of each prompt."""
    return generate(
        model.decoder,
        model.params,
        PROMPTS,
        mode=Adaptive(policy=policy),
        max_new_tokens=NEW,
        eos_ids=(),
        **options,
    )


def test_rows_run_sets_of_their_own(tiny: Any) -> None:
    """Where no row runs a segment it is skipped, and its K/V come from the states that pass it."""
    sets = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 1]], bool)
    found = run(tiny, given_sets(jnp.asarray(sets)[:, :, None], depths=DEPTHS))
    distributions(tiny, found, lambda row, _: sets[:, row])
    # Rows step together: three layers of four in each of five steps; the fourth is projected.
    np.testing.assert_array_equal(found.token_layers, [15, 15, 15])
    np.testing.assert_array_equal(found.frozen_layers, [5, 5, 5])
    for row in found.executed:
        np.testing.assert_array_equal(row, [4, 3, 3, 3, 3, 3])
    np.testing.assert_array_equal(found.heads, [5, 5, 5])


@pytree
class Late(KnownBefore):
    """The position: tokens run more layers as the text grows."""

    name: str = static(default="late")

    def start(self, token_ids: Any, positions: Any) -> jax.Array:
        return positions.astype(jnp.float32)


def test_a_layer_that_a_whole_step_skipped_has_keys_for_later_ones(tiny: Any) -> None:
    thresholds = jnp.asarray([8.5, -jnp.inf, -jnp.inf])
    found = run(tiny, LayerSets(signal=Late(), thresholds=thresholds, depths=DEPTHS))
    distributions(tiny, found, lambda _, position: [True, position > 8.5, True, True])
    # The longest prompt has 7 tokens: of five steps two skip the second layer, three run it.
    np.testing.assert_array_equal(found.token_layers, [18, 18, 18])
    np.testing.assert_array_equal(found.frozen_layers, [2, 2, 2])


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


@pytest.mark.check
def test_looks_at_logits_are_counted(tiny: Any) -> None:
    policy = LayerSets(signal=Entropy(), thresholds=jnp.asarray([1e9, -1.0, 1e9]), depths=DEPTHS)
    found = run(tiny, policy)
    distributions(tiny, found, lambda *_: [True, False, True, False])
    # Three looks a step and the head at its end.
    np.testing.assert_array_equal(found.heads, [20, 20, 20])


def test_what_does_not_go_with_sets_is_refused(tiny: Any) -> None:
    policy = skip_decode(DEPTHS, most=4, least=2, span=10)
    wrong: list[dict[str, Any]] = [{"kv": "drop"}, {"kv": "full"}, {"pack": (1,)}]
    for options in wrong:
        with pytest.raises(ValueError, match='Wanted kv="propagate", no pack and no throttle'):
            Adaptive(policy=policy, **options)
    throttle = Throttle(
        signal=Position(), thresholds=jnp.zeros(3), history=History(recent=4, sinks=1)
    )
    with pytest.raises(ValueError, match="Got kv='propagate', .* and a throttle"):
        Adaptive(policy=policy, throttle=throttle)
    with pytest.raises(ValueError, match="end at the model's last layer"):
        run(tiny, skip_decode((1, 2, 3), most=3, least=2, span=10))
    with pytest.raises(ValueError, match="Read prompts in full"):
        run(tiny, policy, prefill=Prefill(policy=policy))
    tokens = given_sets(jnp.ones((4, 3, 2), bool), depths=DEPTHS)
    with pytest.raises(ValueError, match="Wanted a causal policy"):
        run(tiny, dataclasses.replace(tokens))
