# SPDX-License-Identifier: Apache-2.0
"""Exact 95 % confidence intervals for binary answers: one rate, and a paired difference of two.

Both hold the truth at least 95 times in 100 whatever the rates and however few the rows, which must
be independent; none is given below five. (Quantiles of rows drawn again have no width where nothing
changed, and hold it 50 to 88 times in 100 for two to eight rows.)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool
from scipy.stats import binomtest

FEWEST = 5
"""Rows below which there is no interval."""


def rate_interval(
    right: Bool[np.ndarray, " row"], *, level: float = 0.95
) -> tuple[float, float] | None:
    """Returns the interval of one rate (Clopper & Pearson 1934); None: fewer than five rows."""
    if len(right) < FEWEST:
        return None
    found = binomtest(int(right.sum()), len(right)).proportion_ci(level, method="exact")
    return float(found.low), float(found.high)


def paired_interval(
    first: Bool[np.ndarray, " row"], second: Bool[np.ndarray, " row"], *, level: float = 0.95
) -> tuple[float, float] | None:
    """Returns the interval of `rate(first) - rate(second)` on the same rows; None: fewer than five.

    As in McNemar's test (1947), only rows with two different answers count: the difference is the
    rate of "first alone" less that of "second alone". Each has Clopper and Pearson's interval at
    half of the error (Bonferroni), and the two together bound the difference: exact, and wider than
    Newcombe's scores (1998, method 10), which hold it 95 times in 100 on average alone.
    """
    half = 1 - (1 - level) / 2
    gained = rate_interval(first & ~second, level=half)
    lost = rate_interval(second & ~first, level=half)
    if gained is None or lost is None:
        return None
    return gained[0] - lost[1], gained[1] - lost[0]
