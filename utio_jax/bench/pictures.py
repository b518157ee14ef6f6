# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmark rows: speed-ups by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utio_jax.bench.plots import plain
from utio_jax.bench.rows import Row

_RED = "#b0413e"
# Of the method, not of the place in which it is measured.
_OF_METHOD = ("budget", "buckets")


def is_gain(row: Row) -> bool:
    """Returns whether the row has a speed-up over something else than itself."""
    return row.speedup is not None and row.method != row.baseline


def group(rows: Sequence[Row], *, without: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Returns rows of one model in one setting, apart from the settings in `without`.

    Groups are named by the settings in which they differ.
    """
    skipped = (*_OF_METHOD, *without)
    settings = list[dict[str, object]]()
    for row in rows:
        place = {name: value for name, value in row.setting.items() if name not in skipped}
        # Says nothing that prompt and output do not.
        if place.get("context") == row.setting.get("prompt", 0) + row.setting.get("output", 0):
            del place["context"]
        settings.append(place)
    names = [
        name
        for name in dict.fromkeys(name for setting in settings for name in setting)
        if len({str(setting.get(name)) for setting in settings}) > 1
    ]
    found: dict[str, list[Row]] = {}
    for row, setting in zip(rows, settings, strict=True):
        said = [f"{name} {setting[name]}" for name in names if name in setting]
        found.setdefault(", ".join([model_name(row), *said]), []).append(row)
    return found


def model_name(row: Row) -> str:
    """Returns the model's name, with a word on random weights."""
    return row.model + (" (random weights)" if row.speed_only and "random" not in row.model else "")


def draw_speedups(rows: Sequence[Row]) -> Figure | None:
    """Draws bars of measured speed-ups by batch, with quartiles, and the ideal as a tick.

    Controls (uniform, random) are hatched. What fell back or did not run has a cross instead.
    """
    rows = [row for row in rows if "batch" in row.setting and (is_gain(row) or not row.own)]
    if not any(map(is_gain, rows)):
        return None
    methods = dict.fromkeys(row.method for row in rows)
    colours = {method: colormaps["tab20"](n % 20) for n, method in enumerate(methods)}
    panels = group(rows, without=("batch",))
    most = max(len({row.method for row in members}) for members in panels.values())
    figure, grid = _small_multiples(len(panels), 1 if most > 8 else 2, height=2.9)
    for (name, members), axes in zip(panels.items(), grid, strict=True):
        _speedup_bars(axes, members, colours)
        axes.set_title(plain(name), fontsize=9)
    top = max(axes.get_ylim()[1] for axes in grid)
    for axes in grid:
        axes.set_ylim(0, top)
    figure.supylabel("speed-up over the baseline", fontsize=9)
    figure.supxlabel("batch (rows)", fontsize=9)
    shown: list[Line2D | Patch] = [
        Patch(facecolor=colour, hatch=_hatch(method), edgecolor="white", label=plain(method))
        for method, colour in colours.items()
    ]
    shown.append(Line2D([], [], color="black", linewidth=1.5, label="ideal"))
    if any(row.speedup is None for row in rows):
        cross = Line2D([], [], marker="x", color=_RED, linestyle="", label="fell back, did not run")
        shown.append(cross)
    _legend_above(figure, shown)
    return figure


def _speedup_bars(axes: Axes, rows: Sequence[Row], colours: Mapping[str, tuple]) -> None:
    batches = sorted({row.setting["batch"] for row in rows})
    methods = list(dict.fromkeys(row.method for row in rows))
    width = 0.84 / len(methods)
    for row in rows:
        place = methods.index(row.method) - (len(methods) - 1) / 2
        x = batches.index(row.setting["batch"]) + place * width
        if row.speedup is None:
            axes.plot(x, 0.05, marker="x", color=_RED, markersize=5, linestyle="")
            continue
        middle = row.speedup.median
        axes.bar(
            x,
            middle,
            width=0.92 * width,
            color=colours[row.method],
            hatch=_hatch(row.method),
            edgecolor="white",
            linewidth=0,
            yerr=np.maximum([[middle - row.speedup.low], [row.speedup.high - middle]], 0),
            error_kw={"elinewidth": 1, "ecolor": "#222222"},
        )
        if row.speedup_ideal is not None:
            ends = (x - 0.44 * width, x + 0.44 * width)
            axes.hlines(row.speedup_ideal, *ends, color="black", linewidth=1.5)
    axes.axhline(1, color="#555555", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)


def _hatch(method: str) -> str:
    return "///" if method.startswith(("uniform", "random")) else ""


def _small_multiples(number: int, columns: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure and `number` axes of it in rows of at most `columns`, `height` inches."""
    rows, across = -(-number // columns), min(columns, number)
    figure = Figure(figsize=(10.5, height * rows + 0.6), layout="constrained")
    grid = list(figure.subplots(rows, across, squeeze=False).flat)
    for axes in grid[number:]:
        axes.axis("off")
    return figure, grid[:number]


def _legend_above(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    figure.legend(
        handles=list(handles), loc="outside upper center", ncols=5, frameon=False, fontsize=8
    )
