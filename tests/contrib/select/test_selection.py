# SPDX-License-Identifier: Apache-2.0
"""Margins with a guarantee: replayed as written, cheapest that passes, kept on queries not seen."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.models import Model

from utio_jax.calibration.guarantee import Fitted, half_of
from utio_jax.contrib.select.fitting import fit_select, replay, see_all
from utio_jax.contrib.select.selecting import Select, read_context, select

DEPTHS = (0, 1, 2)


def scores_of(
    queries: int, *, noise: tuple[float, ...] = (2.0, 0.6, 0.2), rows: int = 8, seed: int = 0
) -> np.ndarray:
    """Returns scores `[query, boundary, row]`: full depth's, behind noise that fades with depth."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(queries, 1, rows))
    shape = (queries, len(noise), rows)
    early = full + np.asarray(noise)[None, :, None] * rng.normal(size=shape)
    return np.concatenate([early, full], axis=1).astype(np.float32)


def fit(tiny: Model, seen: np.ndarray, **options: object) -> Fitted:
    given = {"depths": DEPTHS, "tokens": 8, "slots": 16, "max_disagreement": 0.05} | options
    return fit_select(tiny.decoder, tiny.params, seen, **given)  # type: ignore[arg-type]


def test_a_replay_is_the_loop_as_written() -> None:
    seen = scores_of(40)
    seen[3, :, 5:] = np.nan  # Three candidates that there are not.
    margins = np.asarray([1.5, 0.7, 0.1], np.float32)
    counts, lost = replay(seen, margins)
    for query, table in enumerate(seen):
        left = [row for row in range(8) if not np.isnan(table[-1, row])]
        winner = max(left, key=lambda row: table[-1, row])
        mine = [len(left)]
        for scores, margin in zip(table, margins.tolist(), strict=False):
            bar = max(scores[row] for row in left)
            left = [row for row in left if bar - scores[row] <= np.float32(margin)]
            mine.append(len(left))
        assert counts[query].tolist() == mine
        assert lost[query] == (winner not in left)
    assert 0 < lost.sum() < 40


def test_the_cheapest_that_passes_is_chosen_and_costs_what_it_says(tiny: Model) -> None:
    seen = scores_of(400)
    fitted = fit(tiny, seen)
    ratios = [rung.cost for rung in fitted.ladder]
    assert ratios == sorted(ratios, reverse=True)
    passed = [rung.p_value <= 0.05 for rung in fitted.ladder]
    last = passed.index(False) - 1 if False in passed else len(passed) - 1
    assert fitted.chosen is fitted.ladder[last].setting
    assert 0 < last < len(fitted.ladder) - 1
    assert fitted.ladder[last].cost < fitted.ladder[0].cost < 1
    assert fitted.tested == 200


def test_queries_of_one_document_stay_on_one_side(tiny: Model) -> None:
    groups = np.repeat(np.arange(4), 100)
    assert len({*half_of(groups, 0)[::100].tolist()}) == 2
    seen = scores_of(400)
    tests = ~half_of(groups, 0)
    seen[tests, :-1] = -seen[tests, -1:]  # Documents of which exits say the opposite: they test.
    fitted = fit(tiny, seen, groups=groups)
    assert fitted.tested == 200
    assert fitted.ladder[-1].risk > 0.5


def test_what_is_seen_is_what_selecting_would_see(tiny: Model) -> None:
    rng = np.random.default_rng(0)
    queries = [
        (rng.integers(0, 64, 7), rng.integers(0, 64, (4, 3)), np.asarray([3, 2, 3, 1]))
        for _ in range(3)
    ]
    seen = see_all(tiny.decoder, tiny.params, queries, depths=DEPTHS, slots=8)
    assert seen.shape == (3, 4, 4)
    how = Select(depths=(1,), margins=np.asarray([0.2], np.float32))
    for (ids, candidates, lengths), table in zip(queries, seen, strict=True):
        context = read_context(tiny.decoder, tiny.params, ids, slots=8)
        found = select(tiny.decoder, tiny.params, context, candidates, lengths, how)
        (counts,), (lost,) = replay(table[None, [1, 3]], how.margins)
        assert counts.tolist() == [4, int((found.depths == 4).sum())]
        assert (found.winner != table[-1].argmax()) == lost


def test_what_does_not_fit_is_named(tiny: Model, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="Make them with see_all"):
        fit(tiny, scores_of(400)[:, 1:])
    with pytest.raises(ValueError, match="Wanted at least 118 queries"):
        fit(tiny, scores_of(117))
    with pytest.raises(ValueError, match="a group for each of 400 queries"):
        fit(tiny, scores_of(400), groups=np.zeros(3, np.int32))
