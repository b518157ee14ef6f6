# SPDX-License-Identifier: Apache-2.0
"""Goals of calibration: a budget, a bound on the loss, or a guarantee about disagreement."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from utio_jax.calibration.guarantee import check_units, fit_with_guarantee
from utio_jax.calibration.risk import group_near_duplicates, risks_of_groups
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.policies.base import Signal
from utio_jax.policies.store import Thresholds
from utio_jax.staircase.score import Comparison

_HALVINGS = 6  # Of the range of budgets: steps of about 1 % of a full pass.
_CANDIDATES = 12
_ROWS = 16  # Of a pass over documents.
_MIN_PREDICTED = 32  # A document of three tokens that all differ has risk 1, and says little.

CONFIDENCE = 0.95
"""Confidence of a guarantee, by default."""

Say = Callable[[str], None]


def _try(
    search: ThresholdSearch, signal: Signal, budget: float, say: Say
) -> tuple[float, float, Thresholds] | None:
    """Returns the `flops_ratio` and the loss increase, in %, of real passes, and the thresholds."""
    say(f"{signal.name} at {budget:.3g}")
    entry = search.fit(signal, budget)
    if entry is None:
        return None
    spent = search.run(signal, entry)
    return search.ratio(spent), search.nll_increase_pct(spent), entry


@runtime_checkable
class Goal(Protocol):
    """Chooses thresholds for one signal."""

    def reach(
        self, search: ThresholdSearch, signal: Signal, say: Say
    ) -> tuple[dict[float, Thresholds], dict[str, Any]]:
        """Returns thresholds by `flops_ratio`, and a record of the search.

        There are none if nothing short of full depth reaches the goal.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Least loss at each target `flops_ratio`."""

    budgets: tuple[float, ...] = (0.5, 0.6, 0.75, 0.9)

    def __post_init__(self) -> None:
        if not self.budgets or not all(0 < budget <= 1 for budget in self.budgets):
            raise ValueError(
                f"Wanted budgets above 0, at most 1: shares of a full pass. Got {self.budgets}."
            )

    def reach(
        self, search: ThresholdSearch, signal: Signal, say: Say
    ) -> tuple[dict[float, Thresholds], dict[str, Any]]:
        thresholds: dict[float, Thresholds] = {}
        increases: dict[str, float] = {}
        for budget in self.budgets:
            if (tried := _try(search, signal, budget, say)) is not None:
                _, increase, thresholds[budget] = tried
                increases[f"{budget:g}"] = round(increase, 4)
        unreachable = [budget for budget in self.budgets if budget not in thresholds]
        record = {"unreachable": unreachable} if unreachable else {}
        return thresholds, {"nll_increase_pct_by_budget": increases, **record}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxLoss:
    """Least cost at which the loss on the calibration text rises by at most a bound.

    Attributes:
      nll_increase_pct: the bound, in %. What it is on other text is for `compare` to say.
    """

    nll_increase_pct: float

    def __post_init__(self) -> None:
        if not 0 < self.nll_increase_pct < math.inf:
            raise ValueError(
                f"Wanted a finite max_nll_increase_pct above 0, in %. Got {self.nll_increase_pct}."
            )

    def reach(
        self, search: ThresholdSearch, signal: Signal, say: Say
    ) -> tuple[dict[float, Thresholds], dict[str, Any]]:
        low, high = search.cheapest(signal), 1.0
        best: tuple[float, float, Thresholds] | None = None
        for _ in range(_HALVINGS):
            budget = (low + high) / 2
            tried = _try(search, signal, budget, say)
            if tried is None or tried[1] > self.nll_increase_pct:
                low = budget
                continue
            high = budget
            if tried[0] < 1:
                best = min(best, tried, key=lambda one: one[:2]) if best else tried
        record: dict[str, Any] = {"max_nll_increase_pct": self.nll_increase_pct}
        if best is None:
            return {}, record
        ratio, increase, entry = best
        return {round(ratio, 4): entry}, {**record, "nll_increase_pct": round(increase, 4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxDisagreement:
    """Least cost at which documents' mean disagreement with full depth stays below a bound.

    Disagreement is the share of predicted tokens whose most probable token is not full depth's; the
    guarantee is that of `fit_with_guarantee`. Several policies are tested on the same documents,
    and one picks the cheapest: the one whose test was luckiest, perhaps. So the guarantee is one
    for all of them: each is tested at `1 - confidence` over `policies` (Bonferroni).

    Attributes:
      max_disagreement: the bound, in (0, 1).
      confidence: in (0, 1).
      documents: token ids of documents on which nothing was fitted, nor on copies of them, see
        `utio_jax.calibration.risk.split_documents`. Only those of more than 32 tokens are kept: the
        guarantee is about documents like these.
      policies: number of policies fitted to this goal; one may be picked by its result.
      seed: of the order of the documents.
    """

    max_disagreement: float
    confidence: float
    documents: Sequence[np.ndarray]
    policies: int = 1
    seed: int = 0
    _groups: Int[np.ndarray, " document"] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.policies < 1:
            raise ValueError(f"Wanted a goal for at least 1 policy. Got policies={self.policies}.")
        kept = tuple(ids for ids in self.documents if len(ids) > _MIN_PREDICTED)
        object.__setattr__(self, "documents", kept)
        object.__setattr__(self, "_groups", group_near_duplicates(kept))
        check_units(
            len(set(self._groups.tolist())),
            max_risk=self.max_disagreement,
            confidence=self.confidence,
            looks=self.policies,
            names=(f"documents of more than {_MIN_PREDICTED} tokens", "max_disagreement"),
        )

    def reach(
        self, search: ThresholdSearch, signal: Signal, say: Say
    ) -> tuple[dict[float, Thresholds], dict[str, Any]]:
        budgets = np.linspace(0.97, search.cheapest(signal), _CANDIDATES, endpoint=False)
        candidates: dict[float, Thresholds] = {}
        for budget in budgets:
            tried = _try(search, signal, float(budget), say)
            if tried is not None and round(tried[0], 4) < 1:
                candidates.setdefault(round(tried[0], 4), tried[2])
        ratios = sorted(candidates, reverse=True)  # The costliest is the safest: known beforehand.
        if not ratios:
            return {}, {"max_disagreement": self.max_disagreement, "candidates": {}}
        say(f"{signal.name}: disagreement of {len(self.documents)} documents")
        risks, tokens = self._disagreement(search, signal, [candidates[r] for r in ratios])
        result = fit_with_guarantee(
            risks_of_groups(risks, tokens, self._groups),
            max_risk=self.max_disagreement,
            confidence=self.confidence,
            settings=ratios,
            looks=self.policies,
            seed=self.seed,
        )
        record = {
            "max_disagreement": self.max_disagreement,
            "confidence": self.confidence,
            "policies": self.policies,
            "documents": result.tested,
            "candidates": {
                str(rung.setting): {
                    "mean": round(rung.risk, 5),
                    "p_value": float(f"{rung.p_value:.3g}"),
                }
                for rung in result.ladder
            },
        }
        chosen = result.chosen
        return {} if chosen is None else {chosen: candidates[chosen]}, record

    def _disagreement(
        self, search: ThresholdSearch, signal: Signal, candidates: Sequence[Thresholds]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[candidate, document]`, and the number of predicted tokens per document."""
        config = search.decoder.config
        batches, document_of = sample_batches(
            self.documents, rows=_ROWS, width=config.context_length, vocab_size=config.vocab_size
        )
        tokens = np.asarray([len(ids) - 1 for ids in self.documents])
        agree = np.zeros((len(candidates), len(tokens)))

        def observe(name: str, batch: Batch, comparison: Comparison, _: np.ndarray) -> None:
            rows = np.flatnonzero(batch.window >= 0)
            agreed = np.asarray(comparison.agree)[rows].sum(axis=1)
            np.add.at(agree[int(name)], document_of[batch.window[rows]], agreed)

        evaluate(
            search.decoder,
            search.params,
            batches,
            {
                str(index): entry.policy(signal, exits=search.exits)
                for index, entry in enumerate(candidates)
            },
            executor=search.executor,
            mesh=search.mesh,
            observe=observe,
        )
        return 1 - agree / tokens, tokens


def goal_of(
    budget: float | Sequence[float] | None,
    max_nll_increase_pct: float | None,
    max_disagreement: float | None,
    confidence: float,
) -> Goal | Callable[..., MaxDisagreement]:
    """Returns the goal of options, at most one of which is given; a guarantee lacks its documents.

    Raises:
      ValueError: more than one goal, a confidence without a guarantee, or a goal out of range.
    """
    goals = (budget, max_nll_increase_pct, max_disagreement)
    if sum(goal is not None for goal in goals) > 1:
        raise ValueError(
            "Wanted one of budget, max_nll_increase_pct and max_disagreement. Got "
            f"budget={budget}, max_nll_increase_pct={max_nll_increase_pct}, "
            f"max_disagreement={max_disagreement}."
        )
    if max_disagreement is not None:
        guarantee = {"max_disagreement": max_disagreement, "confidence": confidence}
        return partial(MaxDisagreement, **guarantee)
    if confidence != CONFIDENCE:
        raise ValueError(
            "Wanted max_disagreement with a confidence, which is that of its guarantee. Got "
            f"confidence={confidence:g} alone. Leave it out, or ask for a guarantee."
        )
    if max_nll_increase_pct is not None:
        return MaxLoss(nll_increase_pct=max_nll_increase_pct)
    return Budgets() if budget is None else Budgets(budgets=several_budgets(budget))


def several_budgets(budget: float | Iterable[float]) -> tuple[float, ...]:
    """Returns one budget or several, perhaps NumPy's, as a tuple of floats."""
    several: Any = [*budget] if isinstance(budget, (AbstractSet, Iterator)) else budget
    several = np.atleast_1d(np.asarray(several, object))
    return tuple(float(b) if isinstance(b, numbers.Real) else b for b in several)
