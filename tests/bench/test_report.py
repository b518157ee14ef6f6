# SPDX-License-Identifier: Apache-2.0
"""A benchmark's report: all of it, for any text."""

from __future__ import annotations

import copy
import html
import itertools
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.results import SCORE, synthetic_results, write
from matplotlib.patches import Rectangle

from utio_jax.bench.report import draw_speedups, write_report
from utio_jax.bench.results import PARTS, Row
from utio_jax.cli.bench import Bench

HOSTILE = "<script>alert('x')</script> | `a` $x^$ [b](javascript:c) <img src=http://d>\n# e"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return synthetic_results()


@pytest.fixture(scope="module")
def rows(stored: dict[str, Any]) -> list[Row]:
    return [Row.from_dict(row) for row in stored["rows"]]


@pytest.fixture(scope="module")
def page(stored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole report."""
    out = tmp_path_factory.mktemp("report")
    found = Bench(report=write(stored, out / "results.json"), out=out).run()
    return Path(found["report"]).read_text()


class Page(HTMLParser):
    """What a browser would find: tags, their attributes, and text, if all tags are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def only(stored: dict[str, Any], *parts: str) -> dict[str, Any]:
    """Returns a copy with the rows of some parts."""
    rows = [copy.deepcopy(row) for row in stored["rows"] if row["part"] in parts]
    return {**copy.deepcopy({k: v for k, v in stored.items() if k != "rows"}), "rows": rows}


@pytest.mark.check
def test_every_part_and_every_row_is_on_a_page_that_needs_nothing_else(
    page: str, rows: list[Row]
) -> None:
    found = Page(page)
    assert {row.part for row in rows} == {*PARTS}
    parts = page.split("<h2>")[1:]
    assert len(parts) == len(PARTS)
    for part, text in zip(PARTS, parts, strict=True):
        assert all(row.key in text for row in rows if row.part == part)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    sources = [value for name, value in found.attributes if name == "src"]
    assert len(sources) == found.tags["figure"] >= 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [value for name, value in found.attributes if name == "href"]
    assert "http:" not in page
    assert "https:" not in page


@pytest.mark.check
def test_what_fell_back_or_did_not_run_is_shown_without_a_speedup(page: str) -> None:
    text = " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())
    assert "score/shipped/learned@0.9/batch1/prompt512" in text
    assert "fell back: full depth, 7 times" in text
    assert "did not run" in text
    assert "too slow at this batch" in text


@pytest.mark.check
def test_any_text_is_shown_as_it_is(stored: dict[str, Any], tmp_path: Path) -> None:
    bad = only(stored, "score", "peer")
    for row in bad["rows"]:
        row["model"], row["note"] = HOSTILE, HOSTILE
        row["method"] = ("_" if row["method"] == "learned@0.6" else "") + row["method"]
    bad["environment"]["device"] = bad["suite"] = HOSTILE
    file = write(bad, tmp_path / "results.json")
    page = Page(write_report(file, tmp_path).read_text())
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(v.startswith("data:") for name, v in page.attributes if name == "src")
    assert "[b](javascript:c)" in page.text


def broken(stored: dict[str, Any], **changes: Any) -> dict[str, Any]:
    other = only(stored, "score")
    other["rows"][1] |= changes
    return other


@pytest.mark.check
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda s: {"command": "demo"}, "Wanted results .*Got what `utio-jax demo` printed"),
        (lambda s: {**s, "schema": 1}, "schema 4 at .*schema 1. Measure again"),
        (lambda s: {k: v for k, v in s.items() if k != "environment"}, "missing: .*environment"),
        (
            lambda s: {**s, "rows": [{k: v for k, v in s["rows"][0].items() if k != "note"}]},
            r"Wanted a row with every key .*: \['note'\]. Measure again",
        ),
        (lambda s: broken(s, more=1), r"Wanted a row with every key .*: \['more'\]. Measure again"),
        (lambda s: {**s, "rows": [[]]}, r"Wanted a row with every key .*: \[\]. Measure again"),
        (lambda s: {**s, "rows": s["rows"][:1] * 2}, "two rows have the same key"),
        (lambda s: broken(s, seconds={"median": 1.0}), "Wanted a spread in seconds. Got: "),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_files_that_cannot_be_read_are_refused(
    stored: dict[str, Any], tmp_path: Path, make: Any, wanted: str
) -> None:
    file = write(make(stored), tmp_path / "bad.json")
    with pytest.raises(ValueError, match=wanted):
        write_report(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def some(rows: list[Row], part: str, model: str = "shipped") -> list[Row]:
    return [row for row in rows if row.part == part and row.model == model]


def test_bars_are_as_high_as_the_measured_speedups(rows: list[Row]) -> None:
    rows = some(rows, "score")
    figure = draw_speedups(rows)
    assert figure is not None
    (axes,) = figure.axes
    measured = [row for row in rows if row.speedup is not None]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    heights = sorted(bar.get_height() for bar in bars)
    assert heights == pytest.approx(sorted(row.speedup.median for row in measured if row.speedup))
    left = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(left)), "bars overlap"
    assert len({bar.get_facecolor() for bar in bars}) == len(SCORE)


def test_a_panel_for_each_length(rows: list[Row]) -> None:
    assert draw_speedups([row for row in rows if row.method == "full dense"]) is None
    figure = draw_speedups(some(rows, "score", "random 30M"))
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["prompt 128", "prompt 1024"]
