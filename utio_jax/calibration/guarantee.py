# SPDX-License-Identifier: Apache-2.0
"""Thresholds with a guarantee: Learn-then-Test by fixed-sequence testing of one-sided bounds.

    bound = {"max_risk": 0.01, "confidence": 0.95}
    fits = halves(np.arange(queries), units="queries", **bound)
    ladder = ...                                   # candidates from the fitting half, safest first
    result = fit_with_guarantee(lost[:, ~fits], settings=ladder, **bound)
    result.chosen                                  # the cheapest that may be used, or None

A unit is what is drawn on its own: a document, a query, a row, a prompt. Its risk lies in [0, 1],
such as the share of its predicted tokens that differ from full depth's. The guarantee is about the
mean over units like those tested, so near-duplicates are one unit, and no token counts as
independent of its neighbours.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.core.decoder import is_integer

# Bets are sized to reach a p-value of 1/20. Others stay valid, and at 0.1 or 0.01 lose little.
_AIM = 2 * math.log(20)


class Rung(NamedTuple):
    """A tested candidate with its setting, cost, mean risk and p-value.

    The p-value is that of a mean risk above the bound. Those beyond the first that was not rejected
    decide nothing.
    """

    setting: Any
    cost: float
    risk: float
    p_value: float


class Fitted(NamedTuple):
    """Result of `fit_with_guarantee`.

    Attributes:
      chosen: the cheapest setting that has the guarantee; None: nothing short of full depth has.
      ladder: tested candidates, safest first.
      tested: units that they are tested on.
    """

    chosen: Any
    ladder: tuple[Rung, ...]
    tested: int


def fit_with_guarantee(
    risks: Float[np.ndarray, "candidate unit"] | Bool[np.ndarray, "candidate unit"],
    *,
    max_risk: float,
    confidence: float,
    settings: Sequence[Any] | None = None,
    costs: Sequence[float] | None = None,
    looks: int = 1,
    seed: int = 0,
) -> Fitted:
    """Returns the cheapest candidate whose mean risk is at most `max_risk`, at a confidence.

    Learn-then-Test (Angelopoulos et al. 2021, arXiv 2110.01052) by fixed-sequence testing: the
    candidates are tested in order, each at the level 1 - confidence, up to the first whose mean
    risk may still be above the bound. Whatever the risks, a candidate above the bound is chosen
    with a probability of at most 1 - confidence, over the draw of the units.

    Args:
      risks: in [0, 1], safest candidate first. The order must not come from these units, nor may
        the candidates. Booleans are tested by the exact binomial test, which no order enters.
      max_risk: the bound, in (0, 1).
      confidence: in (0, 1).
      settings: of the candidates; by default their indices.
      costs: of the candidates, for the record; by default NaN.
      looks: number of tests on these units, each for candidates of its own; one may be picked by
        its result. Each is tested at the level (1 - confidence) / looks
        (Bonferroni), so that all guarantees hold at once with that confidence.
      seed: of the order in which units are bet on. Trying several voids the guarantee.

    Raises:
      ValueError: risks of another form or range, fewer units than `units_needed`, or settings,
        costs or looks of another number.
    """
    risks = np.asarray(risks)
    if risks.ndim != 2 or not len(risks):
        raise ValueError(
            f"Wanted risks [candidate, unit] of at least one candidate. Got shape {risks.shape}. "
            f"Give one row per candidate, safest first."
        )
    units, binary = risks.shape[1], risks.dtype == np.bool_
    check_units(
        units,
        max_risk=max_risk,
        confidence=confidence,
        looks=looks,
        binary=binary,
        names=("tested units", "max_risk"),
    )
    if not ((risks >= 0) & (risks <= 1)).all():
        raise ValueError(
            f"Wanted risks from 0 to 1. Got {risks.min()} to {risks.max()}. Give shares of "
            f"tokens, and leave out documents that predict none."
        )
    settings = range(len(risks)) if settings is None else settings
    costs = [math.nan] * len(risks) if costs is None else costs
    if not len(settings) == len(costs) == len(risks):
        raise ValueError(
            f"Wanted a setting and a cost for each of {len(risks)} candidates. Got "
            f"{len(settings)} settings and {len(costs)} costs. Give one per row of risks."
        )
    order = np.random.default_rng(seed).permutation(units)
    test = _binomial if binary else _p_values
    p_values = test(risks[:, order], max_risk)
    kept = [*(p_values <= (1 - confidence) / looks), False].index(False)
    tested = zip(settings, costs, risks.mean(axis=1).tolist(), p_values.tolist(), strict=True)
    return Fitted(
        chosen=settings[kept - 1] if kept else None,
        ladder=tuple(Rung(*row) for row in tested),
        tested=units,
    )


def halves(
    groups: Int[np.ndarray, " unit"],
    *,
    units: str,
    max_risk: float,
    confidence: float,
    bound: str = "max_risk",
    seed: int = 0,
) -> Bool[np.ndarray, " unit"]:
    """Returns the units that a ladder of candidates is fitted to; the others test it.

    Units of one group, such as a document, stay in one half, which has half of the groups.
    `max_risk` bounds a risk of 0 or 1, or its mean over a group, where groups hold several units:
    test these by `risks_of_groups`. The error calls the units and the bound by the names that the
    caller gives.

    Raises:
      ValueError: fewer groups than the guarantee takes.
    """
    names, member = np.unique(groups, return_inverse=True)
    binary = len(names) == len(groups)
    needed = units_needed(max_risk, confidence, binary=binary, bound=bound)
    if len(names) < 2 * needed:
        raise ValueError(
            f"Wanted at least {2 * needed} {'' if binary else 'groups of '}{units} for "
            f"{bound}={max_risk} at confidence {confidence}: half of them tests. Got {len(names)}. "
            "Give more, or ask for less."
        )
    return half_of(np.arange(len(names)), seed)[member]


def half_of(groups: np.ndarray, seed: int) -> np.ndarray:
    """Returns the units that a ladder is fitted to: about half, whole groups, at random."""
    names, member = np.unique(groups, return_inverse=True)
    sizes = np.bincount(member)
    order = np.random.default_rng(seed).permutation(len(names))
    fits = np.zeros(len(names), np.bool_)
    held = 0
    for group in order.tolist():  # As near to one half as whole groups come.
        if abs(2 * (held + sizes[group]) - len(groups)) < abs(2 * held - len(groups)):
            fits[group] = True
            held += sizes[group]
    return fits[member]


def check_units(
    units: int,
    *,
    max_risk: float,
    confidence: float,
    looks: int = 1,
    binary: bool = False,
    names: tuple[str, str] = ("documents", "max_disagreement"),
) -> None:
    """Raises ValueError for fewer units than `units_needed`; `names` are of units and bound."""
    needed = units_needed(max_risk, confidence, looks, binary=binary, bound=names[1])
    if units < needed:
        several = f" for each of {looks} policies" if looks > 1 else ""
        raise ValueError(
            f"Wanted at least {needed} {names[0]} for {names[1]}={max_risk} at confidence "
            f"{confidence}{several}, near-duplicates counted once. Got {units}. Give more, or ask "
            f"for less{' or for fewer policies' if several else ''}."
        )


def units_needed(
    max_risk: float,
    confidence: float,
    looks: int = 1,
    *,
    binary: bool = False,
    bound: str = "max_risk",
) -> int:
    """Returns the fewest units with which a candidate can be chosen, even if its risks are all 0.

    Raises:
      ValueError: no `looks`, or `max_risk` or `confidence` is not between 0 and 1; the error calls
        the first of these by the name `bound`.
    """
    for name, value in ((bound, max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(
                f"Wanted {name} between 0 and 1, both excluded. Got {value}. Use for example "
                f"{bound}=0.05 at confidence=0.95."
            )
    if not is_integer(looks, 1):
        raise ValueError(f"Wanted at least 1 of looks, an integer. Got looks={looks!r}.")
    # No bet gains more than a factor of 1 + max_risk per unit.
    level = (1 - confidence) / looks
    if binary:
        return math.ceil(math.log(level) / math.log1p(-max_risk))
    least = math.ceil(-math.log(level) / math.log1p(max_risk))
    enough = lambda units: bool(_p_values(np.zeros((1, units)), max_risk)[0] <= level)  # noqa: E731
    counts = range(least, 2 * least + 10)
    return counts[bisect.bisect_left(counts, True, key=enough)]


def _p_values(risks: np.ndarray, max_risk: float) -> np.ndarray:
    """Returns `[candidate]`: p-values of a mean risk above `max_risk`, for `[candidate, unit]`.

    One over the most wealth that bets on low risks ever reach (Waudby-Smith & Ramdas 2024; bets of
    Bates et al. 2021, arXiv 2101.02703). If the mean is above the bound no bet gains on average,
    and wealth reaches 1 / p with a probability of at most p (Ville). A bet knows only earlier
    units, and is larger the less they varied.
    """
    units = risks.shape[1]
    seen = np.arange(2, units + 2)  # With the prior's mean of 1/2 and variance of 1/4 as one unit.
    means = (0.5 + np.cumsum(risks, axis=1)) / seen
    variances = (0.25 + np.cumsum((risks - means) ** 2, axis=1)) / seen
    before = np.concatenate([np.full((len(risks), 1), 0.25), variances[:, :-1]], axis=1)
    bets = np.minimum(1.0, np.sqrt(_AIM / (units * before)))
    wealth = np.cumsum(np.log1p(bets * (max_risk - risks)), axis=1)
    return np.exp(-np.maximum(wealth.max(axis=1), 0.0))


def _binomial(risks: np.ndarray, max_risk: float) -> np.ndarray:
    """Returns `[candidate]`: the probability of as few errors at an error rate of `max_risk`."""
    from scipy.stats import binom  # A second to import, which `import utio_jax` has no use for.

    return np.asarray(binom.cdf(risks.sum(axis=1), risks.shape[1], max_risk))
