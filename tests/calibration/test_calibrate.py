# SPDX-License-Identifier: Apache-2.0
"""Calibration: thresholds against exhaustive search, gates against a known target, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import EXECUTOR, calibrated, run_dense
from helpers.folders import edit_json
from helpers.models import assert_equal, plain_nll
from scipy.stats import spearmanr

from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import hindsight_policies
from utio_jax.calibration.gates import SIGNALS, fit_gates, fit_linear_gates
from utio_jax.calibration.goals import Budgets
from utio_jax.calibration.lens import fit_lens
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import (
    check_varied,
    predicted_tokens,
    study_exits,
)
from utio_jax.calibration.thresholds import _sweep, fit_thresholds, leave_at
from utio_jax.core.arrays import normalise
from utio_jax.core.documents import Batch
from utio_jax.core.pytrees import pytree, static
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.policies import Position
from utio_jax.policies.signals import ScoreTable, SignalBase
from utio_jax.policies.store import Calibration, Thresholds, check_storable, load_calibration


def test_tokens_of_the_least_score_exit() -> None:
    """Their threshold is no -inf, at which none exits."""
    scores, kl = np.full((1, 10), -np.inf), np.stack([np.arange(10.0), np.zeros(10)])
    scores[0, 6:] = 1.0
    fit = fit_thresholds(
        scores,
        kl,
        depths=(2, 4),
        cost_of_depth=np.asarray([0.5, 1.0]),
        cost_of_gate=np.zeros(1),
        budget=0.7,
    )
    assert fit.fractions == (0.6, 0.4)
    assert leave_at(scores, np.asarray(fit.thresholds)).tolist() == [0] * 6 + [1] * 4


@pytest.mark.parametrize(
    ("gate", "tokens"),
    # Cheap gates; dear ones, which the budget must hold; and ones that are hardly worth their cost.
    [((0.01, 0.01), 40), ((0.05, 0.05), 40), ((0.01, 0.15), 60), ((0.01, 0.2), 60)],
)
def test_thresholds_are_as_good_as_exhaustive_search(
    gate: tuple[float, float], tokens: int
) -> None:
    rng = np.random.default_rng(0)
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
    outcomes = [outcome(cuts) for cuts in itertools.product(*grid)]
    for budget in (0.5, 0.7, 0.85):
        best = min(harm for harm, mean in outcomes if mean <= budget)
        fit = fit_thresholds(
            scores,
            kl,
            depths=(1, 2, 3),
            cost_of_depth=cost,
            cost_of_gate=np.asarray(gate),
            budget=budget,
        )
        result = dict(zip(fit.depths[:-1], fit.thresholds, strict=True))
        cuts = result.get(1, -np.inf), result.get(2, -np.inf)
        harm, mean = outcome(cuts)
        assert mean <= budget
        # Exact at the corners of the convex hull of all outcomes; between them within a token's
        # worth or two. Corners alone would be up to 0.28 off in these cases.
        assert harm <= best + 0.03
        shares = np.bincount(stops(cuts), minlength=3) / tokens
        assert fit.fractions == pytest.approx([shares[depth - 1] for depth in fit.depths])
        assert sum(fit.fractions) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_at_a_price_no_threshold_alone_could_be_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kl = np.stack([rng.exponential(size, 50) for size in (1.0, 0.6, 0.3)] + [np.zeros(50)])
    scores = np.sqrt(kl[:3]) + rng.normal(0, 0.3, (3, 50))
    depth_price, gate_price = np.asarray([0.1, 0.3, 0.5, 1.0]), rng.uniform(0.0, 0.25, 3)

    def total(cuts: np.ndarray) -> float:
        left = leave_at(scores, cuts)
        gates = [gate_price[b] * (left >= b).sum() for b in range(3) if np.isfinite(cuts[b])]
        return float((kl[left, np.arange(50)] + depth_price[left]).sum() + sum(gates))

    result = _sweep(scores, kl, np.argsort(scores, axis=1), depth_price, gate_price)
    for boundary in range(3):
        for cut in (-np.inf, *scores[boundary]):
            other = result.copy()
            other[boundary] = cut
            assert total(result) <= total(other) + 1e-9


@pytest.mark.check
def test_gates_learn_what_the_state_says_about_kl() -> None:
    rng = np.random.default_rng(1)
    states = rng.normal(size=(2, 4000, 16)).astype(np.float32)
    unit = states / np.sqrt((states**2).mean(-1, keepdims=True))
    root = np.abs(unit @ rng.normal(size=16) * 0.2) + 0.1
    gates = fit_gates(states, root, steps=600, batch=512)
    for index, (x, target) in enumerate(zip(states, root, strict=True)):
        correlation: Any = spearmanr(gates.at(index)(jnp.asarray(x)), target)
        assert correlation.statistic > 0.9
    classifier = fit_gates(states, root > 0.3, loss="logistic", hidden=16, steps=600)
    for index, (x, target) in enumerate(zip(states, root, strict=True)):
        logit = np.asarray(classifier.at(index)(jnp.asarray(x)))
        assert ((logit > 0) == (target > 0.3)).mean() > 0.85


def test_tokens_of_one_score_leave_together() -> None:
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 3, (1, 600)).astype(np.float32)
    scores[0, :60] = np.inf  # Who may not stop.
    harm = np.stack([0.1 * scores[0] + rng.normal(0, 1, 600), np.zeros(600)])
    harm[0, :60] = -100.0
    fit = fit_thresholds(
        scores,
        harm,
        depths=(1, 2),
        cost_of_depth=np.asarray([0.5, 1.0]),
        cost_of_gate=np.zeros(1),
        budget=0.85,
    )
    left = leave_at(scores, np.asarray(fit.thresholds))
    assert fit.fractions[0] == (left == 0).mean()
    assert np.isfinite(fit.thresholds[0])
    assert 0.5 * fit.fractions[0] + 1.0 * fit.fractions[1] <= 0.85
    assert (left[:60] == 1).all()


@pytest.mark.check
def test_a_calibration_keeps_to_its_budget_and_to_its_model(
    tiny: Any, text: list[Batch], fitted: Calibration, tmp_path: Path
) -> None:
    assert 0.8 in fitted.entries["learned"]
    goal = fitted.info["goals"]["learned"]
    assert goal["unreachable"] == [0.3]
    assert list(goal["nll_increase_pct_by_budget"]) == ["0.8"]
    # Real passes, padding and all, come out at the budget; below it where no threshold is near.
    policies = {name: fitted.policy(name, 0.8) for name in fitted.entries}
    result = evaluate(tiny.decoder, tiny.params, text[::4], policies, executor=EXECUTOR)
    ratios = {name: quality.flops / quality.flops_full for name, quality in result.items()}
    assert abs(ratios["utio_surrogate"] - 0.8) < 0.03
    assert ratios["learned"] < 0.83
    fitted.save(tmp_path)
    loaded = load_calibration(tmp_path, model_sha256="a" * 64)
    assert loaded.entries == fitted.entries
    with pytest.raises(ValueError, match="belongs to aaaaaaaaaaaa. Make one for this model"):
        load_calibration(tmp_path, model_sha256="b" * 64)
    with pytest.raises(
        ValueError, match=r"a budget of \[0.8\], for which 'learned' was calibrated. Got 0.5"
    ):
        loaded.policy("learned", 0.5)
    with pytest.raises(ValueError, match="a policy of full, uniform, learned.*Got 'magic'"):
        loaded.policy("magic", 0.8)


@pytest.mark.slow
def test_signals_are_calibrated_and_survive_their_files(
    tiny: Any, text: list[Batch], tmp_path: Path
) -> None:
    names = tuple(SIGNALS)
    fitted = calibrated(tiny, text, policies=names, budgets=(0.85,))
    assert set(fitted.signals) == set(fitted.entries)
    fitted.save(tmp_path)
    loaded = load_calibration(tmp_path, model_sha256="a" * 64)
    result = {name for name, entries in fitted.entries.items() if 0.85 in entries}
    # Looks cost too much for the smallest of models, of 64 tokens' vocabulary and 4 layers.
    assert result >= {"learned", "classifier", "hazard", "position", "utio_before"}
    for name in result:
        ours, theirs = fitted.policy(name, 0.85), loaded.policy(name, 0.85)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert_equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))
        batch = text[:1]
        row = evaluate(tiny.decoder, tiny.params, batch, {"": theirs}, executor=EXECUTOR)[""]
        assert row.flops / row.flops_full < 1.0, name


def test_a_policy_that_misses_its_goal_has_no_entry_and_hides_no_control(
    tiny: Any, text: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Thresholds(depths=(1, 4), thresholds=(0.5,), fractions=(0.5, 0.5))
    reach = lambda _, search, signal, say: ({0.5: entry} if signal.name == "position" else {}, {})  # noqa: E731
    monkeypatch.setattr(Budgets, "reach", reach)
    monkeypatch.setattr(ThresholdSearch, "with_row_shares", lambda *args: args[-1])
    fitted = calibrated(tiny, text[::2], policies=("entropy", "position"))
    assert fitted.entries == {"position": {0.5: entry}}
    assert [*fitted.signals] == ["position"]
    assert [*fitted.info["goals"]] == ["entropy", "position"]
    missed = {"learned": {}, **fitted.entries}  # As files of earlier versions have it.
    fitted = dataclasses.replace(fitted, entries=missed)
    assert fitted.fitted["random"] == {0.5: entry}


def test_signals_of_no_known_type_are_refused(tmp_path: Path) -> None:
    calibration_of(Position()).save(tmp_path)
    stored = json.loads((tmp_path / "policies.json").read_text())
    stored["signals"]["own"]["type"] = "os.system"
    (tmp_path / "policies.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="do not fit each other.*Calibrate again"):
        load_calibration(tmp_path, model_sha256="b")


@pytree
class Fields(SignalBase):
    """A signal with fields of any kind."""

    name: str = static(default="fields")
    bands: Any = static(default=())
    weights: Any = 2.0

    def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
        return boundary.x[..., 0], memory


def calibration_of(signal: Any) -> Calibration:
    entry = Thresholds(depths=(1, 4), thresholds=(0.5,), fractions=(0.5, 0.5))
    info = {"model_sha256": "b"}
    return Calibration(entries={"own": {0.5: entry}}, signals={"own": signal}, info=info)


def test_fields_of_a_signal_of_ones_own_come_back_as_they_were(tmp_path: Path) -> None:
    ones, bands = jnp.ones((2, 3)), ((1, 2), ("a", None), True)
    for weights in (ones, {"low": ones, "high": {"bias": ones[0]}}, None, 0.5):
        signal = Fields(bands=bands, weights=weights)
        calibration_of(signal).save(tmp_path)
        loaded: Any = load_calibration(tmp_path, model_sha256="b").signals["own"]
        assert jax.tree.structure(loaded) == jax.tree.structure(signal)
        assert hash(jax.tree.structure(loaded)) == hash(jax.tree.structure(signal))
        assert_equal(jax.tree.leaves(loaded), jax.tree.leaves(signal))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"weights": [jnp.ones(3), jnp.ones(3)]}, r"Fields.weights .*Got list"),
        ({"weights": {"a": {"b": (jnp.ones(3),)}}}, r"Fields.weights\['a'\]\['b'\] .*Got tuple"),
        ({"weights": {"a.b": jnp.ones(3)}}, "names without dots, in field Fields.weights"),
        ({"weights": jax.random.key(0)}, "Fields.weights .*Got PRNGKeyArray"),
        ({"bands": jnp.float32}, "static field Fields.bands .*Got .*float32"),
    ],
)
def test_fields_that_a_file_cannot_hold_are_refused_by_name(
    fields: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=name):
        calibration_of(Fields(**fields)).save(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_field_named_as_the_class_is_in_files_is_refused() -> None:
    @pytree
    class Typed(SignalBase):
        name: str = static(default="typed")
        type: str = static(default="own")

    with pytest.raises(ValueError, match="other names than `type`.*Got Typed.type"):
        check_storable(Typed())


def test_a_text_of_one_token_is_refused_before_anything_is_fitted(tiny: Any) -> None:
    """Its states are the same everywhere: gates and lenses would be fitted to rounding errors."""
    rows = np.full((32, 32), 7, np.int32)
    one = Batch(token_ids=rows, lengths=np.full(32, 32, np.int32), window=np.arange(32))
    messages: list[str] = []
    with pytest.raises(ValueError, match="text whose tokens differ.*states do not vary"):
        calibrate(
            tiny.decoder, tiny.params, [one], policies=("position",), progress=messages.append
        )
    assert not [message for message in messages if "weights" in message]
    with pytest.raises(ValueError, match="states do not vary"):
        fit_lens(tiny.decoder, tiny.params, [one])
    two = dataclasses.replace(one, token_ids=np.where(np.arange(32) % 2, rows, 8).astype(np.int32))
    (study,) = study_exits(tiny.decoder, tiny.params, [two])
    large = 1e25 * study.states.astype(np.float32)
    check_varied(large.reshape(len(large), -1, large.shape[-1]))


@pytest.mark.check
def test_states_beyond_float16_are_kept_as_they_are(tiny: Any, text: list[Batch]) -> None:
    """The second batch's states are too large for it; the first one's stay in float16."""
    scale = np.float32(1e6)
    params = dict(tiny.params)
    embedding = np.array(params["embedding"]["embedding"])
    hot = int(text[1].token_ids[0, 3])
    embedding[hot] *= scale
    params["embedding"] = {"embedding": jnp.asarray(embedding)}
    cold = dataclasses.replace(
        text[0], token_ids=np.where(text[0].token_ids == hot, hot ^ 1, text[0].token_ids)
    )
    result = study_exits(tiny.decoder, params, [cold, text[1]])
    assert [study.states.dtype for study in result] == [np.float16, np.float32]
    for study, batch in zip(result, (cold, text[1]), strict=True):
        real = np.arange(32) < batch.lengths[:, None]
        states = run_dense(
            tiny.decoder, params, batch.token_ids, batch.lengths, depths=tiny.decoder.config.exits
        )
        for actual, theirs in zip(study.states, states, strict=False):
            np.testing.assert_allclose(actual[real], np.asarray(theirs)[real], rtol=2e-3, atol=1e-2)
    assert np.abs(result[1].states).max() > 65504
    merged = predicted_tokens(result, [study.states for study in result])
    assert np.isfinite(merged).all()
    assert merged.dtype == np.float32
    params["embedding"] = {"embedding": jnp.asarray(embedding).at[hot].set(jnp.inf)}
    with pytest.raises(ValueError, match="finite states at every exit.*in batch 1 of the text"):
        study_exits(tiny.decoder, params, [cold, text[1]])
    with pytest.raises(ValueError, match="finite states at every exit in batch 1 of the text"):
        fit_lens(tiny.decoder, params, [cold, text[1]])


@pytest.mark.check
def test_a_study_holds_the_divergences_and_the_harm_of_the_exits(
    tiny: Any, text: list[Batch]
) -> None:
    studies = study_exits(tiny.decoder, tiny.params, text)
    merge = lambda field: predicted_tokens(studies, [getattr(s, field) for s in studies])  # noqa: E731
    kl, differs = merge("kl"), merge("differs")
    exits = tiny.decoder.config.exits
    predicted = 39 * 31 + 19
    assert merge("states").shape == (len(exits) - 1, predicted, tiny.decoder.config.embed_dim)
    assert kl.shape == differs.shape == (len(exits), predicted)
    np.testing.assert_allclose(kl[-1], 0, atol=1e-6)
    assert (kl[0] > 0).mean() > 0.99
    assert not differs[-1].any(), "the last exit is the outcome itself: no gate learns from it"
    assert 0 < differs[0].mean() < 1

    losses = []
    for batch in text:
        ids, lengths = batch.token_ids, batch.lengths
        mask = np.arange(31) < lengths[:, None] - 1
        states = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=exits)
        losses.append([plain_nll(tiny, ids, x)[mask] for x in states])
    harm = np.concatenate(losses, axis=1)
    np.testing.assert_allclose(merge("harm"), harm - harm[-1], atol=1e-3)


@pytest.mark.check
def test_the_oracle_knows_the_divergence_of_every_exit(tiny: Any, text: list[Batch]) -> None:
    studies = study_exits(tiny.decoder, tiny.params, text)
    find = partial(hindsight_policies, tiny.decoder, tiny.params, studies, executor=EXECUTOR)
    assert find(0.01) == [], "below the first exit"
    policies = find(0.8)
    harms, blind, shares = [], [], []
    for policy, study in zip(policies, studies, strict=True):
        assert policy.name == "oracle_kl"
        assert not policy.causal
        harm = study.kl[:, study.predicted]
        exits = np.asarray(tiny.decoder.config.exits)
        assert isinstance(policy.signal, ScoreTable)
        depths = np.asarray(policy.signal.scores)
        left = np.searchsorted(exits, depths[study.predicted])
        harms.append(harm[left, np.arange(left.size)])
        blind.append(harm[np.random.default_rng(0).permutation(left), np.arange(left.size)])
        row = evaluate(tiny.decoder, tiny.params, [study.batch], {"": policy}, executor=EXECUTOR)
        shares.append(row[""].flops / row[""].flops_full)
    assert np.concatenate(harms).mean() < 0.8 * np.concatenate(blind).mean()
    assert np.mean(shares) == pytest.approx(0.8, abs=0.08)


@pytree
class Part:
    """Of a signal, and no signal itself."""

    directions: jax.Array
    scale: float = 2.0


@pytree
class Projected(SignalBase):
    """Scores states along a direction of each exit."""

    part: Part
    anything: Any = None
    exits: tuple[int, ...] = static()
    name: str = static(default="projected")

    def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
        along = self.part.directions[self.exits.index(boundary.depth)]
        return boundary.x @ along * self.part.scale, memory


@pytest.mark.check
def test_signals_of_ones_own_are_fitted_and_survive_their_files(
    tiny: Any, text: list[Batch], tmp_path: Path
) -> None:
    def fit(fitter: Any) -> Projected:
        predicted = [study.states[:, study.predicted] for study in fitter.studies]
        states = np.concatenate(predicted, axis=1).astype(np.float32)
        kl = np.concatenate([study.kl[:-1, study.predicted] for study in fitter.studies], axis=1)
        pairs = zip(states, kl, strict=True)
        directions = [np.linalg.lstsq(x, target, rcond=None)[0] for x, target in pairs]
        part = Part(directions=jnp.asarray(directions, jnp.float32))
        return Projected(part=part, exits=fitter.exits)

    fits: Any = {"mine": fit}
    fitted = calibrated(tiny, text, policies=fits, budgets=(0.85,))
    assert [*fitted.entries] == ["mine"]
    fitted.save(tmp_path)
    file = tmp_path / "policies.json"
    stored = json.loads(file.read_text())["signals"]
    assert stored["mine"]["type"] == f"{Projected.__module__}.Projected"
    loaded = load_calibration(tmp_path, model_sha256="a" * 64)
    ours, theirs = fitted.policy("mine", 0.85), loaded.policy("mine", 0.85)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert_equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    # A module of another name defines it again, as a script does whose class is now imported.
    stored["mine"]["type"] = "__main__.Projected"
    edit_json(file, signals=stored)
    again = load_calibration(tmp_path, model_sha256="a" * 64)
    assert isinstance(again.signals["mine"], Projected)


# Gates on a row's mean state: linear, with the penalty that rows left out ask for.


def test_gates_follow_what_the_state_says_and_nothing_else() -> None:
    """Where harm is a function of the state it is found; where it is noise, all rows are alike."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2, 60, 24))
    unit = np.asarray(normalise(jnp.asarray(means)))
    direction = rng.normal(size=24)
    target = np.stack([3 + unit[0, :, :] @ direction, 3 + rng.normal(size=60)])
    gates = fit_linear_gates(means[:, :40], target[:, :40])
    follows, noise = (
        np.asarray(gates.at(index)(jnp.asarray(means[index, 40:], jnp.float32)))
        for index in range(2)
    )
    np.testing.assert_allclose(follows, target[0, 40:], atol=0.01)
    assert noise.std() < 0.3, "on rows that it has not seen, where noise has 1"
    assert noise.mean() == pytest.approx(target[1, :40].mean(), abs=0.3)


def test_the_penalty_is_that_of_rows_left_out() -> None:
    """The closed form is what fitting without each row in turn gives."""
    rng = np.random.default_rng(1)
    means = rng.normal(size=(1, 12, 5))
    unit = np.asarray(normalise(jnp.asarray(means)), np.float64)[0]
    expected = unit @ rng.normal(size=5) + 0.7 * rng.normal(size=12)
    result = fit_linear_gates(means, expected[None])
    top = np.linalg.svd(unit - unit.mean(0), compute_uv=False)[0] ** 2

    def fitted(rows: np.ndarray, penalty: float, keep: np.ndarray) -> np.ndarray:
        # The penalty of a fit to fewer rows, whose centre is its own.
        x, y = rows - rows.mean(0), keep - keep.mean()
        return np.linalg.solve(x.T @ x + penalty * np.eye(5), x.T @ y)

    def left_out(penalty: float) -> float:
        total = 0.0
        for row in range(12):
            kept = np.arange(12) != row
            weight = fitted(unit[kept], penalty, expected[kept])
            guess = expected[kept].mean() + (unit[row] - unit[kept].mean(0)) @ weight
            total += (expected[row] - guess) ** 2
        return total

    best = min(np.geomspace(1e-6, 1e6, 25) * top, key=left_out)
    weight = fitted(unit, best, expected)
    np.testing.assert_allclose(np.asarray(result.hidden)[0, :, 0], weight, atol=1e-4)
