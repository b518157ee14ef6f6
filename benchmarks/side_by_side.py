# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: rows of part "peer", kept as `bench`'s are.

`utio-jax bench --report FOLDER/results.json` then makes a page of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utio_jax.bench.rows import Row, describe, rounded, save_rows, timed_row
from utio_jax.bench.timing import Timing


def peer_row(  # noqa: PLR0913 (options, each named)
    model_name: str,
    method: str,
    baseline: str,
    times: Mapping[str, Timing],
    *,
    setting: Mapping[str, Any],
    tokens: float,
    figures: Mapping[str, Any],
    calls: int = 1,
    fallback: str = "",
) -> Row:
    """Returns the row of one program beside another.

    Args:
      model_name: as rows are to name it.
      method: what ran.
      baseline: what it is compared with.
      times: of both and perhaps others, which took turns.
      setting: batch, prompt and output.
      tokens: scored, or new, in one call.
      figures: what else was counted.
      calls: in one timed turn.
      fallback: what it did in place of what it says: then it has no speed-up.
    """
    return timed_row(
        times[method],
        times[method].ratios_over(times[baseline]),
        calls=calls,
        fallback=fallback,
        note="; ".join(f"{name} {value}" for name, value in rounded(dict(figures)).items()),
        part="peer",
        model=model_name,
        method=method,
        baseline=baseline,
        tokens_per_second=tokens * calls / times[method].median,
        **setting,
    )


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
    file, rows = out / "results.json", list[Row]()
    environment = describe(dtype="float32")
    environment["versions"] |= versions
    shown = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    head = {"settings": shown | {"suite": suite}, "environment": environment}

    def keep(row: Row) -> None:
        rows.append(row)
        save_rows(file, head, rows, complete=False)

    yield keep
    print(json.dumps(save_rows(file, head, rows, complete=True)))
    print(f"Results: {file}", file=sys.stderr)
