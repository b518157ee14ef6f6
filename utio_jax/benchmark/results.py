# SPDX-License-Identifier: Apache-2.0
"""What a benchmark writes: `results.json`, checked as it is written and as it is read.

A row says what ran, in which setting, against what, and what it took. What was not measured is
null. A row whose method did not run, or fell back to another, has no speed-up: that is checked here
and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from utio_jax.timing import Spread

SCHEMA = 1
"""Version of the format; readers refuse others."""

PARTS = (
    "routing",
    "score",
    "decode",
    "lossless",
    "sparse",
    "throttle",
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
      ledger: the whole record, see `utio_jax.ledger.Ledger`.
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
            elif name in _KEYS_OF and value is not None and set(value) != _KEYS_OF[name]:
                found.append(f"{name} has the keys {sorted(value)}")
        if found:
            return found
        if self.part not in PARTS:
            found.append(f"part {self.part!r} is none of {', '.join(PARTS)}")
        if (self.part == "growth") != ("axis" in self.setting):
            found.append("setting.axis and part growth belong together")
        if "axis" in self.setting and self.setting["axis"] not in self.setting:
            found.append(f"setting has no {self.setting['axis']!r}, the axis")
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
        return _rounded(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Row:
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


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class Recorder:
    """Keeps every row on disk as soon as it is known: an interruption loses what was under way.

    Attributes:
      rows: by key, in the order of measuring.
    """

    def __init__(
        self,
        file: Path,
        *,
        suite: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
        resume: bool = False,
    ):
        """Opens a file of results: anew, or to go on.

        Args:
          file: to write; its folder is made.
          suite: name of it.
          settings: the options as given.
          environment: what the machine is and can do.
          resume: keep the rows that are there; without it they are replaced.

        Raises:
          ValueError: `resume`, and the file is broken, or was measured with other settings, devices
            or versions.
        """
        self._file, self._resumed = file, 0.0
        self._head: dict[str, Any] = {
            "command": "bench",
            "schema": SCHEMA,
            "suite": suite,
            "complete": False,
            "seconds": 0.0,
            "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "settings": dict(settings),
            "environment": dict(environment),
        }
        self.rows: dict[str, Row] = {}
        if resume and file.is_file():
            self._continue(read_results(file))
        self._write()

    def _continue(self, stored: Mapping[str, Any]) -> None:
        ours = self._head
        for what, was, now in (
            ("suite", stored["suite"], ours["suite"]),
            ("settings", stored["settings"], _rounded(ours["settings"])),
            *(
                (name, stored["environment"].get(name), ours["environment"].get(name))
                for name in ("device", "dtype", "versions", "commit")
            ),
        ):
            if was != now:
                raise ValueError(
                    f"Wanted --resume of a run with the same {what}. {self._file} has {was!r}, "
                    f"this run {now!r}. Leave out --resume to replace it, or name another --out."
                )
        self.rows = {row["key"]: Row.from_dict(row) for row in stored["rows"]}
        # The first run's clock and ceilings: what its rows were held against.
        self._resumed = float(stored["seconds"])
        self._head |= {"started": stored["started"], "environment": stored["environment"]}

    @property
    def environment(self) -> dict[str, Any]:
        """The machine that the rows are held against: the first run's, where one was resumed."""
        return self._head["environment"]

    def add(self, rows: Sequence[Row], *, seconds: float) -> None:
        """Writes rows, in place of those with the same keys; `seconds` since this run began."""
        self.rows |= {row.key: row for row in rows}
        self._head["seconds"] = round(self._resumed + seconds, 1)
        self._write()

    def close(self, *, complete: bool, seconds: float) -> dict[str, Any]:
        """Writes whether all rows are there, and returns the whole."""
        self._head |= {"complete": complete, "seconds": round(self._resumed + seconds, 1)}
        self._write()
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file holds."""
        return _rounded({**self._head, "rows": [row.to_dict() for row in self.rows.values()]})

    def _write(self) -> None:
        write_json(self._file, self.to_dict())


def write_json(file: Path, value: Any) -> None:
    """Writes JSON that appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(file)


_HEAD: dict[str, tuple[type, ...]] = {
    "command": (str,),
    "schema": (int,),
    "suite": (str,),
    "complete": (bool,),
    "seconds": (int, float),
    "started": (str,),
    "settings": (dict,),
    "environment": (dict,),
    "rows": (list,),
}


def read_results(file: Path) -> dict[str, Any]:
    """Returns what `utio-jax bench` wrote, checked.

    Raises:
      ValueError: there is no such file, it is not JSON, or not what this version writes.
    """
    wanted = f"Wanted results of `utio-jax bench`, schema {SCHEMA}, in {file}."
    remedy = "Measure again: utio-jax bench."

    def refuse(number: str) -> None:
        raise ValueError(f"{wanted} Got {number}, which is no JSON. {remedy}")

    try:
        stored = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"{wanted} Got: {error.strerror}. {remedy}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{wanted} It is not JSON: {error}. {remedy}") from error
    command = stored.get("command", "bench") if isinstance(stored, dict) else "bench"
    if command != "bench":
        raise ValueError(f"{wanted} Got what `utio-jax {command}` printed. {remedy}")
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        version = stored.get("schema") if isinstance(stored, dict) else None
        raise ValueError(f"{wanted} Got schema {version!r}. {remedy}")
    wrong = [name for name, kinds in _HEAD.items() if not isinstance(stored.get(name), kinds)]
    if wrong:
        raise ValueError(
            f"{wanted} These are missing or of another kind: {', '.join(wrong)}. {remedy}"
        )
    seen = set[str]()
    for number, row in enumerate(stored["rows"]):
        try:
            key = Row.from_dict(row).key
        except ValueError as error:
            raise ValueError(f"In row {number} of {file}: {error} {remedy}") from error
        if key in seen:
            raise ValueError(f"{wanted} Two rows have the same key: {key!r}. {remedy}")
        seen.add(key)
    return stored
