# SPDX-License-Identifier: Apache-2.0
"""The record that every claim of speed or quality carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.core.html import table_html


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Ledger:
    """One policy at one budget, measured in one run. Unmeasured fields are None.

    Attributes:
      policy: stable name, the same for all budgets.
      budget: the `flops_ratio` that the policy was calibrated for; None where there is no target.
      tokens: tokens of the text, without padding.
      num_layers: of the model.
      depth_decided_mean: layers that the policy decided, per token.
      depth_executed_mean: query slots computed, times layers, per token; padding included.
      depth_histogram: share of tokens by decided depth.
      involuntary_stays: tokens run deeper than decided.
      involuntary_exits: tokens run shallower than decided: always 0.
      nll_full: loss of the full model, nats per predicted token.
      nll: loss of the policy, nats per predicted token.
      nll_increase_pct: of `nll` over `nll_full`.
      kl_full: KL(full || policy), nats per predicted token.
      agreement: share of predicted tokens with the full model's most probable token.
      kv_bytes_ratio: bytes of K/V read in decoding / plain decoding's; in
        generation.
      flops_ratio: executed FLOPs (layers, padding, frozen K/V, head, gates) / the full pass'.
      gate_pct: extra heads and gates, % of the full pass' FLOPs.
      padding_ratio: executed / decided token-layers.
      overflows: segments in which a row's tokens outgrew a static prefix, so that whole rows ran.
      seconds_full: median of the fastest full-depth program in the repository.
      seconds: median, from the same interleaved runs.
      speedup: median over rounds of the paired ratio.
      speedup_ideal: full FLOPs / FLOPs of decided layers, frozen K/V and one head per token.
      efficiency: speedup / speedup_ideal.
      compiles: backend compilations after warm-up.
    """

    policy: str
    budget: float | None = None
    tokens: int | None = None
    num_layers: int | None = None
    depth_decided_mean: float | None = None
    depth_executed_mean: float | None = None
    depth_histogram: dict[str, float] | None = None
    involuntary_stays: int | None = None
    involuntary_exits: int | None = None
    nll_full: float | None = None
    nll: float | None = None
    nll_increase_pct: float | None = None
    kl_full: float | None = None
    agreement: float | None = None
    kv_bytes_ratio: float | None = None
    flops_ratio: float | None = None
    gate_pct: float | None = None
    padding_ratio: float | None = None
    overflows: int | None = None
    seconds_full: float | None = None
    seconds: float | None = None
    speedup: float | None = None
    speedup_ideal: float | None = None
    efficiency: float | None = None
    compiles: int | None = None

    def figures(self) -> dict[str, str]:
        """Returns the measured cost, time and quality as text, by label."""
        shown = {
            "policy": (self.policy, ""),
            "budget": (self.budget, "g"),
            "work": (self.flops_ratio, ".2f"),
            "time": (self.speedup, ".2f"),
            "loss %": (self.nll_increase_pct, "+.2f"),
            "same tokens": (self.agreement, ".1%"),
        }
        return {name: format(of, form) for name, (of, form) in shown.items() if of is not None}

    def summary(self) -> str:
        """Returns the figures as one line of text."""
        return ", ".join(f"{name} {value}" for name, value in self.figures().items())

    def __repr__(self) -> str:
        return f"Ledger({self.summary()})"

    def _repr_html_(self) -> str:
        return table_html([*self.figures()], [[*self.figures().values()]])

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as JSON-ready values, floats rounded to six significant digits."""
        return {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in dataclasses.asdict(self).items()
        }


def uniform_hull(rows: Sequence[Ledger]) -> Callable[[float], float | None]:
    """Returns the lower convex hull of the `uniform` rows and full depth, as a function.

    It maps a `flops_ratio` to the lowest loss increase (%) that one exit, or two mixed at random,
    reach at no more FLOPs; None below the cheapest exit.
    """
    exits = [row for row in rows if row.policy in ("uniform", "full")]
    return convex_hull([(row.flops_ratio or 0.0, row.nll_increase_pct or 0.0) for row in exits])


def convex_hull(points: Sequence[tuple[float, float]]) -> Callable[[float], float | None]:
    """Returns the lower convex hull of points as a function; None left of the first.

    It never rises: a point that costs more and loses more than another is not used.

    >>> hull = convex_hull([(0.5, 2.0), (0.75, -1.0), (1.0, 0.0)])
    >>> hull(0.625), hull(0.9)
    (0.5, -1.0)
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) > 0:  # It turns up.
                break
            hull.pop()
        hull.append((x, y))
    xs, ys = zip(*hull, strict=True)
    lowest = np.minimum.accumulate(ys)
    return lambda x: None if x < xs[0] else float(np.interp(x, xs, lowest))
