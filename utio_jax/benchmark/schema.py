# SPDX-License-Identifier: Apache-2.0
"""What a benchmark says of one method in one setting, checked as it is made and as it is read.

A row says what ran, in which setting, against what, and what it took. What was not measured is
null. A row whose method did not run, or fell back to another, has no speed-up: that is checked here
and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from utio_jax.benchmark.timing import Spread

SCHEMA = 1
"""Version of the format; readers refuse others."""

PARTS = (
    "routing",
    "score",
    "decode",
    "lossless",
    "engine",
    "sparse",
    "throttle",
    "prompt",
    "compile",
    "memory",
    "growth",
    "profit",
    "peer",
)

_SPREADS = ("seconds", "baseline_seconds", "speedup")
_NUMBER_OR_NONE: tuple[type, ...] = (int, float, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "key": (str,),
    "part": (str,),
    "model": (str,),
    "speed_only": (bool,),
    "method": (str,),
    "baseline": (str, type(None)),
    "setting": (dict,),
    "ran": (bool,),
    "note": (str,),
    "fallbacks": (dict,),
    **dict.fromkeys(_SPREADS, (Spread, type(None))),
    **dict.fromkeys(
        ("speedup_ideal", "efficiency", "flops_ratio", "flops", "bytes", "tokens_per_second"),
        _NUMBER_OR_NONE,
    ),
    "utilisation": (dict,),
    **dict.fromkeys(
        ("quality", "compile_seconds", "memory_bytes", "profit", "ledger"), (dict, type(None))
    ),
    "compiles": (int, type(None)),
}
_KEYS_OF = {
    "utilisation": {"matmul", "copy"},
    "quality": {"nll_full", "nll", "nll_increase_pct", "agreement"},
    "compile_seconds": {"cold", "warm"},
    "memory_bytes": {"peak", "arguments", "temporaries"},
    "profit": {"histogram", "predicted_seconds", "measured_seconds", "held_out"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one setting.

    Attributes:
      key: unlike that of any other row; a resumed run skips keys that it finds.
      part: of the suite, one of `PARTS`.
      model: name of the model.
      method: what ran.
      speed_only: the weights are random, or the context beyond what they were trained for: there
        is no quality to speak of.
      baseline: the method that `speedup` compares with; None where nothing is compared.
      setting: batch, prompt, output, context, budget, layers, buckets, block, as far as they have a
        meaning; in part "growth" `axis` names the one that is varied.
      ran: whether the method itself ran.
      note: why it did not, what it fell back to, what was assumed.
      fallbacks: how often it did something else instead, by reason.
      seconds: of one call, over the rounds.
      baseline_seconds: of the baseline, in the same rounds.
      speedup: the rounds' ratios.
      speedup_ideal: full FLOPs over those of the decided layers.
      efficiency: speedup / speedup_ideal.
      flops_ratio: executed FLOPs over the full pass'.
      flops: executed in one call.
      bytes: read and written at least once, where known.
      utilisation: share of the machine's own matrix product (`matmul`) and copy (`copy`).
      quality: `nll_full`, `nll` in nats per token, `nll_increase_pct`, `agreement`.
      tokens_per_second: scored, or new ones.
      compiles: backend compilations after the warm-up.
      compile_seconds: of a first call in a fresh process, `cold`, and with the persistent cache
        filled, `warm`.
      memory_bytes: `peak`, `arguments` and `temporaries` of the compiled program.
      profit: `histogram` of depths, seconds `predicted_seconds` and `measured_seconds`, and whether
        the point was `held_out` of the fit.
      ledger: the whole record, see `utio_jax.evaluation.ledger.Ledger`; of another system, what
        was counted.
    """

    key: str
    part: str
    model: str
    method: str
    speed_only: bool = False
    baseline: str | None = None
    setting: dict[str, Any] = dataclasses.field(default_factory=dict)
    ran: bool = True
    note: str = ""
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: Spread | None = None
    baseline_seconds: Spread | None = None
    speedup: Spread | None = None
    speedup_ideal: float | None = None
    efficiency: float | None = None
    flops_ratio: float | None = None
    flops: float | None = None
    bytes: float | None = None
    utilisation: dict[str, float | None] = dataclasses.field(
        default_factory=lambda: {"matmul": None, "copy": None}
    )
    quality: dict[str, float | None] | None = None
    tokens_per_second: float | None = None
    compiles: int | None = None
    compile_seconds: dict[str, float | None] | None = None
    memory_bytes: dict[str, float | None] | None = None
    profit: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise ValueError(
                f"Wanted a row of results.json, schema {SCHEMA}. Got in row {self.key!r}: "
                + "; ".join(problems)
            )

    def _problems(self) -> list[str]:
        found = []
        for name, kinds in _TYPES.items():
            value = getattr(self, name)
            # A bool is an int to Python, and no number to a reader.
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                found.append(f"{name} is {value!r}")
            elif isinstance(value, Spread):
                found += _not_numbers(name, dataclasses.asdict(value), (int, float))
        for name, keys in _KEYS_OF.items():
            record: dict[str, Any] | None = getattr(self, name)
            if isinstance(record, dict):
                if set(record) != keys:
                    found.append(f"{name} has the keys {sorted(record)}")
                found += _not_numbers(name, record, _NUMBER_OR_NONE)
        return found or self._contradictions()

    def _contradictions(self) -> list[str]:
        """Returns what fields of the right kinds claim together and cannot."""
        found = []
        if self.part not in PARTS:
            found.append(f"part {self.part!r} is none of {', '.join(PARTS)}")
        if (self.part == "growth") != ("axis" in self.setting):
            found.append("setting.axis and part growth belong together")
        if "axis" in self.setting:
            axis = self.setting["axis"]
            if not isinstance(self.setting.get(axis), (int, float)):
                found.append(f"setting has no {axis!r}, the axis, as a number")
        if (not self.ran or self.fallbacks) and (self.speedup or self.efficiency):
            found.append("a speed-up of a method that did not run, or fell back")
        if not self.ran and not self.note:
            found.append("a method that did not run without a note that says why")
        if self.speedup is not None and self.baseline is None:
            found.append("a speed-up over no baseline")
        if self.speed_only and self.quality is not None:
            found.append("quality of a row that is about speed only")
        return found

    def to_dict(self) -> dict[str, Any]:
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
        for name in _SPREADS:
            if isinstance(values[name], dict):
                try:
                    values[name] = Spread(**values[name])
                except TypeError as error:
                    raise ValueError(f"Wanted a spread in {name}. Got: {error}.") from error
        return cls(**values)

    def failed(self, reason: str) -> Row:
        """Returns the row of a method that could not run."""
        return dataclasses.replace(self, ran=False, note=_joined(self.note, reason))

    def noting(self, note: str) -> Row:
        """Returns the row with one remark more."""
        return dataclasses.replace(self, note=_joined(self.note, note))


def _not_numbers(name: str, values: Mapping[str, Any], kinds: tuple[type, ...]) -> list[str]:
    return [
        f"{name}.{member} is {value!r}"
        for member, value in values.items()
        if member not in ("histogram", "held_out") and not isinstance(value, kinds)
    ]


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def rounded(value: Any) -> Any:
    """Returns JSON-ready values: six significant digits, null for what is no number."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
