# SPDX-License-Identifier: Apache-2.0
"""Fits policies to a model and a text: signals, thresholds, and the exits in use by budget.

One way for every signal. Its scores are collected where every token runs to the end; thresholds of
least harm at a budget follow from scores, harm and the cost model. Real
passes show the other costs. Damage by frozen K/V of shallow tokens sets the depth floor. The cost
of padding corrects the budget, a target `flops_ratio` over everything executed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from utio_jax.calibration.advice import advise, may_pay
from utio_jax.calibration.gates import Fit, SignalFitter, fits_of
from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement
from utio_jax.calibration.lens import LEAST_PREDICTED
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.core.calls import takes_decoder
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch, check_batches
from utio_jax.core.files import hash_params, versions
from utio_jax.core.flops import rounded_up
from utio_jax.core.lens import Lensed
from utio_jax.policies.base import Signal
from utio_jax.policies.store import Calibration, Thresholds
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches

POLICIES = ("learned", "utio_surrogate")
"""The policies that are fitted by default; `utio_jax.calibration.gates.SIGNALS` lists all."""


@takes_decoder("model.calibrate(texts)")
def calibrate(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    model_sha256: str | None = None,
    text: Mapping[str, Any] | None = None,
    policies: Sequence[str] | Mapping[str, Fit] = POLICIES,
    goal: Goal = Budgets(),
    executor: Executor = MicroBatches(),
    mesh: Mesh | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fits policies to a goal; deterministic for a seed.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the calibration text, all of one shape; none of it may be reported on later.
      model_sha256: identifies the weights; a saved calibration refuses others. None takes
        `utio_jax.core.files.hash_params` of `params`.
      text: identifies the text, for the record; None: its size and hash.
      policies: names from `utio_jax.calibration.SIGNALS`; or, by a name each, functions of the
        `SignalFitter` that return a signal.
      goal: `Budgets`, `MaxLoss` or `MaxDisagreement`. A policy that cannot reach it has no entry,
        and `info["goals"]` says so.
      executor: of later passes; padding is part of the budget.
      mesh: splits the rows of every pass over its axis "data".
      seed: of the gates.
      progress: called with what happens next.

    Raises:
      ValueError: batches of several shapes, the model has no early exit, a name is unknown, there
        is too little text, or no policy reaches the goal. A guarantee is for fewer policies than
        are fitted.
    """
    check_batches(batches, instead="model.calibrate(texts)", one_shape=True)
    say = progress if progress is not None else lambda _: None
    fits = fits_of(policies)
    if isinstance(goal, MaxDisagreement) and goal.policies < len(fits):
        raise ValueError(
            f"Wanted a guarantee for all {len(fits)} policies: the luckiest of them may be picked. "
            f"Got policies={goal.policies}. Make it with MaxDisagreement(policies={len(fits)}), or "
            "fit fewer."
        )
    tokens = int(sum(np.maximum(batch.lengths - 1, 0).sum() for batch in batches))
    if tokens < LEAST_PREDICTED:
        raise ValueError(
            f"Wanted at least {LEAST_PREDICTED} predicted tokens to fit policies to. Got {tokens}. "
            "Add text."
        )
    say("exits of the full pass")
    done = itertools.count(1)
    counted = lambda: say(f"exits of the full pass: batch {next(done)} of {len(batches)}")  # noqa: E731
    studies = study_exits(decoder, params, batches, mesh=mesh, progress=counted)
    fitter = SignalFitter(decoder, params, studies, seed=seed)
    search = ThresholdSearch(decoder, params, studies, executor=executor, mesh=mesh)
    entries: dict[str, dict[float, Thresholds]] = {}
    signals: dict[str, Signal] = {}
    goals = dict[str, Any]()
    for name, fit in fits.items():
        say(f"{name}: weights")
        signal = signals[name] = fitter.fit(fit)
        fitted, goals[name] = goal.reach(search, signal, say)
        entries[name] = {cost: search.with_row_shares(signal, one) for cost, one in fitted.items()}
        search.forget()
    if not any(entries.values()):
        name = next(iter(fits))
        least = rounded_up(search.cheapest(signals[name]))
        raise ValueError(
            f"Wanted a goal that some policy reaches; {name} gets as cheap as {least:.3f}. Got "
            f"{goals}. Ask for less."
        )
    entries = {name: fitted for name, fitted in entries.items() if fitted}
    signals = {name: signals[name] for name in entries}
    info: dict[str, Any] = {
        "model_sha256": hash_params(params) if model_sha256 is None else model_sha256,
        "text": _describe(batches) if text is None else dict(text),
        "versions": versions(),
        "seed": seed,
        "width": batches[0].token_ids.shape[1],
        "tokens": tokens,
        "goals": goals,
        "exit_nll_increase_pct": search.exit_nll_increase_pct(),
        "exit_agreement": search.exit_agreement(),
    }
    advice = advise(decoder, info, lens=isinstance(decoder, Lensed))
    info["verdict"] = may_pay(info) if advice is None else advice
    return Calibration(entries=entries, signals=signals, info=info)


def _describe(batches: Sequence[Batch]) -> dict[str, Any]:
    """Returns a description of a text that is given as batches."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(np.ascontiguousarray(batch.token_ids).tobytes())
        digest.update(np.ascontiguousarray(batch.lengths).tobytes())
    windows = sum(int((batch.window >= 0).sum()) for batch in batches)
    return {"windows": windows, "sha256": digest.hexdigest()}
