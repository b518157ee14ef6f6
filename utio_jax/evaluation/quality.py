# SPDX-License-Identifier: Apache-2.0
"""Loss and cost of a policy or a decoding mode, summed over a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from utio_jax.core.flops import TokenCost
from utio_jax.core.work import Work
from utio_jax.evaluation.ledger import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Sums over a text, from which a ledger's quality and cost follow.

    What compares with full depth is None where no full-depth pass was run.

    Attributes:
      tokens: real tokens.
      predicted: tokens that were predicted.
      nll: summed negative log-likelihood, nats.
      nll_full: the same at full depth.
      kl: summed KL(full || policy), nats.
      agree: predicted tokens with the full model's most probable token.
      histogram: tokens by decided depth.
      query_layers: query slots computed, times layers.
      overflows: segments, by batch, that ran whole rows since a static prefix was too short.
      flops: executed.
      flops_full: executed FLOPs of the full-depth pass.
      flops_ideal: of decided layers, frozen K/V and one head per token.
      flops_gates: of all decisions, and of heads beyond one per token.
      kv_bytes: K/V that rows of generated text read until they ended.
      kv_bytes_full: read by plain decoding of as many tokens.
    """

    tokens: int = 0
    predicted: int = 0
    nll: float = 0.0
    nll_full: float | None = 0.0
    kl: float | None = 0.0
    agree: int | None = 0
    histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)
    query_layers: float = 0.0
    overflows: int = 0
    flops: float = 0.0
    flops_full: float = 0.0
    flops_ideal: float = 0.0
    flops_gates: float = 0.0
    kv_bytes: float = 0.0
    kv_bytes_full: float = 0.0

    def __add__(self, other: Quality) -> Quality:
        added: dict[str, Any] = {
            name: _add(value, getattr(other, name))
            for name, value in vars(self).items()
            if name != "histogram"
        }
        depths = sorted({*self.histogram, *other.histogram})
        histogram = {d: self.histogram.get(d, 0) + other.histogram.get(d, 0) for d in depths}
        return Quality(**added, histogram=histogram)

    def ledger(self, policy: str, *, budget: float | None, num_layers: int) -> Ledger:
        """Returns the record's quality and cost; times are left None.

        Raises:
          ValueError: nothing was predicted, so that no loss exists.
        """
        if not self.predicted:
            raise ValueError(
                "Wanted a text in which something is predicted: a document of at least two tokens. "
                f"Got {self.tokens} tokens that predict nothing. Add text."
            )
        compared: dict[str, Any] = {}
        if self.nll_full is not None and self.kl is not None and self.agree is not None:
            compared = {
                "nll_full": self.nll_full / self.predicted,
                "nll_increase_pct": 100 * (self.nll / self.nll_full - 1),
                "kl_full": self.kl / self.predicted,
                "agreement": self.agree / self.predicted,
            }
        decided = sum(depth * count for depth, count in self.histogram.items())
        return Ledger(
            policy=policy,
            budget=budget,
            tokens=self.tokens,
            num_layers=num_layers,
            depth_decided_mean=decided / self.tokens,
            depth_executed_mean=self.query_layers / self.tokens,
            depth_histogram={
                str(d): round(n / self.tokens, 6) for d, n in self.histogram.items() if n
            },
            involuntary_stays=0,
            involuntary_exits=0,
            nll=self.nll / self.predicted,
            kv_bytes_ratio=self.kv_bytes / self.kv_bytes_full if self.kv_bytes_full else None,
            flops_ratio=self.flops / self.flops_full,
            gate_pct=100 * self.flops_gates / self.flops_full,
            padding_ratio=self.query_layers / decided,
            overflows=self.overflows,
            speedup_ideal=self.flops_full / self.flops_ideal,
            **compared,
        )


def costs_of(
    cost: TokenCost, work: Work, *, full: Work, ideal: Work, gates: float, slot_bytes: int = 0
) -> dict[str, Any]:
    """Returns the costs of executed work by the fields of `Quality`.

    Args:
      cost: cost of one token.
      work: executed work.
      full: work of full depth on the same text.
      ideal: work of decided layers, frozen K/V and one head per token.
      gates: FLOPs of all decisions, beyond the heads that `work` counts.
      slot_bytes: bytes of K/V of one token in one layer.
    """
    total = lambda entries: float(np.sum(entries, dtype=np.float64))  # noqa: E731
    heads = total(work.heads) - total(full.heads)
    return {
        "query_layers": total(work.queries),
        "overflows": int(np.sum(work.overflows)),
        "flops": cost.flops(work, gates=gates),
        "flops_full": cost.flops(full),
        "flops_ideal": cost.flops(ideal),
        "flops_gates": gates + cost.head * heads + cost.exit_map * total(work.exit_maps),
        "kv_bytes": slot_bytes * total(work.kv_reads),
        "kv_bytes_full": slot_bytes * total(full.kv_reads),
    }


def _add(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
