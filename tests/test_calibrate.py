# SPDX-License-Identifier: Apache-2.0
"""Calibration: thresholds against exhaustive search, gates against a known target, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import run_dense
from test_forward import plain_nll

from utio_jax import predictive_entropy
from utio_jax.calibrate import _Study, calibrate
from utio_jax.calibration import load_calibration
from utio_jax.documents import Batch, batches_of, windows_of
from utio_jax.evaluate import evaluate
from utio_jax.gates import collect_signals, fit_gates, rank_correlation
from utio_jax.microbatches import MicroBatches
from utio_jax.thresholds import fit_thresholds

EXECUTOR = MicroBatches(min_bucket=4, block=32, query_block=8, key_step=16)


@pytest.mark.parametrize(
    ("gate", "tokens", "seed"),
    # Cheap gates; dear ones, which the budget must hold; and ones that are hardly worth their cost.
    [((0.01, 0.01), 40, 0), ((0.05, 0.05), 40, 0), ((0.01, 0.15), 60, 1), ((0.01, 0.2), 60, 7)],
)
def test_thresholds_are_as_good_as_exhaustive_search(
    gate: tuple[float, float], tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kl = np.stack([rng.exponential(1.0, tokens), rng.exponential(0.4, tokens), np.zeros(tokens)])
    scores = np.sqrt(kl[:2]) + rng.normal(0, 0.3, (2, tokens))
    cost = np.asarray([0.3, 0.6, 1.0])

    def stops(cuts: tuple[float, float]) -> np.ndarray:
        return np.where(scores[0] <= cuts[0], 0, np.where(scores[1] <= cuts[1], 1, 2))

    def outcome(cuts: tuple[float, float]) -> tuple[float, float]:
        left = stops(cuts)
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
            scores,
            kl,
            depths=(1, 2, 3),
            cost_of_depth=cost,
            cost_of_gate=np.asarray(gate),
            budget=budget,
        )
        found = dict(zip(fit.depths[:-1], fit.thresholds, strict=True))
        cuts = found.get(1, -np.inf), found.get(2, -np.inf)
        harm, mean = outcome(cuts)
        assert mean <= budget
        # A price of computation reaches the convex hull of all outcomes, not every point between.
        assert harm <= best + 0.05
        shares = np.bincount(stops(cuts), minlength=3) / tokens
        assert fit.fractions == pytest.approx([shares[depth - 1] for depth in fit.depths])
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


@pytest.mark.parametrize("name", ["learned", "utio_surrogate"])
@pytest.mark.parametrize(
    ("first", "budget"),
    # Below 0.6 only exits that spare everybody the K/V of the last layer can hold the budget.
    [(0, 0.56), (0, 0.72), (0, 0.9), (1, 0.93)],
)
def test_a_fit_is_the_least_harmful_choice_of_exits_and_thresholds_within_the_budget(
    name: str, first: int, budget: float
) -> None:
    rng = np.random.default_rng(5)
    tokens, exits, gate, head = 48, (1, 2, 3), 0.01, 0.08
    harm = np.stack([rng.exponential(1.0, tokens), rng.exponential(0.3, tokens), np.zeros(tokens)])
    # Each exit's scores tell of the harm there, and nothing of another exit's.
    predicted = np.sqrt(harm[:2]) + rng.normal(0, 0.1, (2, tokens))
    surrogate = np.sqrt(harm[:2]) + rng.normal(0, 0.1, (2, tokens))

    def share(depths: Sequence[int]) -> np.ndarray:
        return 0.2 * np.asarray(depths) + 0.4 * depths[-1] / 3

    study = _Study(
        exits=exits,
        predicted=predicted,
        surrogate=surrogate,
        harm=harm,
        share=share,
        gate=gate,
        head=head,
    )

    def outcome(depths: tuple[int, ...], cuts: tuple[float, ...]) -> tuple[float, float]:
        stop = np.full(tokens, len(depths) - 1, np.int32)
        decided = np.zeros(tokens)
        for index in reversed(range(len(cuts))):
            exit_index = exits.index(depths[index])
            score = predicted[exit_index] if name == "learned" else surrogate[first]
            stop = np.where(score <= cuts[index], index, stop)
        for index in range(len(cuts)):
            decided += stop >= index
        # The surrogate reads logits at the floor, which tokens that stop there need anyway.
        spent = gate * decided if name == "learned" else head * (stop > 0)
        of_exit = np.asarray([exits.index(depth) for depth in depths], np.int32)[stop]
        cost = float((share(depths)[stop] + spent).mean())
        return float(harm[of_exit, np.arange(tokens)].mean()), cost

    fit = study.fit(name, first, budget)
    assert fit is not None
    mine, cost = outcome(fit.depths, fit.thresholds)
    assert cost <= budget + 1e-9
    grids = [
        [*np.sort(predicted[index] if name == "learned" else surrogate[first])]
        for index in range(2)
    ]
    best = min(
        found
        for depths in ((exits[first:],) if first else ((1, 2), (1, 3), (1, 2, 3)))
        for cuts in itertools.product(*(grids[exits.index(depth)] for depth in depths[:-1]))
        for found, spent in [outcome(depths, cuts)]
        if spent <= cost + 1e-9
    )
    # A price per FLOP reaches the best choice for what it costs, if not for every budget.
    assert best - 1e-9 <= mine <= best + 0.05
    assert cost > budget - 0.1


def test_gates_learn_what_the_state_says_about_kl() -> None:
    rng = np.random.default_rng(1)
    states = rng.normal(size=(2, 4000, 16)).astype(np.float32)
    unit = states / np.sqrt((states**2).mean(-1, keepdims=True))
    root = np.abs(unit @ rng.normal(size=16) * 0.2) + 0.1
    gates = fit_gates(states, root**2, hidden=16, steps=800)
    for gate, x, target in zip(gates, states, root, strict=True):
        predicted = np.asarray(gate(jnp.asarray(x)))
        assert rank_correlation(predicted, target) > 0.9
        assert np.abs(predicted - target).mean() < 0.1 * target.mean()


def test_rank_correlation_of_monotone_and_of_unrelated_values() -> None:
    values = np.random.default_rng(2).normal(size=2000)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert abs(rank_correlation(values, np.random.default_rng(3).normal(size=2000))) < 0.1


@pytest.fixture(scope="module")
def text(tiny: Any) -> list[Batch]:
    """Documents that the full model wrote itself: it predicts them better than its exits do."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 64, (40, 32)).astype(np.int32)
    lengths = np.full(40, 32, np.int32)
    for position in range(31):
        (x,) = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=(4,))
        logits = np.asarray(tiny.decoder.unembed(tiny.params, x))[:, position]
        ids[:, position + 1] = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
    windows = windows_of([*ids[:-1], ids[-1, :20]], width=32)
    return list(batches_of(windows, rows=8, widths=[32], vocab_size=64))


def run(model: Any, text: list[Batch]) -> Any:
    return calibrate(
        model.decoder,
        model.params,
        text,
        model_sha256="a" * 64,
        text={"documents": 40},
        budgets=(0.3, 0.8),
        executor=EXECUTOR,
    )


def numbers_of(leaf: jax.Array) -> np.ndarray:
    """Returns a leaf of a policy as numbers; the control's PRNG key is opaque otherwise."""
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_a_calibration_is_deterministic_survives_its_files_and_refuses_other_models(
    tiny: Any, text: list[Batch], tmp_path: Path
) -> None:
    fitted, again = run(tiny, text), run(tiny, text)
    assert fitted.entries == again.entries
    assert 0.8 in fitted.entries["learned"]
    assert any("learned at 0.3" in reason for reason in fitted.info["unreachable"])
    correlations = fitted.info["rank_correlation_kl"]["learned"]
    assert min(correlations.values()) > 0.9, "each exit's gate must have learned that exit's KL"
    # Real passes, padding and all, come out at the budget; below it where no threshold is near.
    policies = {name: fitted.policy(name, 0.8) for name in fitted.entries}
    found = evaluate(tiny.decoder, tiny.params, text[::4], policies, executor=EXECUTOR)
    ratios = {name: quality.flops / quality.flops_full for name, quality in found.items()}
    assert abs(ratios["utio_surrogate"] - 0.8) < 0.03
    assert ratios["learned"] < 0.83
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


def test_signals_are_the_divergences_of_the_exits(tiny: Any, text: list[Batch]) -> None:
    signals = collect_signals(tiny.decoder, tiny.params, text)
    exits = tiny.decoder.config.exits
    predicted = 39 * 31 + 19
    assert signals.states.shape == (len(exits) - 1, predicted, tiny.decoder.config.embed_dim)
    assert signals.kl.shape == (len(exits), predicted)
    np.testing.assert_allclose(signals.kl[-1], 0, atol=1e-6)
    assert (signals.kl[0] > 0).mean() > 0.99

    rows = [(batch.token_ids, batch.lengths) for batch in text]
    harm = []
    for depth in exits:
        losses = []
        for ids, lengths in rows:
            mask = np.arange(31) < lengths[:, None] - 1
            states = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=(depth,))
            losses.append(plain_nll(tiny, ids, states[0])[mask])
        harm.append(np.concatenate(losses))
    np.testing.assert_allclose(signals.harm, np.asarray(harm) - harm[-1], atol=1e-3)
    for index, x in enumerate(signals.states.astype(np.float32)):
        mean = x.mean(axis=0)
        np.testing.assert_allclose(signals.mean_state[index], mean, atol=1e-4)
        entropy = np.asarray(predictive_entropy(tiny.decoder.unembed(tiny.params, jnp.asarray(x))))
        outlier = 1 - x @ mean / np.linalg.norm(x, axis=-1) / np.linalg.norm(mean)
        wanted = 2 / 3 * entropy + 1 / 3 * outlier
        np.testing.assert_allclose(signals.surrogate[index], wanted, atol=1e-3)


def test_models_without_exits_cannot_be_calibrated(tiny: Any, text: list[Batch]) -> None:
    config = dataclasses.replace(tiny.decoder.config, exits=(4,))
    with pytest.raises(ValueError, match="an exit before its last layer 4. Got exits=\\(4,\\)"):
        collect_signals(type(tiny.decoder)(config), tiny.params, text)
