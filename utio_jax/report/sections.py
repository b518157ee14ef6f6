# SPDX-License-Identifier: Apache-2.0
"""What a report says, in order: conditions, what changed, every part, and the pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from utio_jax.benchmark.schema import PARTS, Row
from utio_jax.report.grouping import is_gain, ran_as_itself
from utio_jax.report.growth import growth_series
from utio_jax.report.plots import saved
from utio_jax.report.regressions import THRESHOLD, ResultsComparison
from utio_jax.report.results import Results
from utio_jax.report.speed_plots import draw_efficiency, draw_growth, draw_profit, draw_speedups
from utio_jax.report.tables import (
    Table,
    change_table,
    growth_table,
    missing_table,
    pair_table,
    row_table,
    show,
)
from utio_jax.report.work_plots import draw_losses, draw_roofline, draw_utilisation, in_roofline

_READING = (
    "A speed-up is the median of paired ratios over the baseline, the fastest full-depth program, "
    "with first and third quartiles; the ideal has neither padding nor gates, and efficiency is "
    "measured over ideal. What fell back or did not run has no speed-up, and says why.",
    "Speed-up by batch: bars with quartiles, the ideal in black; hatched are the controls, "
    "truncation (uniform) and chance (random).",
    "Loss over work and time: executed FLOPs on the left, measured time on the right, with the "
    "speed-up above. The dashed hull of single exits is what mixing them at random reaches: a "
    "policy is worth its name below it.",
    "Growth: medians with quartiles, and the power of the varied setting that fits them, by least "
    "squares of logarithms, with its standard error.",
    "The machine: its ceilings are a large matrix product and a large copy, measured in the same "
    "run. What stays in caches is read faster than that copy.",
)

_PARTS = {
    "routing": ("Routing alone", "Scores and packing with none of the model's arithmetic."),
    "score": ("Scoring", "Whole passes over prompts; nothing is generated."),
    "decode": ("Decoding", "New tokens at a depth each, prefill included."),
    "lossless": ("Lossless decoding", "Shallow drafts, verified: the full model's own tokens."),
    "engine": ("Continuous batching", "Requests of many lengths, which join and leave a batch."),
    "sparse": ("Sparse attention", "Tokens of low importance see a part of the past; scoring."),
    "throttle": ("Throttled KV", "Tokens of low importance read a part of the cache; decoding."),
    "prompt": ("Prompts by importance", "Most of a prompt stops early; the first token, and all."),
    "compile": ("Compilation", "A fresh process' first call, without and with the stored cache."),
    "memory": ("Memory", "Of the compiled programs."),
    "growth": ("Growth", "One setting varies, all else stays."),
    "profit": ("Predicted and measured time", "From a histogram of depths, before it is run."),
    "peer": ("Other systems", "What others' programs do on the same machine, where they run."),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture that has been written.

    Attributes:
      file: a PNG.
      caption: what it shows.
    """

    file: Path
    caption: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what is below it.

    Attributes:
      title: of the section.
      level: 2 or 3, as headings go.
      text: paragraphs.
      pictures: after the text.
      tables: after the pictures.
    """

    title: str
    level: int
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


def reading_section() -> Section:
    """Returns the section on how to read all others."""
    return Section(title="How to read this", level=2, text=_READING)


def sections_of(results: Results, out: Path, *, name: str) -> list[Section]:
    """Returns the sections of one run, and writes its pictures.

    Args:
      results: of the run.
      out: folder for the pictures.
      name: of the run, above its sections and before the pictures' names.
    """
    stem = f"{name}-" if name else ""
    title = f"{name.capitalize()}: {results.file.name}" if name else results.file.name

    def picture(figure: Figure | None, called: str, caption: str) -> tuple[Picture, ...]:
        if figure is None:
            return ()
        file = out / f"{stem}{called}.png"
        saved(figure, file)
        return (Picture(file=file, caption=caption),)

    rows, found = results.rows, [_conditions(results, title)]
    for part in PARTS:
        members = [row for row in rows if row.part == part]
        if not members:
            continue
        heading, about = _PARTS[part]
        pictures, tables = list[Picture](), [row_table(members)]
        models = dict.fromkeys(row.model for row in members)
        for number, model in enumerate(models if part != "growth" else ()):
            of_model = [row for row in members if row.model == model]
            after = f"-{number + 1}" if len(models) > 1 else ""
            pictures += picture(
                draw_speedups(of_model), f"speedup-{part}{after}", f"Speed-up by batch: {model}"
            )
            pictures += picture(
                draw_losses(of_model), f"loss-{part}{after}", f"Loss over work and time: {model}"
            )
        if part == "growth":
            pictures += picture(draw_growth(members), part, "Growth of time")
            tables.insert(0, growth_table(growth_series(members)))
        if part == "profit":
            pictures += picture(draw_profit(members), part, "Predicted and measured time")
            about = " ".join([about, *_profit_errors(members)])
        found.append(
            Section(
                title=heading,
                level=3,
                text=(about,),
                pictures=tuple(pictures),
                tables=tuple(table for table in tables if table.rows),
            )
        )
    # Growing settings would put a cloud where the suite's own settings are to be seen.
    usual = [row for row in rows if row.part != "growth"]
    roofline = draw_roofline(usual, results.environment)
    placed = {row.key for row in in_roofline(usual)} if roofline is not None else set[str]()
    others = [row for row in usual if row.key not in placed]
    machine = (
        *picture(
            draw_efficiency(usual),
            "efficiency",
            "Measured over ideal speed-up; lines of equal efficiency",
        ),
        *picture(roofline, "roofline", "FLOP/s reached, under this machine's measured ceilings"),
        *picture(
            draw_utilisation(others),
            "utilisation",
            "Share of the measured ceilings: points are rows, bars their range",
        ),
    )
    if machine:
        found.append(Section(title="Efficiency and the machine", level=3, pictures=machine))
    return found


def comparison_sections(found: ResultsComparison, before: Results, after: Results) -> list[Section]:
    """Returns the sections on how two runs differ."""
    first, second = ({row.key: row for row in run.rows} for run in (before, after))
    worse, better = found.those("regression"), found.those("improvement")
    rest = [c for c in found.changes if c.verdict not in ("regression", "improvement")]
    text = [
        f"Before: {before.file} ({before.started}). After: {after.file} ({after.started}).",
        f"{len(worse)} regressions, {len(better)} improvements, {len(rest)} others; "
        f"{len(found.only_before)} rows only before, {len(found.only_after)} only after.",
        f"A regression or an improvement is a ratio of medians beyond {THRESHOLD - 1:.0%}, each "
        "median beyond the other run's quartiles. A speed-up is a ratio of programs that took "
        "turns; seconds also feel the machine.",
    ]
    if found.conditions:
        text.append(
            "The conditions differ, as listed: read the ratios of seconds with that in mind."
        )
    sections = [
        Section(
            title="What changed",
            level=2,
            text=tuple(text),
            tables=(_differences(found),) if found.conditions else (),
        )
    ]
    for title, changes in (
        ("Regressions", worse),
        ("Improvements", better),
        ("No change, or none that can be told", rest),
    ):
        if changes:
            table = change_table(changes, first, second)
            sections.append(Section(title=title, level=3, tables=(table,)))
    for title, rows in (("Only before", found.only_before), ("Only after", found.only_after)):
        if rows:
            sections.append(Section(title=title, level=3, tables=(missing_table(rows),)))
    return sections


def _differences(found: ResultsComparison) -> Table:
    rows = tuple((name, show(a), show(b)) for name, (a, b) in found.conditions.items())
    return Table(columns=("condition", "before", "after"), rows=rows, marks=("",) * len(rows))


def _conditions(results: Results, title: str) -> Section:
    text = [f"Suite {results.suite}, started {results.started}, {show(results.seconds)} seconds."]
    if not results.complete:
        text.append("The run did not come to its end: rows are missing. Go on with --resume.")
    absent = [part for part in PARTS if not any(row.part == part for row in results.rows)]
    if absent:
        text.append(f"No rows of: {', '.join(absent)}.")
    conditions = {
        **results.environment,
        **{f"--{k.replace('_', '-')}": v for k, v in results.settings.items()},
    }
    return Section(
        title=title,
        level=2,
        text=tuple(text),
        tables=(_counts(results.rows), pair_table(conditions, ("condition", "value"))),
    )


def _counts(rows: Sequence[Row]) -> Table:
    cells = list[tuple[str, ...]]()
    for part in PARTS:
        members = [row for row in rows if row.part == part]
        if not members:
            continue
        gains = [row.speedup.median for row in members if row.speedup and is_gain(row)]
        counts = (
            len(members),
            sum(ran_as_itself(row) for row in members),
            sum(row.ran and bool(row.fallbacks) for row in members),
            sum(not row.ran for row in members),
            sum(bool(row.compiles) for row in members),
        )
        span = f"{min(gains):.2f} to {max(gains):.2f}" if gains else ""
        cells.append((part, *map(str, counts), span))
    columns = ("part", "rows", "ran", "fell back", "did not run", "compiled when warm", "speed-ups")
    return Table(columns=columns, rows=tuple(cells), marks=("",) * len(cells))


def _profit_errors(rows: Sequence[Row]) -> list[str]:
    said = []
    for held_out, name in ((True, "Held out"), (False, "In the fit")):
        errors = [
            abs(row.profit["predicted_seconds"] / row.profit["measured_seconds"] - 1)
            for row in rows
            if row.profit is not None
            and row.profit["held_out"] == held_out
            and row.profit["predicted_seconds"]
            and row.profit["measured_seconds"]
        ]
        if errors:
            said.append(
                f"{name}: median error {100 * np.median(errors):.1f} %, "
                f"largest {100 * max(errors):.1f} % ({len(errors)} points)."
            )
    return said
