# SPDX-License-Identifier: Apache-2.0
"""Routers of FiRST: the harm of a segment, learned from prompts, within a number of layers."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.layer_sets import reference_layer_sets

from utio_jax.calibration.studies import study_exits
from utio_jax.contrib.layer_skipping import fit_prompt_sets
from utio_jax.contrib.layer_skipping.fitting import _threshold, skipping_harm
from utio_jax.contrib.layer_skipping.scoring import run_sets
from utio_jax.core.documents import Batch

PROMPT = 4


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    shape, lengths = (2, 3, 16), np.array([16, 11, 4], np.int32)
    ids = np.random.default_rng(0).integers(0, 64, shape).astype(np.int32)
    return [Batch(token_ids=token_ids, lengths=lengths, window=np.arange(3)) for token_ids in ids]


def test_harm_is_what_skipping_one_segment_alone_does(tiny: Any, batches: list[Batch]) -> None:
    harm = skipping_harm(tiny.decoder, tiny.params, batches, prompt=PROMPT, executor=cases.EXECUTOR)
    depths = tiny.decoder.config.exits
    assert harm.shape == (len(depths) - 1, 6)
    # Rows of four tokens have nothing behind a prompt of four.
    np.testing.assert_array_equal(np.isnan(harm), [[False, False, True] * 2] * len(harm))
    oracle = jax.jit(reference_layer_sets, static_argnums=0)
    ids, lengths = batches[1].token_ids, batches[1].lengths

    def distribution(runs: np.ndarray) -> np.ndarray:
        x = oracle(tiny.decoder, tiny.params, ids, lengths, runs)
        logits = tiny.decoder.unembed(tiny.params, x).astype(jnp.float32)
        return np.asarray(jax.nn.log_softmax(logits), np.float64)

    everything = np.ones((depths[-1], 3, 16), bool)
    full = distribution(everything)
    for index, (start, stop) in enumerate(itertools.pairwise(depths)):
        runs = everything.copy()
        runs[start:stop, :, PROMPT:] = False
        kl = (np.exp(full) * (full - distribution(runs))).sum(-1)
        for row, length in enumerate(lengths[:2].tolist()):
            expected = kl[row, PROMPT : length - 1].mean()
            assert harm[index, 3 + row] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_rows_choose_no_more_layers_than_wanted(tiny: Any, batches: list[Batch]) -> None:
    studies = study_exits(tiny.decoder, tiny.params, batches)
    rows, executor = (tiny.decoder, tiny.params), cases.EXECUTOR
    fit = partial(fit_prompt_sets, *rows, studies, prompt=PROMPT, executor=executor)
    policy, depths = fit(layers=3), tiny.decoder.config.exits
    assert policy.name == "first"
    assert policy.depths == depths
    ran = []
    for batch in batches:
        result = run_sets(*rows, batch.token_ids, batch.lengths, policy, executor=executor)
        depths_run = np.asarray(result.depths)
        np.testing.assert_array_equal(depths_run[:2, :PROMPT], depths[-1])
        for row, length in enumerate((16, 11)):
            assert len({*depths_run[row, PROMPT:length].tolist()}) == 1, "one set behind a prompt"
            ran.append(depths_run[row, PROMPT])
    assert depths[0] <= np.mean(ran) <= 3
    assert (np.asarray(fit(layers=depths[-1]).thresholds) == -np.inf).all()
    for wrong in (0, depths[-1] + 1):
        with pytest.raises(ValueError, match="Wanted a prompt of at least 1 token, and from"):
            fit(layers=wrong)
    with pytest.raises(ValueError, match="Wanted rows of more than 17 tokens"):
        fit(layers=3, prompt=16)


@pytest.mark.slow
def test_the_threshold_is_the_lowest_that_fits() -> None:
    scores = np.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]])
    layers = np.array([2, 4])
    result = _threshold(scores, layers, target=3.0)
    mean = lambda threshold: (layers[:, None] * (scores > threshold)).sum(0).mean()  # noqa: E731
    assert mean(result) <= 3.0
    assert all(mean(score) > 3.0 for score in scores.ravel() if score < result - 0.11)
    assert np.abs(scores - result).min() == pytest.approx(0.05)
    assert mean(_threshold(scores, layers, target=0.0)) == 0
    assert _threshold(scores, layers, target=6.0) == -np.inf
