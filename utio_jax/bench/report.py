# SPDX-License-Identifier: Apache-2.0
"""The page of `utio-jax bench --report`: tables and pictures; it needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from utio_jax.bench.pictures import draw_speedups, model_name
from utio_jax.bench.results import read_results
from utio_jax.bench.rows import PARTS, Row
from utio_jax.bench.timing import Spread
from utio_jax.core.files import save_text

_TITLE = "Benchmark of utio_jax"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 78em;
  padding: 0 1em; }
h2 { border-bottom: 2px solid #11806a; margin-top: 2.2em; }
figure { margin: 1.2em 0; }
figure img { max-width: 100%; }
figcaption, .note { color: #555; font-size: 90%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 85%; margin: 0.6em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.6em; text-align: left;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child { white-space: normal; }
th { background: #f2f5f4; }
tr.weak td { color: #777; }
"""

# The browser loads nothing: pictures are in the page, and there are no scripts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_READING = (
    "A speed-up is the median of paired ratios over the baseline, the fastest full-depth program, "
    "with first and third quartiles; the ideal has neither padding nor gates, and efficiency is "
    "measured over ideal. What fell back or did not run has no speed-up, and says why. In bars, "
    "the ideal is black; hatched are the controls, truncation (uniform) and chance (random)."
)

_ABOUT = {
    "score": ("Scoring", "Whole passes over prompts; nothing is generated."),
    "decode": ("Decoding", "New tokens at a depth each, prefill included."),
    "lossless": ("Lossless decoding", "Shallow drafts, verified: the full model's own tokens."),
    "peer": ("Other systems", "What others' programs do on the same machine, where they run."),
}


def write_report(file: Path, out: Path) -> Path:
    """Writes report.html of one run into a folder, and returns it.

    Raises:
      ValueError: a file that cannot be read as results.
    """
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{_TITLE}</title><style>{_STYLE}</style></head>",
        f"<body><h1>{_TITLE}</h1>",
        *_run(file, read_results(file)),
        "<h2>How to read this</h2>",
        _paragraph(_READING),
        "</body></html>\n",
    ]
    page = out / "report.html"
    out.mkdir(parents=True, exist_ok=True)
    save_text(page, "\n".join(lines))
    return page


def _run(file: Path, run: Mapping[str, Any]) -> list[str]:
    """Returns what one run measured: its conditions, then every part."""
    rows = [Row.from_dict(row) for row in run["rows"]]
    said = f"Suite {run['suite']}, started {run['started']}, {_show(run['seconds'])} seconds."
    if not run["complete"]:
        said += " The run did not come to its end: rows are missing. Go on with --resume."
    options = {f"--{name.replace('_', '-')}": each for name, each in run["settings"].items()}
    cells = [(name, _show(each)) for name, each in (run["environment"] | options).items()]
    found = [f"<h2>{html.escape(str(file))}</h2>", _paragraph(said)]
    found += [_table(("condition", "value"), cells)]
    for part in PARTS:
        members = [row for row in rows if row.part == part]
        if not members:
            continue
        title, about = _ABOUT[part]
        found += [f"<h3>{title}</h3>", _paragraph(about)]
        for model in dict.fromkeys(row.model for row in members):
            of_model = [row for row in members if row.model == model]
            found += _picture(draw_speedups(of_model), f"Speed-up by batch: {model}")
        found.append(_row_table(members))
    return found


def _row_table(rows: Sequence[Row]) -> str:
    """Returns a table of all that was measured of one part; no column of it is empty."""
    columns: dict[str, Callable[[Row], str]] = {
        "model": model_name,
        "method": lambda row: row.method,
    }
    for name in dict.fromkeys(name for row in rows for name in row.setting):
        columns[name] = lambda row, name=name: _show(row.setting.get(name))
    columns |= _MEASURED
    cells = {name: [column(row) for row in rows] for name, column in columns.items()}
    kept = {name: values for name, values in cells.items() if any(values)}
    marks = ["" if row.own else "weak" for row in rows]
    return _table([*kept], zip(*kept.values(), strict=True), marks=marks)


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, marks: Sequence[str] = ()
) -> str:
    """Returns a table; nothing where it would be empty. Marks are classes of its rows."""
    head, lines = "".join(f"<th>{html.escape(name)}</th>" for name in columns), list[str]()
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{marks[number] if marks else ""}">{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>' if lines else ""


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _picture(figure: Figure | None, caption: str) -> list[str]:
    if figure is None:
        return []
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    data, caption = base64.b64encode(stream.getvalue()).decode(), html.escape(caption)
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return [f"<figure>{image}<figcaption>{caption}</figcaption></figure>"]


def _show(value: Any) -> str:
    """Returns a value of JSON as text: null as nothing, numbers to four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_show(each) for each in value)
    return str(value)


def _spread(spread: Spread | None, scale: float = 1.0) -> str:
    if spread is None:
        return ""
    middle, low, high = (scale * each for each in (spread.median, spread.low, spread.high))
    return f"{middle:#.3g} ({low:#.3g} to {high:#.3g})"


def _speedup(row: Row) -> str:
    if row.speedup is not None:
        return _spread(row.speedup)
    if not row.ran:
        return "did not run"
    return "fell back" if row.fallbacks else ""


def _note(row: Row) -> str:
    fell = [f"fell back: {name}, {_show(count)} times" for name, count in row.fallbacks.items()]
    return "; ".join([*([row.note] if row.note else []), *fell])


def _number(name: str, form: str) -> Callable[[Row], str]:
    def column(row: Row) -> str:
        value = getattr(row, name) if hasattr(row, name) else (row.quality or {}).get(name)
        return "" if value is None else format(value, form)

    return column


_MEASURED: dict[str, Callable[[Row], str]] = {
    "baseline": lambda row: row.baseline or "",
    "time, ms (quartiles)": lambda row: _spread(row.seconds, 1e3),
    "baseline's": lambda row: _spread(row.baseline_seconds, 1e3),
    "speed-up (quartiles)": _speedup,
    "ideal": _number("speedup_ideal", ".2f"),
    "efficiency": _number("efficiency", ".2f"),
    "FLOPs / full": _number("flops_ratio", ".3f"),
    "loss +%": _number("nll_increase_pct", "+.2f"),
    "agreement": _number("agreement", ".3f"),
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "note": _note,
}
