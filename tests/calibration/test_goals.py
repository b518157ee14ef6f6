# SPDX-License-Identifier: Apache-2.0
"""What calibration is asked for is what the policies then do."""

from __future__ import annotations

import dataclasses
import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cases import EXECUTOR

from utio_jax import uniform
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.gates import SignalFitter
from utio_jax.calibration.goals import Budgets, MaxDisagreement, MaxLoss
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.core.documents import Batch
from utio_jax.core.files import versions
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.policies import Patience
from utio_jax.policies.store import Calibration, Thresholds, load_calibration

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def search(tiny: Any, text: list[Batch]) -> Any:
    studies = study_exits(tiny.decoder, tiny.params, text)
    found = ThresholdSearch(tiny.decoder, tiny.params, studies, executor=EXECUTOR)
    return found, SignalFitter(tiny.decoder, tiny.params, studies).fit("learned")


def quiet(what: str) -> None:
    assert what


def rows_of(text: list[Batch]) -> list[np.ndarray]:
    return [
        ids[:length]
        for batch in text
        for ids, length in zip(batch.token_ids, batch.lengths, strict=True)
        if length
    ]


def test_what_exits_lose_is_what_uniform_loses(tiny: Any, search: Any) -> None:
    found = search[0].exit_nll_increase_pct()
    assert list(found) == ["1", "2"]
    tried = [search[0].studies[number].batch for number in search[0]._tried]
    for depth, lost in found.items():
        row = evaluate(
            tiny.decoder, tiny.params, tried, {"": uniform(int(depth))}, executor=EXECUTOR
        )[""].ledger("uniform", budget=None, num_layers=4)
        assert lost == pytest.approx(row.nll_increase_pct, abs=0.05)


def test_the_loss_stays_within_its_bound(tiny: Any, search: Any) -> None:
    seen = []
    for bound in (8.0, 30.0):
        entries, record = MaxLoss(nll_increase_pct=bound).reach(search[0], search[1], quiet)
        ((ratio, entry),) = entries.items()
        policy = search[0].policy(search[1], entry)
        tried = [search[0].studies[number].batch for number in search[0]._tried]
        found = evaluate(tiny.decoder, tiny.params, tried, {"": policy}, executor=EXECUTOR)[""]
        row = found.ledger("learned", budget=None, num_layers=4)
        assert (row.nll_increase_pct or 0) <= bound
        assert row.nll_increase_pct == pytest.approx(record["nll_increase_pct"], abs=0.01)
        assert row.flops_ratio == pytest.approx(ratio, abs=1e-3)
        seen.append(ratio)
    assert seen[1] < seen[0] < 1.0, "a larger loss costs less"


def test_nothing_is_promised_that_nothing_reaches(search: Any) -> None:
    entries, record = MaxLoss(nll_increase_pct=1e-9).reach(search[0], search[1], quiet)
    assert entries == {}
    assert record == {"max_nll_increase_pct": 1e-9}


def test_disagreement_is_that_of_the_pass_document_by_document(
    tiny: Any, text: list[Batch], search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents longer than the context, and one window each, come out as their own shares."""
    monkeypatch.setattr("utio_jax.calibration.goals._MIN_PREDICTED", 8)
    rows = rows_of(text)
    goal = MaxDisagreement(max_disagreement=0.5, confidence=0.5, documents=rows, rows=8)
    entry = Thresholds(depths=(1, 4), thresholds=(0.66,), fractions=(0.5, 0.5))
    risks, tokens = goal._disagreement(search[0], search[1], [entry, entry.over((1, 2, 4))])
    np.testing.assert_array_equal(risks[0], risks[1])
    np.testing.assert_array_equal(tokens, [len(row) - 1 for row in rows])
    agreed: list[int] = []
    evaluate(
        tiny.decoder,
        tiny.params,
        text,
        {"": search[0].policy(search[1], entry)},
        executor=EXECUTOR,
        observe=lambda _, batch, found, depths: agreed.extend(
            np.asarray(found.agree).sum(axis=1)[batch.lengths > 0].tolist()
        ),
    )
    np.testing.assert_allclose(risks[0], 1 - np.asarray(agreed) / tokens, atol=1e-6)
    assert 0 < risks.mean() < 1


def test_a_promise_chooses_the_cheapest_candidate_that_is_sure_enough(
    text: list[Batch], search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utio_jax.calibration.goals._MIN_PREDICTED", 8)
    rows, chosen = rows_of(text), []
    for bound in (0.6, 0.75):
        goal = MaxDisagreement(max_disagreement=bound, confidence=0.8, documents=rows, rows=8)
        entries, record = goal.reach(search[0], search[1], quiet)
        ratios = [float(ratio) for ratio in record["candidates"]]
        assert ratios == sorted(ratios, reverse=True), "safest first"
        sure = [c["p_value"] <= 0.2 for c in record["candidates"].values()]
        wanted = ratios[: [*sure, False].index(False)]
        assert list(entries) == wanted[-1:]
        assert record["unbounded_flops_ratio"] <= min([*entries, 1.0])
        chosen.append(min([*entries, 1.0]))
    assert chosen[1] < chosen[0]


def test_goals_that_mean_nothing_are_refused(text: list[Batch]) -> None:
    with pytest.raises(ValueError, match="budgets above 0, at most 1.*Got \\(1.2,\\)"):
        Budgets(budgets=(1.2,))
    with pytest.raises(ValueError, match="budgets above 0"):
        Budgets(budgets=())
    with pytest.raises(ValueError, match="above 0, in %. Got -1"):
        MaxLoss(nll_increase_pct=-1)
    with pytest.raises(ValueError, match="at least 63 documents.*Got 0. Give more text"):
        MaxDisagreement(max_disagreement=0.05, confidence=0.95, documents=rows_of(text))
    with pytest.raises(ValueError, match="for each of 13 policies.*or for fewer policies"):
        MaxDisagreement(
            max_disagreement=0.05, confidence=0.95, documents=long_documents(70), policies=13
        )
    with pytest.raises(ValueError, match="at least 1 policy. Got policies=0"):
        MaxDisagreement(max_disagreement=0.05, confidence=0.95, documents=[], policies=0)


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    tiny: Any, text: list[Batch], tmp_path: Path
) -> None:
    def fit(
        *,
        done: Any = None,
        keep: Any = None,
        seed: int = 0,
        goal: Any = Budgets(budgets=(0.8,)),
        policies: tuple[str, ...] = ("position", "utio_before"),
        refit: bool = False,
    ) -> Any:
        return calibrate(
            tiny.decoder,
            tiny.params,
            text,
            model_sha256="a" * 64,
            text={"documents": 40},
            policies=policies,
            goal=goal,
            executor=EXECUTOR,
            seed=seed,
            done=done,
            refit=refit,
            keep=keep,
        )

    class StoppedError(Exception):
        pass

    def keep_and_stop(so_far: Any) -> None:
        so_far.save(tmp_path / "out.json")
        raise StoppedError

    with pytest.raises(StoppedError):
        fit(keep=keep_and_stop)
    done = load_calibration(tmp_path / "out.json", model_sha256="a" * 64)
    assert list(done.entries) == ["position"]
    marked = dataclasses.replace(
        done, entries={"position": {0.8: Thresholds(depths=(2,), thresholds=(), fractions=(1.0,))}}
    )
    found, whole = fit(done=marked), fit()
    assert found.entries["position"] == marked.entries["position"], "not fitted again"
    assert found.entries["utio_before"] == whole.entries["utio_before"]
    assert set(found.info["goals"]) == {"position", "utio_before"}
    # Added to what is there: what was asked for is fitted again, the rest is kept.
    assert fit(done=found, policies=("position",), refit=True).entries == whole.entries
    with pytest.raises(ValueError, match="add to a calibration with .*'seed': 1.*'seed': 0"):
        fit(done=done, seed=1)
    for goal in (Budgets(budgets=(0.8, 0.9)), MaxLoss(nll_increase_pct=5.0)):
        with pytest.raises(
            ValueError, match="add to a calibration with .*'goal': .*Name another --out"
        ):
            fit(done=done, goal=goal)
    old = dataclasses.replace(done, info={k: v for k, v in done.info.items() if k != "goal"})
    with pytest.raises(ValueError, match="Got one with {'goal': None}"):
        fit(done=old)


def test_what_cannot_be_added_is_refused_before_any_pass(
    tiny: Any, text: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*_: Any, **__: Any) -> None:
        raise AssertionError("a pass")

    class Promise:
        """One for two policies, whichever these are."""

        def asked(self) -> dict[str, Any]:
            return {"max_disagreement": 0.1, "policies": 2}

        def reach(self, *_: Any) -> Any: ...

    promise: Any = Promise()
    monkeypatch.setattr(
        importlib.import_module("utio_jax.calibration.calibrate"), "study_exits", ran
    )
    run = partial(
        calibrate,
        tiny.decoder,
        tiny.params,
        text,
        model_sha256="a" * 64,
        text={},
        goal=promise,
        refit=True,
    )
    info = {
        "model_sha256": "a" * 64,
        "text": {},
        "versions": versions(),
        "seed": 0,
        "width": 32,
        "tokens": sum(int((batch.lengths - 1).clip(0).sum()) for batch in text),
        "goal": promise.asked(),
        "goals": {"position": {}, "entropy": {}},
    }
    done = Calibration(entries={}, signals={}, info=info)
    with pytest.raises(AssertionError, match="a pass"):
        run(done=done, policies=("entropy",))
    with pytest.raises(
        ValueError, match="a guarantee for the 2 policies that share it. Got 3 with"
    ):
        run(done=done, policies=("entropy", "hazard"))
    other = dataclasses.replace(done, info={**info, "text": {"documents": 1}})
    with pytest.raises(ValueError, match="Name another --out, or remove what is there first"):
        run(done=other, policies=("entropy",))
    with pytest.raises(ValueError, match="Wanted policies of learned.*Got none"):
        run(policies=())


def test_calibrations_ask_alike_where_they_promise_alike() -> None:
    promise = MaxDisagreement(max_disagreement=0.9, confidence=0.1, documents=long_documents(3))
    assert promise.asked() == {"max_disagreement": 0.9, "confidence": 0.1, "policies": 1}
    changes: list[dict[str, Any]] = [
        {"confidence": 0.2},
        {"max_disagreement": 0.8},
        {"policies": 2},
    ]
    for change in changes:
        assert dataclasses.replace(promise, **change).asked() != promise.asked()
    same = dataclasses.replace(promise, documents=long_documents(4))
    assert same.asked() == promise.asked(), "documents are distinguished by the text's hash"


def long_documents(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 64, 40) for seed in range(count)]


def test_too_little_text_is_refused(tiny: Any, text: list[Batch]) -> None:
    one = Batch(
        token_ids=text[0].token_ids[:1], lengths=text[0].lengths[:1], window=text[0].window[:1]
    )
    with pytest.raises(ValueError, match="at least 512 predicted tokens.*Got 31. Add text"):
        calibrate(
            tiny.decoder,
            tiny.params,
            [one],
            model_sha256="a" * 64,
            text={},
            policies=("position",),
            goal=Budgets(budgets=(0.8,)),
            executor=EXECUTOR,
        )


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
