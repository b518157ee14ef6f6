# SPDX-License-Identifier: Apache-2.0
"""Calibration: thresholds against exhaustive search, gates against a known target, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.calibrate import calibrate
from utio_jax.calibration import load_calibration
from utio_jax.documents import batches_of, windows_of
from utio_jax.gates import collect_signals, fit_gates, rank_correlation
from utio_jax.microbatches import MicroBatches
from utio_jax.thresholds import fit_thresholds

EXECUTOR = MicroBatches(min_bucket=4, block=32, query_block=8, key_step=16)


def test_thresholds_are_as_good_as_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    tokens = 40
    kl = np.stack([rng.exponential(1.0, tokens), rng.exponential(0.4, tokens), np.zeros(tokens)])
    scores = np.sqrt(kl[:2]) + rng.normal(0, 0.3, (2, tokens))
    cost, gate = np.asarray([0.3, 0.6, 1.0]), np.asarray([0.01, 0.01])

    def outcome(cuts: tuple[float, float]) -> tuple[float, float]:
        left = np.where(scores[0] <= cuts[0], 0, np.where(scores[1] <= cuts[1], 1, 2))
        gates = sum(gate[b] * (left >= b).mean() for b in range(2) if np.isfinite(cuts[b]))
        return float(kl[left, np.arange(tokens)].mean()), float(cost[left].mean() + gates)

    grid = [[-np.inf, *np.sort(row)] for row in scores]
    for budget in (0.5, 0.7, 0.85):
        best = min(
            harm
            for cuts in itertools.product(*grid)
            for harm, mean in [outcome(cuts)]
            if mean <= budget
        )
        fit = fit_thresholds(
            scores, kl, depths=(1, 2, 3), cost_of_depth=cost, cost_of_gate=gate, budget=budget
        )
        cuts = dict(zip(fit.depths[:-1], fit.thresholds, strict=True))
        harm, mean = outcome((cuts.get(1, -np.inf), cuts.get(2, -np.inf)))
        assert mean <= budget
        # A price of computation reaches the convex hull of all outcomes, not every point between.
        assert harm <= best + 0.03
        assert sum(fit.fractions) == pytest.approx(1)


def test_unreachable_budgets_are_refused() -> None:
    with pytest.raises(
        ValueError, match="at least 0.310, the cost of leaving at depth 1. Got budget=0.2"
    ):
        fit_thresholds(
            np.zeros((1, 4)),
            np.zeros((2, 4)),
            depths=(1, 2),
            cost_of_depth=np.asarray([0.3, 1.0]),
            cost_of_gate=np.asarray([0.01]),
            budget=0.2,
        )


def test_gates_learn_what_the_state_says_about_kl() -> None:
    rng = np.random.default_rng(1)
    states = rng.normal(size=(2, 4000, 16)).astype(np.float32)
    unit = states / np.sqrt((states**2).mean(-1, keepdims=True))
    root = np.abs(unit @ rng.normal(size=16) * 0.2) + 0.1
    gates = fit_gates(states, root**2, hidden=16, steps=800)
    for gate, x, target in zip(gates, states, root, strict=True):
        assert rank_correlation(np.asarray(gate(jnp.asarray(x))), target) > 0.9


def test_rank_correlation_of_monotone_and_of_unrelated_values() -> None:
    values = np.random.default_rng(2).normal(size=2000)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert abs(rank_correlation(values, np.random.default_rng(3).normal(size=2000))) < 0.1


def text(model: Any) -> list[Any]:
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 64, 200) for _ in range(6)]
    return list(batches_of(windows_of(documents, width=32), rows=8, widths=[32], vocab_size=64))


def run(model: Any) -> Any:
    return calibrate(
        model.decoder,
        model.params,
        text(model),
        model_sha256="a" * 64,
        text={"documents": 6},
        budgets=(0.3, 0.8),
        executor=EXECUTOR,
    )


def numbers_of(leaf: jax.Array) -> np.ndarray:
    """Returns a leaf of a policy as numbers; the control's PRNG key is opaque otherwise."""
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_a_calibration_is_deterministic_survives_its_files_and_refuses_other_models(
    tiny: Any, tmp_path: Path
) -> None:
    fitted, again = run(tiny), run(tiny)
    assert fitted.entries == again.entries
    assert 0.8 in fitted.entries["learned"]
    assert any("learned at 0.3" in reason for reason in fitted.info["unreachable"])
    fitted.save(tmp_path)
    loaded = load_calibration(tmp_path, model_sha256="a" * 64)
    assert loaded.entries == fitted.entries
    for name in ("learned", "random"):
        ours, theirs = fitted.policy(name, 0.8), loaded.policy(name, 0.8)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(numbers_of(a), numbers_of(b))
    with pytest.raises(ValueError, match="belongs to aaaaaaaaaaaa. Calibrate this model"):
        load_calibration(tmp_path, model_sha256="b" * 64)
    with pytest.raises(
        ValueError, match=r"a budget of \[0.8\], for which 'learned' was calibrated. Got 0.5"
    ):
        loaded.policy("learned", 0.5)
    with pytest.raises(ValueError, match="a policy of full, uniform, learned.*Got 'magic'"):
        loaded.policy("magic", 0.8)
    with pytest.raises(ValueError, match="calibration at .*There is none"):
        load_calibration(tmp_path / "nowhere", model_sha256="a" * 64)
    stored = json.loads((tmp_path / "policies.json").read_text())
    del stored["info"]["model_sha256"]
    (tmp_path / "policies.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="cannot be read"):
        load_calibration(tmp_path, model_sha256="a" * 64)


def test_signals_are_the_divergences_of_the_exits(tiny: Any) -> None:
    signals = collect_signals(tiny.decoder, tiny.params, text(tiny))
    exits = tiny.decoder.config.exits
    predicted = sum(len(d) - 1 for d in [range(200)] * 6)
    assert signals.states.shape == (len(exits) - 1, predicted, tiny.decoder.config.embed_dim)
    assert signals.kl.shape == (len(exits), predicted)
    np.testing.assert_allclose(signals.kl[-1], 0, atol=1e-6)
    assert (signals.kl[0] > 0).mean() > 0.99


def test_models_without_exits_cannot_be_calibrated(tiny: Any) -> None:
    config = dataclasses.replace(tiny.decoder.config, exits=(4,))
    with pytest.raises(ValueError, match="an exit before its last layer 4. Got exits=\\(4,\\)"):
        collect_signals(type(tiny.decoder)(config), tiny.params, text(tiny))
