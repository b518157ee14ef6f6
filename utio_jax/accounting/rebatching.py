# SPDX-License-Identifier: Apache-2.0
"""Whether to pack rows by depth, to let them step together, or to decode plainly: by seconds.

Of rows whose tokens stop independently of each other, with shares `p[i]` at depths `d[i]`, so many
need the layers from `d[i - 1]` to `d[i]`:

    n[i] ~ Binomial(rows, 1 - (p[0] + ... + p[i - 1]))

Together a step runs all rows through them wherever `n[i] > 0`. Packed it runs `n[i]` rows, in the
smallest width that holds them. A layer's seconds are measured at each width. Behind them, at all
depths but the last, a boundary asks whoever has come so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import binom


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRates:
    """What a step of decoding takes, measured on one device for one model and number of slots.

    Attributes:
      seconds: of what runs whatever the depth: embedding, boundaries, head, sampling.
      seconds_per_layer: of a layer on so many rows, by number of rows: the widths that rows are
        packed into, and all rows.
      plain_seconds: of the plain model's step.
      seconds_per_boundary: of a boundary that some row comes to: its gate, and the head where its
        signal reads logits. 0: boundaries are in `seconds`, all of them.
    """

    seconds: float
    seconds_per_layer: Mapping[int, float]
    plain_seconds: float
    seconds_per_boundary: float = 0.0

    @property
    def nonsense(self) -> str | None:
        """What no machine left alone would have measured; None where nothing is wrong.

        That is layers or plain steps of nothing and below, or a layer that takes half as long again
        on fewer rows. What is beside layers is little, and extrapolated: below zero by more than a
        quarter of a plain step.
        """
        layers, most = dict(sorted(self.seconds_per_layer.items())), self.plain_seconds / 4
        for what, seconds, least in (
            ("a plain step", self.plain_seconds, 0.0),
            ("a step without its layers", self.seconds, -most),
            *((f"a layer on {width} rows", each, 0.0) for width, each in layers.items()),
        ):
            if not least < seconds < math.inf:
                return f"{what} takes {1e3 * seconds:.3g} ms"
        for fewer, more in itertools.pairwise(layers):
            if layers[fewer] > 1.5 * layers[more]:
                return f"a layer on {fewer} rows takes longer than on {more}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns the rates in milliseconds, JSON-ready."""
        return {
            "ms": round(1e3 * self.seconds, 4),
            "ms_per_layer": {
                str(width): round(1e3 * each, 4) for width, each in self.seconds_per_layer.items()
            },
            "ms_per_boundary": round(1e3 * self.seconds_per_boundary, 4),
            "plain_ms": round(1e3 * self.plain_seconds, 4),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebatchingPlan:
    """What is foretold to be fastest.

    Attributes:
      choice: `"pack"`, `"together"` or `"plain"`.
      seconds: of a step of each of them, foretold; plain: measured.
      rates: that it was foretold from.
    """

    choice: str
    seconds: Mapping[str, float]
    rates: RowRates

    @property
    def speed_up(self) -> float:
        """Plain decoding's seconds over those of the choice."""
        return self.seconds["plain"] / self.seconds[self.choice]


def plan_rebatching(
    rates: RowRates, histogram: Mapping[int, float], *, rows: int, widths: tuple[int, ...]
) -> RebatchingPlan:
    """Returns whether packing, stepping together or plain decoding takes the fewest seconds.

    Args:
      rates: measured at all of `widths`, and at `rows`.
      histogram: share of tokens that stop at each depth, in layers.
      rows: that run at once.
      widths: into which they may be packed, ascending; those of `rows` and more count for nothing.

    Raises:
      ValueError: shares below 0 or that do not sum to 1, or a width without a rate.

    >>> slow = {4: 0.002, 8: 0.003, 16: 0.004}
    >>> rates = RowRates(seconds=0.001, seconds_per_layer=slow, plain_seconds=0.06)
    >>> plan_rebatching(rates, {6: 0.8, 16: 0.2}, rows=16, widths=(4, 8)).choice
    'pack'
    >>> plan_rebatching(rates, {16: 1.0}, rows=16, widths=(4, 8)).choice
    'plain'
    """
    packs = [width for width in widths if width < rows]
    missing = [width for width in (*packs, rows) if width not in rates.seconds_per_layer]
    if missing:
        raise ValueError(
            f"Wanted seconds_per_layer for all widths {(*packs, rows)}. Got those of "
            f"{sorted(rates.seconds_per_layer)}. Measure {missing}, too."
        )
    shares = np.asarray([histogram[depth] for depth in sorted(histogram)])
    if not shares.size or shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    stopped = np.cumsum([0.0, *shares[:-1]]) / shares.sum()
    packed = together = rates.seconds
    layer = [_layer_seconds(rates, needed, packs, rows) for needed in range(rows + 1)]
    last = max(histogram)
    for (start, stop), q in zip(
        itertools.pairwise((0, *sorted(histogram))), 1.0 - stopped, strict=True
    ):
        chances = binom.pmf(np.arange(rows + 1), rows, min(1.0, max(0.0, q)))
        anybody = float(1.0 - chances[0])
        boundary = anybody * rates.seconds_per_boundary if stop < last else 0.0
        packed += (stop - start) * float(chances @ layer) + boundary
        together += (stop - start) * anybody * rates.seconds_per_layer[rows] + boundary
    # Of equals the plainest.
    seconds = {"plain": rates.plain_seconds, "together": together}
    if packs:
        seconds["pack"] = packed
    return RebatchingPlan(
        choice=min(seconds, key=seconds.__getitem__), seconds=seconds, rates=rates
    )


def _layer_seconds(rates: RowRates, needed: int, packs: list[int], rows: int) -> float:
    if not needed:
        return 0.0
    width = next((width for width in packs if width >= needed), rows)
    return rates.seconds_per_layer[width]
