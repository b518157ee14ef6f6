# SPDX-License-Identifier: Apache-2.0
"""HTML of results for notebooks: text coloured by depth, and small tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

SHADES = ("#2f9e8f", "#7fb83d", "#d8b02a", "#e07b2e", "#d1495b", "#a44ac2")
"""Shallow to deep, on any background."""


def shade(index: int, levels: int) -> str:
    """Returns the colour of a depth, by its rank among all possible depths.

    >>> shade(0, 3), shade(2, 3)
    ('#2f9e8f', '#a44ac2')
    """
    return SHADES[round(index * (len(SHADES) - 1) / max(levels - 1, 1))]


def depth_html(pieces: Sequence[str], depths: Sequence[int], *, num_layers: int) -> str:
    """Returns a text as HTML; the colour of each token's piece shows its layers."""
    levels = sorted({*depths, num_layers})
    colours = {depth: shade(index, len(levels)) for index, depth in enumerate(levels)}
    text = "".join(
        f'<span style="color:{colours[depth]}" title="{depth} layers">{html.escape(piece)}</span>'
        for piece, depth in zip(pieces, depths, strict=True)
    )
    legend = " ".join(
        f'<span style="color:{colour}">{depth}</span>' for depth, colour in colours.items()
    )
    return f'<pre style="white-space:pre-wrap">{text}</pre><small>layers: {legend}</small>'


def table_html(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as HTML; None is an empty cell.

    >>> table_html(["loss"], [[1.5], [None]])
    '<table><tr><th>loss</th></tr><tr><td>1.5</td></tr><tr><td></td></tr></table>'
    """
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in names)]
    for row in rows:
        cells = ("" if cell is None else html.escape(str(cell)) for cell in row)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
