# SPDX-License-Identifier: Apache-2.0
"""What notebooks show: nothing of a text is lost, and none of it is taken for HTML."""

from __future__ import annotations

import html
import re

from utio_jax.core.html import depth_html, table_html


def test_text_is_coloured_by_depth_and_stays_text() -> None:
    pieces, depths = ["if a", " <b", ">&c"], [8, 16, 8]
    shown = depth_html(pieces, depths, num_layers=16)
    inside = re.findall(r'<span style="color:(#\w+)" title="(\d+) layers">(.*?)</span>', shown)
    assert [html.unescape(piece) for _, _, piece in inside] == pieces
    assert [int(depth) for _, depth, _ in inside] == depths
    (one, two, three) = (colour for colour, _, _ in inside)
    assert one == three != two
    assert "<b" not in shown.replace("<br", "")


def test_a_table_has_a_cell_for_what_is_not_known() -> None:
    assert table_html(["a<", "b"], [[1, None]]) == (
        "<table><tr><th>a&lt;</th><th>b</th></tr><tr><td>1</td><td></td></tr></table>"
    )
