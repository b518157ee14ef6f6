# SPDX-License-Identifier: Apache-2.0
"""Draws docs/staircase.png from a real pass: `.venv/bin/python docs/draw_staircase.py`."""

from __future__ import annotations

from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from utio_jax import score
from utio_jax.models import load

TEXT = "def mean(values):\n    return sum(values) / len(values)\n"


def main() -> None:
    """Writes the picture beside this script."""
    model = load(branches=False)  # Exits of one stack: nested segments.
    ids = model.encode([TEXT])[0]
    policy = model.calibration.policy("learned", 0.75)
    run = jax.jit(score, static_argnums=0)
    lengths = np.asarray([len(ids)], np.int32)
    depths = np.asarray(run(model.decoder, model.params, ids[None], lengths, policy).depths[0])
    layers = model.decoder.config.num_layers
    pieces = ["BOS", *(model.tokenizer.decode([int(i)]) for i in ids[1:])]
    labels = [piece.replace("\n", "\\n").replace(" ", "·") for piece in pieces]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.9), sharey=True, layout="constrained"
    )
    colours = ListedColormap(["#dfe7ea", "#11806a", "#f6f6f4"])
    extent = (-0.5, len(ids) - 0.5, 0, layers)
    grid = np.where(np.arange(layers)[:, None] < depths, 1, 0)
    left.imshow(grid, cmap=colours, vmin=0, vmax=2, origin="lower", aspect="auto", extent=extent)
    left.set_xticks(range(len(labels)), labels, rotation=90, family="monospace", fontsize=8)
    left.set_title("tokens, in text order", fontsize=10)
    left.set_ylabel("layer")
    packed = np.full((layers, len(ids)), 2)
    for layer in range(layers):
        packed[layer, : int((depths > layer).sum())] = 1
    right.imshow(packed, cmap=colours, vmin=0, vmax=2, origin="lower", aspect="auto", extent=extent)
    right.set_title("slots: what a segment's blocks compute", fontsize=10)
    right.set_xlabel("slot")
    right.set_xticks(range(0, len(ids), 4))
    for axes in (left, right):
        for depth in policy.depths[:-1]:
            axes.axhline(depth, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks([0, *(d for d in policy.depths)], [0, *policy.depths])
    figure.legend(
        handles=[
            Patch(color="#11806a", label="computed"),
            Patch(color="#dfe7ea", label="frozen: shows K/V only"),
            Patch(facecolor="#f6f6f4", edgecolor="#bbbbbb", label="no slot, no work"),
            plt.Line2D(
                [],
                [],
                color="black",
                linewidth=0.8,
                linestyle=":",
                label="boundary: the gate decides",
            ),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(Path(__file__).with_name("staircase.png"), dpi=120)


if __name__ == "__main__":
    main()
