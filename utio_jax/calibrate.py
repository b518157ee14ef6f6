# SPDX-License-Identifier: Apache-2.0
"""Fits policies to a model and a text: signals, thresholds, and which exits to use at which budget.

One way for every signal. Its scores are collected where every token runs to the end; thresholds of
least harm at a budget follow from scores, harm and the cost model. What that cannot show, real
passes do: the damage that frozen K/V of shallow tokens does to others chooses the depth floor, and
what padding adds corrects the budget, a target `flops_ratio` with everything executed included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utio_jax.artifacts import versions
from utio_jax.calibration import Calibration
from utio_jax.decoder import Decoder, Params
from utio_jax.documents import Batch
from utio_jax.executors import Executor
from utio_jax.exits import predicted_tokens, rank_correlation, study_exits
from utio_jax.gates import SignalFitter
from utio_jax.microbatches import MicroBatches
from utio_jax.search import ThresholdSearch
from utio_jax.thresholds import Thresholds

BUDGETS = (0.5, 0.6, 0.75, 0.9)
"""The `flops_ratio`s that policies are fitted for by default."""

POLICIES = ("learned", "utio_surrogate")
"""The policies that are fitted by default; `utio_jax.gates.SIGNALS` lists all."""


def calibrate(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    model_sha256: str,
    text: Mapping[str, Any],
    policies: Sequence[str] = POLICIES,
    budgets: Sequence[float] = BUDGETS,
    executor: Executor = MicroBatches(),
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fits policies at every budget; deterministic for a seed.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the calibration text, all of one width; none of it may be reported on later.
      model_sha256: identifies the weights; a calibration refuses others.
      text: identifies the text, for the record.
      policies: names from `utio_jax.gates.SIGNALS`.
      budgets: target `flops_ratio`s. A policy that cannot get as cheap as one of them has no entry
        there, and `info["unreachable"]` says so.
      executor: how passes will run; padding is part of the budget.
      seed: of the gates.
      progress: called with what happens next.

    Raises:
      ValueError: the model has no early exit, a name is unknown, or no budget can be reached.
    """
    say = progress if progress is not None else lambda _: None
    say("exits of the full pass")
    studies = study_exits(decoder, params, batches)
    fitter = SignalFitter(decoder, params, studies, seed=seed)
    signals = {}
    for name in policies:
        say(f"{name}: weights")
        signals[name] = fitter.fit(name)
    search = ThresholdSearch(decoder, params, studies, executor=executor)
    entries: dict[str, dict[float, Thresholds]] = {name: {} for name in signals}
    correlations, unreachable = {}, []
    for name, signal in signals.items():
        correlations[name] = _correlations(search, signal)
        for budget in budgets:
            say(f"{name} at {budget:g}")
            entry = search.fit(signal, budget)
            if entry is None:
                unreachable.append(f"{name} at {budget:g}")
            else:
                entries[name][budget] = entry
        search.forget()
    if not any(entries.values()):
        name, signal = next(iter(signals.items()))
        raise ValueError(
            f"Wanted budgets that {name} can reach: at least {search.cheapest(signal):.3f} here. "
            f"Got {tuple(budgets)}."
        )
    info = {
        "model_sha256": model_sha256,
        "text": dict(text),
        "versions": versions(),
        "seed": seed,
        "width": batches[0].token_ids.shape[1],
        "tokens": int(sum(study.predicted.sum() for study in studies)),
        "rank_correlation_kl": correlations,
        "unreachable": unreachable,
    }
    return Calibration(entries=entries, signals=signals, info=info)


def _correlations(search: ThresholdSearch, signal: Any) -> dict[str, float]:
    """Returns, per exit, the rank correlation of a signal's scores with sqrt(KL to full depth)."""
    exits = search.exits
    root = np.sqrt(predicted_tokens(search.studies, [study.kl for study in search.studies]))
    scores = search.scores(signal, exits)
    found = {}
    for index, depth in enumerate(exits[:-1]):
        finite = np.isfinite(scores[index])
        correlation = rank_correlation(scores[index][finite], root[index][finite])
        found[str(depth)] = round(correlation, 4)
    return found
