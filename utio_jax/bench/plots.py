# SPDX-License-Identifier: Apache-2.0
"""Plots of ledger rows and depths. Needs the extra `cli`.

Figures are made without pyplot: the backend stays, and notebooks show what is returned.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utio_jax.evaluation.ledger import Ledger


class _Picture(Figure):
    """A figure that displays itself in a notebook without a Matplotlib backend."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


COLOURS = {
    "uniform": "#777777",
    "random": "#d08b2c",
    "utio_surrogate": "#7a5aa6",
    "learned": "#11806a",
}

# Of policies without a colour of their own, by their place among these.
OTHER_COLOURS = ("#33658a", "#b0413e", "#7d9d2f", "#c06aa1", "#3fa7bf", "#8a5a33")


_LUMINANCE = (0.2126, 0.7152, 0.0722)  # Of red, green and blue (Rec. 709).


def plot_pareto(
    rows: Sequence[Ledger],
    file: str | Path | None = None,
    *,
    title: str,
    hull: Callable[[float], float | None],
    plain: Callable[[float], float | None] = lambda _: None,
) -> Figure:
    """Draws loss increase (%) over `flops_ratio`: policies, single exits and their frontier.

    `plain` is the loss of plain models of other depths at a `flops_ratio`; None where not known.
    """
    figure = _Picture(figsize=(7.2, 5.1), layout="constrained")
    axes = figure.subplots()
    measured = [
        (row, row.flops_ratio, row.nll_increase_pct)
        for row in rows
        if row.flops_ratio is not None and row.nll_increase_pct is not None
    ]
    exits = sorted(
        (x, y, f"{row.depth_decided_mean:.0f} layers")
        for row, x, y in measured
        if row.policy in ("uniform", "full") and row.depth_decided_mean is not None
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row, x, y in measured:
        if row.policy not in ("uniform", "full") and row.budget is not None:
            curves.setdefault(row.policy, []).append((x, y))
    points = [point for curve in curves.values() for point in curve]
    # The shallowest exits would squeeze everything of interest into the bottom edge.
    shown = [y for x, y in points for y in (y, hull(x) or 0.0)] or [y for _, y, _ in exits]
    top = 1.35 * max(0.5, *shown)
    costs = [x for x, *_ in exits]
    xs = np.linspace(min(costs), max(costs), 400)
    mixed = np.asarray([hull(float(x)) for x in xs], np.float64)
    grey = COLOURS["uniform"]
    axes.plot(xs, mixed, color=grey, linewidth=1, linestyle="--", label="exits mixed at random")
    controls = np.asarray([plain(float(x)) for x in xs], np.float64)
    if np.isfinite(controls).any():
        axes.plot(xs, controls, color="black", linewidth=1.2, label="plain models of fewer layers")
    label = "uniform (one exit for all)"
    axes.scatter(costs, [y for _, y, _ in exits], color=grey, s=22, zorder=3, label=label)
    for x, y, name in exits:
        if y <= top:
            axes.annotate(
                name,
                (x, y),
                textcoords="offset points",
                xytext=(4, 6),
                fontsize=8,
                color="#555555",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
                zorder=4,
            )
    others = itertools.cycle(OTHER_COLOURS)
    for name, curve in curves.items():
        x, y = zip(*sorted(curve), strict=True)
        colour = COLOURS.get(name) or next(others)
        axes.plot(x, y, marker="o", markersize=5, color=colour, label=name)
    left = min(x for x, y, *_ in (*points, *exits) if y <= top) - 0.06
    right = max(x for x, *_ in (*points, *exits)) + 0.06  # Room for a name.
    bottom = min([-0.06 * top, *(1.1 * y for _, y in points)])
    axes.set(ylim=(bottom, top), xlim=(left, right), title=title)
    axes.set_xlabel(
        "executed FLOPs / FLOPs of the full pass (padding, gates and frozen K/V included)"
    )
    axes.set_ylabel("loss increase over full depth (%)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncol=3, frameon=False)
    return saved(figure, file)


def plot_depths(
    text: str,
    offsets: Sequence[tuple[int, int]],
    depths: Sequence[int],
    file: str | Path | None = None,
    *,
    levels: Sequence[int],
    title: str,
    columns: int = 100,
) -> Figure:
    """Draws a text; the background of each token shows its depth.

    Args:
      text: the tokenised text.
      offsets: each token's first and last-plus-one character.
      depths: each token's decided depth.
      file: picture to write; None writes none.
      levels: all depths that can occur, ascending.
      title: above the picture.
      columns: characters per line; longer lines are cut.
    """
    level_of_character = np.full(len(text), -1)
    for (start, stop), depth in zip(offsets, depths, strict=True):
        level_of_character[start:stop] = list(levels).index(depth)
    lines, begin = text.split("\n"), 0
    grid = np.full((len(lines), columns), np.nan)
    for number, line in enumerate(lines):
        shown = level_of_character[begin : begin + min(len(line), columns)]
        grid[number, : len(shown)] = np.where(shown < 0, np.nan, shown)
        begin += len(line) + 1
    colours = ListedColormap(colormaps["YlGnBu"](np.linspace(0.08, 0.85, len(levels))))
    figure = _Picture(
        figsize=(0.085 * columns + 0.4, 0.172 * len(lines) + 0.9), layout="constrained"
    )
    axes = figure.subplots()
    norm = BoundaryNorm(np.arange(len(levels) + 1) - 0.5, len(levels))
    axes.imshow(grid, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    for number, line in enumerate(lines):
        for column, character in enumerate(line[:columns]):
            if not character.isspace():
                level = grid[number, column]
                shade = 1.0 if np.isnan(level) else np.dot(colours(int(level))[:3], _LUMINANCE)
                axes.text(
                    column,
                    number,
                    character,
                    family="monospace",
                    fontsize=7.5,
                    ha="center",
                    va="center",
                    color="white" if shade < 0.5 else "black",
                )
    axes.axis("off")
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(
        handles=[
            Patch(color=colours(i), label=f"{depth} layers") for i, depth in enumerate(levels)
        ],
        loc="outside lower center",
        ncols=len(levels),
        frameon=False,
        fontsize=8,
    )
    return saved(figure, file)


def saved(figure: Figure, file: str | Path | None) -> Figure:
    """Returns the figure, after writing it to `file` if given."""
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    return figure
