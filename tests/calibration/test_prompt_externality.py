# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens chosen by externality: windows, the pass behind them, the gate that foretells."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model, live_params, with_random_maps

from utio_jax.calibration.prompt_externality import (
    ExternalityConfig,
    externalities,
    fit_externality,
    own_of,
)
from utio_jax.calibration.prompt_maps import fit_kv_maps, fit_rows
from utio_jax.calibration.prompt_windows import (
    WindowShape,
    continued_states,
    divergence_of,
    mapped_of,
    window_of,
)
from utio_jax.core.kv_maps import with_kv_maps
from utio_jax.models import TINY, Transformer
from utio_jax.staircase.loop import staircase
from utio_jax.staircase.prompts import PromptChoice
from utio_jax.staircase.reference import dense_states, reference_states

SHAPE = WindowShape(width=32, continuation=12)


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


def test_externality_is_what_the_divergence_falls_by_to_first_order(model: Model) -> None:
    """Maps that are nearly right: then first order is all there is, and a token's worth is what
    the divergence loses as its K/V become its own."""
    ids = model.tokens(1, 24)
    running = np.asarray([0, 1, 9, *range(15, 24)])
    counts = np.arange(15, 24)
    random = with_random_maps(model, (2,))
    x = dense_states(model.decoder, model.params, ids, jnp.asarray([24]), depths=(2,))[0]
    _, found = externalities(
        random.decoder, random.params, ids, jnp.asarray(running)[None], len(counts)
    )[2]
    depths = jnp.full((1, 24), 2, jnp.int32).at[0, running].set(4)
    before = divergence(random, ids, depths, counts)
    assert before > 0
    # The slope along the way from mapped to own K/V of one token, by a central difference.
    for token in (4, 12):

        def along(share: float, token: int = token) -> float:
            last, own = own_of(random.decoder, random.params, x, stop=2)
            shown = mapped_of(random.decoder, random.params, x, stop=2)
            shown = shown.at[:, :, token].add(share * (own - shown)[:, :, token])
            mine = continued_states(
                random.decoder, random.params, x, jnp.asarray(running)[None], stop=2, shown=shown
            )
            at = jnp.asarray([index >= 15 for index in running])
            return float(divergence_of(random.decoder, random.params, last[:, running], mine, at))

        assert along(0.0) == pytest.approx(before, rel=1e-4)
        slope = (along(-0.01) - along(0.01)) / 0.02
        assert float(found[0, token]) == pytest.approx(slope, rel=0.03, abs=1e-4)
    # Nothing to gain where a token shows its own already.
    np.testing.assert_allclose(found[0, running], 0, atol=1e-6)


@pytest.fixture(scope="module")
def gated(model: Model) -> dict[int, Any]:
    """Maps with gates, fitted to random text."""
    text = [*np.asarray(model.tokens(6, 200))]
    rows = fit_rows(text, width=64, tokens=1200, batch=4, decoder=model.decoder)
    maps = fit_kv_maps(model.decoder, model.params, rows, stops=(1, 2))
    said: list[str] = []
    found = fit_externality(
        model.decoder,
        model.params,
        maps,
        text,
        SHAPE,
        ExternalityConfig(windows=16),
        progress=said.append,
    )
    assert said == ["externality: 8 of 16 windows", "externality: 16 of 16 windows"]
    for stop, each in maps.items():
        np.testing.assert_array_equal(found[stop].kernel, each.kernel)
        assert np.std(np.asarray(found[stop].gate)) > 0
    return found


def test_the_gates_favourites_go_deep(model: Model, gated: dict[int, Any]) -> None:
    decoder, params = with_kv_maps(model.decoder, model.params, gated)
    ids, lengths = model.tokens(3, 24), jnp.asarray([24, 20, 9])
    for stop in (1, 2):
        policy = PromptChoice(stop=stop, deep=0.5, by="externality").policy(decoder)
        policy = dataclasses.replace(policy, at_least=0)
        assert policy.flops(0, decoder, params) == 2 * decoder.config.embed_dim
        found = staircase(decoder, params, ids, lengths, policy, kv="mapped")
        (x,) = dense_states(model.decoder, model.params, ids, lengths, depths=(stop,))
        x = np.asarray(x, np.float64)
        x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        worth = x @ np.asarray(gated[stop].gate, np.float64) + float(gated[stop].gate_bias)
        for row, length in enumerate(np.asarray(lengths)):
            worth[row, [0, 1, 2, 3, length - 1]] = np.inf
            order = np.argsort(-worth[row, :length], kind="stable")
            deep = np.flatnonzero(np.asarray(found.depths)[row] == 4)
            assert deep.tolist() == sorted(order[: max(5, -(-length // 2))])


def test_what_has_no_gate_is_named(model: Model, gated: dict[int, Any]) -> None:
    choice = PromptChoice(stop=2, deep=0.5, by="externality")
    with pytest.raises(ValueError, match="Wanted a model with KV maps to choose"):
        choice.policy(model.decoder)
    bare = with_random_maps(model, (2,))
    policy, ids = choice.policy(bare.decoder), model.tokens(1, 24)
    with pytest.raises(ValueError, match="Wanted KV maps with a gate"):
        staircase(bare.decoder, bare.params, ids, jnp.asarray([24]), policy, kv="mapped")
    few = ExternalityConfig(windows=1)
    with pytest.raises(ValueError, match="Wanted at least 64 tokens to fit a gate"):
        fit_externality(
            model.decoder, model.params, gated, [np.asarray(model.tokens(100))], SHAPE, few
        )
    with pytest.raises(ValueError, match="continuation of at least one token"):
        WindowShape(width=32, continuation=17)
