# SPDX-License-Identifier: Apache-2.0
"""Exits chosen while decoding: the full model's output whatever is chosen, and what it costs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.generation import PROMPTS, SMALL, assert_drawn_law, assert_greedy, plain_run, run
from helpers.models import assert_equal

from utio_jax.contrib.drafts import Agreement, DynamicExits
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding import Lossless, SamplingParams
from utio_jax.decoding.loop import run_chunks

DRAWN = SamplingParams(temperature=0.9, top_k=8)


@pytree
class Anyhow(DynamicExits):
    """Goes through all exits and lengths, each row at its own pace."""

    def choose(self, decoder, state):
        number = state.lengths * 7 + state.prompt_lengths
        return number % 2, (number // 2) % self.block


@pytree
class Fixed(DynamicExits):
    """Always the same exit, and as many drafts as may be."""

    number: int = static(default=1)

    def choose(self, decoder, state):
        same = jnp.full_like(state.lengths, self.number)
        return same, jnp.full_like(same, self.max_draft)


@pytest.mark.parametrize("mode", [Anyhow(max_draft=3), DynamicExits(max_draft=3)])
def test_greedy_is_the_full_model(model, mode):
    result = run(model, mode=mode)
    assert_greedy(model, result, kv="full")
    assert_equal(result.token_ids, plain_run().token_ids)
    # Not vacuous: drafts of both exits are right, others wrong.
    assert {*np.concatenate(result.decided)} == {1, 2, 4}
    assert result.acceptance is not None
    assert 0 < result.acceptance < 1


@pytest.mark.slow
def test_a_fixed_exit_is_lossless_decoding_at_its_cost(model):
    mode = Fixed(max_draft=3)
    actual = run(model, mode=mode, sampling=DRAWN)
    other = run(model, mode=Lossless(exit=2, max_draft=3), sampling=DRAWN)
    for name in ("steps", "drafts", "accepted", "token_layers", "key_slots", "attended"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(other, name))
    assert_equal((actual.token_ids, actual.decided), (other.token_ids, other.decided))
    # A head behind each draft and behind the last, one for each exit and pending token.
    np.testing.assert_array_equal(actual.heads, actual.steps * (4 + 4 * 3))


@pytest.mark.slow
def test_layers_run_to_the_deepest_exit_and_the_longest_draft(model):
    result = run(model, PROMPTS[:1], mode=Anyhow(max_draft=3))
    length, expected, steps = len(PROMPTS[0]) + 1, 0, 0
    accepted = iter(np.flatnonzero(result.decided[0][1:] == 4))  # Where rounds end.
    while length < len(PROMPTS[0]) + 40:
        exit_, drafts = (1, 2)[(length * 7 + 3) % 2], (length * 7 + 3) // 2 % 4
        expected, steps = expected + (drafts + 1) * exit_ + 4 * (4 - exit_), steps + 1
        length = len(PROMPTS[0]) + next(accepted, 99) + 2
    assert (result.steps[0], result.token_layers[0]) == (steps, expected)


@pytest.mark.parametrize(
    "mode", [Anyhow(max_draft=3), pytest.param(DynamicExits(max_draft=3), marks=pytest.mark.slow)]
)
def test_a_seed_fixes_the_text_whatever_the_batch(model, mode):
    together = run(model, mode=mode, sampling=DRAWN, seeds=[5, 6, 7])
    others = [PROMPTS[1], PROMPTS[0], PROMPTS[0]]  # As many rows: the same program.
    among = run(model, others, mode=mode, sampling=DRAWN, seeds=[6, 5, 8])
    np.testing.assert_array_equal(together.token_ids[1], among.token_ids[0])


@pytest.mark.slow
def test_drawn_tokens_follow_the_full_model():
    assert_drawn_law(DynamicExits(max_draft=3))


def test_what_is_remembered_is_what_every_exit_would_have_said(model):
    mode = DynamicExits(max_draft=3, decay=1.0)
    options = {"mode": mode, "max_new_tokens": 40, "eos_ids": (), "lengths": SMALL}
    state = next(run_chunks(model.decoder, model.params, PROMPTS, chunk=20, **options))
    ids, ends = np.asarray(state.token_ids), np.asarray(state.lengths)
    states = cases.run_dense(model.decoder, model.params, ids, ends, depths=(1, 2, 4))
    predicted = np.stack(
        [np.argmax(model.decoder.unembed(model.params, x), axis=-1) for x in states]
    )
    for row, prompt in enumerate(PROMPTS):
        verified = slice(len(prompt), ends[row] - 1)  # Prefill's token, up to the one before last.
        right = (predicted[:, row, verified] == predicted[2, row, verified]).sum(axis=1)
        np.testing.assert_allclose(state.memory.right[row], right + np.asarray([0.5, 0.5, 1.0]))


def test_the_choice_has_the_most_tokens_per_layer(model):
    rng, mode = np.random.default_rng(0), DynamicExits(max_draft=3)
    total = rng.integers(1, 30, 50).astype(np.float32)
    right = np.concatenate([total[:, None] * rng.uniform(size=(50, 2)), total[:, None]], axis=1)
    state = next(run_chunks(model.decoder, model.params, PROMPTS, max_new_tokens=20, lengths=SMALL))
    state = dataclasses.replace(state, memory=Agreement(right=jnp.asarray(right, jnp.float32)))
    result = np.stack(mode.choose(model.decoder, state), axis=1)
    for row, share in enumerate(right[:, :2] / total[:, None]):
        rates = {
            (number, drafts): sum(share[number] ** n for n in range(drafts + 1))
            / (4 + drafts * (1, 2)[number])
            for number in range(2)
            for drafts in range(4)
        }
        assert rates[tuple(result[row])] == pytest.approx(max(rates.values()))
    assert len(np.unique(result, axis=0)) > 4
