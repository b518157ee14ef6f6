# SPDX-License-Identifier: Apache-2.0
"""Intervals over documents for how far a policy lies below the hull of uniform exits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


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
          ValueError: fewer than two documents.
        """
        documents = len(uniform[-1].nll)
        if documents < 2:
            raise ValueError(
                "Wanted at least two documents, over which intervals are taken. "
                f"Got {documents}. Add files with --text."
            )
        drawn = np.random.default_rng(seed).multinomial(
            documents, np.full(documents, 1 / documents), size=draws
        )
        # The first draw is the text as it is.
        self._weights = np.concatenate([np.ones((1, documents)), drawn])
        self._full = self._weights @ uniform[-1].nll
        self._full_flops = self._weights @ uniform[-1].flops
        self._points = [self._point(sums) for sums in uniform]

    def _point(self, sums: DocumentSums) -> tuple[np.ndarray, np.ndarray]:
        """Returns `flops_ratio` and loss (% above full depth) in every draw."""
        ratio = self._weights @ sums.flops / self._full_flops
        return ratio, 100 * (self._weights @ sums.nll / self._full - 1)

    def hull(self, ratio: np.ndarray) -> np.ndarray:
        """Returns the lower convex hull at one `flops_ratio` per draw; NaN left of its points.

        That is the lowest of all chords between two of its points.
        """
        best = np.full(ratio.shape, np.nan)
        for (x0, y0), (x1, y1) in itertools.combinations(self._points, 2):
            share = np.clip((ratio - x0) / (x1 - x0), 0.0, None)
            chord = y0 + np.minimum(share, 1.0) * (y1 - y0)
            inside = (ratio >= x0) & ((ratio <= x1) | (x1 == self._points[-1][0]))
            best = np.where(inside, np.fmin(best, chord), best)
        return best

    def margins(self, sums: DocumentSums) -> np.ndarray:
        """Returns how far (% of full depth's loss) a policy lies below the hull in every draw.

        The first entry is that of the text as it is. Positive is better than the hull.
        """
        ratio, loss = self._point(sums)
        return self.hull(ratio) - loss

    def interval(self, sums: DocumentSums) -> tuple[float, float, float] | None:
        """Returns the margin's 2.5 % quantile, itself, and its 97.5 % quantile.

        None if the policy is cheaper than the cheapest exit, in the text or in some draw.
        """
        margins = self.margins(sums)
        if np.isnan(margins).any():
            return None
        low, high = np.quantile(margins[1:], [0.025, 0.975])
        return float(low), float(margins[0]), float(high)

    def ratio(self, sums: DocumentSums) -> float:
        """Returns a policy's `flops_ratio` on the text as it is."""
        return float(self._point(sums)[0][0])
