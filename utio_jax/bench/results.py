# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark, and `results.json`, which keeps each as soon as it is known.

What was not measured is null. A row whose method did not run, or fell back to another, has no
speed-up: that is checked here, as a row is made and as it is read, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.timing import Spread, Timing
from utio_jax.core.files import load_json, save_json, versions

SCHEMA = 4
"""Version of the format; readers refuse others."""

PARTS = ("score", "decode", "lossless", "peer")

QUALITY = ("nll_full", "nll", "nll_increase_pct", "agreement")

_SIZES = ("batch", "prompt", "output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one setting.

    Attributes:
      part: of the suite, one of `PARTS`.
      model: name of the model.
      method: what ran.
      setting: batch, prompt, output, budget, layers, as far as they have a meaning.
      speed_only: the weights are random: there is no quality to speak of.
      baseline: the method that `speedup` compares with; None where nothing is compared.
      ran: whether the method itself ran.
      note: why it did not, what it fell back to, what was assumed.
      fallbacks: how often it did something else instead, by reason.
      seconds: of one call, over the rounds.
      speedup: the rounds' ratios.
      speedup_ideal: full FLOPs over those of the decided layers.
      flops_ratio: executed FLOPs over the full pass'.
      quality: `nll_full`, `nll` in nats per token, `nll_increase_pct`, `agreement`.
      tokens_per_second: scored, or new ones.
    """

    part: str
    model: str
    method: str
    setting: dict[str, Any] = dataclasses.field(default_factory=dict)
    speed_only: bool = False
    baseline: str | None = None
    ran: bool = True
    note: str = ""
    fallbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: Spread | None = None
    speedup: Spread | None = None
    speedup_ideal: float | None = None
    flops_ratio: float | None = None
    quality: dict[str, Any] | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        wrong = {
            f"part {self.part!r} is none of {', '.join(PARTS)}": self.part not in PARTS,
            "a speed-up of a method that did not run, or fell back": self.speedup and not self.own,
            "a method that did not run without a note that says why": not (self.ran or self.note),
            "a speed-up over no baseline": self.speedup and self.baseline is None,
            "quality of a row that is about speed only": (
                self.speed_only and self.quality is not None
            ),
        }
        if found := [what for what, holds in wrong.items() if holds]:
            raise ValueError(
                f"Wanted a row of results.json, schema {SCHEMA}. Got in row {self.key!r}: "
                + "; ".join(found)
            )

    @property
    def key(self) -> str:
        """What no other row of a run is called."""
        sizes = [f"{name}{self.setting[name]}" for name in _SIZES if name in self.setting]
        return "/".join([self.part, self.model, self.method, *sizes])

    @property
    def own(self) -> bool:
        """Whether the method ran, and nothing in its place."""
        return self.ran and not self.fallbacks

    @property
    def gain(self) -> float | None:
        """The median speed-up over something else than itself."""
        return None if not self.speedup or self.method == self.baseline else self.speedup.median

    @property
    def nll_increase_pct(self) -> float | None:
        """Loss over full depth's in %, as far as it is known."""
        return (self.quality or {}).get("nll_increase_pct")

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values, floats rounded to six significant digits."""
        return rounded({"key": self.key, **dataclasses.asdict(self)})

    @classmethod
    def from_dict(cls, stored: Any) -> Row:
        """Returns the row that `to_dict` wrote.

        Raises:
          ValueError: keys that are missing or unknown, or values that do not fit.
        """
        names = {"key", *(field.name for field in dataclasses.fields(cls))}
        if not isinstance(stored, Mapping) or set(stored) != names:
            odd = sorted(names ^ set(stored)) if isinstance(stored, Mapping) else repr(stored)
            raise ValueError(
                f"Wanted a row with every key of schema {SCHEMA}, and no other. These are missing "
                f"or unknown: {odd}."
            )
        values = {name: value for name, value in stored.items() if name != "key"}
        for name in ("seconds", "speedup"):
            if values[name] is not None:
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

    def timed(
        self,
        timing: Timing,
        *,
        ratios: np.ndarray,
        calls: int = 1,
        tokens: float | None = None,
        **values: Any,
    ) -> Row:
        """Returns the row with its times.

        A program that compiled after its warm-up did not run at its speed, and has no speed-up.

        Args:
          timing: of the method.
          ratios: `[round]`, how many times as fast as the baseline it was.
          calls: of what the row is about, in one timed turn.
          tokens: of one call.
          values: of the row's other fields.
        """
        seconds, fallbacks = Spread.of(timing.seconds / calls), dict(self.fallbacks)
        if timing.compiles:
            fallbacks["compiled after the warm-up"] = timing.compiles
        return dataclasses.replace(
            self,
            seconds=seconds,
            speedup=None if fallbacks else Spread.of(ratios),
            fallbacks=fallbacks,
            tokens_per_second=None if tokens is None else tokens / seconds.median,
            **values,
        )


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
    """Rows that are measured together, as planned; `measure` returns them measured."""

    title: str
    rows: tuple[Row, ...]
    measure: Callable[[], Sequence[Row]]


def save_results(
    file: Path, head: Mapping[str, Any], rows: Iterable[Row], *, complete: bool, seconds: float
) -> dict[str, Any]:
    """Writes results in place of what is there, and returns what the file holds.

    Args:
      file: to write; its folder is made.
      head: `suite`, its name; `settings`, the options as given; `environment`, see `describe`.
      rows: that are known so far.
      complete: whether these are all.
      seconds: since the run began.
    """
    began = datetime.now(UTC) - timedelta(seconds=seconds)
    held = rounded(
        {
            "command": "bench",
            "schema": SCHEMA,
            "complete": complete,
            "seconds": round(seconds, 1),
            "started": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            **head,
            "rows": [row.to_dict() for row in rows],
        }
    )
    save_json(file, held)
    return held


def read_results(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """Returns what `utio-jax bench` wrote, and its rows, checked.

    Raises:
      ValueError: there is no such file, it is not JSON, or not what this version writes.
    """
    what, remedy = f"results of `utio-jax bench`, schema {SCHEMA}", "Measure again: utio-jax bench."
    stored = load_json(file, what, strict=True, remedy=remedy)
    found = stored if isinstance(stored, dict) else {}
    if found.get("command") != "bench" or found.get("schema") != SCHEMA:
        raise ValueError(
            f"Wanted {what} at {file}. Got what `utio-jax {found.get('command', '?')}` printed, "
            f"schema {found.get('schema')!r}. {remedy}"
        )
    try:
        rows = [Row.from_dict(row) for row in found["rows"]]
        missing = {"suite", "complete", "seconds", "started", "settings", "environment"} - {*found}
        if missing or len(rows) != len({row.key for row in rows}):
            raise ValueError(f"missing: {sorted(missing)}; or two rows have the same key")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Wanted {what} at {file}. Got: {error} {remedy}") from error
    return found, rows


def describe(*, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns what a benchmark ran on: device, versions, flags, the parameters' dtype."""
    device = jax.devices()[0]
    # Containers and schedulers may give us fewer cores than there are.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "device_count": jax.device_count(),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "dtype": jnp.dtype(dtype).name,
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
