# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: two programs that take turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def turns(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns seconds per program and round; each round runs all of them, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for run in programs.values():
        run()
    for turn in range(rounds):
        order = list(programs) if turn % 2 == 0 else list(programs)[::-1]
        for name in order:
            start = time.perf_counter()
            programs[name]()
            times[name].append(time.perf_counter() - start)
    return times


def row(
    what: str,
    tokens: int,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    *,
    peer: str,
) -> dict[str, Any]:
    """Returns tokens a second of both programs, and the quartiles of their ratio by round."""
    times = turns({"utio_jax": ours, peer: theirs}, rounds)
    ratios = [b / a for a, b in zip(times["utio_jax"], times[peer], strict=True)]
    speeds = {
        f"{name}_tokens_per_second": round(tokens / statistics.median(seconds), 1)
        for name, seconds in times.items()
    }
    quartiles = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
    return {"what": what, **speeds, "ratio": quartiles}
