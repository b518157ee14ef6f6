# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: rows of part "peer", kept as `bench`'s are.

`utio-jax bench --report FOLDER/results.json` then makes a page of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utio_jax.bench.results import Row, describe, rounded, save_results
from utio_jax.bench.timing import Timing


def peer_row(  # noqa: PLR0913 (options, each named)
    model_name: str,
    method: str,
    baseline: str,
    times: Mapping[str, Timing],
    *,
    setting: Mapping[str, Any],
    tokens: float,
    found: Mapping[str, Any],
    calls: int = 1,
    speed_only: bool = False,
    fallbacks: Mapping[str, int] | None = None,
) -> Row:
    """Returns the row of one program beside another.

    Args:
      model_name: as rows are to name it.
      method: what ran.
      baseline: what it is compared with.
      times: of both and perhaps others, which took turns.
      setting: batch, prompt and output.
      tokens: scored, or new, in one call.
      found: what else was counted.
      calls: in one timed turn.
      speed_only: the weights are random.
      fallbacks: how often it did something else than it says: then it has no speed-up.
    """
    found = rounded(dict(found))
    row = Row(
        part="peer",
        model=model_name,
        method=method,
        baseline=baseline,
        setting=dict(setting),
        speed_only=speed_only,
        note="; ".join(f"{name} {value}" for name, value in found.items()),
        fallbacks=dict(fallbacks or {}),
    )
    ratios = times[method].ratios_over(times[baseline])
    return row.timed(times[method], ratios=ratios, calls=calls, tokens=tokens)


@contextmanager
def recording(
    out: Path, *, suite: str, settings: Mapping[str, Any], versions: Mapping[str, str]
) -> Iterator[Callable[[Row], None]]:
    """Keeps rows in results.json as they come, and prints all of it as a line at the end.

    Args:
      out: folder.
      suite: name of the comparison.
      settings: the options as given.
      versions: of the other libraries.
    """
    started, file = time.perf_counter(), out / "results.json"
    environment = describe(dtype="float32")
    environment["versions"] |= versions
    shown = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    head = {"suite": suite, "settings": shown, "environment": environment}
    rows = list[Row]()

    def save(*, complete: bool) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        return save_results(file, head, rows, complete=complete, seconds=seconds)

    def keep(row: Row) -> None:
        rows.append(row)
        save(complete=False)

    save(complete=False)
    yield keep
    print(json.dumps(save(complete=True)))
    print(f"Results: {file}", file=sys.stderr)
