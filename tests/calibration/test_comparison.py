# SPDX-License-Identifier: Apache-2.0
"""Policies against their controls: the hull in every draw, documents' sums."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.cases import EXECUTOR
from scipy import stats

from utio_jax.calibration.advice import conclude
from utio_jax.calibration.compare import ComparisonRow, compare
from utio_jax.calibration.gates import SignalFitter
from utio_jax.calibration.studies import collect_scores, predicted_tokens, study_exits
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.pytrees import pytree, static
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.intervals import (
    DocumentSums,
    drawn_again,
    hull_of,
    margin_test,
)
from utio_jax.evaluation.ledger import Ledger, convex_hull, uniform_hull
from utio_jax.policies import Entropy, PolicyBase
from utio_jax.policies.store import Calibration, Thresholds


def sums(nll: Any, flops: Any) -> DocumentSums:
    return DocumentSums(nll=np.asarray(nll, float), flops=np.asarray(flops, float))


def some_exits(rng: np.random.Generator, documents: int) -> list[DocumentSums]:
    size = rng.integers(5, 50, documents)
    full = rng.uniform(1, 3, documents) * size
    # The third exit loses less than full depth in half of the texts, as exit branches do.
    rates = (0.4, 0.1, rng.uniform(-0.06, 0.06))
    losses = [full * (1 + rate * rng.uniform(0.5, 1.5, documents)) for rate in rates]
    return [
        *(sums(nll, cost * size) for nll, cost in zip(losses, (0.3, 0.5, 0.7), strict=True)),
        sums(full, size),
    ]


def test_every_draw_has_the_convex_hull_of_its_own_documents() -> None:
    """The lowest of all chords is the hull by turning left, in each draw."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        uniform = some_exits(rng, 6)
        weights, full = drawn_again(6, draws=15, seed=3), uniform[-1]
        nll, flops = weights @ full.nll, weights @ full.flops
        drawn = [(weights @ x.flops / flops, 100 * (weights @ x.nll / nll - 1)) for x in uniform]
        for ratio in (0.29, 0.301, 0.41, 0.5, 0.66, 0.93, 0.999, 1.02):
            result = hull_of(drawn, np.full(16, ratio))
            for draw, actual in enumerate(result):
                at_hull = convex_hull([(x[draw], y[draw]) for x, y in drawn])(ratio)
                expected = np.nan if at_hull is None else at_hull
                assert actual == pytest.approx(expected, abs=1e-9, nan_ok=True)


def text_of(
    rng: np.random.Generator, documents: int, kind: str
) -> tuple[DocumentSums, DocumentSums, DocumentSums]:
    """Returns a cheap exit, full depth, and a policy half-way between them, of one text.

    The true margin is 1 % of the loss. Sizes of documents vary by a factor of ten and more, and so
    does what the policy loses on them.
    """
    size = np.minimum(np.exp(rng.normal(0, 1.2, documents)), 6)
    noise = {
        "normal": lambda: rng.normal(size=documents),
        "heavy": lambda: rng.standard_t(3, documents),
        "skewed": lambda: np.exp(rng.normal(size=documents)) - np.exp(0.5),
    }[kind]()
    full = 1.5 * size * rng.uniform(0.7, 1.3, documents)
    lost = full * 0.04 + 0.03 * noise * np.sqrt(size)
    return sums(full * 1.1, 0.5 * size), sums(full, size), sums(full + lost, 0.75 * size)


def coverage(documents: int, kind: str, *, repeats: int, draws: int) -> float:
    rng, held = np.random.default_rng(documents), 0
    for trial in range(repeats):
        shallow, full, policy = text_of(rng, documents, kind)
        result = margin_test([shallow, full], policy, draws=draws, seed=trial)
        assert result is not None
        held += result.interval[0] <= 1.0 <= result.interval[2]
    return held / repeats


LEAST = {
    "normal": {5: 0.93, 10: 0.91, 29: 0.93, 100: 0.93},
    "heavy": {5: 0.95, 10: 0.94, 29: 0.94, 100: 0.94},
    "skewed": {5: 0.84, 10: 0.80, 29: 0.84, 100: 0.90},
}
"""Coverage by the number of documents."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEAST)
def test_intervals_cover_as_often_as_their_docstring_says(kind: str) -> None:
    """The documented figures less three standard errors of 1,000 repeats."""
    for documents, least in LEAST[kind].items():
        assert least <= coverage(documents, kind, repeats=1000, draws=500) < 0.99, documents


def test_errors_of_a_margin_are_those_of_a_ratio_of_sums() -> None:
    """Where the hull is one chord and costs are equal, the margin is a ratio: a known error."""
    shallow, full, policy = text_of(np.random.default_rng(4), 40, "heavy")
    result = margin_test([shallow, full], policy, draws=4000, seed=1)
    assert result is not None
    low, middle, high = result.interval
    gain = 100 * (shallow.nll + full.nll - 2 * policy.nll) / 2
    ratio = gain.sum() / full.nll.sum()
    assert middle == pytest.approx(ratio)
    assert middle - low == pytest.approx(high - middle)
    influence = (gain - ratio * full.nll) / full.nll.sum()
    error = np.sqrt((influence**2).sum() * 40 / 39)
    reaches = []
    for weight in drawn_again(40, draws=4000, seed=1)[1:]:
        drawn = weight @ gain / (weight @ full.nll)
        spread = weight @ ((gain - drawn * full.nll) / (weight @ full.nll)) ** 2 * 40 / 39
        reaches.append(abs(drawn - ratio) / np.sqrt(spread))
    assert high - middle == pytest.approx(error * np.quantile(reaches, 0.95), rel=2e-3)
    assert np.quantile(reaches, 0.95) > 2, "wider than a normal's 1.96"
    far = (np.asarray(reaches) >= abs(ratio) / error).sum()
    assert result.p_value == pytest.approx((1 + far) / 4001, abs=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_policy_on_the_hull_of_some_draws_has_an_interval_of_its_own_size(share: float) -> None:
    """An exit above the hull, or a mixture with another, is on it in draws that leave no error."""
    rng = np.random.default_rng(1)
    size = np.exp(rng.normal(size=29))
    losses = [2 * size * (1 + rate + 0.02 * rng.normal(size=29)) for rate in (0.09, 0.065, 0.03)]
    pairs = zip([*losses, 2 * size], (0.28, 0.52, 0.76, 1.0), strict=True)
    exits = [sums(nll, cost * size) for nll, cost in pairs]
    mixed = (
        (1 - share) * np.asarray(one) + share * np.asarray(other)
        for one, other in zip(*exits[1:3], strict=True)
    )
    result = margin_test(exits, DocumentSums(*mixed), draws=400)
    assert result is not None
    low, margin, high = result.interval
    assert -1.0 < margin <= 0.0
    assert 0.1 < high - low < 3.0
    assert result.p_value > 0.05


def test_documents_that_all_say_the_same_leave_no_doubt() -> None:
    same = [sums(np.full(6, nll), np.full(6, flops)) for nll, flops in ((11.0, 0.5), (10.0, 1.0))]
    policy = sums(np.full(6, 10.4), np.full(6, 0.75))
    result = margin_test(same, policy, draws=50)
    assert result is not None
    assert result.interval == pytest.approx((1.0, 1.0, 1.0))
    assert result.p_value == 1 / 51


def test_intervals_hold_the_margin_and_cover_its_true_value_about_as_often_as_they_say() -> None:
    assert 0.88 < coverage(40, "normal", repeats=300, draws=300) < 0.985


def test_of_many_policies_on_the_frontier_none_is_called_better() -> None:
    """One of thirty has its own 95 % interval above 0 on every second text or so."""
    rng, texts, called = np.random.default_rng(3), 40, 0
    for trial in range(texts):
        size = np.exp(rng.normal(0, 1, 29))
        exits, rows = [sums(2.2 * size, 0.5 * size), sums(2.0 * size, size)], []
        for number in range(30):
            lost = 0.04 * size * rng.normal(size=29)
            tested = margin_test(exits, sums(2.1 * size + lost, 0.75 * size), draws=700, seed=trial)
            assert tested is not None
            rows.append(
                ComparisonRow(
                    ledger=Ledger(policy=str(number)),
                    hull_margin_pct=tested.interval,
                    hull_margin_p_value=tested.p_value,
                )
            )
        called += "no policy is better" not in conclude(rows)
    assert called <= stats.binom.ppf(0.999, texts, 0.05)


def test_a_policy_cheaper_than_the_cheapest_exit_has_no_margin() -> None:
    exits = some_exits(np.random.default_rng(2), 8)
    cheaper = sums(exits[0].nll, 0.9 * exits[0].flops)
    assert margin_test(exits, cheaper, draws=50) is None
    assert margin_test(exits, exits[1], draws=50) is not None


def test_too_few_documents_are_refused_before_any_pass(tiny: Any) -> None:
    rng, messages = np.random.default_rng(6), list[str]()
    batches, document_of = sample_batches(
        [rng.integers(0, 60, 40) for _ in range(4)], rows=4, width=16, vocab_size=64
    )
    entry = Thresholds(depths=(1, 4), thresholds=(0.5,), fractions=(0.5, 0.5))
    calibration = Calibration(entries={"position": {0.5: entry}}, signals={}, info={})
    with pytest.raises(ValueError, match="at least 5 documents.*Got 4. Add files"):
        compare(
            tiny.decoder, tiny.params, batches, document_of, calibration, progress=messages.append
        )
    with pytest.raises(ValueError, match="at least 5 documents.*Got 4. Add files"):  # Are read.
        compare(tiny.decoder, tiny.params, batches, np.append(document_of, 9), calibration)
    with pytest.raises(ValueError, match="document of each of .* Got 2. utio_jax.core.sample_batc"):
        compare(tiny.decoder, tiny.params, batches, document_of[:2], calibration, budgets={0.5})
    with pytest.raises(ValueError, match="at least 5 documents.*Got 0. Add files"):
        compare(tiny.decoder, tiny.params, [], document_of, calibration, budgets=iter([0.5]))
    wide = dataclasses.replace(batches[0], token_ids=np.zeros((4, 32), np.int32))
    with pytest.raises(ValueError, match=r"batches of one shape.*Got \(4, 16\), \(4, 32\)"):
        compare(tiny.decoder, tiny.params, [*batches, wide], document_of, calibration)
    with pytest.raises(ValueError, match="calibration, or policies of your own. Got neither"):
        compare(tiny.decoder, tiny.params, batches, document_of, None)
    assert not messages


def test_windows_are_drawn_over_all_documents() -> None:
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 60, n) for n in (100, 3, 1, 40, 200)]
    batches, document_of = sample_batches(
        documents, rows=2, width=16, batches=4, vocab_size=64, seed=1
    )
    assert len(batches) == 4
    assert set(document_of) == {0, 1, 3, 4}, "one token predicts nothing"
    seen = set()
    for batch in batches:
        for ids, length, window in zip(batch.token_ids, batch.lengths, batch.window, strict=True):
            text = documents[document_of[window]]
            cuts = range(0, len(text), 15)
            starts = [s for s in cuts if np.array_equal(text[s : s + length], ids[:length])]
            assert starts
            seen.add((document_of[window], starts[0]))
    assert len(seen) == 8, "without replacement"
    whole, document_of = sample_batches(documents, rows=2, width=16, vocab_size=64)
    assert sum((batch.lengths - 1).clip(0).sum() for batch in whole) == 99 + 2 + 39 + 199


@pytest.fixture(scope="module")
def compared(tiny: Any, text: list[Batch]) -> Any:
    """Returns gates at which half of all tokens stop at the first exit, and their comparison."""
    studies = study_exits(tiny.decoder, tiny.params, text)
    signal = SignalFitter(tiny.decoder, tiny.params, studies).fit("learned")
    collected = collect_scores(tiny.decoder, tiny.params, signal, studies, depths=(1, 2, 4))
    cut = float(np.median(predicted_tokens(studies, collected)[0]))
    entry = Thresholds(depths=(1, 4), thresholds=(cut,), fractions=(0.5, 0.5))
    learned = Calibration(entries={"learned": {0.7: entry}}, signals={"learned": signal}, info={})
    document_of = np.arange(40) // 4
    return learned, compare(
        tiny.decoder, tiny.params, text, document_of, learned, executor=EXECUTOR, draws=50
    )


def test_a_dearer_worse_exit_is_no_part_of_the_hull() -> None:
    """Branches of 12 layers may lose less than all 16: at 0.9 truncation is then those of 12."""
    points = [(0.5, 4.0), (0.6, 3.0), (0.75, -1.0), (1.0, 0.0)]
    names = ("uniform", "uniform", "uniform", "full")
    rows = [
        Ledger(policy=name, flops_ratio=ratio, nll_increase_pct=loss)
        for name, (ratio, loss) in zip(names, points, strict=True)
    ]
    hull = uniform_hull([*rows, Ledger(policy="learned", flops_ratio=0.4, nll_increase_pct=0.0)])
    assert [hull(ratio) for ratio in (0.4, 0.5, 0.625, 0.9, 1.1)] == [None, 4.0, 1.5, -1.0, -1.0]
    drawn = [(np.full(2, x), np.full(2, y)) for x, y in points]
    assert hull_of(drawn, np.asarray([0.625, 0.9])).tolist() == [1.5, -1.0]


@pytest.mark.check
def test_random_depths_are_a_control_of_any_policy(compared: Any) -> None:
    fitted = compared[0].entries["learned"]
    other = dataclasses.replace(
        compared[0], entries={"entropy": fitted}, signals={"entropy": Entropy()}
    )
    assert other.fitted["random"] is fitted
    assert "random" not in dataclasses.replace(other, entries={}).fitted


@pytest.mark.check
def test_rows_are_those_of_evaluate_with_margins_of_the_table(
    tiny: Any, text: list[Batch], compared: Any
) -> None:
    fitted, rows = compared
    names = [(row.ledger.policy, row.ledger.budget) for row in rows]
    assert len(set(names)) == len(names) - 1, "uniform has a row per exit"
    policies = {str(b): fitted.policy("learned", b) for b in fitted.entries["learned"]}
    result = evaluate(tiny.decoder, tiny.params, text, policies, executor=EXECUTOR)
    hull = uniform_hull([row.ledger for row in rows])
    studies, signal = study_exits(tiny.decoder, tiny.params, text), fitted.signals["learned"]
    collected = collect_scores(tiny.decoder, tiny.params, signal, studies, depths=(1, 2, 4))
    values = (collected, [study.kl for study in studies])
    scores, kl = (predicted_tokens(studies, value) for value in values)
    ranked: Any = [stats.spearmanr(scores[i], kl[i])[0] for i in range(2)]
    assert min(ranked) > 0.85, "each exit's gate must have learned that exit's KL"
    for budget, quality in zip(fitted.entries["learned"], result.values(), strict=True):
        row = rows[names.index(("learned", budget))]
        expected = quality.ledger("learned", budget=budget, num_layers=4)
        # Over all exits, yet at the cost of those in use.
        assert row.ledger.nll == pytest.approx(expected.nll, rel=1e-5)
        assert row.ledger.flops_ratio == pytest.approx(expected.flops_ratio, rel=1e-6)
        assert row.ledger.depth_histogram == expected.depth_histogram
        assert row.ledger.gate_pct == pytest.approx(expected.gate_pct)
        assert row.hull_margin_pct is not None
        at_hull = hull(expected.flops_ratio or 0)
        assert at_hull is not None
        assert row.hull_margin_pct[1] == pytest.approx(
            at_hull - (expected.nll_increase_pct or 0), abs=1e-3
        )
    by_name = {row.ledger.policy: row for row in rows}
    assert by_name["uniform"].hull_margin_pct is None
    assert by_name["full"].ledger.flops_ratio == pytest.approx(1)
    learned, oracle = (by_name[name].hull_margin_pct[1] for name in ("learned", "oracle_kl"))
    assert learned < oracle, "hindsight is better"
    for row in rows:
        result = row.to_dict()
        assert {"policy", "nll", "hull_margin_pct"} <= set(result)
        assert result["hull_margin_pct"] is None or len(result["hull_margin_pct"]) == 3


@pytest.mark.check
def test_policies_of_ones_own_are_judged_beside_their_controls(
    tiny: Any, text: list[Batch]
) -> None:
    @pytree
    class Even(PolicyBase):
        name: str = static(default="even")

        def go_deeper(self, index: int, boundary: Any, memory: Any) -> Any:
            return boundary.positions % 2 == 0, memory

    policy = Even(depths=(1, 4))
    run = partial(
        compare, tiny.decoder, tiny.params, text, np.arange(40) // 4, None, executor=EXECUTOR
    )
    by_name = {row.name: row for row in run(policies=[policy], draws=50)}
    assert [*by_name] == ["uniform 1", "uniform 2", "full", "even", "random as even"]
    expected = evaluate(tiny.decoder, tiny.params, text, {"": policy}, executor=EXECUTOR)[""]
    even, chance = by_name["even"], by_name["random as even"]
    assert even.ledger.nll == pytest.approx(expected.nll / expected.predicted, rel=1e-5)
    assert even.ledger.flops_ratio == pytest.approx(expected.flops / expected.flops_full, rel=1e-5)
    for row in (even, chance):
        assert row.hull_margin_pct is not None
        assert row.hull_margin_pct[0] < row.hull_margin_pct[1] < row.hull_margin_pct[2]
    # As many tokens at each depth, but others.
    shares = [row.ledger.depth_histogram or {} for row in (even, chance)]
    tokens = even.ledger.tokens or 0
    assert abs(shares[0]["1"] - shares[1]["1"]) < 5 / (2 * np.sqrt(tokens))
    assert chance.ledger.nll != even.ledger.nll
    assert conclude([chance]).startswith("No policy could be held")
    own = dataclasses.replace(even.ledger, policy="oracle_mine")
    assert "oracle_mine" in conclude([dataclasses.replace(even, ledger=own)])
    with pytest.raises(ValueError, match="a name each.*Got \\['even', 'even'\\]. Name them"):
        run(policies=[policy, policy])
