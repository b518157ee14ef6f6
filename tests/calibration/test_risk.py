# SPDX-License-Identifier: Apache-2.0
"""Guaranteed risks: kept on known distributions, by bets as in a plain loop; near-copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from utio_jax.calibration import risk
from utio_jax.calibration.goals import MaxDisagreement
from utio_jax.calibration.guarantee import (
    Fitted,
    _p_values,
    fit_with_guarantee,
    halves,
    units_needed,
)
from utio_jax.calibration.risk import group_near_duplicates, risks_of_groups, split_documents

REPEATS = 1000
Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def bernoulli(rng: np.random.Generator, means: np.ndarray, units: int) -> np.ndarray:
    return (rng.random((len(means), units)) < means[:, None]).astype(float)


def even_beta(rng: np.random.Generator, means: np.ndarray, units: int) -> np.ndarray:
    return rng.beta(100 * means[:, None], 100 * (1 - means[:, None]), (len(means), units))


def rare_ones(rng: np.random.Generator, means: np.ndarray, units: int) -> np.ndarray:
    """60 % of the mean from every unit, the rest from units of risk 1: the hardest for any test."""
    low = 0.6 * means[:, None]
    chance = (means[:, None] - low) / (1 - low)
    return np.where(rng.random((len(means), units)) < chance, 1.0, low)


def slow_p_value(risks: np.ndarray, max_risk: float) -> float:
    """Bets on one unit after the other; wealth starts at 1."""
    wealth = most = 1.0
    for now in range(len(risks)):
        variance, total = 0.25, 0.5
        for i, earlier in enumerate(risks[:now]):
            total += earlier
            variance += (earlier - total / (i + 2)) ** 2
        variance /= now + 1
        bet = min(1.0, math.sqrt(2 * math.log(20) / (len(risks) * variance)))
        wealth *= 1 + bet * (max_risk - risks[now])
        most = max(most, wealth)
    return 1 / most


def p_values_of(result: Fitted) -> list[float]:
    return [rung.p_value for rung in result.ladder]


def most_violations(confidence: float) -> float:
    return float(stats.binom.ppf(0.999, REPEATS, 1 - confidence))


@pytest.mark.parametrize("draw", [bernoulli, even_beta, rare_ones])
def test_p_values_are_those_of_a_plain_loop(draw: Draw) -> None:
    risks = draw(np.random.default_rng(0), np.linspace(0.001, 0.9, 12), 40)
    for max_risk in (0.02, 0.3, 0.8):
        expected = [slow_p_value(row, max_risk) for row in risks]
        np.testing.assert_allclose(_p_values(risks, max_risk), expected, rtol=1e-10)


@pytest.mark.parametrize("draw", [bernoulli, even_beta, rare_ones])
@pytest.mark.parametrize(("units", "confidence"), [(85, 0.8), (300, 0.8), (160, 0.95), (300, 0.95)])
def test_a_risk_at_the_bound_is_seldom_taken_for_a_lower_one(
    draw: Draw, units: int, confidence: float
) -> None:
    risks = draw(np.random.default_rng(1), np.full(REPEATS, 0.05), units)
    violations = (_p_values(risks, 0.05) <= 1 - confidence).sum()
    assert violations <= most_violations(confidence)
    if draw is rare_ones and units < 300:  # Here no valid p-value can be much smaller.
        assert violations >= 0.5 * (1 - confidence) * REPEATS


def test_the_order_of_bets_comes_from_the_seed() -> None:
    risks = bernoulli(np.random.default_rng(5), np.full(3, 0.3), 80)
    expected = []
    for seed in (0, 7):
        order = np.random.default_rng(seed).permutation(80)
        result = fit_with_guarantee(risks, max_risk=0.4, confidence=0.9, seed=seed)
        expected.append([slow_p_value(row[order], 0.4) for row in risks])
        np.testing.assert_allclose(p_values_of(result), expected[-1], rtol=1e-10)
    assert expected[0] != expected[1]


def test_testing_stops_at_the_first_candidate_not_rejected() -> None:
    low, high = np.full(100, 0.01), np.full(100, 0.2)
    result = fit_with_guarantee(np.stack([low, low, high, low]), max_risk=0.05, confidence=0.95)
    assert result.chosen == 1
    assert result.tested == 100
    np.testing.assert_allclose([rung.risk for rung in result.ladder], [0.01, 0.01, 0.2, 0.01])
    _, passes, fails, unused = p_values_of(result)
    assert unused == passes < 0.05 < fails == 1
    assert fit_with_guarantee(np.stack([high, low]), max_risk=0.05, confidence=0.95).chosen is None
    assert fit_with_guarantee(np.stack([low, low]), max_risk=0.05, confidence=0.95).chosen == 1


@pytest.mark.parametrize("max_risk", [0.003, 0.02, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.999])
def test_one_unit_less_than_needed_could_prove_nothing(max_risk: float, confidence: float) -> None:
    needed = units_needed(max_risk, confidence)
    rejected = [_p_values(np.zeros((1, n)), max_risk)[0] <= 1 - confidence for n in range(1, 400)]
    assert [*rejected, True].index(True) + 1 == min(needed, 400)
    best = np.zeros((1, needed))
    assert fit_with_guarantee(best, max_risk=max_risk, confidence=confidence).chosen == 0


@pytest.mark.parametrize("looks", [2, 5])
def test_several_policies_need_the_units_of_a_higher_confidence(looks: int) -> None:
    needed = units_needed(0.05, 0.9, looks)
    assert needed == units_needed(0.05, 1 - 0.1 / looks) > units_needed(0.05, 0.9)
    best = np.zeros((1, needed))
    assert fit_with_guarantee(best, max_risk=0.05, confidence=0.9, looks=looks).chosen == 0
    message = f"at least {needed} tested units for max_risk=.*for each of {looks} policies"
    with pytest.raises(ValueError, match=message):
        fit_with_guarantee(best[:, 1:], max_risk=0.05, confidence=0.9, looks=looks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"looks": 0}, "at least 1 of looks.* Got looks=0"),
        ({"looks": 1.5}, "Got looks=1.5"),
        ({"settings": [1]}, "each of 2 candidates. Got 1 settings and 2 costs"),
        ({"costs": [0.5, 0.4, 0.3]}, "Got 2 settings and 3 costs"),
        ({"risks": [0.0]}, r"of at least one candidate. Got shape \(1,\)"),
    ],
)
def test_tests_without_meaning_are_refused(
    options: Any, message: str, unchecked_shapes: None
) -> None:
    bound: Any = {"risks": [[0.0] * 100] * 2, "max_risk": 0.1, "confidence": 0.9}
    assert fit_with_guarantee(**bound).chosen == 1, "lists are taken"
    with pytest.raises(ValueError, match=message):
        fit_with_guarantee(**bound | options)


def shingles_of(document: np.ndarray) -> set[tuple[int, ...]]:
    ids = document.tolist()
    return {tuple(ids[i : i + 8]) for i in range(max(1, len(ids) - 7))}


def slow_groups(documents: list[np.ndarray]) -> list[int]:
    """Joins whatever is alike, pair by pair, until nothing changes."""
    sets = [shingles_of(document) for document in documents]
    groups = list(range(len(documents)))
    for _ in documents:
        for a, one in enumerate(sets):
            for b, other in enumerate(sets):
                if len(one & other) >= 1 / 3 * len(one | other):
                    groups[a] = groups[b] = min(groups[a], groups[b])
    return [sorted(set(groups)).index(group) for group in groups]


def changed(rng: np.random.Generator, document: np.ndarray, share: float) -> np.ndarray:
    hit = rng.random(len(document)) < share
    return np.where(hit, rng.integers(0, 16384, len(document)), document)


def test_a_header_that_all_share_is_compared_once_a_pair() -> None:
    rng = np.random.default_rng(0)
    header, texts = rng.integers(0, 16384, 500), 16384 + np.arange(12_000).reshape(40, 300)
    sets = [risk._shingles(np.concatenate([header, text])) for text in texts]
    owners, weight = risk.owners_of(sets)
    assert owners.shape == (40, 41), "one column for the header, one for each text"
    assert sorted(weight.tolist()) == [300] * 40 + [493]


def test_halves_keep_copies_on_one_side() -> None:
    rng = np.random.default_rng(3)
    originals = [rng.integers(0, 16384, 200) for _ in range(40)]
    copies = [changed(rng, original, 0.03) for original in originals]
    documents = [*originals, *copies, *originals[:5]]
    documents = [documents[index] for index in rng.permutation(len(documents))]
    first, second = split_documents(documents, seed=1)
    assert abs(len(first) - len(second)) <= 3
    contents = lambda part: [tuple(document.tolist()) for document in part]  # noqa: E731
    assert sorted(contents([*first, *second])) == sorted(contents(documents))
    both = group_near_duplicates([*first, *second])
    assert not {*both[: len(first)].tolist()} & {*both[len(first) :].tolist()}
    again, other = split_documents(documents, seed=1), split_documents(documents, seed=2)
    assert contents(again[0]) == contents(first) != contents(other[0])
    single, none = split_documents([originals[0], originals[0]])
    assert {len(single), len(none)} == {0, 2}, "nothing is left to test on"


@pytest.mark.parametrize(("looks", "holds"), [(1, False), (13, True)])
def test_the_best_of_several_policies_is_promised_only_where_all_are_at_once(
    looks: int, holds: bool
) -> None:
    """Thirteen policies beyond the bound, tested on the same documents; any that passes is used."""
    rng, broken, repeats = np.random.default_rng(12), 0, 200
    for seed in range(repeats):
        risks = rare_ones(rng, np.full(13, 0.0501), 150)
        bound: dict[str, Any] = {"max_risk": 0.05, "confidence": 0.9, "looks": looks}
        passed = [fit_with_guarantee(risk[None], seed=seed, **bound).chosen for risk in risks]
        broken += 0 in passed
    assert (broken <= stats.binom.ppf(0.999, repeats, 0.1)) == holds


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_those_of_plain_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 3, length) for length in (1, 1, 1, 7, 8, 9)]
    for length in (3, 7, 8, 30, 200, 200):
        source = rng.integers(0, 16384, length)
        for share in (0.0, 0.02, 0.05, 0.1, 0.2):
            cut = rng.integers(0, length // 3 + 1)
            documents.append(changed(rng, source[cut:], share))
    loop = np.tile(rng.integers(0, 16384, 12), 9)  # Its 8-grams recur.
    documents += [loop, np.concatenate([loop, rng.integers(0, 16384, 30)])]
    documents = [documents[index] for index in rng.permutation(len(documents))]
    result = group_near_duplicates(documents)
    slow = slow_groups(documents)
    assert result.tolist() == slow
    assert 6 < len(set(slow)) < len(documents)


def test_a_group_counts_as_its_documents_laid_end_to_end() -> None:
    rng = np.random.default_rng(9)
    differs = [rng.random((2, length)) < 0.3 for length in (5, 40, 1, 17, 9)]
    groups = np.asarray([0, 1, 0, 2, 1])
    result = risks_of_groups(
        np.stack([tokens.mean(axis=1) for tokens in differs], axis=1),
        np.asarray([tokens.shape[1] for tokens in differs]),
        groups,
    )
    for group in range(3):
        members = [tokens for tokens, name in zip(differs, groups, strict=True) if name == group]
        expected = np.concatenate(members, axis=1).mean(axis=1)
        np.testing.assert_allclose(result[:, group], expected, rtol=1e-12)
    tokens = np.asarray([3, 7, 49, 1, 1])
    assert risks_of_groups(np.ones((1, 5)), tokens, groups).max() <= 1


def test_a_bound_out_of_range_has_the_name_that_the_caller_knows() -> None:
    with pytest.raises(ValueError, match="Wanted max_risk between.*example max_risk=0.05"):
        fit_with_guarantee(np.zeros((1, 99)), max_risk=1.0, confidence=0.95)
    with pytest.raises(ValueError, match="Wanted max_changed between 0 and 1"):
        halves(np.arange(9), units="rows", max_risk=0, confidence=0.95, bound="max_changed")
    with pytest.raises(ValueError, match="Wanted max_disagreement between 0 and 1"):
        MaxDisagreement(max_disagreement=1.0, confidence=0.95, documents=())


def test_errors_are_counted_by_the_binomial_itself() -> None:
    assert units_needed(0.01, 0.95, binary=True) == 299
    assert 0.99**299 <= 0.05 < 0.99**298
    lost_of = np.arange(600) < np.asarray([[0], [2], [9]])
    result = fit_with_guarantee(lost_of, max_risk=0.02, confidence=0.95)
    for lost, p_value in zip((0, 2, 9), p_values_of(result), strict=True):
        expected = sum(math.comb(600, k) * 0.02**k * 0.98 ** (600 - k) for k in range(lost + 1))
        assert p_value == pytest.approx(expected)
    assert result.chosen == 1
