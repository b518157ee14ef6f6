# SPDX-License-Identifier: Apache-2.0
"""Which exits to use, and up to which score tokens leave there: least harm at a given mean cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Which exits a policy uses, and up to which score tokens leave there.

    Attributes:
      depths: exits in use, the last layer included.
      thresholds: one per exit but the last.
      fractions: share of tokens that stop at each depth, on the calibration text.
    """

    depths: tuple[int, ...]
    thresholds: tuple[float, ...]
    fractions: tuple[float, ...]

    def over(self, depths: Sequence[int]) -> Thresholds:
        """Returns the same decisions with more exits, at which nobody stops."""
        thresholds = dict(zip(self.depths, self.thresholds, strict=False))
        fractions = dict(zip(self.depths, self.fractions, strict=True))
        return Thresholds(
            depths=tuple(depths),
            # JSON has no infinity.
            thresholds=tuple(thresholds.get(depth, -1e30) for depth in depths[:-1]),
            fractions=tuple(fractions.get(depth, 0.0) for depth in depths),
        )


def fit_thresholds(
    scores: np.ndarray,
    kl: np.ndarray,
    *,
    depths: Sequence[int],
    cost_of_depth: np.ndarray,
    cost_of_gate: np.ndarray,
    budget: float,
) -> Thresholds:
    """Returns the thresholds of least KL at a mean cost of `budget`.

    For a price of computation, each boundary's best threshold is found exactly, by sorting: leaving
    is worth KL + price x cost of the exit, staying what the later thresholds make of the token. A
    few sweeps from the last boundary to the first settle all; the price is found by bisection.

    Args:
      scores: `[boundary, token]`; a token leaves at the first boundary where its score is finite,
        and at or below the threshold.
      kl: `[boundary + 1, token]` in nats, of leaving there.
      depths: `[boundary + 1]`.
      cost_of_depth: `[boundary + 1]`, as shares of the full pass.
      cost_of_gate: `[boundary]`, of deciding there.
      budget: the mean cost to reach.

    Raises:
      ValueError: the budget lies below what leaving everything at the first exit costs.
    """
    cheapest = cost_of_depth[0] + cost_of_gate[0]
    if budget < cheapest:
        raise ValueError(
            f"Wanted a budget of at least {cheapest:.3f}, the cost of leaving at depth "
            f"{depths[0]}. Got budget={budget}. Use an earlier exit, or a larger budget."
        )
    order = np.argsort(scores, axis=1, kind="stable")
    cuts = np.full(len(scores), -np.inf)
    left = leave_at(scores, cuts)
    low, high, best = 0.0, 1e4, None
    for _ in range(40):
        price = np.sqrt(max(low, 1e-6) * high)
        cuts = _sweep(scores, kl, order, price * cost_of_depth, price * cost_of_gate, cuts)
        left = leave_at(scores, cuts)
        mean = float(cost_of_depth[left].mean())
        mean += sum(
            float(g * (left >= b).mean())
            for b, g in enumerate(cost_of_gate)
            if np.isfinite(cuts[b])
        )
        if mean > budget:
            low = price
        else:
            high, best = price, (cuts, left)
        if high / max(low, 1e-6) < 1.001:
            break
    cuts, left = best if best is not None else (cuts, left)
    used = [b for b in range(len(cuts)) if np.isfinite(cuts[b])]
    kept = [*used, len(cuts)]
    return Thresholds(
        depths=tuple(int(depths[b]) for b in kept),
        thresholds=tuple(float(cuts[b]) for b in used),
        fractions=tuple(float((left == b).mean()) for b in kept),
    )


def _sweep(
    scores: np.ndarray,
    kl: np.ndarray,
    order: np.ndarray,
    depth_price: np.ndarray,
    gate_price: np.ndarray,
    start: np.ndarray,
) -> np.ndarray:
    boundaries = len(scores)
    cuts = start.copy()  # Those of a similar price: two sweeps then settle what takes four.
    for _ in range(4):
        before = cuts.copy()
        left = leave_at(scores, cuts)
        ahead = kl[-1] + depth_price[-1]  # What each token costs if it stays beyond this boundary.
        for b in reversed(range(boundaries)):
            leave = kl[b] + depth_price[b]
            ranked = order[b][((left >= b) & np.isfinite(scores[b]))[order[b]]]
            # Gain of letting the k tokens of lowest score leave here, for every k.
            gain = np.concatenate([[0.0], np.cumsum(ahead[ranked] - leave[ranked])])
            ranks = scores[b, ranked]  # Tokens of one score leave together, or not at all.
            gain[1:-1][ranks[1:] == ranks[:-1]] = -np.inf
            count = int(np.argmax(gain))
            if gain[count] > gate_price[b] * (left >= b).sum():
                cuts[b] = scores[b, ranked[count - 1]]
                ahead = np.where(scores[b] <= cuts[b], leave, ahead) + gate_price[b]
            else:
                cuts[b] = -np.inf
        if np.array_equal(cuts, before):
            break
    return cuts


def leave_at(scores: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Returns the boundary at which each token leaves; the number of boundaries if at none.

    As `Thresholded` does: scores of NaN and +inf leave nowhere.
    """
    cuts = np.expand_dims(cuts, tuple(range(1, scores.ndim)))
    leaves = (scores <= cuts) & (scores < np.inf)
    return np.where(leaves.any(axis=0), leaves.argmax(axis=0), len(cuts))
