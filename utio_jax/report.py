# SPDX-License-Identifier: Apache-2.0
"""Pictures of ledger rows and depths. Needs the extra `cli` (matplotlib).

Figures are made without pyplot: nobody's backend changes, and notebooks show what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utio_jax.comparison import ComparisonRow
from utio_jax.ledger import Ledger

_COLOURS = {
    "uniform": "#777777",
    "uniform_hull": "#777777",
    "random": "#d08b2c",
    "utio_surrogate": "#7a5aa6",
    "learned": "#11806a",
}


_LUMINANCE = (0.2126, 0.7152, 0.0722)  # Of red, green and blue (Rec. 709).


def plot_pareto(
    rows: Sequence[Ledger],
    file: str | Path | None = None,
    *,
    title: str,
    hull: Callable[[float], float | None],
) -> Figure:
    """Draws loss increase (%) over `flops_ratio`: policies, single exits and their hull."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    exits = sorted(
        (row.flops_ratio, row.nll_increase_pct, row.depth_decided_mean)
        for row in rows
        if row.policy in ("uniform", "full")
        and row.flops_ratio is not None
        and row.nll_increase_pct is not None
        and row.depth_decided_mean is not None
    )
    # The shallowest exits would squeeze everything of interest into the bottom edge.
    others = [
        r.nll_increase_pct
        for r in rows
        if r.policy not in ("uniform", "full") and r.nll_increase_pct
    ]
    top = 1.35 * max([0.5, *others])
    xs = np.linspace(min(x for x, *_ in exits), 1.0, 400)
    axes.plot(
        xs,
        np.asarray([hull(float(x)) for x in xs], np.float64),
        color=_COLOURS["uniform_hull"],
        linewidth=1,
        linestyle="--",
        label="uniform_hull (random mix of exits)",
    )
    axes.scatter(
        [x for x, *_ in exits],
        [y for _, y, _ in exits],
        color=_COLOURS["uniform"],
        s=22,
        zorder=3,
        label="uniform (one exit for all)",
    )
    for x, y, depth in exits:
        if y <= top:
            axes.annotate(
                f"{depth:.0f} layers",
                (x, y),
                textcoords="offset points",
                xytext=(4, 6),
                fontsize=8,
                color="#555555",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
                zorder=4,
            )
    for name in dict.fromkeys(row.policy for row in rows):
        points = sorted(
            (r.flops_ratio, r.nll_increase_pct)
            for r in rows
            if r.policy == name and r.budget is not None
        )
        if name == "uniform_hull" or not points:
            continue
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=5,
            color=_COLOURS.get(name),
            label=name,
        )
    left = min(r.flops_ratio for r in rows if r.budget is not None and r.flops_ratio) - 0.06
    axes.set(
        xlabel="executed FLOPs / FLOPs of the full pass (padding, gates and frozen K/V included)",
        ylabel="loss increase over full depth (%)",
        ylim=(-0.06 * top, top),
        xlim=(left, 1.03),
        title=title,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return _saved(figure, file)


def plot_margins(
    rows: Sequence[ComparisonRow], file: str | Path | None = None, *, title: str
) -> Figure:
    """Draws how far each policy lies below the hull over `flops_ratio`, with its interval."""
    names = list(dict.fromkeys(row.ledger.policy for row in rows if row.hull_margin_pct))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.3 * lines + 0.7), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for name, axes in zip(names, grid.flat, strict=False):
        points = sorted(
            (row.ledger.flops_ratio or 0.0, *row.hull_margin_pct)
            for row in rows
            if row.ledger.policy == name and row.hull_margin_pct
        )
        x, low, mid, high = np.asarray(points).T
        axes.axhline(0, color=_COLOURS["uniform_hull"], linewidth=1, linestyle="--")
        colour = _COLOURS.get(name, "#33658a")
        axes.fill_between(x, low, high, color=colour, alpha=0.2)
        axes.plot(x, mid, marker="o", markersize=3, color=colour)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
    for axes in list(grid.flat)[len(names) :]:
        axes.axis("off")
    # Bad policies would squeeze the good ones: they leave the picture at the bottom.
    best = max(0.1, *(row.hull_margin_pct[2] for row in rows if row.hull_margin_pct))
    grid[0, 0].set_ylim(-1.2 * best, 1.2 * best)
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("executed FLOPs / FLOPs of the full pass", fontsize=9)
    figure.supylabel("loss below the hull (%)\n95 % interval over documents", fontsize=9)
    return _saved(figure, file)


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
    """Draws a text with every token on the colour of its depth.

    Args:
      text: what was tokenised.
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
    figure = Figure(figsize=(0.085 * columns + 0.4, 0.172 * len(lines) + 0.9), layout="constrained")
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
    return _saved(figure, file)


def _saved(figure: Figure, file: str | Path | None) -> Figure:
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    return figure
