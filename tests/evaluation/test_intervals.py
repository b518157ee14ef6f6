# SPDX-License-Identifier: Apache-2.0
"""95 % intervals over documents: how often they hold the true value, and when there is none."""

from __future__ import annotations

import numpy as np
import pytest

from utio_jax.evaluation.intervals import ratio_interval

_TRUTH = 0.02


def text_of(
    rng: np.random.Generator, documents: int, rows: int, *, skewed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what rows lose, their loss at full depth, and their documents.

    Rows of one document share half the variance.
    """

    def noise(*shape: int) -> np.ndarray:
        drawn = rng.normal(size=shape)
        return (np.exp(drawn) - np.exp(0.5)) / 2.16 if skewed else drawn

    full = rng.uniform(50, 150, (documents, rows))
    alike = np.sqrt(0.5) * (noise(documents, 1) + noise(documents, rows))
    lost = full * (_TRUTH + 0.02 * alike)
    return lost.ravel(), full.ravel(), np.repeat(np.arange(documents), rows)


@pytest.mark.parametrize(
    ("documents", "rows", "skewed", "least"),
    [
        (5, 1, False, 0.93),
        (8, 1, False, 0.92),
        (8, 1, True, 0.87),
        (29, 1, True, 0.89),
        (16, 4, False, 0.92),
        (16, 4, True, 0.86),
        (8, 8, False, 0.92),
        (8, 8, True, 0.87),
    ],
)
def test_intervals_cover_as_often_as_their_docstring_says(
    documents: int, rows: int, skewed: bool, least: float
) -> None:
    """The documented figures less two standard errors of 400 repeats, and more."""
    rng, held = np.random.default_rng(100 * documents + rows), 0
    for trial in range(400):
        text = text_of(rng, documents, rows, skewed=skewed)
        low, _, high = ratio_interval(*text, draws=300, seed=trial) or (0.0, 0.0, 0.0)
        held += low <= _TRUTH <= high
    assert least <= held / 400 < 0.99


def test_rows_of_one_document_count_as_one() -> None:
    """Copies of each row in its document leave the interval as it is; their names do not matter."""
    lost, full, documents = text_of(np.random.default_rng(0), 9, 1, skewed=False)
    result = ratio_interval(lost, full, documents)
    low, value, high = result or (0.0, 0.0, 0.0)
    assert value == pytest.approx(lost.sum() / full.sum())
    assert value - low == pytest.approx(high - value)
    again = ratio_interval(np.repeat(lost, 3), np.repeat(full, 3), np.repeat(7 * documents, 3))
    assert again == pytest.approx(result)


def test_no_interval_over_fewer_than_five_documents() -> None:
    ones, documents = np.ones(20), np.arange(20) % 5
    assert ratio_interval(ones, ones, documents % 4) is None
    assert ratio_interval(0 * ones, ones, documents) == (0.0, 0.0, 0.0)
    under = np.where(documents == 0, 1.0, 0.0)
    assert ratio_interval(ones, under, documents) is None, "a draw without that document"
