# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows as tables of text: no column that is empty, and what is equal said once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.timing import Spread
from utio_jax.report.grouping import ran_as_itself
from utio_jax.report.growth import Series
from utio_jax.report.regressions import Change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns.

    Attributes:
      columns: their names.
      rows: `[row][column]`, as it shall be read; not escaped for any format.
      marks: of each row: "worse", "better", "weak", or "".
      note: what holds for all rows.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...]
    note: str = ""


_Column = Callable[[Row], str]


def row_table(rows: Sequence[Row]) -> Table:
    """Returns a table of everything that was measured of rows of one part."""
    places: dict[str, _Column] = {"model": _model, "method": lambda row: row.method}
    for name in dict.fromkeys(name for row in rows for name in row.setting):
        places[name] = lambda row, name=name: show(row.setting.get(name))
    places["baseline"] = lambda row: row.baseline or ""
    same = {
        name: {column(row) for row in rows}
        for name, column in places.items()
        if len(rows) > 1 and name != "method"
    }
    common = {name: values.pop() for name, values in same.items() if len(values) == 1}
    columns = {name: column for name, column in places.items() if name not in common}
    return _table(
        {**columns, **_MEASURED, "note": _note},
        rows,
        note="; ".join(f"{name} {value}" for name, value in common.items() if value),
    )


def missing_table(rows: Sequence[Row]) -> Table:
    """Returns a table of rows that another run lacks, by key."""
    names = ("time (quartiles)", "speed-up (quartiles)", "loss +%")
    columns = {"row": lambda row: row.key, **{name: _MEASURED[name] for name in names}}
    return _table({**columns, "note": _note}, rows)


def _table(columns: Mapping[str, _Column], rows: Sequence[Row], note: str = "") -> Table:
    cells = {name: [column(row) for row in rows] for name, column in columns.items()}
    kept = {name: values for name, values in cells.items() if any(values)}
    return Table(
        columns=tuple(kept),
        rows=tuple(zip(*kept.values(), strict=True)),
        marks=tuple("" if ran_as_itself(row) else "weak" for row in rows),
        note=note and f"In all rows: {note}.",
    )


def change_table(
    changes: Sequence[Change], before: Mapping[str, Row], after: Mapping[str, Row]
) -> Table:
    """Returns a table of changes, with the loss of both runs beside each.

    Args:
      changes: of rows that both runs have.
      before: first run's rows, by key.
      after: second run's.
    """
    marks = {"regression": "worse", "improvement": "better"}
    return Table(
        columns=("row", "measure", "before", "after", "after / before", "verdict", "loss +%"),
        rows=tuple(
            (
                each.key,
                each.measure,
                *(_measure(each.measure, value) for value in (each.before, each.after)),
                "" if each.ratio is None else f"{each.ratio:.3f}",
                each.verdict,
                _both(_loss(before[each.key]), _loss(after[each.key])),
            )
            for each in changes
        ),
        marks=tuple(marks.get(each.verdict, "") for each in changes),
    )


def growth_table(series: Sequence[Series]) -> Table:
    """Returns a table of how times grow."""
    rows = list[tuple[str, ...]]()
    for each in series:
        fit, x, (median, *_) = each.exponent, each.x, each.seconds
        rows.append(
            (
                each.axis,
                each.model,
                each.label,
                f"{x[0]:g} to {x[-1]:g}",
                str(len(x)),
                f"{show_seconds(median[0])} to {show_seconds(median[-1])}",
                "" if fit is None else f"{fit[0]:.2f} ± {fit[1]:.2f}",
            )
        )
    names = ("varied", "model", "method", "range", "points", "time", "fitted power")
    return Table(columns=names, rows=tuple(rows), marks=("",) * len(rows))


def pair_table(values: Mapping[str, Any], names: tuple[str, str]) -> Table:
    """Returns a table of names and values."""
    rows = tuple((name, show(value)) for name, value in values.items())
    return Table(columns=names, rows=rows, marks=("",) * len(rows))


def show(value: Any) -> str:
    """Returns a value of JSON as text: null as nothing, numbers to four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {show(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(show(each) for each in value)
    return str(value)


def show_seconds(value: float) -> str:
    """Returns a time in the unit that suits it.

    >>> show_seconds(0.0123), show_seconds(4.5e-5), show_seconds(1234.5)
    ('12.3 ms', '45.0 µs', '1234 s')
    """
    scale, unit = _unit(value)
    return f"{_digits(value * scale)} {unit}"


def _unit(value: float) -> tuple[float, str]:
    units = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
    return next((scale, unit) for least, scale, unit in units if abs(value) >= least)


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _seconds(spread: Spread | None) -> str:
    if spread is None:
        return ""
    scale, unit = _unit(spread.median)
    low, high = _digits(spread.low * scale), _digits(spread.high * scale)
    return f"{_digits(spread.median * scale)} {unit} ({low} to {high})"


def _speedup(row: Row) -> str:
    if row.speedup is not None:
        return f"{row.speedup.median:.2f} ({row.speedup.low:.2f} to {row.speedup.high:.2f})"
    if not row.ran:
        return "did not run"
    return "fell back" if row.fallbacks else ""


def _model(row: Row) -> str:
    return row.model + (" (random weights)" if row.speed_only and "random" not in row.model else "")


def _note(row: Row) -> str:
    fell = [f"fell back: {name}, {show(count)} times" for name, count in row.fallbacks.items()]
    compiled = [f"{row.compiles} compilations after the warm-up"] if row.compiles else []
    return "; ".join([*([row.note] if row.note else []), *fell, *compiled])


def _loss(row: Row) -> float | None:
    return _of(row.quality, "nll_increase_pct")


def _of(values: Mapping[str, Any] | None, name: str) -> Any:
    return None if values is None else values.get(name)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(scale * value, form)


def _measure(measure: str, value: float) -> str:
    if measure == "ran":
        return "as itself" if value else "not, or fell back"
    return show_seconds(value) if measure == "seconds" else f"{value:.2f}"


def _both(before: float | None, after: float | None) -> str:
    shown = [_number(value, "+.2f") for value in (before, after)]
    return shown[0] if shown[0] == shown[1] else " to ".join(each or "none" for each in shown)


def _error_pct(row: Row) -> str:
    predicted, measured = (_of(row.profit, f"{name}_seconds") for name in ("predicted", "measured"))
    return f"{100 * (predicted / measured - 1):+.1f}" if predicted and measured else ""


def _time_of(which: str, name: str) -> _Column:
    def column(row: Row) -> str:
        value = _of(getattr(row, which), name)
        return "" if value is None else show_seconds(value)

    return column


def _mebibytes(name: str) -> _Column:
    return lambda row: _number(_of(row.memory_bytes, name), ",.1f", 2**-20)


_MEASURED: dict[str, _Column] = {
    "time (quartiles)": lambda row: _seconds(row.seconds),
    "baseline's": lambda row: _seconds(row.baseline_seconds),
    "speed-up (quartiles)": _speedup,
    "ideal": lambda row: _number(row.speedup_ideal, ".2f"),
    "efficiency": lambda row: _number(row.efficiency, ".2f"),
    "FLOPs / full": lambda row: _number(row.flops_ratio, ".3f"),
    "of matmul %": lambda row: _number(_of(row.utilisation, "matmul"), ".0f", 100),
    "of copy %": lambda row: _number(_of(row.utilisation, "copy"), ".0f", 100),
    "loss +%": lambda row: _number(_loss(row), "+.2f"),
    "agreement": lambda row: _number(_of(row.quality, "agreement"), ".3f"),
    "tokens/s": lambda row: _number(row.tokens_per_second, ",.0f"),
    "compiled cold": _time_of("compile_seconds", "cold"),
    "compiled warm": _time_of("compile_seconds", "warm"),
    "peak MiB": _mebibytes("peak"),
    "arguments MiB": _mebibytes("arguments"),
    "temporaries MiB": _mebibytes("temporaries"),
    "predicted": _time_of("profit", "predicted_seconds"),
    "measured": _time_of("profit", "measured_seconds"),
    "error %": _error_pct,
    "held out": lambda row: show(_of(row.profit, "held_out")),
}
