# SPDX-License-Identifier: Apache-2.0
"""Pictures of measured times: speed-ups by batch, efficiency, growth, profit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullFormatter, NullLocator

from utio_jax.benchmark.schema import Row
from utio_jax.report.grouping import family, group, is_gain, ran_as_itself, tell_apart
from utio_jax.report.growth import Series, fit_exponent, growth_series
from utio_jax.report.plots import legend_above, method_colours, plain, small_multiples

_GREY = "#555555"
_CONTROLS = ("uniform", "random")
_CROSS: dict[str, Any] = {"marker": "x", "color": "#b0413e", "markersize": 5, "linestyle": ""}
_UNITS = {"batch": "rows", "prompt": "tokens", "output": "tokens", "context": "tokens"}


def draw_speedups(rows: Sequence[Row]) -> Figure | None:
    """Draws bars of measured speed-ups by batch, with quartiles, and the ideal as a tick.

    Controls (uniform, random) are hatched. What fell back or did not run has a cross instead.
    """
    rows = [
        row for row in rows if "batch" in row.setting and (is_gain(row) or not ran_as_itself(row))
    ]
    if not any(map(is_gain, rows)):
        return None
    colours = method_colours({row.method: family(row) for row in rows})
    panels = {
        name: tell_apart(members, place=lambda row: row.setting["batch"])
        for name, members in group(rows, without=("batch",)).items()
    }
    bars = max(sum(len(found) for found in panel.values()) for panel in panels.values())
    columns = 1 if bars > 24 else 2 if bars > 12 else 3
    figure, grid = small_multiples(len(panels), columns, height=2.9)
    for (name, panel), axes in zip(panels.items(), grid, strict=True):
        _speedup_bars(axes, panel, colours)
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
    if any(row.speedup is not None and row.speedup_ideal is not None for row in rows):
        shown.append(Line2D([], [], color="black", linewidth=1.5, label="ideal"))
    if any(row.speedup is None for row in rows):
        shown.append(Line2D([], [], label="fell back or did not run", **_CROSS))
    legend_above(figure, shown)
    return figure


def _speedup_bars(axes: Axes, panel: dict[str, dict], colours: dict[str, str]) -> None:
    batches = sorted({batch for found in panel.values() for batch in found})
    width = 0.84 / len(panel)
    for number, found in enumerate(panel.values()):
        for batch, row in found.items():
            x = batches.index(batch) + (number - (len(panel) - 1) / 2) * width
            if row.speedup is None:
                axes.plot(x, 0.05, **_CROSS)
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
                axes.hlines(
                    row.speedup_ideal,
                    x - 0.44 * width,
                    x + 0.44 * width,
                    color="black",
                    linewidth=1.5,
                )
    axes.axhline(1, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)


def _hatch(method: str) -> str:
    return "///" if method.startswith(_CONTROLS) else ""


def draw_efficiency(rows: Sequence[Row]) -> Figure | None:
    """Draws measured over ideal speed-ups, a panel per part, with lines of equal efficiency."""
    points = [
        (row.part, family(row), row.speedup_ideal, row.speedup)
        for row in rows
        if is_gain(row) and row.speedup is not None and row.speedup_ideal is not None
    ]
    if not points:
        return None
    parts = list(dict.fromkeys(part for part, *_ in points))
    families = list(dict.fromkeys(name for _, name, *_ in points))
    colours = method_colours({name: name for name in families})
    figure, grid = small_multiples(len(parts), 2 if len(parts) == 4 else 3, height=3.2)
    for part, axes in zip(parts, grid, strict=True):
        members = [(name, ideal, found) for at, name, ideal, found in points if at == part]
        top = 1.1 * max(max(ideal, found.high) for _, ideal, found in members)
        low = min(0.9, *(0.9 * min(ideal, found.low) for _, ideal, found in members))
        for share in (1.0, 0.8, 0.6):
            axes.plot(
                [low, top], [share * low, share * top], color="#bbbbbb", linewidth=0.9, zorder=1
            )
            axes.annotate(
                f"{share:.0%}",
                (top, share * top),
                fontsize=7,
                color=_GREY,
                xytext=(2, 0),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
            )
        for name, ideal, found in members:
            ends = [[found.median - found.low], [found.high - found.median]]
            axes.errorbar(
                ideal,
                found.median,
                yerr=np.maximum(ends, 0),
                fmt="o",
                markersize=4.5,
                alpha=0.85,
                elinewidth=1,
                color=colours[name],
            )
        axes.set(xlim=(low, top), ylim=(0.55 * low, top), title=part)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.2)
    figure.supxlabel("ideal speed-up (no padding, no gate)", fontsize=9)
    figure.supylabel("measured speed-up, quartiles", fontsize=9)
    legend_above(
        figure,
        [
            Line2D([], [], color=colours[name], marker="o", linestyle="", label=plain(name))
            for name in families
        ],
    )
    return figure


def draw_growth(rows: Sequence[Row]) -> Figure | None:
    """Draws seconds while one setting grows, a panel each, logarithmic where it spans 4 to 1."""
    series = growth_series(rows)
    if not series:
        return None
    panels: dict[tuple[str, str], list[Series]] = {}
    for each in series:
        panels.setdefault((each.axis, each.model), []).append(each)
    methods = {each.rows[0].method: family(each.rows[0]) for each in series}
    colours = method_colours(methods)
    figure, grid = small_multiples(len(panels), 3, height=3.1)
    for ((axis, model), members), axes in zip(panels.items(), grid, strict=True):
        for each in members:
            _growth_line(axes, each, colours[each.rows[0].method])
        _baseline_line(axes, members)
        axes.set_title(plain(model), fontsize=9)
        unit = f" ({_UNITS[axis]})" if axis in _UNITS else ""
        axes.set_xlabel(plain(axis) + unit, fontsize=9)
        xs = np.unique(np.concatenate([each.x for each in members]))
        if xs[0] > 0 and xs[-1] >= 4 * xs[0]:
            axes.set_xscale("log")
            axes.set_yscale("log")
            _leave_room(axes)
            _time_axis(axes, "y")
        else:
            axes.set_ylim(bottom=0)
            _leave_room(axes)
            axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
        axes.xaxis.set_major_locator(FixedLocator(xs.tolist()))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.grid(alpha=0.25)
        axes.legend(
            frameon=False,
            fontsize=7,
            title="fitted power",
            title_fontsize=7,
            alignment="left",
            loc="upper left",
        )
    figure.supylabel("seconds, quartiles", fontsize=9)
    return figure


def _growth_line(axes: Axes, series: Series, colour: str) -> None:
    median, low, high = series.seconds
    axes.errorbar(
        series.x,
        median,
        yerr=np.maximum([median - low, high - median], 0),
        marker="o",
        markersize=4,
        elinewidth=1,
        color=colour,
        label=plain(f"{series.label}: {_power(series.exponent)}", 46),
    )


def _power(found: tuple[float, float] | None) -> str:
    return "none" if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"


def _leave_room(axes: Axes, share: float = 0.3) -> None:
    """Lifts the upper end of the y axis: its legend stands there, above all curves."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** share)
    else:
        axes.set_ylim(low, high + share * (high - low))


def _baseline_line(axes: Axes, members: Sequence[Series]) -> None:
    """Draws what the members are compared with, unless that is one of them."""
    points: dict[float, list[float]] = {}
    for series in members:
        for x, row in zip(series.x, series.rows, strict=True):
            if row.baseline_seconds is not None:
                points.setdefault(float(x), []).append(row.baseline_seconds.median)
    x = np.asarray(sorted(points))
    y = np.asarray([np.median(points[each]) for each in x])
    drawn = any(np.array_equal(x, each.x) and np.allclose(y, each.seconds[0]) for each in members)
    if points and not drawn:
        axes.plot(
            x,
            y,
            color=_GREY,
            linestyle="--",
            linewidth=1,
            label=f"baseline: {_power(fit_exponent(x, y))}",
        )


def draw_profit(rows: Sequence[Row]) -> Figure | None:
    """Draws measured over predicted seconds; points held out of the fit are filled."""
    found = [
        (row.profit["predicted_seconds"], row.profit["measured_seconds"], row.profit["held_out"])
        for row in rows
        if row.profit is not None
        and row.profit["predicted_seconds"]
        and row.profit["measured_seconds"]
    ]
    if not found:
        return None
    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    axes = figure.subplots()
    ends = np.asarray(
        [0.8 * min(min(p, m) for p, m, _ in found), 1.25 * max(max(p, m) for p, m, _ in found)]
    )
    axes.plot(ends, ends, color=_GREY, linewidth=1, linestyle="--", label="exact")
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#dddddd", label="within 10 %", zorder=0)
    for held_out, name in ((False, "in the fit"), (True, "held out")):
        points = [(p, m) for p, m, out in found if out == held_out]
        if points:
            axes.scatter(
                *zip(*points, strict=True),
                s=26,
                facecolor="#11806a" if held_out else "white",
                edgecolor="#11806a",
                zorder=3,
                label=f"{name} ({len(points)})",
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="predicted seconds", ylabel="measured seconds (median)")
    for which in ("x", "y"):
        _time_axis(axes, which)
    axes.set_aspect("equal")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _time_axis(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_minor_formatter(NullFormatter())
