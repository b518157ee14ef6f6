# SPDX-License-Identifier: Apache-2.0
"""Draws results/prompts.png: loss behind prompts over time to the first token, way by way.

`.venv/bin/python docs/draw_prompts.py` reads results/prompt_ways.json, which holds what
`benchmarks/prompt_ways.py` printed, by the title of a panel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent.parent / "results"

KINDS = {
    "externality": ("by externality", "#11806a", "o"),
    "sinks_recent": ("first four and latest", "#3b6fb6", "s"),
    "heat": ("by attention heat", "#b0762a", "D"),
    "random": ("by chance", "#8a8a8a", "^"),
    "none": ("last token alone", "#8a8a8a", "v"),
    "drop": ("others hidden", "#b23a48", "x"),
    "propagate": ("others copied", "#6d4c9f", "+"),
    "truncated": ("model truncated", "#000000", "_"),
    "plain": ("plain model", "#000000", "*"),
}
"""What a way is drawn as: by its control where it is one, else by what chooses."""


def kind_of(row: dict[str, Any], kv: str) -> str:
    """Returns the entry of `KINDS` that a way belongs to; `kv` is what others show by default."""
    _, by, *_, shown = row["way"].split(" ")
    return by if shown == kv or by not in KINDS else shown


def main() -> None:
    """Writes the picture."""
    panels = json.loads((RESULTS / "prompt_ways.json").read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, len(panels), figsize=(9.6, 4.0), layout="constrained")
    drawn = {}
    for axis, panel in zip(axes, panels, strict=True):
        for row in panel["rows"]:
            if row["way"].startswith("full"):
                continue
            kind = row.get("kind") or kind_of(row, panel["kv"])
            label, colour, marker = KINDS[kind]
            time = 1000 * row["seconds"] if "seconds" in row else None
            if time is None:
                continue
            point = axis.plot(time, row["nll_increase_pct"], marker, color=colour, label=label)
            drawn.setdefault(label, point[0])
            axis.annotate(
                row["way"].split(" ")[0],
                (time, row["nll_increase_pct"]),
                textcoords="offset points",
                xytext=(5, 3),
                fontsize=7,
                color=colour,
            )
        full = 1000 * panel["rows"][0]["seconds"]
        axis.axvline(full, color="black", linewidth=0.8, linestyle=":")
        axis.text(full, 0.97, "in full ", ha="right", va="top", fontsize=8, rotation=90,
                  transform=axis.get_xaxis_transform())  # fmt: skip
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_yscale("symlog", linthresh=1.0)
        axis.set_yticks([-3, -1, 0, 1, 3, 5, 10], ["-3", "-1", "0", "1", "3", "5", "10"])
        axis.set_title(panel["title"], fontsize=10)
        axis.set_xlabel("time to the first token, ms")
    axes[0].set_ylabel("loss of the next 64 tokens over full depth, %")
    figure.legend(
        handles=list(drawn.values()),
        labels=list(drawn),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(RESULTS / "prompts.png", dpi=110)


if __name__ == "__main__":
    main()
