# SPDX-License-Identifier: Apache-2.0
"""How time grows with a setting: series of benchmark rows, and their exponents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from utio_jax.benchmark.schema import Row
from utio_jax.report.grouping import ran_as_itself, tell_apart

# An exponent of fewer points, or over a narrower range, is a guess.
MIN_POINTS = 3
MIN_RANGE = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One method while one setting grows.

    Attributes:
      axis: the setting's name.
      model: the model's.
      label: the method, and what else tells it from its neighbours.
      rows: by growing `axis`, all of them with seconds of the method's own.
    """

    axis: str
    model: str
    label: str
    rows: tuple[Row, ...]

    @property
    def x(self) -> np.ndarray:
        """The setting, `[row]`."""
        return np.asarray([row.setting[self.axis] for row in self.rows], np.float64)

    @property
    def seconds(self) -> np.ndarray:
        """`[3, row]`: medians, first and third quartiles."""
        spreads = [row.seconds for row in self.rows if row.seconds is not None]
        return np.asarray([(s.median, s.low, s.high) for s in spreads], np.float64).T

    @property
    def exponent(self) -> tuple[float, float] | None:
        """The p of seconds ~ axis**p, and its standard error; None where that would be a guess."""
        return fit_exponent(self.x, self.seconds[0])


def fit_exponent(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Returns p of y ~ x**p by least squares of the logarithms, and its standard error.

    None with fewer than 3 points, a range of x below 4 to 1, or anything that has no logarithm.

    >>> fit_exponent(np.array([1.0, 2, 4, 8]), np.array([3.0, 12, 48, 192]))
    (2.0, 0.0)
    """
    if len(x) < MIN_POINTS or min(*x, *y) <= 0 or max(x) < MIN_RANGE * min(x):
        return None
    u, v = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    slope = (u @ v) / (u @ u)
    rest = v - slope * u
    error = np.sqrt((rest @ rest) / (len(x) - 2) / (u @ u))
    return round(float(slope), 6), round(float(error), 6)


def growth_series(rows: Sequence[Row]) -> list[Series]:
    """Returns the series in rows of the part "growth"; a single point is no series."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.part == "growth" and ran_as_itself(row) and row.seconds is not None:
            groups.setdefault((row.setting["axis"], row.model), []).append(row)
    found = list[Series]()
    for (axis, model), members in groups.items():
        series = tell_apart(members, place=lambda row: row.setting[row.setting["axis"]])
        for label, at in series.items():
            if len(at) > 1:
                ordered = tuple(at[x] for x in sorted(at))
                found.append(Series(axis=axis, model=model, label=label, rows=ordered))
    return found
