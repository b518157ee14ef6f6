# SPDX-License-Identifier: Apache-2.0
"""Timing of programs that take turns in one run; speed-ups are ratios of the same round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from utio_jax.decoding.generate import Generated
from utio_jax.evaluation.ledger import Ledger

_compilations = 0  # By XLA, in this process.


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def quartiles(values: np.ndarray) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile of `[round]` values."""
    return np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75]).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One program's seconds, one entry per round; entries of one round belong together.

    Attributes:
      seconds: `[round]`.
      compiles: backend compilations after the warm-up; anything but 0 spoils the timing.
    """

    seconds: np.ndarray
    compiles: int

    @property
    def median(self) -> float:
        """Median seconds."""
        return float(np.median(self.seconds))

    def ratios_over(self, other: Timing) -> np.ndarray:
        """Returns the speed-up over `other` of each round, `[round]`."""
        return other.seconds / self.seconds

    def speedup_over(self, other: Timing) -> float:
        """Returns the median speed-up over `other`."""
        return float(np.median(self.ratios_over(other)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Results of one program, with its times and full depth's; None if it was not timed.

    Attributes:
      ledger: quality, cost and times.
      ratios: `[round]`, full depth's seconds over the program's, for as many tokens.
      baseline: name of the full-depth program.
      results: the new tokens of each batch, if it made any.
    """

    ledger: Ledger
    ratios: np.ndarray | None = None
    baseline: str | None = None
    results: tuple[Generated, ...] = ()

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts per verified draft; None where nothing was drafted."""
        drafts = sum(int(result.work.drafts.sum()) for result in self.results)
        accepted = sum(int(result.work.accepted.sum()) for result in self.results)
        return accepted / drafts if drafts else None

    def to_dict(self) -> dict[str, Any]:
        """Returns rates and ledger as JSON-ready values."""
        tokens, seconds = self.ledger.tokens, self.ledger.seconds
        rates = {
            "tokens_per_second": None if seconds is None else round((tokens or 0) / seconds, 1),
            "acceptance": None if self.acceptance is None else round(self.acceptance, 4),
        }
        return rates | self.ledger.to_dict()


def timed_ledger(
    ledger: Ledger,
    timing: Timing,
    *,
    against: Timing,
    baseline: str,
    ideal: float | None,
    share: float = 1.0,
    results: tuple[Generated, ...] = (),
) -> Timed:
    """Returns a ledger with its program's times, over those of a full-depth program.

    `ideal` is the speed-up that FLOPs alone would give. `share` is the program's tokens over the
    full-depth one's: seconds per token are compared.
    """
    ratios = timing.ratios_over(against) * share
    speedup = float(np.median(ratios))
    ledger = dataclasses.replace(
        ledger,
        seconds_full=against.median * share,
        seconds=timing.median,
        speedup=speedup,
        speedup_ideal=ideal,
        efficiency=None if ideal is None else speedup / ideal,
        compiles=timing.compiles,
    )
    return Timed(ledger=ledger, ratios=ratios, baseline=baseline, results=results)


def time_programs(
    programs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Times programs in turns, so that a drift of the machine affects all of them.

    Args:
      programs: name to a function without arguments; its result is waited for.
      rounds: timed turns of each, after one in which everything compiles. The order rotates by one
        from round to round.
      progress: called after every turn.

    Raises:
      ValueError: no programs, or rounds < 1.
    """
    if not programs or rounds < 1:
        raise ValueError(
            f"Wanted programs and at least one round. Got {len(programs)} programs, "
            f"rounds={rounds}."
        )
    names = list(programs)
    for name in names:
        jax.block_until_ready(programs[name]())
        if progress is not None:
            progress()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    compiles = dict.fromkeys(names, 0)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before, start = _compilations, time.perf_counter()
            jax.block_until_ready(programs[name]())
            seconds[name].append(time.perf_counter() - start)
            compiles[name] += _compilations - before
            if progress is not None:
                progress()
    return {
        name: Timing(seconds=np.asarray(seconds[name]), compiles=compiles[name]) for name in names
    }
