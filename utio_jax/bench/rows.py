# SPDX-License-Identifier: Apache-2.0
"""Rows of `results.json`: what ran, in which setting, against what, and what that took.

What was not measured is null. A row whose method did not run, or fell back to another, has no
speed-up: that is checked here, as a row is made and as it is read, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utio_jax.bench.subjects import Subject
from utio_jax.bench.timing import Spread, Timing
from utio_jax.evaluation.ledger import Ledger

SCHEMA = 3
"""Version of the format; readers refuse others."""

PARTS = ("score", "decode", "lossless", "peer")

Record = dict[str, Any]

_QUALITY = ("nll_full", "nll", "nll_increase_pct", "agreement")
# How settings are named in keys.
_SHORT = {"batch": "b", "prompt": "p", "output": "o", "context": "c"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one setting.

    Attributes:
      key: unlike that of any other row; a resumed run skips keys that it finds.
      part: of the suite, one of `PARTS`.
      model: name of the model.
      method: what ran.
      speed_only: the weights are random: there is no quality to speak of.
      baseline: the method that `speedup` compares with; None where nothing is compared.
      setting: batch, prompt, output, context, budget, layers, buckets, as far as they have a
        meaning.
      ran: whether the method itself ran.
      note: why it did not, what it fell back to, what was assumed.
      fallbacks: how often it did something else instead, by reason.
      seconds: of one call, over the rounds.
      baseline_seconds: of the baseline, in the same rounds.
      speedup: the rounds' ratios.
      speedup_ideal: full FLOPs over those of the decided layers.
      efficiency: speedup / speedup_ideal.
      flops_ratio: executed FLOPs over the full pass'.
      quality: `nll_full`, `nll` in nats per token, `nll_increase_pct`, `agreement`.
      tokens_per_second: scored, or new ones.
      compiles: backend compilations after the warm-up.
      ledger: the whole record, see `utio_jax.evaluation.ledger.Ledger`; of another system, what
        was counted.
    """

    key: str
    part: str
    model: str
    method: str
    speed_only: bool = False
    baseline: str | None = None
    setting: Record = dataclasses.field(default_factory=dict)
    ran: bool = True
    note: str = ""
    fallbacks: Record = dataclasses.field(default_factory=dict)
    seconds: Spread | None = None
    baseline_seconds: Spread | None = None
    speedup: Spread | None = None
    speedup_ideal: float | None = None
    efficiency: float | None = None
    flops_ratio: float | None = None
    quality: Record | None = None
    tokens_per_second: float | None = None
    compiles: int | None = None
    ledger: Record | None = None

    def __post_init__(self) -> None:
        problems = self._contradictions()
        if problems:
            raise ValueError(
                f"Wanted a row of results.json, schema {SCHEMA}. Got in row {self.key!r}: "
                + "; ".join(problems)
            )

    def _contradictions(self) -> list[str]:
        """Returns what fields claim together and cannot."""
        found = []
        if self.part not in PARTS:
            found.append(f"part {self.part!r} is none of {', '.join(PARTS)}")
        if (not self.ran or self.fallbacks) and (self.speedup or self.efficiency):
            found.append("a speed-up of a method that did not run, or fell back")
        if not self.ran and not self.note:
            found.append("a method that did not run without a note that says why")
        if self.speedup is not None and self.baseline is None:
            found.append("a speed-up over no baseline")
        if self.speed_only and self.quality is not None:
            found.append("quality of a row that is about speed only")
        return found

    @property
    def own(self) -> bool:
        """Whether the method ran, and nothing in its place."""
        return self.ran and not self.fallbacks

    def to_dict(self) -> Record:
        """Returns JSON-ready values, floats rounded to six significant digits."""
        return rounded(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, stored: Any) -> Row:
        """Returns the row that `to_dict` wrote.

        Raises:
          ValueError: keys that are missing or unknown, or values that do not fit.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(stored, Mapping) or set(stored) != names:
            odd = sorted(names ^ set(stored)) if isinstance(stored, Mapping) else repr(stored)
            raise ValueError(
                f"Wanted a row with every key of schema {SCHEMA}, and no other. These are missing "
                f"or unknown: {odd}."
            )
        values = dict(stored)
        for name in ("seconds", "baseline_seconds", "speedup"):
            if isinstance(values[name], dict):
                try:
                    values[name] = Spread(**values[name])
                except TypeError as error:
                    raise ValueError(f"Wanted a spread in {name}. Got: {error}.") from error
        return cls(**values)

    def noting(self, note: str) -> Row:
        """Returns the row with one remark more."""
        return dataclasses.replace(self, note="; ".join(each for each in (self.note, note) if each))

    def failed(self, reason: str) -> Row:
        """Returns the row of a method that could not run."""
        return dataclasses.replace(self.noting(reason), ran=False)


def rounded(value: Any) -> Any:
    """Returns JSON-ready values: six significant digits, null for what is no number."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are measured together, programs taking turns.

    Attributes:
      title: a line of progress.
      rows: as planned; a resumed run skips the group if it has them all.
      measure: returns them measured.
    """

    title: str
    rows: tuple[Row, ...]
    measure: Callable[[], Sequence[Row]]


def plan(
    subject: Subject,
    part: str,
    method: str,
    setting: Mapping[str, Any],
    *,
    baseline: str | None = None,
) -> Row:
    """Returns a row that is not measured yet, its key made of the setting's sizes."""
    sizes = [f"{short}{setting[name]}" for name, short in _SHORT.items() if name in setting]
    return Row(
        key="/".join([part, subject.name, method, *sizes]),
        part=part,
        model=subject.name,
        method=method,
        speed_only=subject.speed_only,
        baseline=baseline,
        setting={**setting, "layers": subject.decoder.config.num_layers},
        note=subject.note,
    )


def timed(
    row: Row,
    timing: Timing,
    *,
    against: Timing | None = None,
    ratios: np.ndarray | None = None,
    calls: int = 1,
    tokens: float | None = None,
    **values: Any,
) -> Row:
    """Returns the row with its times.

    A program that compiled after its warm-up did not run at its speed: then there is no speed-up.

    Args:
      row: as planned.
      timing: of the method.
      against: the baseline, in the same rounds; None where nothing is compared.
      ratios: of the rounds, where they are not the seconds' own.
      calls: of what the row is about, in one timed turn.
      tokens: of one call.
      values: of the row's other fields.
    """
    seconds = Spread.of(timing.seconds / calls)
    found = dataclasses.replace(
        row,
        seconds=seconds,
        compiles=timing.compiles,
        tokens_per_second=None if tokens is None else tokens / seconds.median,
        **values,
    )
    if against is None:
        return found
    fallbacks = dict(found.fallbacks)
    if timing.compiles:
        fallbacks["compiled after the warm-up"] = timing.compiles
    baseline = Spread.of(against.seconds / calls)
    found = dataclasses.replace(found, fallbacks=fallbacks, baseline_seconds=baseline)
    if found.fallbacks:
        return found
    speedup = Spread.of(timing.ratios_over(against) if ratios is None else ratios)
    ideal = found.speedup_ideal
    return dataclasses.replace(
        found, speedup=speedup, efficiency=None if ideal is None else speedup.median / ideal
    )


def quality_of(row: Row, ledger: Ledger) -> Record:
    """Returns a row's quality, None where it is about speed only, and its ledger."""
    record = ledger.to_dict()
    if row.speed_only:  # Random weights have losses too; they mean nothing.
        return {"quality": None, "ledger": record | dict.fromkeys((*_QUALITY, "kl_full"))}
    return {"quality": {name: record[name] for name in _QUALITY}, "ledger": record}
