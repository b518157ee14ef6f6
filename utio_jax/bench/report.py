# SPDX-License-Identifier: Apache-2.0
"""The page of `utio-jax bench --report`: tables and pictures; it needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console

from utio_jax.bench.plots import plain
from utio_jax.bench.results import PARTS, Row, read_results
from utio_jax.bench.terminal import bench_table
from utio_jax.core.files import save_text

# The browser loads nothing: pictures are in the page, and there are no scripts.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">
<title>Benchmark of utio_jax</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em; }
pre { font: 12px/1.3 Menlo, Consolas, monospace; overflow-x: auto; }
img { max-width: 100%; }
</style></head>
<body><h1>Benchmark of utio_jax</h1>"""

_READING = (
    "A speed-up is the median of paired ratios over the baseline, the fastest full-depth program, "
    "with quartiles; the ideal has neither padding nor gates. What fell back or did not run has no "
    "speed-up, and says why. In bars, the ideal is black; hatched are the controls, truncation "
    "(uniform) and chance (random)."
)

_ABOUT = {
    "score": "Scoring: whole passes over prompts; nothing is generated",
    "decode": "Decoding: new tokens at a depth each, prefill included",
    "lossless": "Lossless decoding: shallow drafts, verified, the full model's own tokens",
    "peer": "Other systems: others' programs on the same machine, where they run",
}

_LENGTHS = ("prompt", "output")

_COLUMNS = 200  # Characters of a table's line.


def write_report(file: Path, out: Path) -> Path:
    """Writes report.html of one run into a folder, and returns it.

    Raises:
      ValueError: a file that cannot be read as results.
    """
    run, rows = read_results(file)
    said = f"{file}: suite {run['suite']}, started {run['started']}, {run['seconds']} seconds."
    if not run["complete"]:
        said += " The run did not come to its end: rows are missing."
    conditions = json.dumps(run["environment"] | {"options": run["settings"]}, indent=1)
    lines = [_HEAD, _tag("p", said), _tag("p", _READING), _tag("pre", conditions)]
    for part in PARTS:
        members = [row for row in rows if row.part == part]
        if not members:
            continue
        lines.append(_tag("h2", _ABOUT[part]))
        for model in dict.fromkeys(row.model for row in members):
            figure = draw_speedups([row for row in members if row.model == model])
            lines += [] if figure is None else [_picture(figure, f"Speed-up by batch: {model}")]
        console = Console(record=True, width=_COLUMNS, file=io.StringIO())
        console.print(bench_table(members, title="", notes=True))
        lines.append(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
    page = out / "report.html"
    out.mkdir(parents=True, exist_ok=True)
    save_text(page, "\n".join([*lines, "</body></html>\n"]))
    return page


def _tag(name: str, text: str) -> str:
    return f"<{name}>{html.escape(text)}</{name}>"


def _picture(figure: Figure, caption: str) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    data, caption = base64.b64encode(stream.getvalue()).decode(), html.escape(caption)
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def draw_speedups(rows: Sequence[Row]) -> Figure | None:
    """Draws one model's measured speed-ups by batch, a panel for each length of prompts and texts.

    Bars have quartiles, and the ideal as a tick; controls (uniform, random) are hatched.
    """
    rows = [row for row in rows if row.gain is not None and "batch" in row.setting]
    if not rows:
        return None
    panels: dict[str, list[Row]] = {}
    for row in rows:
        sizes = [f"{name} {row.setting[name]}" for name in _LENGTHS if name in row.setting]
        panels.setdefault(", ".join(sizes), []).append(row)
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = Figure(figsize=(10.5, 2.9 * len(panels) + 0.6), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
    for (name, members), axes in zip(panels.items(), grid, strict=True):
        batches = sorted({row.setting["batch"] for row in members})
        width = 0.84 / len(methods)
        for row in members:
            assert row.speedup is not None
            number, middle = methods.index(row.method), row.speedup.median
            place = (number - (len(methods) - 1) / 2) * width
            x = batches.index(row.setting["batch"]) + place
            axes.bar(
                x,
                middle,
                width=0.92 * width,
                color=colormaps["tab20"](number % 20),
                hatch="///" if row.method.startswith(("uniform", "random")) else "",
                edgecolor="white",
                linewidth=0,
                yerr=np.maximum([[middle - row.speedup.low], [row.speedup.high - middle]], 0),
                error_kw={"elinewidth": 1, "ecolor": "#222222"},
                label=plain(row.method),
            )
            if row.speedup_ideal is not None:
                ends = (x - 0.44 * width, x + 0.44 * width)
                axes.hlines(row.speedup_ideal, *ends, color="black", linewidth=1.5)
        axes.axhline(1, color="#555555", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.grid(alpha=0.25, axis="y")
        axes.set_axisbelow(True)
        axes.set_title(plain(name), fontsize=9)
    labels = {
        label: bar
        for axes in grid
        for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [*labels.values()],
        [*labels],
        loc="outside upper center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    figure.supylabel("speed-up over the baseline", fontsize=9)
    figure.supxlabel("batch (rows)", fontsize=9)
    return figure
