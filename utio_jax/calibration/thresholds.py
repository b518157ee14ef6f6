# SPDX-License-Identifier: Apache-2.0
"""Exits and thresholds of least harm at a given mean cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from utio_jax.core.flops import rounded_up
from utio_jax.policies.store import Thresholds


def fit_thresholds(
    scores: Float[np.ndarray, "boundary token"],
    kl: Float[np.ndarray, "boundary+1 token"],
    *,
    depths: Sequence[int],
    cost_of_depth: Float[np.ndarray, " boundary+1"],
    cost_of_gate: Float[np.ndarray, " boundary"],
    budget: float,
) -> Thresholds:
    """Returns the thresholds of least KL at a mean cost of `budget`; -inf where no token exits.

    A token leaves at the first boundary where its score is finite, and at or below the threshold.
    `kl` is in nats, of leaving there; costs of depths and decisions are shares of the full pass.

    For a price of computation, each boundary's best threshold is found exactly, by sorting: leaving
    is worth KL + price x cost of the exit, staying what the later thresholds make of the token. A
    few sweeps from the last boundary to the first settle all; the price is found by bisection.
    Prices reach the convex hull of all outcomes. If the budget lies in a gap between two of its
    corners, the thresholds of the dearer one are also raised until they fit; the better one counts.

    Raises:
      ValueError: the budget is below the cost of the first exit. Tokens that may not exit (scores
        of NaN and +inf) cost a full pass.
    """
    cheapest = cost_of_depth[0] + cost_of_gate[0]
    if budget < cheapest:
        raise ValueError(
            f"Wanted a budget of at least {rounded_up(cheapest):.3f}, the cost of leaving at depth "
            f"{depths[0]}. Got budget={budget}. Use an earlier exit, or a larger budget."
        )
    scores = np.maximum(scores, np.finfo(np.float32).min)  # At a cut of -inf none exits.
    order = np.argsort(scores, axis=1, kind="stable")

    def cost_at(cuts: np.ndarray) -> float:
        left = leave_at(scores, cuts)
        asked = [
            float(g * (left >= b).mean())
            for b, g in enumerate(cost_of_gate)
            if np.isfinite(cuts[b])
        ]
        return float(cost_of_depth[left].mean()) + sum(asked)

    def at_price(price: float) -> tuple[np.ndarray, float]:
        cuts = _sweep(scores, kl, order, price * cost_of_depth, price * cost_of_gate)
        return cuts, cost_at(cuts)

    low, high, dearer = 0.0, 1e4, None
    best, mean = at_price(high)
    if mean > budget:
        raise ValueError(
            f"Wanted a budget of at least {rounded_up(mean):.3f}, the least that these scores "
            f"reach, as some tokens may not leave. Got budget={budget}. Use a larger budget."
        )
    for _ in range(40):
        price = np.sqrt(max(low, 1e-6) * high)
        cuts, mean = at_price(price)
        if mean > budget:
            low, dearer = price, cuts
        else:
            high, best = price, cuts
        if high / max(low, 1e-6) < 1.001:
            break
    choices = [best]
    if dearer is not None:
        choices += _raised(scores, dearer, lambda cuts: cost_at(cuts) <= budget)
    token = np.arange(scores.shape[1])
    cuts = min(choices, key=lambda cuts: kl[leave_at(scores, cuts), token].mean())
    left = leave_at(scores, cuts)
    return Thresholds(
        depths=tuple(map(int, depths)),
        thresholds=tuple(cuts.tolist()),
        fractions=tuple(float((left == b).mean()) for b in range(len(depths))),
    )


def _sweep(
    scores: np.ndarray,
    kl: np.ndarray,
    order: np.ndarray,
    depth_price: np.ndarray,
    gate_price: np.ndarray,
) -> np.ndarray:
    boundaries = len(scores)
    # From "none leaves", always: where all leave at once, no later boundary has a token to
    # learn from, and the sweeps would stay there.
    cuts = np.full(boundaries, -np.inf)
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


def _raised(
    scores: np.ndarray, cuts: np.ndarray, fits: Callable[[np.ndarray], bool]
) -> Iterator[np.ndarray]:
    """Yields cuts raised by the least that meets the budget: at each boundary alone, and at all."""
    used = [b for b in range(len(cuts)) if np.isfinite(cuts[b])]
    above = {}
    for b in used:
        ranked = np.sort(scores[b][np.isfinite(scores[b])])
        above[b] = ranked[np.searchsorted(ranked, cuts[b]) :]

    def raised(boundaries: Sequence[int], share: float) -> np.ndarray:
        new = cuts.copy()
        for b in boundaries:
            new[b] = above[b][int(share * (len(above[b]) - 1))]
        return new

    for boundaries in [*([b] for b in used), used]:
        low, high = 0.0, 1.0
        if not fits(raised(boundaries, high)):
            continue
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(raised(boundaries, middle)) else (middle, high)
        yield raised(boundaries, high)


def leave_at(scores: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Returns the boundary at which each token exits; the number of boundaries if at none.

    As `Thresholded` does: scores of NaN and +inf leave only where all do, at a cut of +inf.
    """
    cuts = np.expand_dims(cuts, tuple(range(1, scores.ndim)))
    leaves = (scores <= cuts) & (scores < np.inf) & (cuts > -np.inf) | (cuts == np.inf)
    return np.where(leaves.any(axis=0), leaves.argmax(axis=0), len(cuts))
