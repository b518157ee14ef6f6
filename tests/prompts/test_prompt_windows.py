# SPDX-License-Identifier: Apache-2.0
"""Windows of prompts and what follows: what they ask, and the pass that learns from them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model, live_params, with_random_maps

from utio_jax.models import TINY, Transformer
from utio_jax.prompts.train import (
    MapTraining,
    continued_states,
    divergence_of,
    window_of,
)
from utio_jax.staircase.reference import dense_states, reference_states

SHAPE = MapTraining(width=32, continuation=12)


@pytest.fixture(scope="module")
def model() -> Model:
    decoder = Transformer(dataclasses.replace(TINY, windows=(0, 9, 0, 0), attention_softcap=5.0))
    return Model(decoder, live_params(decoder))


def test_what_runs_on_is_what_the_reference_says(model: Model) -> None:
    mapped = with_random_maps(model, (1, 2))
    ids = jnp.asarray(
        np.random.default_rng(1).integers(0, model.decoder.config.vocab_size, (2, 24))
    )
    running = jnp.asarray([[0, 3, 9, *range(15, 20)], [1, 2, 14, *range(15, 20)]], jnp.int32)
    lengths = jnp.asarray([24, 24], jnp.int32)
    for stop in (1, 2):
        depths = jnp.full((2, 24), stop, jnp.int32).at[jnp.arange(2)[:, None], running].set(4)
        wanted = reference_states(mapped.decoder, mapped.params, ids, lengths, depths, kv="mapped")
        (x,) = dense_states(model.decoder, model.params, ids, lengths, depths=(stop,))
        found = continued_states(mapped.decoder, mapped.params, x, running, stop=stop)
        at = jnp.arange(2)[:, None], running
        np.testing.assert_allclose(found, wanted[at], atol=1e-4)


def test_what_a_window_asks() -> None:
    """Sinks, the prompt's last token and all behind it run; words come again where they are to."""
    ids = np.arange(32)
    seen = set()
    for seed in range(30):
        shape = dataclasses.replace(SHAPE, repeated=float(seed % 2))
        new, running = window_of(ids, np.random.default_rng(seed), shape)
        assert len(running) == shape.running + shape.continuation == len(set(running))
        prompt = int(running[-1]) + 1 - shape.continuation
        assert 8 <= prompt <= 20
        assert [*running[:4], *running[-13:]] == [0, 1, 2, 3, *range(prompt - 1, prompt + 12)]
        changed = np.flatnonzero(new != ids)
        if seed % 2:
            assert changed.tolist() == list(range(prompt + 8, prompt + 12))
            assert new[changed].tolist() == list(range(new[changed][0], new[changed][0] + 4))
            assert new[changed].max() < prompt
        else:
            assert not changed.size
        seen.add(prompt)
    assert len(seen) > 5


def divergence(model: Model, ids: jax.Array, depths: jax.Array, counts: np.ndarray) -> float:
    """Returns KL(full || at these depths) of the tokens that count, the plain way."""
    lengths = jnp.asarray([ids.shape[1]], jnp.int32)

    def logp(depths: jax.Array) -> np.ndarray:
        x = reference_states(model.decoder, model.params, ids, lengths, depths, kv="mapped")
        return np.asarray(jax.nn.log_softmax(model.decoder.unembed(model.params, x[0])), np.float64)

    full, mine = logp(jnp.full_like(depths, 4)), logp(depths)
    return float(np.sum(np.exp(full) * (full - mine), axis=-1)[counts].mean())


def test_the_divergence_is_that_of_the_predictions(model: Model) -> None:
    """Without a map's own error: of what runs, the mean of what counts."""
    ids, running = model.tokens(1, 24), np.asarray([0, 1, 9, *range(15, 24)])
    mapped = with_random_maps(model, (2,))
    full, x = (
        dense_states(model.decoder, model.params, ids, jnp.asarray([24]), depths=(depth,))[0]
        for depth in (4, 2)
    )
    mine = continued_states(mapped.decoder, mapped.params, x, jnp.asarray(running)[None], stop=2)
    counts = jnp.asarray(running >= 15)
    found = divergence_of(mapped.decoder, mapped.params, full[:, running], mine, counts)
    depths = jnp.full((1, 24), 2, jnp.int32).at[0, running].set(4)
    assert float(found) == pytest.approx(
        divergence(mapped, ids, depths, np.arange(15, 24)), rel=1e-4
    )


def test_a_continuation_of_more_than_half_is_refused() -> None:
    with pytest.raises(ValueError, match="continuation of at least one token"):
        MapTraining(width=32, continuation=17)
