# SPDX-License-Identifier: Apache-2.0
"""A benchmark's report: all of it, for any text, and an honest word on what became slower."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.results import SCORE, synthetic_results, write
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from utio_jax.benchmark.schema import PARTS, Row
from utio_jax.cli.main import main
from utio_jax.evaluation.ledger import convex_hull
from utio_jax.report.grouping import group, tell_apart
from utio_jax.report.growth import fit_exponent, growth_series
from utio_jax.report.plots import method_colours
from utio_jax.report.regressions import Change, compare_results
from utio_jax.report.results import Results, load_results
from utio_jax.report.speed_plots import draw_growth, draw_profit, draw_speedups
from utio_jax.report.work_plots import draw_losses, draw_roofline, draw_utilisation

HOSTILE = "<script>alert('x')</script> | `a` $x^$ [b](javascript:c) <img src=http://d>\n# e"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return synthetic_results()


@pytest.fixture(scope="module")
def results(stored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(write(stored, tmp_path_factory.mktemp("results") / "results.json"))


@pytest.fixture(scope="module")
def report(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole report."""
    out = tmp_path_factory.mktemp("report")
    assert main(["report", str(results.file), "--out", str(out)]) == 0
    return out


class Page(HTMLParser):
    """What a browser would find: tags, their attributes, and text, if all tags are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def only(stored: dict[str, Any], *parts: str) -> dict[str, Any]:
    """Returns a copy with the rows of some parts."""
    rows = [copy.deepcopy(row) for row in stored["rows"] if row["part"] in parts]
    return {**copy.deepcopy({k: v for k, v in stored.items() if k != "rows"}), "rows": rows}


@pytest.mark.check
def test_every_part_and_every_row_is_in_every_file(report: Path, results: Results) -> None:
    page = Page((report / "report.html").read_text())
    text = (report / "report.md").read_text()
    with (report / "rows.csv").open(newline="") as stream:
        assert [row["key"] for row in csv.DictReader(stream)] == [row.key for row in results.rows]
    present = [part for part in PARTS if any(row.part == part for row in results.rows)]
    for part in present:
        count = str(sum(row.part == part for row in results.rows))
        assert f"| {part} | {count} |" in text
        assert page.cells[page.cells.index(part) + 1] == count
    sections = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    assert len(sections) == len(present) + 1
    # A line of the table per row: those that follow the headings of parts, less what is no row.
    body = text[text.index("### ") : text.index("## How to read")]
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    tables = body.count("|---|") and len(re.findall(r"^\|---", body, flags=re.MULTILINE))
    assert len(lines) - tables == len(results.rows) + len(growth_series(results.rows))


@pytest.mark.check
def test_the_page_needs_nothing_else(report: Path) -> None:
    text = (report / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = [value for name, value in page.attributes if name == "src"]
    pictures = sorted(report.glob("*.png"))
    assert len(sources) == len(pictures) == page.tags["figure"] >= 13
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert "http:" not in text
    assert "https:" not in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (report / "report.md").read_text())
    assert sorted(named) == [picture.name for picture in pictures]


@pytest.mark.check
def test_the_csv_gives_back_every_row(report: Path, stored: dict[str, Any]) -> None:
    texts = {"key", "part", "model", "method", "note"}

    def value(cell: str) -> Any:
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell

    with (report / "rows.csv").open(newline="") as stream:
        for found, wanted in zip(csv.DictReader(stream), stored["rows"], strict=True):
            row: dict[str, Any] = dict.fromkeys(wanted)
            for column, cell in found.items():
                name, _, member = column.partition(".")
                if name in texts:
                    row[name] = cell
                elif cell and member:
                    row[name] = {**(row[name] or {}), member: value(cell)}
                elif cell and name != "file":
                    row[name] = value(cell)
            assert row == wanted


@pytest.mark.check
def test_what_fell_back_or_did_not_run_is_shown_without_a_speedup(report: Path) -> None:
    text = (report / "report.md").read_text()
    (fell,) = [line for line in text.splitlines() if "fell back: full depth, 7 times" in line]
    assert "| fell back |" in fell
    assert "512 tokens are too few to pay" in fell
    assert re.search(r"\d\.\d\d \(", fell) is None, "a speed-up with quartiles"
    (ran_not,) = [line for line in text.splitlines() if "too slow at this batch" in line]
    assert "| did not run |" in ran_not
    assert "2 compilations after the warm-up" in text


@pytest.mark.check
def test_any_text_is_shown_as_it_is(stored: dict[str, Any], tmp_path: Path) -> None:
    bad = only(stored, "score", "growth", "peer")
    bad["rows"] = [row for row in bad["rows"] if row["setting"].get("axis") in (None, "batch")]
    bad["rows"] = [row for row in bad["rows"] if row["setting"]["prompt"] < 1000]
    for row in bad["rows"]:
        row["model"], row["note"] = HOSTILE, HOSTILE
        row["key"] = HOSTILE + row["key"]
        row["method"] = ("_" if row["method"] == "learned@0.6" else "") + row["method"]
    bad["environment"]["device"] = bad["suite"] = HOSTILE
    file = write(bad, tmp_path / "results.json")
    assert main(["report", str(file), "--out", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(v.startswith("data:") for name, v in page.attributes if name == "src")
    assert HOSTILE in page.cells
    markdown = (tmp_path / "report.md").read_text()
    assert re.search(r"(?<!\\)<(script|img)", markdown) is None
    assert "](javascript" not in markdown.replace(r"\](", "")
    assert "\n# e" not in markdown
    columns = 0
    for line in markdown.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        columns = cells if not columns else columns if cells else 0
        assert cells == columns, "a cell opened another"
    figure = draw_speedups(load_results(file).rows)
    assert figure is not None
    assert r"\$" in figure.axes[0].get_title()


@pytest.mark.check
def test_the_command_says_what_it_wrote_and_what_got_worse(
    stored: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = only(stored, "routing")
    before = write(slow, tmp_path / "before.json")
    for name in ("median", "low", "high"):
        slow["rows"][0]["seconds"][name] *= 2
    after = write(slow, tmp_path / "after.json")
    assert main(["report", str(before), str(after), "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["command"] == "report"
    assert {Path(file).name for file in found["files"]} >= {"report.md", "rows.csv", "report.html"}
    assert all(Path(file).stat().st_size > 100 for file in found["files"])
    (worse,) = found["regressions"]
    assert worse["key"] == slow["rows"][0]["key"]
    assert worse["ratio"] == pytest.approx(2)
    assert worse["measure"] == "seconds"


def changed(stored: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns a copy whose times and speed-ups differ by up to 20 %, quartiles by some."""
    rng, other = np.random.default_rng(seed), copy.deepcopy(stored)
    for row in other["rows"]:
        for name in ("seconds", "speedup"):
            if row[name]:
                factor, width = rng.uniform(0.83, 1.2), rng.uniform(0, 0.15, 2)
                middle = row[name]["median"] * factor
                row[name] |= {
                    "median": middle,
                    "low": middle * (1 - width[0]),
                    "high": middle * (1 + width[1]),
                }
    return other


def compared(first: Any, second: Any, folder: Path) -> Any:
    files = [write(each, folder / f"{n}.json") for n, each in enumerate((first, second))]
    return compare_results(*map(load_results, files))


@pytest.mark.parametrize("seed", range(3))
def test_swapping_the_runs_swaps_regressions_and_improvements(
    stored: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    other = changed(stored, seed)
    there, back = compared(stored, other, tmp_path), compared(other, stored, tmp_path)
    named = lambda changes: {(c.key, c.measure) for c in changes}  # noqa: E731
    worse, better = named(there.those("regression")), named(there.those("improvement"))
    assert len(worse) > 20
    assert len(better) > 20
    assert worse == named(back.those("improvement"))
    assert better == named(back.those("regression"))
    assert named(there.those("same")) == named(back.those("same"))
    rows = {row["key"]: row for row in stored["rows"]}
    rows_after = {row["key"]: row for row in other["rows"]}
    for change in there.changes:
        a, b = (side[change.key][change.measure] for side in (rows, rows_after))
        apart = not (b["low"] <= a["median"] <= b["high"] or a["low"] <= b["median"] <= a["high"])
        far = max(a["median"] / b["median"], b["median"] / a["median"]) > 1.05
        slower = (b["median"] > a["median"]) == (change.measure == "seconds")
        wanted = ("regression" if slower else "improvement") if apart and far else "same"
        assert change.verdict == wanted


def test_equal_runs_have_no_regressions_and_noise_of_one_percent_has_none(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    for other in (stored, synthetic_results(seed=1)):
        found = compared(stored, other, tmp_path)
        assert {change.verdict for change in found.changes} == {"same"}
        assert not found.conditions
        measured = sum(bool(r["seconds"]) + bool(r["speedup"]) for r in stored["rows"])
        assert len(found.changes) == measured


def test_two_rounds_are_too_few_to_judge(stored: dict[str, Any], tmp_path: Path) -> None:
    few = only(stored, "routing")
    other = changed(few, 0)
    for row in other["rows"]:
        row["seconds"]["rounds"] = 2
    found = compared(few, other, tmp_path)
    assert {change.verdict for change in found.changes} == {"too few rounds"}


def test_a_method_that_no_longer_runs_is_a_regression_and_one_that_does_an_improvement(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    fewer = only(stored, "score")
    row = next(row for row in fewer["rows"] if row["speedup"])
    row |= {"fallbacks": {"full depth": 3}, "speedup": None, "efficiency": None}
    (change,) = compared(only(stored, "score"), fewer, tmp_path).those("regression")
    assert (change.key, change.measure) == (row["key"], "ran")
    (change,) = compared(fewer, only(stored, "score"), tmp_path).those("improvement")
    assert change == Change(
        key=row["key"], measure="ran", before=0, after=1, ratio=None, verdict="improvement"
    )


@pytest.mark.check
def test_missing_rows_and_other_conditions_are_named_first(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    first, second = only(stored, "routing", "memory"), only(stored, "routing", "compile")
    second["environment"]["device"] = "another machine"
    second["environment"]["versions"] = {"jax": "0.11.0", "jaxlib": "0.10.2"}
    second["environment"]["matmul_flops_per_second"] *= 1.04  # Two measurements of one machine.
    second["environment"]["copy_bytes_per_second"] *= 1.2
    files = [str(write(each, tmp_path / f"{n}.json")) for n, each in enumerate((first, second))]
    assert main(["report", *files, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    top = text[: text.index("###")]
    assert "| environment.device | synthetic | another machine |" in top
    assert "| environment.versions.jax | 0.10.2 | 0.11.0 |" in top
    assert "copy_bytes_per_second" in top
    assert "matmul" not in top
    assert "jaxlib" not in top
    for title, rows in (("Only before", first["rows"][2:]), ("Only after", second["rows"][2:])):
        section = text[text.index(f"### {title}") :].split("\n#")[0]
        assert all(row["key"] in section for row in rows)


def broken(stored: dict[str, Any], **changes: Any) -> dict[str, Any]:
    other = only(stored, "routing")
    other["rows"][1] |= changes
    return other


@pytest.mark.check
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda s: [1], "Wanted results .*Got schema None. Measure again: utio-jax bench"),
        (lambda s: {"command": "demo"}, "Wanted results .*Got what `utio-jax demo` printed"),
        (lambda s: {**s, "schema": 2}, "schema 1 at .*Got schema 2. Measure again"),
        (lambda s: {k: v for k, v in s.items() if k != "environment"}, "missing .*: environment"),
        (lambda s: {**s, "rows": [7]}, "In row 0 of .*or unknown: 7. Measure again"),
        (
            lambda s: {**s, "rows": [{k: v for k, v in s["rows"][0].items() if k != "flops"}]},
            r"In row 0 of .*Wanted a row with every key .*: \['flops'\]. Measure again",
        ),
        (lambda s: {**s, "rows": s["rows"][:1] * 2}, "Two rows have the same key: 'routing/"),
        (lambda s: broken(s, part="speed"), "In row 1 of .*part 'speed' is none of routing"),
        (lambda s: broken(s, ran=1), "In row 1 of .*Got in row 'routing/.*: ran is 1"),
        (
            lambda s: broken(s, flops=float("nan")),
            "It is not JSON: NaN is no number of JSON. Measure again",
        ),
        (lambda s: broken(s, seconds={"median": 1.0}), "Wanted a spread in seconds. Got: "),
        (
            lambda s: broken(s, seconds={"median": "1", "low": 1, "high": 1, "rounds": 3}),
            "row 1 of .*seconds.median is '1'",
        ),
        (
            lambda s: broken(s, part="growth", setting={"axis": "batch", "batch": "4"}),
            "setting has no 'batch', the axis, as a number",
        ),
        (lambda s: broken(s, part="growth"), "setting.axis and part growth belong together"),
        (
            lambda s: broken(s, ran=False, note="late", efficiency=2.0),
            "a speed-up of a method that did not run, or fell back",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_files_that_cannot_be_read_are_refused(
    stored: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Any,
    wanted: str,
) -> None:
    file = write(make(stored), tmp_path / "bad.json")
    with pytest.raises(ValueError, match=wanted):
        load_results(file)
    assert main(["report", str(file), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert re.search(wanted, captured.err)
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.check
def test_files_that_are_not_there_or_too_many_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="There is none. Measure again: utio-jax"):
        load_results(tmp_path / "none.json")
    cut = tmp_path / "cut.json"
    cut.write_text('{"command": "bench", "rows": [')
    with pytest.raises(ValueError, match="It is not JSON: .*Measure again: utio-jax bench"):
        load_results(cut)
    cut.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="It is not JSON: 'utf-8' codec"):
        load_results(cut)
    assert main(["report", *[str(cut)] * 3]) == 2
    assert (
        "Wanted one file of `utio-jax bench`, or two to compare. Got 3" in capsys.readouterr().err
    )


def some(results: Results, part: str, model: str = "shipped") -> list[Row]:
    return [row for row in results.rows if row.part == part and row.model == model]


def test_bars_are_as_high_as_the_measured_speedups(results: Results) -> None:
    rows = some(results, "score")
    figure = draw_speedups(rows)
    assert figure is not None
    (axes,) = figure.axes
    measured = [row for row in rows if row.speedup is not None]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    heights = sorted(bar.get_height() for bar in bars)
    assert heights == pytest.approx(sorted(row.speedup.median for row in measured if row.speedup))
    left = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(left)), "bars overlap"
    colours = method_colours(
        {row.method: row.method.replace(":", "@").split("@")[0] for row in rows}
    )
    assert {to_hex(bar.get_facecolor()) for bar in bars} == set(colours.values()) - {
        colours["full dense"]
    }
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert len(crosses) == sum(not row.ran or bool(row.fallbacks) for row in rows) == 1


def test_losses_lie_over_flops_and_times_with_a_hull_of_the_exits(results: Results) -> None:
    rows = [row for row in some(results, "score") if row.setting["batch"] == 16]
    figure = draw_losses(rows)
    assert figure is not None
    left, right = figure.axes[:2]
    shares = {method: (ratio, loss) for method, (ratio, loss, *_) in SCORE.items()}
    exits = [(1.0, 0.0), *(at for method, at in shares.items() if method.startswith("uniform"))]
    lines = {str(line.get_label()): line for line in left.lines}
    hull = next(line for label, line in lines.items() if label.startswith("uniform_hull"))
    wanted = [convex_hull(exits)(x) for x in np.asarray(hull.get_xdata())]
    np.testing.assert_allclose(np.asarray(hull.get_ydata()), np.asarray(wanted, np.float64))
    learned = sorted(at for method, at in shares.items() if method.startswith("learned"))
    np.testing.assert_allclose(np.asarray(lines["learned"].get_xydata()), learned)
    (times,) = [line for line in right.lines if line.get_label() == "learned"]
    measured = [row for row in rows if row.method.startswith("learned") and row.speedup]
    wanted = sorted(1 / row.speedup.median for row in measured if row.speedup)
    np.testing.assert_allclose(np.asarray(times.get_xdata()), wanted)


def test_powers_are_fitted_where_there_is_something_to_fit(results: Results) -> None:
    rng = np.random.default_rng(0)
    x = 2.0 ** np.arange(6)
    assert fit_exponent(x, 3 * x**1.5) == pytest.approx((1.5, 0), abs=1e-6)
    errors = [fit_exponent(x, x * rng.lognormal(0, 0.1, 6)) for _ in range(300)]
    deviations = [(p - 1) / error for p, error in filter(None, errors)]
    assert 1 < np.std(deviations) < 1.7, "Student's t with 4 degrees of freedom: 1.41"
    assert fit_exponent(x[:2], x[:2]) is None
    assert fit_exponent(x[:3] + 10, x[:3]) is None, "a range of 14 to 11"
    assert fit_exponent(np.asarray([0.0, 4, 8]), x[:3]) is None
    series = {(each.axis, each.label): each for each in growth_series(results.rows)}
    assert set(series) == {
        (axis, method)
        for axis in ("prompt", "layers", "batch", "context", "buckets")
        for method in ("learned@0.6", "uniform:4")
    }
    assert series["context", "learned@0.6"].exponent == pytest.approx((1.4, 0), abs=0.02)
    figure = draw_growth(results.rows)
    assert figure is not None
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_xscale() for axes in drawn] == ["log"] * 5
    legend = drawn[3].get_legend()
    assert legend is not None
    (label,) = [text.get_text() for text in legend.texts if "learned" in text.get_text()]
    assert label.startswith("learned@0.6: 1.40 ± 0.0")


def test_the_machine_is_drawn_as_a_roofline_where_bytes_are_known(results: Results) -> None:
    rows = some(results, "score")
    figure = draw_roofline(rows, results.environment)
    assert figure is not None
    (axes,) = figure.axes
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    own = [row for row in rows if not row.fallbacks]
    assert len(points) == len(own)
    row = own[0]
    assert row.flops is not None
    assert row.bytes is not None
    assert row.seconds is not None
    assert points[0].get_xydata() == pytest.approx(
        np.asarray([[row.flops / row.bytes, row.flops / row.seconds.median]])
    )
    roof = next(line for line in axes.lines if len(np.asarray(line.get_xdata())) == 3)
    assert max(np.asarray(roof.get_ydata())) == results.environment["matmul_flops_per_second"]
    assert draw_roofline(some(results, "decode"), results.environment) is None
    assert draw_roofline(rows, {}) is None, "no ceilings"
    figure = draw_utilisation(some(results, "decode"))
    assert figure is not None
    (axes,) = figure.axes
    shares = [row.utilisation["matmul"] for row in some(results, "decode") if row.utilisation]
    drawn = np.concatenate([np.asarray(line.get_xdata()) for line in axes.lines[:3]])
    assert sorted(drawn) == pytest.approx(sorted(share or 0.0 for share in shares))


def test_what_cannot_be_drawn_is_left_out(results: Results) -> None:
    rows = some(results, "memory")
    drawings = (draw_speedups, draw_losses, draw_growth, draw_profit, draw_utilisation)
    assert [draw(rows) for draw in drawings] == [None] * len(drawings)


def test_rows_of_one_method_at_one_place_are_told_apart(results: Results) -> None:
    rows = some(results, "score")
    at = tell_apart(rows, place=lambda row: row.setting["batch"])
    assert set(at) == {"full dense", *SCORE}
    assert sum(len(found) for found in at.values()) == len(rows)
    at = tell_apart(rows, place=lambda row: None)
    assert set(at) == {
        f"{method}, batch {batch}" for method in ("full dense", *SCORE) for batch in (1, 4, 16)
    }
    same = [rows[0], rows[0]]
    assert sum(len(found) for found in tell_apart(same, place=lambda row: 0).values()) == 2
    names = group([row for row in results.rows if row.part == "score"], without=("batch",))
    assert list(names) == [
        "shipped, prompt 512, layers 16",
        "random 30M, prompt 128",
        "random 30M, prompt 1024",
    ]
