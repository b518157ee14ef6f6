# SPDX-License-Identifier: Apache-2.0
"""Intervals over documents for how far a policy lies below the hull of uniform exits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from utio_jax.evaluation.intervals import FEWEST, drawn_again, studentised


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentSums:
    """What a policy lost and executed on each document.

    Attributes:
      nll: `[document]`, summed over its predicted tokens, nats.
      flops: `[document]`.
    """

    nll: np.ndarray
    flops: np.ndarray


class HullBootstrap:
    """Draws documents again (Efron 1979), and reads policies against the hull in each draw.

    Documents are the unit in which text varies: tokens of one are alike. A draw moves the policy,
    full depth and the hull together, so that what is hard for all of them cancels.
    """

    def __init__(self, uniform: Sequence[DocumentSums], *, draws: int = 2000, seed: int = 0):
        """Draws the documents.

        Args:
          uniform: of every exit, shallowest first, full depth last.
          draws: how often.
          seed: of the draws.

        Raises:
          ValueError: fewer than five documents.
        """
        documents = len(uniform[-1].nll)
        if documents < FEWEST:
            raise ValueError(
                f"Wanted at least {FEWEST} documents, over which intervals are taken. "
                f"Got {documents}. Add files."
            )
        self._weights = drawn_again(documents, draws=draws, seed=seed)
        self._uniform = tuple(uniform)

    def _values(self, sums: DocumentSums) -> np.ndarray:
        """Returns `[document, 2 * (exits + 1)]`: nll and flops of every exit, and of a policy."""
        return np.stack([x for each in (*self._uniform, sums) for x in (each.nll, each.flops)], 1)

    def margins(self, sums: DocumentSums) -> np.ndarray:
        """Returns how far (% of full depth's loss) a policy lies below the hull in every draw.

        The first entry is that of the text as it is. Positive is better than the hull; NaN where
        the policy is cheaper than the cheapest exit.
        """
        return _margin(self._weights @ self._values(sums))

    def interval(self, sums: DocumentSums) -> tuple[float, float, float] | None:
        """Returns the margin's interval at 95 %: its lower end, the margin, its upper end.

        The studentised bootstrap, see `utio_jax.evaluation.intervals.studentised`. Simulated, it
        holds the true margin in so many of 100 texts, of documents whose sizes vary by a factor of
        ten and whose losses are normal, heavy-tailed (Student's t of 3 degrees) or strongly skewed
        (log-normal):

            documents                       5           10           29          100
            normal, heavy, skewed     95 97 87     94 96 83     96 96 88     95 96 93
            quantiles of margins      83 82 73     88 88 77     92 93 84     95 94 91

        So a skewed text of few documents is covered less often than is said.

        None if the policy is cheaper than the cheapest exit, in the text or in some draw.
        """
        values = self._values(sums)
        totals = self._weights @ values
        margins = _margin(totals)
        if np.isnan(margins).any():
            return None
        # What each document's weight adds to the margin, in every draw: by the chain rule.
        return studentised(self._weights, margins, _slopes(totals) @ values.T)

    def ratio(self, sums: DocumentSums) -> float:
        """Returns a policy's `flops_ratio` on the text as it is."""
        return float(sums.flops.sum() / self._uniform[-1].flops.sum())


def hull_of(points: Sequence[tuple[np.ndarray, np.ndarray]], ratio: np.ndarray) -> np.ndarray:
    """Returns the lower convex hull at one `flops_ratio` per draw; NaN left of its points.

    That is the lowest of all chords between two of its points.

    Args:
      points: `flops_ratio` and loss of each, `[draw]`; the dearest is last.
      ratio: where the hull is read, `[draw]`.
    """
    best = np.full(ratio.shape, np.nan)
    for (x0, y0), (x1, y1) in itertools.combinations(points, 2):
        share = np.clip((ratio - x0) / (x1 - x0), 0.0, None)
        chord = y0 + np.minimum(share, 1.0) * (y1 - y0)
        inside = (ratio >= x0) & ((ratio <= x1) | (x1 == points[-1][0]))
        best = np.where(inside, np.fmin(best, chord), best)
    return best


def _margin(totals: np.ndarray) -> np.ndarray:
    """Returns margins `[draw]` of sums `[draw, 2 * (exits + 1)]`, see `HullBootstrap._values`."""
    nll, flops = totals[:, 0::2], totals[:, 1::2]
    # Full depth is the last exit, the policy is behind it.
    loss, ratio = 100 * (nll / nll[:, -2:-1] - 1), flops / flops[:, -2:-1]
    points = [(ratio[:, index], loss[:, index]) for index in range(nll.shape[1] - 1)]
    return hull_of(points, ratio[:, -1]) - loss[:, -1]


def _slopes(totals: np.ndarray) -> np.ndarray:
    """Returns the margin's slope by each sum, `[draw, sum]`, by differences.

    One-sided where the other side has no margin: at the cheapest exit itself.
    """
    here, slopes = _margin(totals), []
    for column in range(totals.shape[1]):
        step = np.maximum(1e-6 * np.abs(totals[:, column]), 1e-12)
        sides = []
        for sign in (1, -1):
            moved = totals.copy()
            moved[:, column] += sign * step
            sides.append(sign * (_margin(moved) - here) / step)
        slopes.append(np.nanmean(sides, axis=0))
    return np.stack(slopes, axis=1)
