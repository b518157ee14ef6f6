# SPDX-License-Identifier: Apache-2.0
"""Draws results/frontier.png: bits per byte over FLOPs, exits and branches next to plain models.

`.venv/bin/python docs/draw_frontier.py` reads results/frontier.json, points of FLOPs over all
layers of the shipped model and bits per byte by the name of a line, and the plain models of
models/shared_16/controls.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
STYLES = (
    ("#9fb6d3", "s-"),
    ("#9fb6d3", "o--"),
    ("#11806a", "D-"),
    ("#b23a48", "o-"),
    ("#8a8a8a", "x--"),
    ("#b0762a", "^:"),
    ("#7b4fa3", "P"),
    ("#7b4fa3", "X"),
    ("#2457a8", "D-"),
    ("#e0602a", "o-"),
)


def main() -> None:
    """Writes the picture."""
    lines = json.loads((ROOT / "results" / "frontier.json").read_text(encoding="utf-8"))
    controls = json.loads((ROOT / "models/shared_16/controls.json").read_text(encoding="utf-8"))
    figure, axis = plt.subplots(figsize=(7.6, 5.4), layout="constrained")
    plain = [(row["flops_ratio"], row["bits_per_byte"]) for row in controls["controls"]]
    axis.plot(*zip(*plain, strict=True), "*-", color="black", label="plain models, one a depth")
    for row in controls["controls"]:
        axis.annotate(
            f"{row['layers']} layers",
            (row["flops_ratio"], row["bits_per_byte"]),
            textcoords="offset points",
            xytext=(4, 6),
            fontsize=8,
        )
    for (name, points), (colour, style) in zip(lines.items(), STYLES, strict=False):
        axis.plot(*zip(*points, strict=True), style, color=colour, label=name, markersize=5)
    axis.set_xlim(right=1.06)
    axis.set_xlabel("FLOPs over those of all 16 layers of the shipped model")
    axis.set_ylabel("bits per byte, test documents")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "results" / "frontier.png", dpi=110)


if __name__ == "__main__":
    main()
