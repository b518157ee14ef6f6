# SPDX-License-Identifier: Apache-2.0
"""A benchmark's report: all of it, for any text."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from utio_jax.bench.plots import draw_speedups
from utio_jax.bench.report import write_report
from utio_jax.bench.rows import Row, failed_row, name_of, save_rows, timed_row
from utio_jax.bench.timing import Timed
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


class Page(HTMLParser):
    """Tags, their sources and text of a page of which every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_row_is_on_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    result = Bench(report=saved(tmp_path), out=tmp_path / "page").run()
    text = Path(result["report"]).read_text()
    page = Page(text)
    assert all(name_of(row) in page.text for row in ROWS)
    assert "interrupted, rows are missing" in page.text
    assert not {"script", "link", "iframe", "object"} & {*page.tags}
    assert len(page.sources) == page.tags.count("img") == 3
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    plain = " ".join(html.unescape(re.sub("<[^>]*>", "", text)).split())
    assert all(note in plain for note in ("compiled after", "did not run", "too slow"))


def test_any_text_is_shown_as_it_is(tmp_path: Path) -> None:
    bad = [{**row, "model": HOSTILE, "note": HOSTILE, "method": "_a"} for row in ROWS]
    page = Page(write_report(saved(tmp_path, bad), tmp_path).read_text())
    assert not {"script", "link", "iframe"} & {*page.tags}
    assert all(source.startswith("data:") for source in page.sources)
    assert "[b](javascript:c)" in page.text


def test_bars_are_as_long_as_the_measured_speedups() -> None:
    figure = draw_speedups(ROWS)
    assert figure is not None
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_width() for bar in bars] == [1.9, 1.7, 1.7, 0.7]
    control, own, *_ = (bar.get_facecolor() for bar in bars)
    assert control != own
    assert draw_speedups(ROWS[:1]) is None
