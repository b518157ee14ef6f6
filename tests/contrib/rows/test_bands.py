# SPDX-License-Identifier: Apache-2.0
"""Rows that stop outside a band of losses: decided as a loop over rows decides, and charged so."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model, live_params

from utio_jax import score
from utio_jax.calibration.guarantee import half_of
from utio_jax.contrib.rows import UncertainBand, fit_band, row_losses
from utio_jax.core.documents import Batch
from utio_jax.models.transformer import Transformer
from utio_jax.policies.depth import uniform
from utio_jax.staircase import Scores

EXITS = (1, 2, 4)
LENGTHS = np.array([16, 9, 2, 1, 0, 16, 12, 16], np.int32)
SLOPES, OFFSETS = np.array([0.7, 0.9, 1.0], np.float32), np.array([1.5, 0.4, 0.0], np.float32)


@pytest.fixture(scope="module")
def batch(tiny: Any) -> Batch:
    ids = np.asarray(tiny.tokens(len(LENGTHS), 16, seed=2))
    ids = np.where(np.arange(16) < LENGTHS[:, None], ids, 0).astype(np.int32)
    return Batch(token_ids=ids, lengths=LENGTHS, window=np.arange(len(LENGTHS)))


@pytest.fixture(scope="module")
def losses(tiny: Any, batch: Batch) -> np.ndarray:
    return row_losses(tiny.decoder, tiny.params, [batch])


def band(limit: float) -> UncertainBand:
    return UncertainBand(limit=limit, slopes=SLOPES, offsets=OFFSETS, exits=EXITS)


RUN = jax.jit(score, static_argnums=0, static_argnames="kv")


def run(tiny: Any, batch: Batch, policy: Any, **options: Any) -> Scores:
    ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
    return RUN(tiny.decoder, tiny.params, ids, lengths, policy, **options)


def test_losses_are_those_of_uniform_exits(tiny: Any, batch: Batch, losses: np.ndarray) -> None:
    assert losses.shape == (len(EXITS), len(LENGTHS))
    np.testing.assert_array_equal(np.isnan(losses).all(axis=0), LENGTHS < 2)
    for row, depth in enumerate(EXITS):
        result = run(tiny, batch, uniform(depth))
        for index in np.flatnonzero(LENGTHS > 1):
            nll = -np.asarray(result.log_likelihood)[index, : LENGTHS[index] - 1]
            np.testing.assert_allclose(losses[row, index], nll.mean(), rtol=1e-5)


@pytest.mark.parametrize("margins", [(0.3, 0.1), (np.inf, 0.05), (0, 0), (np.inf, np.inf)])
def test_rows_stop_where_a_loop_over_rows_says(
    tiny: Any, batch: Batch, losses: np.ndarray, margins: tuple[float, float]
) -> None:
    estimates = OFFSETS[:, None] + SLOPES[:, None] * losses
    limit = float(np.nanmedian(estimates[1]))
    signal = band(limit)
    result = run(tiny, batch, signal.policy(margins))
    judged = signal.judge(result)
    for row, length in enumerate(LENGTHS.tolist()):
        if length < 2:  # Nothing is known of it: as if it lay on the limit.
            known = [0.0, 0.0]
        else:
            known = np.abs(estimates[:2, row] - limit).tolist()
        expected = next((e for e, d, m in zip(EXITS, known, margins, strict=False) if d >= m), 4)
        np.testing.assert_array_equal(result.depths[row, :length], expected)
        np.testing.assert_array_equal(result.depths[row, length:], 0)
        if length < 2:
            assert np.isnan(judged.estimate[row])
            assert not judged.above[row]
            continue
        estimate = estimates[EXITS.index(expected), row]
        np.testing.assert_allclose(judged.estimate[row], estimate, rtol=1e-4)
        assert judged.depths[row] == expected
        assert judged.above[row] == (estimate > limit)
    stopped = [np.asarray(result.depths).max(axis=1) == depth for depth in EXITS]
    if margins == (0, 0):
        assert stopped[0][LENGTHS > 0].all()
        assert int(np.asarray(result.work.queries)[1:].sum()) == 0
    if margins == (np.inf, np.inf):
        assert stopped[2][LENGTHS > 0].all()
        assert int(np.asarray(result.work.decisions).sum()) == 0


def drawn(rows: int = 800, seed: int = 0) -> np.ndarray:
    """Returns losses of made rows: shallower exits are worse, and noisier."""
    rng = np.random.default_rng(seed)
    full = rng.normal(2.0, 0.6, rows)
    worse = [1.3 * full + 0.8 + rng.normal(0, 0.25, rows), 1.1 * full + 0.2]
    return np.stack([worse[0], worse[1] + rng.normal(0, 0.05, rows), full])


def test_every_rung_is_what_replaying_it_gives(tiny: Any) -> None:
    table, limit = drawn(), 2.2
    fitted = fit_band(tiny.decoder, tiny.params, table, limit=limit, tokens=16, seed=5)
    half = half_of(np.arange(table.shape[1]), 5)
    assert fitted.tested == (~half).sum()
    signal = fitted.ladder[0].setting.signal
    lines = [np.polyfit(scores[half], table[-1, half], 1) for scores in table[:-1]]
    np.testing.assert_allclose(signal.slopes, [*(line[0] for line in lines), 1], rtol=1e-5)
    ratios = [rung.cost for rung in fitted.ladder]
    assert ratios == sorted(ratios, reverse=True)
    assert 0 < ratios[-1] < 0.5
    passed = []
    for number, rung in enumerate(fitted.ladder):
        wrong = 0
        margins = -np.asarray(rung.setting.thresholds)
        for row in np.flatnonzero(~half):
            side = table[-1, row] > limit
            for line, loss, margin in zip(lines, table[:-1, row], margins, strict=True):
                estimate = np.polyval(line, loss)
                if abs(estimate - limit) >= margin:
                    side = estimate > limit
                    break
            wrong += side != (table[-1, row] > limit)
        assert rung.risk == pytest.approx(wrong / (~half).sum())
        if len(passed) == number and rung.p_value <= 0.05:
            passed.append(rung)
    assert fitted.chosen is passed[-1].setting
    assert passed[-1].risk < 0.02 < fitted.ladder[-1].risk
    assert fitted.chosen.depths == EXITS


def test_where_exits_say_nothing_all_rows_run_full_depth(tiny: Any) -> None:
    rng = np.random.default_rng(1)
    table = rng.normal(2.0, 0.5, (3, 800))
    fitted = fit_band(tiny.decoder, tiny.params, table, limit=2.0, tokens=16)
    assert fitted.ladder[0].risk > 0.02
    assert fitted.chosen is None


def test_a_model_with_branches_is_refused(tiny: Any, batch: Batch) -> None:
    """Branches are chosen where they begin: what a branch ends with is no reason to choose it."""
    shared: dict[str, Any] = {"kv_source": ((0,), (1,), (1,), (1,)), "branches": (1,)}
    decoder = Transformer(dataclasses.replace(tiny.decoder.config, **shared))
    model = Model(decoder, live_params(decoder))
    for call in (
        lambda: row_losses(model.decoder, model.params, [batch]),
        lambda: fit_band(model.decoder, model.params, drawn(), limit=2.2, tokens=16),
        lambda: run(model, batch, band(2.2).policy((0.3, 0.1))),
    ):
        with pytest.raises(ValueError, match="a model without exit branches, for rows that stop"):
            call()
