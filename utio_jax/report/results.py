# SPDX-License-Identifier: Apache-2.0
"""What `utio-jax bench` measured, read back from its file and checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1

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

# What each value must be; "?" allows null. Members of an object are in `_MEMBERS`.
_KINDS = {
    "key": "text",
    "part": "text",
    "model": "text",
    "speed_only": "flag",
    "method": "text",
    "baseline": "text?",
    "setting": "object",
    "ran": "flag",
    "note": "text",
    "fallbacks": "object",
    "seconds": "object?",
    "baseline_seconds": "object?",
    "speedup": "object?",
    "speedup_ideal": "number?",
    "efficiency": "number?",
    "flops_ratio": "number?",
    "flops": "number?",
    "bytes": "number?",
    "utilisation": "object?",
    "quality": "object?",
    "tokens_per_second": "number?",
    "compiles": "number?",
    "compile_seconds": "object?",
    "memory_bytes": "object?",
    "profit": "object?",
    "ledger": "object?",
}
_SPREAD = {"median": "number", "low": "number", "high": "number"}
_MEMBERS = {
    "seconds": {**_SPREAD, "rounds": "number"},
    "baseline_seconds": {**_SPREAD, "rounds": "number"},
    "speedup": _SPREAD,
    "utilisation": {"matmul": "number?", "copy": "number?"},
    "quality": {"nll_increase_pct": "number?", "agreement": "number?"},
    "compile_seconds": {"cold": "number?", "warm": "number?"},
    "memory_bytes": {"peak": "number?", "arguments": "number?", "temporaries": "number?"},
    "profit": {
        "predicted_seconds": "number?",
        "measured_seconds": "number?",
        "held_out": "flag",
    },
}
_IN_FILE = {
    "suite": "text",
    "complete": "flag",
    "seconds": "number?",
    "started": "text",
    "settings": "object",
    "environment": "object",
    "rows": "list",
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "flag": bool,
    "number": (int, float),
    "object": dict,
    "list": list,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A measurement's rounds: median, first and third quartile.

    Attributes:
      median: of the rounds.
      low: first quartile.
      high: third quartile.
      rounds: how many there were; None where that is said elsewhere.
    """

    median: float
    low: float
    high: float
    rounds: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one setting. What was not measured is None.

    Attributes:
      key: names the row within its file, and the same measurement in other files.
      part: one of `PARTS`.
      model: its name.
      speed_only: weights are random, so quality means nothing.
      method: for example learned@0.6.
      baseline: the full-depth program that `speedup` is over.
      setting: batch, prompt, output, context, layers, ... as far as they mean something here; in
        the part "growth" also `axis`, the name of the one that is varied.
      ran: whether the method ran at all.
      note: why not, or what is special.
      fallbacks: how often something else ran in the method's place, by name.
      seconds: of the method.
      baseline_seconds: of the baseline, from the same interleaved rounds.
      speedup: of the rounds' ratios; None where the method did not run, or not all of it.
      speedup_ideal: without padding and gates.
      efficiency: speedup / speedup_ideal; None where `speedup` is.
      flops_ratio: executed FLOPs / the full pass'.
      flops: executed.
      bytes: read and written at least once.
      utilisation: achieved / the machine's ceiling, of "matmul" and "copy".
      quality: losses in nats per token, `nll_increase_pct`, `agreement`.
      tokens_per_second: of the method.
      compiles: backend compilations after the warm-up; more than 0 spoils the timing.
      compile_seconds: "cold" and "warm" (with the persistent cache).
      memory_bytes: "peak", "arguments", "temporaries".
      profit: "predicted_seconds", "measured_seconds", and whether that was "held_out" of the fit.
      ledger: the whole record, see `utio_jax.ledger.Ledger`.
    """

    key: str
    part: str
    model: str
    speed_only: bool
    method: str
    baseline: str | None
    setting: Mapping[str, Any]
    ran: bool
    note: str
    fallbacks: Mapping[str, Any]
    seconds: Spread | None
    baseline_seconds: Spread | None
    speedup: Spread | None
    speedup_ideal: float | None
    efficiency: float | None
    flops_ratio: float | None
    flops: float | None
    bytes: float | None
    utilisation: Mapping[str, float | None] | None
    quality: Mapping[str, float | None] | None
    tokens_per_second: float | None
    compiles: int | None
    compile_seconds: Mapping[str, float | None] | None
    memory_bytes: Mapping[str, float | None] | None
    profit: Mapping[str, Any] | None
    ledger: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON-ready values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """One run of `utio-jax bench`.

    Attributes:
      file: where it was read.
      suite: which rows were asked for.
      complete: whether the run came to its end.
      seconds: that it took.
      started: when.
      settings: the options.
      environment: device, versions, and the machine's measured ceilings.
      rows: in the order of the file.
    """

    file: Path
    suite: str
    complete: bool
    seconds: float | None
    started: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]


def read_results(file: Path) -> Results:
    """Reads a file of `utio-jax bench`.

    Raises:
      ValueError: there is no such file, it is something else, of another schema, or a row lacks
        something, has the wrong type, or another row's key.
    """
    stored = _read_json(file)
    if not isinstance(stored, dict) or stored.get("command") != "bench":
        command = stored.get("command") if isinstance(stored, dict) else None
        found = f"one of `utio-jax {command}`" if command else "something else"
        raise ValueError(
            f"Wanted a file of `utio-jax bench` in {file}. Got {found}. Make one: utio-jax bench."
        )
    if stored.get("schema") != SCHEMA:
        raise ValueError(
            f"Wanted schema {SCHEMA} in {file}. Got {stored.get('schema')!r}. Measure anew with "
            "this version's `utio-jax bench`, or report with the version that wrote the file."
        )
    _check(stored, _IN_FILE, f"in {file}")
    rows = tuple(_row(each, f"in row {n} of {file}") for n, each in enumerate(stored["rows"]))
    seen = set[str]()
    for row in rows:
        if row.key in seen:
            raise ValueError(
                f"Wanted each key once in {file}. Got {row.key!r} twice. Delete one of its rows."
            )
        seen.add(row.key)
    head = {name: stored[name] for name in _IN_FILE if name != "rows"}
    return Results(file=file, **head, rows=rows)


def _read_json(file: Path) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(
            f"Wanted finite numbers, and null for what was not measured, in {file}. Got {name}. "
            "Measure anew: utio-jax bench."
        )

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "text that is not UTF-8"
        raise ValueError(
            f"Wanted a file of `utio-jax bench` in {file}. Got: {reason}. Make one: utio-jax bench."
        ) from error
    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"Wanted a file of `utio-jax bench` in {file}. Got no JSON: {error}. If its run was "
            "cut short, go on with: utio-jax bench --resume."
        ) from error


def _row(stored: Any, where: str) -> Row:
    if not isinstance(stored, dict):
        raise ValueError(f"Wanted an object {where}. Got {stored!r}. {_REMEDY}")
    if isinstance(stored.get("key"), str):
        where += f" ({stored['key']})"
    _check(stored, _KINDS, where)
    for name, members in _MEMBERS.items():
        if stored[name] is not None:
            _check(stored[name], members, f"of {name!r} {where}")
    if stored["part"] not in PARTS:
        raise ValueError(
            f"Wanted a part among {', '.join(PARTS)} {where}. Got {stored['part']!r}. {_REMEDY}"
        )
    axis = stored["setting"].get("axis")
    if stored["part"] == "growth" and not isinstance(stored["setting"].get(axis), int | float):
        raise ValueError(
            f"Wanted 'axis' {where} to name a number of its setting. Got {axis!r}. {_REMEDY}"
        )
    if (not stored["ran"] or stored["fallbacks"]) and (stored["speedup"] or stored["efficiency"]):
        raise ValueError(
            f"Wanted no speed-up {where}, which did not run, or fell back. Got "
            f"{stored['speedup']!r}. {_REMEDY}"
        )
    spreads = {name: _spread(stored[name]) for name in ("seconds", "baseline_seconds", "speedup")}
    return Row(**{**{name: stored[name] for name in _KINDS}, **spreads})


_REMEDY = "Make the file anew with this version's `utio-jax bench`."


def _check(stored: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> None:
    for name, kind in kinds.items():
        if name not in stored:
            raise ValueError(f"Wanted the key {name!r} {where}. Got none. {_REMEDY}")
        value, wanted = stored[name], kind.removesuffix("?")
        good = isinstance(value, _TYPES[wanted]) and (wanted == "flag") == isinstance(value, bool)
        if not good and not (value is None and kind.endswith("?")):
            nullable = " or null" if kind.endswith("?") else ""
            raise ValueError(
                f"Wanted {name!r} to be a {wanted}{nullable} {where}. Got {value!r}. {_REMEDY}"
            )


def _spread(stored: Mapping[str, float] | None) -> Spread | None:
    if not stored:
        return None
    return Spread(**{name: stored[name] for name in (*_SPREAD, "rounds") if name in stored})


def family(row: Row) -> str:
    """Returns the method without budget or depth: learned of learned@0.6, uniform of uniform:8."""
    return row.method.replace(":", "@").split("@")[0]


def ran_as_itself(row: Row) -> bool:
    """Returns whether the method ran, and nothing in its place."""
    return row.ran and not row.fallbacks
