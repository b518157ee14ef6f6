# SPDX-License-Identifier: Apache-2.0
"""Seconds of an engine's step in place of FLOPs: what thresholds are chosen by, where it decodes.

A step of many rows takes as long as its rows together: a token that stops early saves nothing
where its neighbours go on, unless rows are packed. So the fewest FLOPs are not the most tokens per
second, and which exits are best depends on the number of slots and on the machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.files import conditions
from utio_jax.engine.planning import RebatchingPlan, RowRates, measure_rates, plan_rebatching
from utio_jax.policies.base import Signal
from utio_jax.policies.store import Thresholds


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineClock:
    """What a step of an engine takes whose slots all run, by measured rates of one machine.

    Attributes:
      slots: rows that run at once.
      pack: numbers of rows into which they may be packed by depth; empty: they step together.
      rates: measures what a signal's step takes, see `utio_jax.engine.measure_rates`.
      machine: on which, for the record.
    """

    slots: int
    pack: tuple[int, ...] = ()
    rates: Callable[[Signal], RowRates]
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slots < 1 or [*self.pack] != sorted({*self.pack}) or min(self.pack, default=1) < 1:
            raise ValueError(
                "Wanted at least one slot, and numbers of rows to pack of at least 1, ascending. "
                f"Got slots={self.slots}, pack={self.pack}."
            )

    @classmethod
    def of(cls, decoder: Decoder, params: Params, *, slots: int) -> Self:
        """Returns the clock of this machine, which may pack a quarter or a half of the slots.

        Args:
          decoder: the model, with an early exit.
          params: its parameters, on one device.
          slots: rows that run at once.
        """
        pack = tuple(sorted({each for each in (slots // 4, slots // 2) if 0 < each < slots}))

        def rates(signal: Signal) -> RowRates:
            return measure_rates(decoder, params, signal, slots=slots, pack=pack)

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        machine = {**conditions(params), "cores": cores}
        return cls(slots=slots, pack=pack, rates=rates, machine=machine)

    def measure(self, signal: Signal) -> RowRates:
        """Returns the rates for a signal's policies.

        Raises:
          ValueError: no machine that is left alone takes so long.
        """
        rates = self.rates(signal)
        if rates.nonsense is not None:
            raise ValueError(
                f"Wanted rates that thresholds can be chosen by. Got: {rates.nonsense}. Measure "
                "while no other program runs, or choose by FLOPs."
            )
        return rates

    def plan(self, rates: RowRates, fit: Thresholds) -> RebatchingPlan:
        """Returns what a step is foretold to take at these thresholds, and plainly.

        Layers behind the last depth of the thresholds do not run, but count as if the K/V of all
        rows were projected there, as where all rows stop early.
        """
        histogram = dict(zip(fit.depths, fit.fractions, strict=True))
        return plan_rebatching(rates, histogram, rows=self.slots, widths=self.pack)

    def fastest(self, plan: RebatchingPlan) -> str:
        """Returns how a plan decodes adaptively: `"together"` or `"pack"`."""
        ways = [way for way in plan.seconds if way != "plain"]
        return min(ways, key=plan.seconds.__getitem__)

    def asked(self) -> dict[str, Any]:
        """Returns what identifies it, JSON-ready."""
        return {"clock": "engine", "slots": self.slots, "pack": list(self.pack)}
