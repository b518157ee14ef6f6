# SPDX-License-Identifier: Apache-2.0
"""Draws results/long_range.png: recall lost over distance, and gates over positions.

`.venv/bin/python docs/draw_long_range.py` reads results/long_range.json, which
`benchmarks/long_range.py` writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).parent.parent / "results"
COLOURS = ("#b23a48", "#3b6fb6", "#11806a", "#b0762a", "#8a8a8a")
Way = tuple[str, str, Any, str]
"""Label, part, stop and kv."""

WHOLE: Sequence[Way] = (
    ("all at 4", "row", 4, "propagate"),
    ("all at 6", "row", 6, "propagate"),
    ("all at 8", "row", 8, "propagate"),
    ("learned gate at 0.4 (exits 4, 6, 8)", "row", "learned 0.4", "propagate"),
    ("its depths, by chance", "row", "random 0.4", "propagate"),
)
SHOWN: Sequence[Way] = (
    ("at 4, propagated", "context", 4, "propagate"),
    ("at 6, propagated", "context", 6, "propagate"),
    ("at 6, dropped", "context", 6, "drop"),
    ("learned gate at 0.4", "context", "learned 0.4", "propagate"),
    ("its depths, by chance", "context", "random 0.4", "propagate"),
)
STOCK: Sequence[Way] = (
    ("at 20, propagated", "context", 20, "propagate"),
    ("at 25, propagated", "context", 25, "propagate"),
    ("at 20, dropped", "context", 20, "drop"),
    ("the fact alone at 20, propagated", "fact", 20, "propagate"),
)


def draw_recall(axis: Any, found: dict[str, Any], ways: Sequence[Way], *, title: str) -> None:
    """Draws means over tasks of the recall that is lost, and the range of tasks."""
    for (label, *way), colour in zip(ways, COLOURS, strict=False):
        tables = [
            row["by_distance"]
            for row in found["rows"]
            if [row["part"], row["stop"], row["kv"]] == way
        ]
        if not tables:
            continue
        at = [each["distance"] for each in tables[0]]
        lost = np.asarray(
            [[(each["recall_lost_pct"] or [np.nan] * 3)[1] for each in table] for table in tables]
        )
        axis.plot(at, np.nanmean(lost, axis=0), "o-", color=colour, label=label, markersize=4)
        low, high = np.nanmin(lost, axis=0), np.nanmax(lost, axis=0)
        axis.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylim(-35, 130)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens between fact and question")
    axis.set_ylabel("recall lost, % of full depth's")
    axis.legend(frameon=False, fontsize=7)


def draw_positions(axis: Any, found: dict[str, Any]) -> None:
    """Draws what gates spend, position by position."""
    for (name, table), colour in zip(found["by_position"].items(), COLOURS, strict=False):
        if not name.startswith("learned"):
            continue
        at = [(row["from"] + row["to"]) / 2 for row in table]
        axis.plot(
            at, [row["flops_ratio"] for row in table], "o-", color=colour, label=name, markersize=4
        )
        axis.axhline(float(name.split(" ")[1]), color=colour, linewidth=0.8, linestyle=":")
    axis.set_title("stdlib-16: gates over the position in rows of 512", fontsize=10)
    axis.set_xlabel("position")
    axis.set_ylabel("FLOPs over full depth's there")
    axis.legend(frameon=False, fontsize=7)


def main() -> None:
    """Writes the picture."""
    found = json.loads((RESULTS / "long_range.json").read_text(encoding="utf-8"))
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 6.8), layout="constrained")
    draw_recall(axes[0, 0], found["recall"], WHOLE, title="stdlib-16: all tokens stop early")
    draw_recall(
        axes[0, 1], found["recall"], SHOWN, title="stdlib-16: text before the question stops early"
    )
    if "recall_stock" in found:
        draw_recall(
            axes[1, 0], found["recall_stock"], STOCK, title="SmolLM2-135M, 30 layers: the same"
        )
    else:
        axes[1, 0].remove()
    draw_positions(axes[1, 1], found["positions"])
    figure.savefig(RESULTS / "long_range.png", dpi=75)


if __name__ == "__main__":
    main()
