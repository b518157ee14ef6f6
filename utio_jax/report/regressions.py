# SPDX-License-Identifier: Apache-2.0
"""Two runs of `utio-jax bench`, row by row: what became slower, faster, or went missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.timing import Spread
from utio_jax.report.grouping import ran_as_itself
from utio_jax.report.results import Results

Verdict = Literal["regression", "improvement", "same", "too few rounds"]
Measure = Literal["ran", "speedup", "seconds"]

# On a shared machine medians of equal programs differ by a few percent from run to run.
THRESHOLD = 1.05

# Quartiles of fewer rounds say nothing.
MIN_ROUNDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of a row that both runs have.

    Attributes:
      key: of the row.
      measure: "speedup", a paired ratio within each run; "seconds", which also feel the machine; or
        "ran", whether the method ran as itself, only where that changed.
      before: first run's median; 1 or 0 for "ran".
      after: second run's.
      ratio: after / before; None for "ran".
      verdict: a regression or improvement lies more than 5 % away, and each median beyond the
        other's quartiles. Swapping the runs swaps the two words.
    """

    key: str
    measure: Measure
    before: float
    after: float
    ratio: float | None
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Returns the change as JSON-ready values."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in dataclasses.asdict(self).items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultsComparison:
    """How a second run differs from a first.

    Attributes:
      conditions: what differs in environment, settings and suite, by dotted name: first run's value
        and second's. Measured ceilings are named beyond 5 %.
      changes: of rows that both have.
      only_before: rows that the second run lacks.
      only_after: rows that the first run lacks.
    """

    conditions: Mapping[str, tuple[Any, Any]]
    changes: tuple[Change, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]

    def those(self, verdict: Verdict) -> tuple[Change, ...]:
        """Returns the changes of one verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)


def compare_results(before: Results, after: Results) -> ResultsComparison:
    """Returns what changed from one run to another."""
    first = {row.key: row for row in before.rows}
    second = {row.key: row for row in after.rows}
    return ResultsComparison(
        conditions=_differences(before, after),
        changes=tuple(
            change
            for key, row in first.items()
            if key in second
            for change in _of(row, second[key])
        ),
        only_before=tuple(row for row in before.rows if row.key not in second),
        only_after=tuple(row for row in after.rows if row.key not in first),
    )


def _of(before: Row, after: Row) -> list[Change]:
    found = list[Change]()
    if ran_as_itself(before) != ran_as_itself(after):
        found.append(
            Change(
                key=before.key,
                measure="ran",
                before=int(ran_as_itself(before)),
                after=int(ran_as_itself(after)),
                ratio=None,
                verdict="regression" if ran_as_itself(before) else "improvement",
            )
        )
    enough = min(_rounds(before), _rounds(after)) >= MIN_ROUNDS
    pairs: tuple[tuple[Measure, Spread | None, Spread | None], ...] = (
        ("speedup", before.speedup, after.speedup),
        ("seconds", before.seconds, after.seconds),
    )
    for measure, a, b in pairs:
        if a is None or b is None or not a.median or not b.median:
            continue
        found.append(
            Change(
                key=before.key,
                measure=measure,
                before=a.median,
                after=b.median,
                ratio=b.median / a.median,
                verdict=_verdict(a, b, measure == "seconds") if enough else "too few rounds",
            )
        )
    return found


def _rounds(row: Row) -> int:
    return row.seconds.rounds if row.seconds is not None else 0


def _verdict(before: Spread, after: Spread, less_is_better: bool) -> Verdict:
    def clearly_more(much: Spread, little: Spread) -> bool:
        return (
            much.median > THRESHOLD * little.median
            and much.median > little.high
            and little.median < much.low
        )

    if clearly_more(after, before):
        return "regression" if less_is_better else "improvement"
    if clearly_more(before, after):
        return "improvement" if less_is_better else "regression"
    return "same"


def _differences(before: Results, after: Results) -> dict[str, tuple[Any, Any]]:
    a, b = _flat(before), _flat(after)
    return {
        name: (a.get(name), b.get(name))
        for name in dict.fromkeys((*a, *b))
        if not _alike(a.get(name), b.get(name))
    }


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):  # Measured, so never quite equal.
        return max(a, b) <= THRESHOLD * min(a, b)
    return a == b


def _flat(results: Results) -> dict[str, Any]:
    """Returns suite, environment and settings by dotted name."""
    found: dict[str, Any] = {"suite": results.suite, "complete": results.complete}
    for part, values in (("environment", results.environment), ("settings", results.settings)):
        for name, value in values.items():
            if isinstance(value, Mapping):
                found |= {f"{part}.{name}.{inner}": each for inner, each in value.items()}
            else:
                found[f"{part}.{name}"] = value
    return found
