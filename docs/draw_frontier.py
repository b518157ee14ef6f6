# SPDX-License-Identifier: Apache-2.0
"""Draws results/frontier.png: loss over FLOPs, exit branches next to models of one depth.

`.venv/bin/python docs/draw_frontier.py` reads results/frontier.json: for each panel, points of
FLOPs over full depth's and bits per byte by the name of a line. To the lines of the first panel it
adds the plain models of models/shared_16/controls.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
STYLES = {
    "plain models": ("black", "*-"),
    "pruned models": ("black", "*-"),
    "nested exits": ("#9fb6d3", "s-"),
    "branches": ("#11806a", "D-"),
    "learned gate": ("#b23a48", "o-"),
    "random": ("#8a8a8a", "x--"),
    "KL known": ("#b0762a", "^:"),
}
"""Colour and marker of a line, by how its name begins."""


def main() -> None:
    """Writes the picture."""
    panels = json.loads((ROOT / "results" / "frontier.json").read_text(encoding="utf-8"))
    controls = json.loads((ROOT / "models/shared_16/controls.json").read_text(encoding="utf-8"))
    plain = [(row["flops_ratio"], row["bits_per_byte"]) for row in controls["controls"]]
    first = next(iter(panels.values()))
    first["plain models of 8 to 16 layers"] = plain
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.8), layout="constrained")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            colour, style = next(of for start, of in STYLES.items() if name.startswith(start))
            axis.plot(*zip(*points, strict=True), style, color=colour, label=name, markersize=5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("FLOPs over full depth's")
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("bits per byte, test documents")
    figure.savefig(ROOT / "results" / "frontier.png", dpi=100)


if __name__ == "__main__":
    main()
