# SPDX-License-Identifier: Apache-2.0
"""What calibration is asked for is what the policies then do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.cases import EXECUTOR, calibrated
from helpers.models import Model

from utio_jax import uniform
from utio_jax.calibration import calibrate, goals
from utio_jax.calibration.gates import SignalFitter
from utio_jax.calibration.goals import Budgets, MaxDisagreement, MaxLoss
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.core.documents import Batch
from utio_jax.core.files import hash_params
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.quality import Quality
from utio_jax.models.transformer import Transformer
from utio_jax.policies import Patience
from utio_jax.policies.store import Calibration, Thresholds, load_calibration

pytestmark = pytest.mark.check


def searched(model: Any, text: list[Batch]) -> Any:
    """Returns what fits thresholds to a text, and the learned signal."""
    studies = study_exits(model.decoder, model.params, text)
    result = ThresholdSearch(model.decoder, model.params, studies, executor=EXECUTOR)
    return result, SignalFitter(model.decoder, model.params, studies).fit("learned")


@pytest.fixture(scope="module")
def short(tiny: Any) -> Model:
    """The tiny model with a context as wide as the text, so that all passes share programs."""
    config = dataclasses.replace(tiny.decoder.config, context_length=32)
    return Model(Transformer(config), tiny.params)


@pytest.fixture(scope="module")
def search(short: Model, text: list[Batch]) -> Any:
    return searched(short, text)


@pytest.fixture
def small_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts documents of nine tokens and more, and reads them in batches like the text's."""
    monkeypatch.setattr(goals, "_MIN_PREDICTED", 8)
    monkeypatch.setattr(goals, "_ROWS", 8)
    monkeypatch.setattr(goals, "_CANDIDATES", 6)


def quiet(what: str) -> None:
    assert what


def rows_of(text: list[Batch]) -> list[np.ndarray]:
    return [
        ids[:length]
        for batch in text
        for ids, length in zip(batch.token_ids, batch.lengths, strict=True)
        if length
    ]


@pytest.mark.slow
def test_a_second_fit_to_a_text_is_the_first(short: Model, text: list[Batch], search: Any) -> None:
    again = searched(short, text)
    signals = map(jax.tree.leaves, (search[1], again[1]))
    for ours, theirs in zip(*signals, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    entry = search[0].fit(search[1], 0.8)
    assert entry is not None
    assert entry == again[0].fit(again[1], 0.8)


def test_what_exits_lose_is_what_uniform_loses(short: Model, search: Any) -> None:
    result = search[0].exit_nll_increase_pct()
    assert list(result) == ["1", "2"]
    tried = [search[0].studies[number].batch for number in search[0]._tried]
    for depth, lost in result.items():
        row = evaluate(
            short.decoder, short.params, tried, {"": uniform(int(depth))}, executor=EXECUTOR
        )[""].ledger("uniform", budget=None, num_layers=4)
        assert lost == pytest.approx(row.nll_increase_pct, abs=0.05)


def test_the_loss_stays_within_its_bound(short: Model, search: Any) -> None:
    seen = []
    for bound in (8.0, 30.0):
        entries, record = MaxLoss(nll_increase_pct=bound).reach(search[0], search[1], quiet)
        ((ratio, entry),) = entries.items()
        policy = entry.policy(search[1], exits=search[0].exits)
        tried = [search[0].studies[number].batch for number in search[0]._tried]
        result = evaluate(short.decoder, short.params, tried, {"": policy}, executor=EXECUTOR)[""]
        row = result.ledger("learned", budget=None, num_layers=4)
        assert (row.nll_increase_pct or 0) <= bound
        assert row.nll_increase_pct == pytest.approx(record["nll_increase_pct"], abs=0.01)
        assert row.flops_ratio == pytest.approx(ratio, abs=1e-3)
        seen.append(ratio)
    assert seen[1] < seen[0] < 1.0, "who may lose more pays less"


def test_a_budget_just_below_all_keeps_a_fit_in_which_tokens_exit(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass costs less than the budget: the fit that corrects this has no exit."""
    result, costs = search[0], iter([0.95, 0.99, 1.0])
    exits = Thresholds(depths=(1, 4), thresholds=(0.66,), fractions=(0.5, 0.5))
    stays = Thresholds(depths=(1, 4), thresholds=(-np.inf,), fractions=(0.0, 1.0))

    def run(signal: Any, fit: Thresholds) -> Quality:
        return dataclasses.replace(result.full, flops=next(costs) * result.full.flops)

    for name, fake in {
        "run": run,
        "_propose": lambda signal, first, budget: exits if first == 0 else None,
        "_fit": lambda signal, depths, budget: stays,
        "_margin": lambda spent: 0.0,
    }.items():
        monkeypatch.setattr(result, name, fake)
    entry = result.fit(search[1], 0.99)
    assert entry == exits
    assert len(result.with_row_shares(search[1], entry).row_shares) == 2


def test_of_two_fits_that_cost_and_lose_the_same_either_is_taken() -> None:
    fits = iter(Thresholds(depths=(1, 4), thresholds=(t,), fractions=(0.5, 0.5)) for t in range(9))
    same = ThresholdSearch.__new__(ThresholdSearch)
    vars(same).update(
        cheapest=lambda signal: 0.1,
        fit=lambda signal, budget: next(fits),
        run=lambda signal, fit: None,
        ratio=lambda spent: 0.5,
        nll_increase_pct=lambda spent: 1.0,
    )
    entries, _ = MaxLoss(nll_increase_pct=5.0).reach(same, Patience(), quiet)
    assert list(entries) == [0.5]


def test_nothing_is_promised_that_nothing_reaches(search: Any) -> None:
    entries, record = MaxLoss(nll_increase_pct=1e-9).reach(search[0], search[1], quiet)
    assert entries == {}
    assert record == {"max_nll_increase_pct": 1e-9}


@pytest.mark.usefixtures("small_documents")
def test_disagreement_is_that_of_the_pass_document_by_document(
    short: Model, text: list[Batch], search: Any
) -> None:
    rows = rows_of(text)
    goal = MaxDisagreement(max_disagreement=0.5, confidence=0.5, documents=rows)
    entry = Thresholds(depths=(1, 4), thresholds=(0.66,), fractions=(0.5, 0.5))
    wide = Thresholds(depths=(1, 2, 4), thresholds=(0.66, -np.inf), fractions=(0.5, 0.0, 0.5))
    risks, tokens = goal._disagreement(search[0], search[1], [entry, wide])
    np.testing.assert_array_equal(risks[0], risks[1])
    np.testing.assert_array_equal(tokens, [len(row) - 1 for row in rows])
    agreed: list[int] = []
    evaluate(
        short.decoder,
        short.params,
        text,
        {"": entry.policy(search[1], exits=search[0].exits)},
        executor=EXECUTOR,
        observe=lambda _, batch, result, depths: agreed.extend(
            np.asarray(result.agree).sum(axis=1)[batch.lengths > 0].tolist()
        ),
    )
    np.testing.assert_allclose(risks[0], 1 - np.asarray(agreed) / tokens, atol=1e-6)
    assert 0 < risks.mean() < 1


@pytest.mark.usefixtures("small_documents")
def test_a_promise_chooses_the_cheapest_candidate_that_is_sure_enough(
    text: list[Batch], search: Any
) -> None:
    rows, chosen = rows_of(text), []
    for bound in (0.6, 0.75):
        goal = MaxDisagreement(max_disagreement=bound, confidence=0.8, documents=rows)
        entries, record = goal.reach(search[0], search[1], quiet)
        ratios = [float(ratio) for ratio in record["candidates"]]
        assert ratios == sorted(ratios, reverse=True), "safest first"
        sure = [c["p_value"] <= 0.2 for c in record["candidates"].values()]
        expected = ratios[: [*sure, False].index(False)]
        assert list(entries) == expected[-1:]
        chosen.append(min([*entries, 1.0]))
    assert chosen[1] < chosen[0]


def test_goals_that_mean_nothing_are_refused(text: list[Batch]) -> None:
    with pytest.raises(ValueError, match="budgets above 0, at most 1.*Got \\(1.2,\\)"):
        Budgets(budgets=(1.2,))
    with pytest.raises(ValueError, match="63 documents of more than 32 tokens.*Got 0. Give more"):
        MaxDisagreement(max_disagreement=0.05, confidence=0.95, documents=rows_of(text))
    with pytest.raises(ValueError, match="for each of 13 policies.*or for fewer policies"):
        MaxDisagreement(
            max_disagreement=0.05, confidence=0.95, documents=long_documents(70), policies=13
        )


def test_a_guarantee_is_for_all_policies_that_are_fitted(short: Model, text: list[Batch]) -> None:
    goal = MaxDisagreement(max_disagreement=0.5, confidence=0.5, documents=long_documents(70))
    with pytest.raises(ValueError, match=r"all 2 policies.*Got policies=1. .*policies=2\)"):
        calibrate(short.decoder, short.params, text, goal=goal)


def long_documents(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 64, 40) for seed in range(count)]


def test_too_little_text_is_refused(tiny: Any, text: list[Batch]) -> None:
    one = Batch(
        token_ids=text[0].token_ids[:1], lengths=text[0].lengths[:1], window=text[0].window[:1]
    )
    with pytest.raises(ValueError, match="at least 512 predicted tokens.*Got 31. Add text"):
        calibrated(tiny, [one], policies=("position",), budgets=(0.8,))


def test_a_file_keeps_thresholds_at_which_nobody_stops(tmp_path: Path) -> None:
    entry = Thresholds(depths=(1, 2, 4), thresholds=(-np.inf, 0.5), fractions=(0.0, 0.5, 0.5))
    fitted = Calibration(
        entries={"patience": {0.9: entry}},
        signals={"patience": Patience()},
        info={"model_sha256": "a" * 64},
    )
    fitted.save(tmp_path / "mine.json")
    assert not (tmp_path / "mine.safetensors").exists(), "patience has no weights"
    json.loads((tmp_path / "mine.json").read_text(), parse_constant=pytest.fail)
    loaded = load_calibration(tmp_path / "mine.json", model_sha256="a" * 64)
    assert loaded.entries == fitted.entries
    params = {"weights": np.arange(6.0)}  # Of a decoder of one's own, instead of its hash.
    own = {"model_sha256": hash_params(params), "verdict": "It may pay."}
    dataclasses.replace(fitted, info=own).save(tmp_path / "own.json")
    again = load_calibration(tmp_path / "own.json", params=params)
    assert again.entries == fitted.entries
    assert repr(again).endswith("It may pay.")
    with pytest.raises(ValueError, match="belongs to"):
        load_calibration(tmp_path / "own.json", params={"weights": np.arange(1.0, 7.0)})
    with pytest.raises(ValueError, match="model_sha256, or the params.*Got neither"):
        load_calibration(tmp_path / "own.json")
