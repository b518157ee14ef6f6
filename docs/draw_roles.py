# SPDX-License-Identifier: Apache-2.0
"""Draws results/depth_by_role.png: loss over time of whole requests, shape by shape.

`.venv/bin/python docs/draw_roles.py` reads results/depth_by_role.json, which
`benchmarks/depth_by_role.py` wrote: requests of 448 prompt tokens and 8 new ones, eight at once.
Other files and sizes: `docs/draw_roles.py FILE PROMPT NEW BATCH`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent.parent / "results"

FAMILIES = {
    "plain-": ("plain models, all layers read prompts", "black", "*-"),
    "8+8": ("8 lower layers read prompts, 8 upper ones write", "#11806a", "o"),
    "8+16": ("8 lower layers read prompts, 16 upper ones write", "#3b6fb6", "o"),
    "8+": ("the same, pruned to 2 or 4 upper layers", "#6d4c9f", "s--"),
    "branch": ("exit branches for all new tokens", "#b0762a", "D"),
    "learned": ("a branch chosen per new token", "#b23a48", "D"),
}
"""Label, colour and marker of a shape, by how its name begins; the first that fits."""

OFFSETS = {
    "8+2": (-7, 4),
    "8+4": (-7, -2),
    "branch 2": (-7, 3),
    "branch 4": (-7, -10),
    "learned 0.75": (-11, -8),
    "plain-8": (-7, -10),
}
"""Places of names next to their points, in points; (7, 4) for others. Below 0: to the left."""


def main(file: str = "", prompt: str = "448", new: str = "8", batch: str = "8") -> None:
    """Writes the picture next to the file."""
    source = Path(file) if file else RESULTS / "depth_by_role.json"
    stored = json.loads(source.read_text(encoding="utf-8"))
    key = ("requests", int(prompt), int(batch))
    parts = [x for x in stored["parts"] if (x["kind"], x["prompt"], x["batch"]) == key]
    if not parts:
        sys.exit(f"Wanted requests of {prompt} tokens, {batch} at once, in {source}. Found none.")
    timed = parts[0]["seconds"]
    losses_of = {name: bits for name, bits in stored["bits"].items() if name in timed}
    seeds = min(map(len, losses_of.values()))  # Those that every model has.
    points: dict[str, list[tuple[float, float, str]]] = {}
    for name, seconds in timed.items():
        if name in losses_of and new in seconds:
            family = next(start for start in FAMILIES if name.startswith(start))
            bits = sum(losses_of[name][:seeds]) / seeds
            points.setdefault(family, []).append((1000 * seconds[new], bits, name))
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for family, members in points.items():
        label, colour, style = FAMILIES[family]
        times, losses, _ = zip(*sorted(members), strict=True)
        axis.plot(times, losses, style, color=colour, label=label, markersize=7)
        for time, loss, name in members:
            offset = OFFSETS.get(name, (7, 4))
            axis.annotate(
                name,
                (time, loss),
                color=colour,
                textcoords="offset points",
                fontsize=8,
                xytext=offset,
                ha="right" if offset[0] < 0 else "left",
            )
    axis.set_xlim(0, 1.1 * max(time for members in points.values() for time, *_ in members))
    axis.set_xlabel(f"ms for {prompt} prompt tokens and {new} new ones, {batch} requests at once")
    which = "seed 0" if seeds == 1 else "mean of two seeds"
    axis.set_ylabel(f"bits per byte, test documents, {which}")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(source.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
