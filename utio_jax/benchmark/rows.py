# SPDX-License-Identifier: Apache-2.0
"""Rows before and after they are measured: keys, times, and how near the machine's ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.timing import Spread, Timing
from utio_jax.evaluation.ledger import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are measured together, programs taking turns.

    Attributes:
      title: for whoever waits.
      rows: as planned; a resumed run skips the group if it has them all.
      measure: returns them measured.
    """

    title: str
    rows: tuple[Row, ...]
    measure: Callable[[], Sequence[Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What all parts are measured with.

    Attributes:
      rounds: timed turns of each program.
      environment: of the machine, its ceilings among it.
    """

    rounds: int
    environment: Mapping[str, Any]


# How settings are named in keys.
_SHORT = {"batch": "b", "prompt": "p", "output": "o", "context": "c"}
_LONG = ("layers", "buckets", "block")


def plan(
    subject: Subject,
    part: str,
    method: str,
    setting: Mapping[str, Any],
    *,
    baseline: str | None = None,
) -> Row:
    """Returns a row that is not measured yet, its key made of the setting."""
    where = [part, subject.name, method]
    where += [str(setting["axis"])] if "axis" in setting else []
    where += [f"{short}{setting[name]}" for name, short in _SHORT.items() if name in setting]
    where += [
        f"{name}{setting[name]}" for name in ("layers", "buckets", "block") if name in setting
    ]
    return Row(
        key="/".join(where),
        part=part,
        model=subject.name,
        method=method,
        speed_only=subject.speed_only,
        baseline=baseline,
        setting=dict(setting),
        note=subject.note,
    )


def timed(
    row: Row,
    timing: Timing,
    bench: Bench,
    *,
    against: Timing | None = None,
    ratios: np.ndarray | None = None,
    calls: int = 1,
    **values: Any,
) -> Row:
    """Returns the row with its times.

    A program that compiled after its warm-up did not run at its speed: then there is no speed-up.

    Args:
      row: as planned.
      timing: of the method.
      bench: what it is measured with.
      against: the baseline, in the same rounds; None where nothing is compared.
      ratios: of the rounds, where they are not the seconds' own.
      calls: of what the row is about, in one timed turn.
      values: of the row's other fields; `tokens` (of one call) becomes tokens per second.
    """
    seconds = Timing(seconds=timing.seconds / calls, compiles=timing.compiles).spread
    tokens = values.pop("tokens", None)
    found = dataclasses.replace(
        row,
        seconds=seconds,
        compiles=timing.compiles,
        utilisation={
            "matmul": _share(values.get("flops"), seconds, bench, "matmul_flops_per_second"),
            "copy": _share(values.get("bytes"), seconds, bench, "copy_bytes_per_second"),
        },
        tokens_per_second=None if tokens is None else tokens / seconds.median,
        **values,
    )
    if against is None:
        return found
    if timing.compiles:
        fallbacks = {**found.fallbacks, "compiled after the warm-up": timing.compiles}
        found = dataclasses.replace(found, fallbacks=fallbacks)
    found = dataclasses.replace(
        found,
        baseline_seconds=Timing(seconds=against.seconds / calls, compiles=0).spread,
    )
    if found.fallbacks:
        return found
    speedup = Spread.of(timing.ratios_over(against) if ratios is None else ratios)
    ideal = found.speedup_ideal
    return dataclasses.replace(
        found, speedup=speedup, efficiency=None if ideal is None else speedup.median / ideal
    )


def _share(amount: float | None, seconds: Spread, bench: Bench, ceiling: str) -> float | None:
    return None if amount is None else amount / seconds.median / bench.environment[ceiling]


def quality_of(row: Row, ledger: Ledger) -> dict[str, Any]:
    """Returns a row's quality, None where it is about speed only, and its ledger."""
    names = ("nll_full", "nll", "nll_increase_pct", "agreement")
    record = ledger.to_dict()
    quality = None if row.speed_only else {name: record[name] for name in names}
    if row.speed_only:  # Random weights have losses too; they mean nothing.
        record |= dict.fromkeys((*names, "kl_full"))
    return {"quality": quality, "ledger": record}
