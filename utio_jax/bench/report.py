# SPDX-License-Identifier: Apache-2.0
"""The page of `utio-jax bench --report`: tables and plots in one file."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path

from rich.console import Console

from utio_jax.bench.plots import draw_speedups
from utio_jax.bench.rows import Row, read_rows
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
    "with quartiles; the ideal (black) has neither padding nor gates. Methods that did not run, or "
    "ran as another, have no speed-up, and a note. Grey bars are the controls: truncation "
    "(uniform) and chance (random)."
)


def write_report(file: Path, out: Path) -> Path:
    """Writes report.html of one run into a folder, and returns it.

    Raises:
      ValueError: a file that cannot be read as results.
    """
    run = read_rows(file)
    summary = f"{file}: {'complete' if run['complete'] else 'interrupted, rows are missing'}."
    conditions = json.dumps(run["environment"] | {"options": run["settings"]}, indent=1)
    texts = (("p", summary), ("p", _READING), ("pre", conditions))
    lines = [_HEAD, *(f"<{tag}>{html.escape(text)}</{tag}>" for tag, text in texts)]
    sections: dict[str, list[Row]] = {}
    for row in run["rows"]:
        sections.setdefault(f"{row['part']}: {row['model']}", []).append(row)
    for title, rows in sections.items():
        lines.append(f"<h2>{html.escape(title)}</h2>")
        figure = draw_speedups(rows)
        if figure is not None:
            stream = io.BytesIO()
            figure.savefig(stream, format="png", dpi=130)
            data = base64.b64encode(stream.getvalue()).decode()
            lines.append(f'<img alt="Speed-ups" src="data:image/png;base64,{data}">')
        console = Console(record=True, width=200, file=io.StringIO())
        console.print(bench_table(rows, title=""))
        lines.append(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
    page = out / "report.html"
    out.mkdir(parents=True, exist_ok=True)
    save_text(page, "\n".join([*lines, "</body></html>\n"]))
    return page
