# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark: a setting, times next to a baseline's, and the ledger's figures.

A row is a dict of `KEYS`, and of whatever figures the ledger has. What was not measured is None.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.timing import Spread, Timing
from utio_jax.core.files import load_json, save_json, versions

PARTS = ("score", "decode", "lossless", "peer")
KEYS = (
    *("part", "model", "method", "batch", "prompt", "output", "baseline"),
    *("seconds", "speedup", "speedup_quartiles", "note"),
)

Row = dict[str, Any]


def timed_row(
    timing: Timing,
    ratios: np.ndarray,
    *,
    calls: int = 1,
    fallback: str = "",
    note: str = "",
    **values: Any,
) -> Row:
    """Returns the row of a method that was timed.

    Args:
      timing: of the method.
      ratios: `[round]`, how many times as fast as the baseline it was.
      calls: per timed turn.
      fallback: what ran in the method's place, which then has no speed-up. A program that
        compiled after its warm-up did not run at its speed, and has none either.
      note: assumptions.
      values: the other values of the row.
    """
    if timing.compiles:
        fallback = f"compiled after the warm-up, {timing.compiles} times"
    spread = None if fallback else Spread.of(ratios)
    return dict.fromkeys(KEYS) | {
        **values,
        "seconds": timing.median / calls,
        "speedup": spread and spread.median,
        "speedup_quartiles": spread and [spread.low, spread.high],
        "note": "; ".join(filter(None, (note, fallback))),
    }


def failed_row(reason: str, **values: Any) -> Row:
    """Returns the row of a method that did not run."""
    return dict.fromkeys(KEYS) | {**values, "note": reason}


def name_of(row: Row) -> str:
    """Returns the name of a row, unique within a run."""
    sizes = [f"{name}{row[name]}" for name in ("batch", "prompt", "output") if row[name]]
    return "/".join([row["part"], row["model"], row["method"], *sizes])


def save_rows(
    file: Path, head: Mapping[str, Any], rows: Sequence[Row], *, complete: bool
) -> dict[str, Any]:
    """Replaces a results file, and returns the results.

    Args:
      file: to write; its folder is made.
      head: `settings`, the options, and `environment`, see `describe`.
      rows: known rows.
      complete: True if these are all.
    """
    stored = {"command": "bench", "complete": complete, **head, "rows": rows}
    save_json(file, rounded(stored))
    return rounded(stored)


def read_rows(file: Path) -> dict[str, Any]:
    """Returns the results that `save_rows` wrote.

    Raises:
      ValueError: there is no such file, it is not JSON, or not what this version writes.
    """
    what, remedy = "results of `utio-jax bench`", "Measure again: utio-jax bench."
    stored = load_json(file, what, strict=True, remedy=remedy)
    named = stored if isinstance(stored, dict) else {}
    missing = {"complete", "settings", "environment", "rows"} - {*named}
    if named.get("command") != "bench" or missing:
        raise ValueError(f"Wanted {what} at {file}. Got none of {sorted(missing)}. {remedy}")
    for row in stored["rows"]:
        held = row if isinstance(row, dict) else {}
        missing = {*KEYS} - {*held}
        if missing or row["part"] not in PARTS:
            raise ValueError(
                f"Wanted rows with {', '.join(KEYS)}, of parts {', '.join(PARTS)}, in {file}. "
                f"Got one of part {held.get('part')!r} without {sorted(missing)}. {remedy}"
            )
    return stored


def rounded(value: Any) -> Any:
    """Returns JSON-ready values: six significant digits, null for NaN and infinities."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def describe(*, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns the environment of a benchmark: device, versions, flags, the parameters' dtype."""
    device = jax.devices()[0]
    # Containers and schedulers may give us fewer cores than there are.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "device_count": jax.device_count(),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "dtype": jnp.dtype(dtype).name,
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
