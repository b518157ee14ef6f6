# SPDX-License-Identifier: Apache-2.0
"""Regressions between two runs of `utio-jax bench`, row by row, and what else differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from utio_jax.bench.rows import Row, rounded
from utio_jax.bench.timing import Spread

# On a shared machine medians of equal programs differ by a few percent from run to run.
THRESHOLD = 1.05

# Quartiles of fewer rounds say nothing.
MIN_ROUNDS = 3


def compare_results(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what changed from one run to another, in rows that both have.

    Each change has the row's `key`; a `measure`, "speedup" (a paired ratio within each run),
    "seconds" (which also feel the machine) or "ran" (whether the method ran as itself, 1 or 0, only
    where that changed); its medians `before` and `after`, and their `ratio`, None for "ran"; and a
    `verdict`. A "regression" or an "improvement" lies more than 5 % away, and each median beyond
    the other's quartiles: swapping the runs swaps the two words. Others are "same" or "too few
    rounds".

    Args:
      before: a first run, as `utio_jax.bench.results.read_results` returns it.
      after: a second one.
    """
    found = list[dict[str, Any]]()
    second = {row["key"]: row for row in after["rows"]}
    for old in before["rows"]:
        if old["key"] not in second:
            continue
        a, b = Row.from_dict(old), Row.from_dict(second[old["key"]])
        measured = list[tuple[str, float, float, float | None, str]]()
        if a.own != b.own:
            verdict = "regression" if a.own else "improvement"
            measured.append(("ran", int(a.own), int(b.own), None, verdict))
        for name in ("speedup", "seconds"):
            x, y = getattr(a, name), getattr(b, name)
            if x is not None and y is not None:
                verdict = _verdict(x, y, less_is_better=name == "seconds")
                measured.append((name, x.median, y.median, y.median / x.median, verdict))
        names = ("measure", "before", "after", "ratio", "verdict")
        found += [
            rounded({"key": a.key, **dict(zip(names, each, strict=True))}) for each in measured
        ]
    return found


def _verdict(before: Spread, after: Spread, *, less_is_better: bool) -> str:
    def clearly_more(much: Spread, little: Spread) -> bool:
        return (
            much.median > THRESHOLD * little.median
            and much.median > little.high
            and little.median < much.low
        )

    if min(before.rounds, after.rounds) < MIN_ROUNDS:
        return "too few rounds"
    if clearly_more(after, before):
        return "regression" if less_is_better else "improvement"
    if clearly_more(before, after):
        return "improvement" if less_is_better else "regression"
    return "same"


def changed_conditions(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns what differs in suite, environment and settings, measured ceilings beyond 5 %."""
    found = dict[str, tuple[Any, Any]]()
    for part in ("environment", "settings"):
        a, b = before[part], after[part]
        found |= {f"{part}.{name}": (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))}
    found["suite"] = before["suite"], after["suite"]
    return {name: pair for name, pair in found.items() if not _alike(*pair)}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):  # Measured, so never quite equal.
        return max(a, b) <= THRESHOLD * min(a, b)
    return a == b
