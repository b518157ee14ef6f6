# SPDX-License-Identifier: Apache-2.0
"""A benchmark's report: all of it, for any text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from utio_jax.bench.plots import draw_speedups, plot_margins
from utio_jax.bench.report import write_report
from utio_jax.bench.rows import Row, failed_row, name_of, save_rows, timed_row
from utio_jax.bench.timing import Timed
from utio_jax.calibration.compare import ComparisonRow
from utio_jax.cli.bench import Bench
from utio_jax.evaluation.ledger import Ledger

HOSTILE = "<script>alert('x')</script> | `a` $x^$ [b](javascript:c) <img src=http://d>\n# e"
HEAD = {"settings": {"rounds": 7}, "environment": {"device": "synthetic"}}


def row(part: str, method: str, gain: float, *, compiles: int = 0, **values: Any) -> Row:
    ledger = Ledger(policy=method, seconds=0.4, compiles=compiles)
    timed = Timed(ledger=ledger, ratios=np.asarray([gain]), baseline="full dense")
    values = {"model": "shipped", "batch": 1, "prompt": 512} | values
    return timed_row(timed, part=part, method=method, **values)


ROWS = [
    row("score", "full dense", 1.0),
    row("score", "uniform:8", 1.9, speedup_ideal=2.0, flops_ratio=0.5),
    row("score", "learned@0.6", 1.7, nll_increase_pct=1.5),
    row("score", "learned@0.9", 1.0, compiles=1),
    row("decode", "learned@0.6", 1.7, output=8),
    failed_row("too slow", part="lossless", model="m", method="lossless:6", batch=32),
    row("lossless", "lossless:ngram", 0.7),
]


def saved(tmp_path: Path, rows: list[Row] = ROWS) -> Path:
    save_rows(tmp_path / "results.json", HEAD, rows, complete=False)
    return tmp_path / "results.json"


def tags_of(page: str) -> tuple[list[str], list[str]]:
    """Returns the names of a page's tags, and what they load; all of them are closed."""
    tags = re.findall("<([a-z]+[0-9]?)([^>]*)>", page)
    names = [name for name, _ in tags]
    closed = re.findall("</([^>]*)>", page)
    assert sorted(closed) == sorted(name for name in names if name not in ("meta", "img"))
    return names, re.findall(r"(?:src|href)=[\"']?([^\"'\s]*)", " ".join(of for _, of in tags))


def text_of(page: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", page))


def test_every_row_is_on_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    result = Bench(report=saved(tmp_path), out=tmp_path / "page").run()
    page = Path(result["report"]).read_text()
    tags, sources = tags_of(page)
    assert not {"script", "link", "iframe", "object"} & {*tags}
    assert len(sources) == tags.count("img") == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(name_of(row) in text_of(page) for row in ROWS)
    plain = " ".join(text_of(page).split())
    notes = ("interrupted, rows are missing", "compiled after", "did not run", "too slow")
    assert all(note in plain for note in notes)


def test_any_text_is_shown_as_it_is(tmp_path: Path) -> None:
    bad = [{**row, "model": HOSTILE, "note": HOSTILE, "method": "_a"} for row in ROWS]
    page = write_report(saved(tmp_path, bad), tmp_path).read_text()
    tags, sources = tags_of(page)
    assert not {"script", "link", "iframe"} & {*tags}
    assert all(source.startswith("data:") for source in sources)
    assert "[b](javascript:c)" in text_of(page)


def test_bars_are_as_long_as_the_measured_speedups() -> None:
    figure = draw_speedups(ROWS)
    assert figure is not None
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_width() for bar in bars] == [1.9, 1.7, 1.7, 0.7]
    control, own, *_ = (bar.get_facecolor() for bar in bars)
    assert control != own
    assert draw_speedups(ROWS[:1]) is None


def test_rows_without_a_margin_are_an_empty_picture() -> None:
    figure = plot_margins([ComparisonRow(ledger=Ledger(policy="learned"))], title="12 tokens")
    assert figure.get_suptitle() == "12 tokens: no margin is known"
