# SPDX-License-Identifier: Apache-2.0
"""Pictures of comparisons."""

from __future__ import annotations

from utio_jax.bench.plots import plot_margins
from utio_jax.calibration.compare import ComparisonRow
from utio_jax.evaluation.ledger import Ledger


def test_rows_without_a_margin_are_an_empty_picture() -> None:
    figure = plot_margins([ComparisonRow(ledger=Ledger(policy="learned"))], title="12 tokens")
    assert figure.get_suptitle() == "12 tokens: no margin is known"
