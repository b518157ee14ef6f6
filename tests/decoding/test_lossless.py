# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding: the full model's output, whatever is drafted, and only the work it needs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import (
    CROSSING,
    PROMPTS,
    SMALL,
    assert_drawn_law,
    assert_greedy,
    begun,
    context_of,
    run,
)
from helpers.marks import slow
from helpers.models import assert_equal

from utio_jax.attention.cache import read
from utio_jax.core.lens import Lens, lensed
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import advance
from utio_jax.decoding.lossless import Lossless, lossless_for
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer

MODES = {"exit 1": Lossless(exit=1, max_draft=1), "exit 2": Lossless(exit=2, max_draft=3)}


@pytest.mark.parametrize("name", ["exit 2", *slow("exit 1")])
def test_greedy_is_the_full_model(model, plain, name):
    result = run(model, mode=MODES[name], lengths=CROSSING if name == "exit 2" else SMALL)
    assert_greedy(model, result, kv="full")
    assert_equal(result.token_ids, plain.token_ids)
    # The case is not vacuous: some drafts are right, some wrong, and rows differ.
    assert result.acceptance is not None
    assert 0 < result.acceptance < 1
    assert len(set(result.work.accepted)) > 1
    assert result.finish_reasons == ("length",) * 3


@pytest.mark.slow
def test_a_perfect_draft_is_accepted_whole(model):
    # Layers 2 and 3 become the identity, so the exit at 2 is the full model.
    layers = model.params["layers"]
    for name in ("o_proj", "down_proj"):
        kernel = layers[name]["kernel"]
        layers = layers | {name: {"kernel": kernel.at[2:].set(0.0)}}
    exact = dataclasses.replace(model, params=model.params | {"layers": layers})
    result = run(exact, mode=Lossless(exit=2, max_draft=3))
    assert result.acceptance == 1.0
    np.testing.assert_array_equal(result.work.steps, [10] * 3)  # 39 tokens, 4 per round.


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [Lossless(exit=1, max_draft=3), Lossless(drafter="ngram", max_draft=3)],
    ids=["fixed", "ngram"],
)
def test_drawn_tokens_follow_the_full_model(mode):
    assert_drawn_law(mode)


def test_keys_are_the_full_models_whatever_was_rejected(model):
    mode = Lossless(exit=2, max_draft=3)
    context = context_of(model, mode)
    state = advance(context, begun(context), np.int32(20), widths=(64,))
    # What lies before each row's last token is the cache that prefill makes of the same tokens.
    ids, ends = np.asarray(state.token_ids), np.asarray(state.lengths)
    whole = begun(context, [ids[row, : ends[row]] for row in range(3)])
    layers = tuple(range(model.decoder.config.num_layers))
    caches = (read(state_.cache, layers, width=64) for state_ in (state, whole))
    for ours, theirs in zip(*caches, strict=True):
        for row in range(3):
            before = slice(int(ends[row]) - 1)
            np.testing.assert_allclose(ours[row, before], theirs[row, before], atol=1e-4)


def test_the_default_drafts_at_a_trained_exit_and_copies_otherwise():
    layers = dataclasses.replace(TINY, num_layers=16, exits=(4, 6, 8, 10, 16))
    assert lossless_for(Transformer(layers)) == Lossless(exit=6)
    assert lossless_for(Transformer(layers), "ngram") == Lossless(drafter="ngram")
    assert lossless_for(Transformer(TINY), max_draft=2) == Lossless(exit=1, max_draft=2)
    stock = Transformer(dataclasses.replace(TINY, exits=(4,)))
    assert lossless_for(stock) == Lossless(drafter="ngram")
    # Exits that are read through a lens were fitted afterwards: drafts there were slower.
    lens = Lens(matrix=jnp.zeros((2, 32, 32)), bias=jnp.zeros((2, 32)), exits=(1, 2))
    through, _ = lensed(Transformer(TINY), {}, lens)
    assert lossless_for(through) == Lossless(drafter="ngram")
    assert lossless_for(through, "exit") == Lossless(exit=1)
    with pytest.raises(ValueError, match=r"can draft.*exits=\(4,\).*ngram"):
        lossless_for(stock, "exit")


@pytest.mark.usefixtures("unchecked_shapes")
def test_forbidden_combinations(model):
    with pytest.raises(ValueError, match=r"an exit that drafts.*Lossless\(exit=4\).*'ngram'"):
        Lossless()
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"max_draft of at least 1.*Got max_draft={wrong}"):
            Lossless(exit=2, max_draft=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"NGram\(longest=...\). Got ngram=\(1, 3\)"):
        Lossless(drafter="ngram", ngram=(1, 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="integers, shortest <= longest.*longest=2.5"):
        NGram(longest=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"shortest <= longest.*shortest=2, longest=1"):
        NGram(longest=1, shortest=2)
    with pytest.raises(ValueError, match=r"early exits \(1, 2\). Got exit=3"):
        run(model, mode=Lossless(exit=3))
    stock = Transformer(dataclasses.replace(TINY, exits=(4,)))
    with pytest.raises(ValueError, match=r"can draft.*exits=\(4,\).*ngram.*Plain\(\)"):
        generate(stock, model.params, PROMPTS, mode=Lossless(exit=2), max_new_tokens=8)
