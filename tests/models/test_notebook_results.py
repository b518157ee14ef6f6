# SPDX-License-Identifier: Apache-2.0
"""What notebooks show of what the verbs return; the text of one prompt by its name."""

from __future__ import annotations

import dataclasses
import html
import re

import numpy as np
import pytest
from helpers.generation import plain_run

from utio_jax.calibration.compare import ComparisonRow
from utio_jax.core.html import depth_html, table_html
from utio_jax.decoding.generate import Generated
from utio_jax.evaluation.ledger import Ledger
from utio_jax.models.results import Compared


def generated(rows: int) -> Generated:
    cut = {"token_ids": np.asarray([1, 2]), "executed": np.asarray([16, 16])}
    cut |= {"decided": np.asarray([8, 16]), "log_probabilities": np.zeros(2, np.float32)}
    shown = {"text": "ab", "pieces": ("a", "b"), "num_layers": 16}
    row = dataclasses.replace(plain_run().rows[0], **cut, **shown)
    return dataclasses.replace(plain_run(), rows=(row,) * rows, has_text=True, num_layers=16)


def test_text_is_coloured_by_depth_and_stays_text() -> None:
    pieces, depths = ["if a", " <b", ">&c"], [8, 16, 8]
    shown = depth_html(pieces, depths, num_layers=16)
    inside = re.findall(r'<span style="color:(#\w+)" title="(\d+) layers">(.*?)</span>', shown)
    assert [html.unescape(piece) for _, _, piece in inside] == pieces
    assert [int(depth) for _, depth, _ in inside] == depths
    (one, two, three) = (colour for colour, _, _ in inside)
    assert one == three != two
    assert "<b" not in shown.replace("<br", "")
    assert "<th>a&lt;</th>" in table_html(["a<"], [])


@pytest.mark.usefixtures("unchecked_shapes")
def test_new_text_is_shown_by_depth() -> None:
    one = generated(1)
    assert one.text == "ab"
    assert one.message == {"role": "assistant", "content": "ab"}
    assert 'title="16 layers">b</span>' in one._repr_html_()
    two = generated(2)
    assert two._repr_html_().count("<pre") == 2
    for name in ("text", "message"):
        with pytest.raises(ValueError, match="Wanted the text of one prompt. Got 2: see texts"):
            getattr(two, name)


def test_figures_are_a_table_of_what_was_measured() -> None:
    ledger = Ledger(policy="learned", budget=0.6, flops_ratio=0.597, nll_increase_pct=1.1)
    assert ledger.figures() == {
        "policy": "learned",
        "budget": "0.6",
        "work": "0.60",
        "loss %": "+1.10",
    }
    assert "<th>loss %</th>" in ledger._repr_html_()
    assert "<td>+1.10</td>" in ledger._repr_html_()
    assert repr(ledger) == "Ledger(policy learned, budget 0.6, work 0.60, loss % +1.10)"
    rows = Compared(
        [
            ComparisonRow(ledger=Ledger(policy="full", flops_ratio=1.0)),
            ComparisonRow(ledger=ledger, hull_margin_pct=(0.1, 0.2, 0.3), hull_margin_p_value=0.01),
        ]
    )
    shown = rows._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>+0.20 [+0.10, +0.30]</td>" in shown
    assert rows.verdict in shown
    lines = repr(rows).splitlines()
    assert lines[1].endswith("loss % +1.10, below truncation % +0.20 [+0.10, +0.30]")
    assert lines[2:] == [rows.verdict]
    assert "1 of 1 policies are better than truncating" in rows.verdict
