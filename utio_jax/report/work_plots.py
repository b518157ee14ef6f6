# SPDX-License-Identifier: Apache-2.0
"""Pictures of what the work buys: loss against FLOPs and time, and how busy the machine is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike

from utio_jax.benchmark.schema import Row
from utio_jax.evaluation.ledger import convex_hull
from utio_jax.report.grouping import family, group, is_full, ran_as_itself
from utio_jax.report.plots import (
    colour_of,
    draw_pareto,
    legend_above,
    method_colours,
    plain,
    small_multiples,
)

_GREY = "#555555"
_SPEEDUP_TICKS = (0.5, 0.7, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10)
_MARKERS = "osD^vP*X<>h"


def draw_losses(rows: Sequence[Row]) -> Figure | None:
    """Draws loss increase over executed FLOPs (left) and measured time (right), with the hulls.

    A row of panels per model and setting. Full depth is (1, 0) by definition. Mixing two exits
    mixes their FLOPs and their times linearly, so both sides have a hull of single exits.
    """
    rows = [row for row in rows if ran_as_itself(row) and _loss(row) is not None]
    panels = {
        name: members
        for name, members in group(rows).items()
        if any(not _is_exit(row) and row.flops_ratio is not None for row in members)
    }
    if not panels:
        return None
    names = dict.fromkeys(family(row) for row in rows if not _is_exit(row))
    figure, grid = small_multiples(2 * len(panels), 2, height=3.3)
    for number, (name, members) in enumerate(panels.items()):
        left, right = grid[2 * number : 2 * number + 2]
        work = {row.key: row.flops_ratio for row in members if row.flops_ratio is not None}
        time = {row.key: 1 / row.speedup.median for row in members if row.speedup is not None}
        for axes, cost in ((left, work), (right, time)):
            _draw(axes, members, cost, list(names))
        _draw_quartiles(right, members, list(names))
        ends = np.asarray([left.get_ylim(), right.get_ylim()])
        for axes in (left, right):
            axes.set_ylim(ends[:, 0].min(), ends[:, 1].max())
        left.set_xlabel("executed FLOPs / full depth's", fontsize=8)
        right.set_xlabel("measured time / full depth's", fontsize=8)
        above = right.secondary_xaxis("top", functions=(_inverse, _inverse))
        above.xaxis.set_major_locator(FixedLocator(_SPEEDUP_TICKS))
        above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
        above.tick_params(labelsize=7)
        left.set_title(plain(name), fontsize=9, loc="left")
    figure.supylabel("loss increase over full depth (%)", fontsize=9)
    lines = [
        Line2D(
            [],
            [],
            color=colour_of("uniform", []),
            marker="o",
            linestyle="--",
            label="uniform exits and their hull",
        )
    ]
    lines += [
        Line2D([], [], color=colour_of(name, names), marker="o", label=plain(name))
        for name in names
    ]
    legend_above(figure, lines)
    return figure


def _draw(axes: Axes, rows: Sequence[Row], cost: Mapping[str, float], names: Sequence[str]) -> None:
    exits = {(1.0, 0.0, "full")} | {
        (cost[row.key], _loss(row) or 0.0, f"{re.split('[:@]', row.method)[-1]} layers")
        for row in rows
        if family(row) == "uniform" and row.key in cost
    }
    curves = {
        name: sorted(
            (cost[row.key], _loss(row) or 0.0)
            for row in rows
            if family(row) == name and row.key in cost
        )
        for name in names
    }
    draw_pareto(axes, sorted(exits), curves, hull=convex_hull([(x, y) for x, y, _ in exits]))


def _draw_quartiles(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    for row in rows:
        if row.speedup is not None:
            axes.hlines(
                _loss(row) or 0.0,
                1 / row.speedup.high,
                1 / row.speedup.low,
                color=colour_of("uniform" if _is_exit(row) else family(row), names),
                linewidth=1,
            )


def _is_exit(row: Row) -> bool:
    return family(row) == "uniform" or is_full(row)


def _loss(row: Row) -> float | None:
    return row.quality["nll_increase_pct"] if row.quality is not None else None


def _inverse(x: ArrayLike) -> np.ndarray:
    return 1 / np.maximum(np.asarray(x, np.float64), 1e-3)


def draw_roofline(rows: Sequence[Row], environment: Mapping[str, object]) -> Figure | None:
    """Draws achieved FLOP/s over FLOPs per byte, under the machine's own measured ceilings."""
    matmul = environment.get("matmul_flops_per_second")
    copy = environment.get("copy_bytes_per_second")
    rows = in_roofline(rows)
    if not rows or not isinstance(matmul, int | float) or not isinstance(copy, int | float):
        return None
    x = np.asarray([(row.flops or 0.0) / (row.bytes or 1.0) for row in rows])
    y = np.asarray([(row.flops or 0.0) / row.seconds.median for row in rows if row.seconds])
    figure, (axes,) = small_multiples(1, 1, height=4.2, width=7.6)
    ridge = matmul / copy
    ends = np.asarray([0.5 * min(*x, ridge), ridge, 2 * max(*x, ridge)])
    axes.plot(ends, np.minimum(matmul, copy * ends), color="black", linewidth=1.2)
    axes.annotate(
        f"measured copy, {EngFormatter(places=1).format_eng(copy)}B/s",
        (ends[0], copy * ends[0]),
        fontsize=8,
        color=_GREY,
        xytext=(8, 2),
        textcoords="offset points",
        va="top",
    )
    axes.annotate(
        f"measured matrix product, {EngFormatter(places=0).format_eng(matmul)}FLOP/s",
        (ends[-1], matmul),
        fontsize=8,
        color=_GREY,
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
    )
    names = list(dict.fromkeys(family(row) for row in rows))
    parts = list(dict.fromkeys(row.part for row in rows))
    for row, at, reached in zip(rows, x, y, strict=True):
        axes.plot(
            at,
            reached,
            marker=_MARKERS[parts.index(row.part) % len(_MARKERS)],
            markersize=5,
            alpha=0.8,
            linestyle="",
            color=colour_of(family(row), names),
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="achieved FLOP/s")
    axes.set_ylim(0.6 * min(*y, copy * ends[0]), 2 * matmul)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.set_major_formatter(EngFormatter() if axis is axes.yaxis else FuncFormatter(_plainly))
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    shown = [
        Line2D([], [], color=colour_of(name, names), marker="s", linestyle="", label=plain(name))
        for name in names
    ] + [
        Line2D(
            [],
            [],
            color=_GREY,
            marker=_MARKERS[n % len(_MARKERS)],
            linestyle="",
            label=f"part {part}",
        )
        for n, part in enumerate(parts)
    ]
    legend_above(figure, shown)
    return figure


def _plainly(x: float, position: int | None) -> str:
    del position
    return f"{x:g}"


def in_roofline(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows whose FLOPs, bytes and seconds are known and their own."""
    return [r for r in rows if r.flops and r.bytes and r.seconds is not None and ran_as_itself(r)]


def draw_utilisation(rows: Sequence[Row]) -> Figure | None:
    """Draws what share of the machine's ceilings each method reaches, from batch to batch."""
    found: dict[str, dict[str, list[float]]] = {"matmul": {}, "copy": {}}
    colours = dict[str, str]()
    rows = [row for row in rows if ran_as_itself(row) and row.utilisation is not None]
    of = method_colours({row.method: family(row) for row in rows})
    for row in rows:
        for ceiling, share in (row.utilisation or {}).items():
            if share is not None and ceiling in found:
                name = f"{row.part}: {row.method}"
                found[ceiling].setdefault(name, []).append(share)
                colours[name] = of[row.method]
    panels = {ceiling: shares for ceiling, shares in found.items() if shares}
    if not panels:
        return None
    most = max(len(shares) for shares in panels.values())
    figure, grid = small_multiples(len(panels), 2, height=0.19 * most + 0.8)
    for (ceiling, shares), axes in zip(panels.items(), grid, strict=True):
        for place, (name, values) in enumerate(shares.items()):
            axes.barh(
                place,
                max(values) - min(values),
                left=min(values),
                height=0.5,
                color=colours[name],
                alpha=0.35,
            )
            axes.plot(values, [place] * len(values), "o", markersize=4, color=colours[name])
        axes.set_yticks(range(len(shares)), [plain(name, 38) for name in shares], fontsize=7)
        axes.set_ylim(len(shares) - 0.5, -0.5)
        axes.set_xlim(0, max(1.05, 1.05 * max(max(values) for values in shares.values())))
        axes.axvline(1, color=_GREY, linewidth=0.8, linestyle="--")
        what = {"matmul": "matrix product (FLOP/s)", "copy": "copy (bytes/s)"}[ceiling]
        axes.set_title(f"of the measured {what}", fontsize=9)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
        axes.grid(alpha=0.25, axis="x")
    return figure
