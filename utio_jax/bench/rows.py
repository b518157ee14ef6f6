# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark: a setting, times next to a baseline's, and the ledger's figures.

A row is a dict of `KEYS`, and of whatever figures the ledger has. What was not measured is None.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.bench.timing import Timed, quartiles
from utio_jax.core.files import save_json, versions

KEYS = (
    *("part", "model", "method", "batch", "prompt", "output", "baseline"),
    *("seconds", "speedup", "speedup_quartiles", "note"),
)

Row = dict[str, Any]


def timed_row(timed: Timed, *, note: str = "", **values: Any) -> Row:
    """Returns the row of a method that was timed.

    A program that compiled after its warm-up did not run at its speed, and has no speed-up.
    """
    ratios: Any = timed.ratios
    low, median, high = quartiles(ratios)
    times = {"baseline": timed.baseline, "seconds": timed.ledger.seconds}
    row = dict.fromkeys(KEYS) | {**values, **times, "note": note}
    if timed.ledger.compiles:
        late = f"compiled after the warm-up, {timed.ledger.compiles} times"
        return row | {"note": "; ".join(filter(None, (note, late)))}
    return row | {"speedup": median, "speedup_quartiles": [low, high]}


def failed_row(reason: str, **values: Any) -> Row:
    """Returns the row of a method that did not run."""
    return dict.fromkeys(KEYS) | {**values, "note": reason}


def name_of(row: Row) -> str:
    """Returns the name of a row, unique within a run."""
    sizes = [f"{name}{row[name]}" for name in ("batch", "prompt", "output") if row[name]]
    return "/".join([row["part"], row["model"], row["method"], *sizes])


def save_rows(file: Path, head: Mapping[str, Any], rows: Sequence[Row], *, complete: bool) -> None:
    """Replaces a results file, whose folder is made; `complete` if these are all rows.

    `head` has `settings`, the options, and `environment`, see `describe`.
    """
    save_json(file, rounded({"command": "bench", "complete": complete, **head, "rows": rows}))


def rounded(value: Any) -> Any:
    """Returns JSON-ready values: six significant digits, null for NaN and infinities."""
    text, number = json.dumps(value), lambda digits: float(f"{float(digits):.6g}")
    return json.loads(text, parse_float=number, parse_constant=lambda _: None)


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
