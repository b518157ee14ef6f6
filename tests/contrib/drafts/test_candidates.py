# SPDX-License-Identifier: Apache-2.0
"""Gates on likely next tokens: their values from the whole head's logits, and their cost."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.models import Model, assert_equal, live_params
from helpers.policies import EXITS, scores_of

from utio_jax.calibration import SIGNALS, study_exits
from utio_jax.calibration.gates import SignalFitter, fit_gates
from utio_jax.contrib.drafts import CandidateGates, candidates, fit_candidates
from utio_jax.contrib.drafts.candidates import gate_inputs, likely_followers
from utio_jax.core.decoder import apply_exit_lens
from utio_jax.core.documents import Batch
from utio_jax.core.lens import Lens, lensed
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies import Calibration, StateGate, Thresholds, load_calibration

IDS = np.random.default_rng(3).integers(0, 64, (3, 17)).astype(np.int32)


@pytest.fixture(scope="module", params=["untied, capped", "through a lens"])
def model(request: Any) -> Model:
    changes = {"tie_embeddings": False, "logit_softcap": 3.0} if "untied" in request.param else {}
    decoder = Transformer(dataclasses.replace(TINY, **changes))
    params = live_params(decoder)
    if request.param != "through a lens":
        return Model(decoder, params)
    dim = decoder.config.embed_dim
    matrix = jax.random.normal(jax.random.key(5), (2, dim, dim)) * dim**-0.5
    lens = Lens(matrix=matrix, bias=jnp.full((2, dim), 0.1), exits=EXITS)
    return Model(*lensed(decoder, params, lens))


def signal_of(model: Any, count: int = 5) -> CandidateGates:
    vocab, inputs = model.decoder.config.vocab_size, model.decoder.config.embed_dim + 6
    rngs = [np.random.default_rng(token) for token in range(vocab)]
    keys = jax.random.split(jax.random.key(11), 4)
    gates = StateGate(
        hidden=jax.random.normal(keys[0], (2, inputs, 8)) * 0.3,
        hidden_bias=jax.random.normal(keys[1], (2, 8)),
        output=jax.random.normal(keys[2], (2, 8)),
        output_bias=jax.random.normal(keys[3], (2,)),
    )
    likely = np.stack([rng.permutation(vocab)[:count] for rng in rngs]).astype(np.int32)
    return CandidateGates(gates=gates, likely=jnp.asarray(likely), exits=EXITS)


def slow_value(model: Any, signal: Any, index: int, x: np.ndarray, place: tuple) -> float:
    """Returns one token's gate value from the whole head's logits, in float64."""
    seen = apply_exit_lens(model.decoder, model.params, jnp.asarray(x, jnp.float32), EXITS[index])
    whole = np.asarray(model.decoder.unembed(model.params, seen), np.float64)
    logits = np.sort(whole[np.asarray(signal.likely)[IDS[place]]])
    log_total = np.log(np.exp(logits).sum())
    p = np.exp(logits - log_total)
    size = np.log((x**2).mean() + 1e-6) / 2
    beside = [-(p * np.log(p)).sum(), logits[-1], logits[-1] - logits[-2], log_total, size]
    inputs = [x / np.sqrt((x**2).mean() + 1e-6), np.asarray([*beside, np.log1p(place[1])]) / 8]
    joined = np.concatenate(inputs)
    joined /= np.sqrt((joined**2).mean() + 1e-6)
    w, b, v, c = (
        np.asarray(leaf[index], np.float64)
        for leaf in (signal.gates.hidden, signal.gates.hidden_bias, signal.gates.output,
                     signal.gates.output_bias)
    )  # fmt: skip
    return float(np.maximum(joined @ w + b, 0) @ v + c)


def test_gates_see_what_an_exit_predicts_of_candidates(model: Model) -> None:
    signal, lengths = signal_of(model), np.full(3, 17, np.int32)
    states = cases.run_dense(model.decoder, model.params, IDS, lengths, depths=EXITS)
    expected = [
        [
            [slow_value(model, signal, index, x[row, at], (row, at)) for at in range(17)]
            for row in range(3)
        ]
        for index, x in enumerate(np.asarray(states, np.float64))
    ]
    np.testing.assert_allclose(scores_of(model, signal, IDS), expected, atol=2e-4)
    # Five columns of the head, the gate, and the lens where there is one; no whole head.
    dim, through = model.decoder.config.embed_dim, "lens" in model.params
    cost = 2 * (5 * dim + (dim + 6) * 8 + 8 + (dim * dim if through else 0))
    assert signal.flops(0, model.decoder, model.params) == cost
    assert not signal.reads_logits(0)


@pytest.mark.parametrize("kept", [[3, 9, 3], [9]])
def test_candidates_may_tie_or_be_one(tiny: Any, kept: list[int]) -> None:
    x = jax.random.normal(jax.random.key(0), (7, tiny.decoder.config.embed_dim))
    likely = jnp.broadcast_to(jnp.asarray(kept), (64, len(kept)))
    ids, options = jnp.arange(7), {"likely": likely, "depth": EXITS[0]}
    result = gate_inputs(tiny.decoder, tiny.params, x, ids, ids, **options)
    logits = np.sort(np.asarray(tiny.decoder.unembed(tiny.params, x))[:, kept], axis=-1)
    expected = logits[:, -1] - logits[:, -2] if len(kept) > 1 else np.zeros(7)
    np.testing.assert_allclose(8 * np.asarray(result)[:, -4], expected, atol=1e-5)


def test_followers_by_frequency_then_the_commonest() -> None:
    ids = np.asarray([[1, 2, 1, 3, 1, 2, 0, 9], [4, 4, 4, 1, 2, 9, 9, 9]], np.int32)
    batch = Batch(token_ids=ids, lengths=np.asarray([7, 5], np.int32), window=np.arange(2))
    result = likely_followers([batch], 10, count=3)
    assert result[1].tolist() == [2, 3, 1]  # Twice, once; then the commonest, 1 or 4.
    assert result[4].tolist() == [4, 1, 2]
    assert result[9].tolist() == [1, 4, 2] or result[9].tolist() == [1, 2, 4]
    assert likely_followers([batch], 10, count=99).shape == (10, 10)


@pytest.mark.slow
def test_they_are_fitted_and_kept_as_any_other(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SIGNALS, "candidates", fit_candidates)
    monkeypatch.setattr(candidates, "fit_gates", partial(fit_gates, steps=300, batch=256))
    ids = np.random.default_rng(0).integers(0, 64, (24, 32)).astype(np.int32)
    batch = Batch(token_ids=ids, lengths=np.full(24, 32, np.int32), window=np.arange(24))
    studies = study_exits(tiny.decoder, tiny.params, [batch])
    signal = SignalFitter(tiny.decoder, tiny.params, studies).fit("candidates")
    assert isinstance(signal, CandidateGates)
    assert signal.likely.shape == (64, 16)
    # Passes show gates what they were fitted to.
    scores, kl = scores_of(tiny, signal, ids)[:, :, :-1], studies[0].kl[:-1, :, :-1]
    for score, expected in zip(scores, kl, strict=True):
        assert np.corrcoef(score.ravel(), np.sqrt(expected).ravel())[0, 1] > 0.7

    entry = Thresholds(depths=(1, 4), thresholds=(0.5,), fractions=(0.4, 0.6))
    made = Calibration(
        entries={"candidates": {0.5: entry}},
        signals={"candidates": signal},
        info={"model_sha256": "a" * 64},
    )
    made.save(tmp_path)
    loaded = load_calibration(tmp_path, model_sha256="a" * 64).signals["candidates"]
    assert_equal(jax.tree.leaves(loaded), jax.tree.leaves(signal))
