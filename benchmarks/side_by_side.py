# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: rows of part "peer", kept as `bench`'s are.

`utio-jax report FOLDER/results.json` then makes a page of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utio_jax.benchmark.environment import describe
from utio_jax.benchmark.results import Recorder
from utio_jax.benchmark.rows import Bench, timed
from utio_jax.benchmark.schema import Row
from utio_jax.timing import Timing


def peer_row(
    model_name: str,
    method: str,
    timing: Timing,
    *,
    baseline: str,
    against: Timing,
    setting: Mapping[str, Any],
    tokens: int,
    found: Mapping[str, Any],
    speed_only: bool = False,
    fallbacks: Mapping[str, int] | None = None,
) -> Row:
    """Returns the row of one program beside another.

    Args:
      model_name: as rows are to name it.
      method: what ran.
      timing: of it.
      baseline: name of what it is compared with.
      against: that one's timing, in the same rounds.
      setting: batch, prompt and output.
      tokens: scored, or new, in one call.
      found: what else was counted; it is kept as the row's ledger.
      speed_only: the weights are random.
      fallbacks: how often it did something else than it says: then it has no speed-up.
    """
    key = "/".join(
        ["peer", model_name, method, *(f"{name}{value}" for name, value in setting.items())]
    )
    row = Row(
        key=key,
        part="peer",
        model=model_name,
        method=method,
        baseline=baseline,
        setting=dict(setting),
        speed_only=speed_only,
        note="; ".join(f"{name} {value}" for name, value in found.items()),
        fallbacks=dict(fallbacks or {}),
        ledger=dict(found),
    )
    bench = Bench(rounds=len(timing.seconds), environment={})
    return timed(row, timing, bench, against=against, tokens=tokens)


def keep(
    rows: Sequence[Row],
    out: Path,
    *,
    suite: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    started: float,
) -> None:
    """Writes results.json, and prints it as a line.

    Args:
      rows: all of them.
      out: folder.
      suite: name of the comparison.
      settings: the options as given.
      versions: of the other libraries.
      started: when it began, of `time.perf_counter`.
    """
    environment = describe(dtype="float32")
    environment["versions"] |= versions
    file, seconds = out / "results.json", time.perf_counter() - started
    shown = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    recorder = Recorder(file, suite=suite, settings=shown, environment=environment)
    recorder.add(rows, seconds=seconds)
    print(json.dumps(recorder.close(complete=True, seconds=seconds)))
    print(f"Results: {file}", file=sys.stderr)
