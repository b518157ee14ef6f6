# SPDX-License-Identifier: Apache-2.0
"""Fits policies to a model and a text: signals, thresholds, and which exits to use at which budget.

One way for every signal. Its scores are collected where every token runs to the end; thresholds of
least harm at a budget follow from scores, harm and the cost model. What that cannot show, real
passes do: the damage that frozen K/V of shallow tokens does to others chooses the depth floor, and
what padding adds corrects the budget, a target `flops_ratio` with everything executed included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.calibration.gates import SIGNALS, SignalFitter
from utio_jax.calibration.goals import Budgets, Goal
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import (
    ExitStudy,
    predicted_tokens,
    rank_correlation,
    study_exits,
)
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.files import hash_params, versions
from utio_jax.policies.store import Calibration
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches

_LEAST = 512  # Below, a gate's weights outnumber what they are fitted to by far.

POLICIES = ("learned", "utio_surrogate")
"""The policies that are fitted by default; `utio_jax.calibration.gates.SIGNALS` lists all."""


def calibrate(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    model_sha256: str | None = None,
    text: Mapping[str, Any] | None = None,
    gate_batches: Sequence[Batch] | None = None,
    gate_text: Mapping[str, Any] | None = None,
    policies: Sequence[str] = POLICIES,
    goal: Goal = Budgets(),
    executor: Executor = MicroBatches(),
    mesh: Mesh | None = None,
    seed: int = 0,
    done: Calibration | None = None,
    refit: bool = False,
    keep: Callable[[Calibration], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fits policies to a goal; deterministic for a seed.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the calibration text, all of one width; none of it may be reported on later.
      model_sha256: identifies the weights; a saved calibration refuses others. None takes
        `utio_jax.core.files.hash_params` of `params`.
      text: identifies the text, for the record; None: its size and hash.
      gate_batches: another text, to which the weights of signals are fitted, so that thresholds see
        scores as they are on text that no gate knows; None fits both to `batches`.
      gate_text: identifies that text; None: its size and hash.
      policies: names from `utio_jax.calibration.gates.SIGNALS`.
      goal: `Budgets`, `MaxLoss` or `MaxDisagreement`. A policy that cannot reach it has no entry,
        and `info["goals"]` says so.
      executor: how passes will run; padding is part of the budget.
      mesh: splits the rows of every pass over its axis "data".
      seed: of the gates.
      done: a calibration of the same model, text and goal, to which policies are added. One of
        anything else is refused: what is asked for would be mixed with what once was.
      refit: policies that it holds already are fitted again; otherwise they are kept, as after an
        interruption.
      keep: called with all that is fitted so far, after each policy.
      progress: called with what happens next.

    Raises:
      ValueError: the model has no early exit, a name is unknown, there is too little text, no
        policy reaches the goal, or `done` is of something else.
    """
    say = progress if progress is not None else lambda _: None
    unknown = [name for name in policies if name not in SIGNALS]
    if unknown or not policies:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"Wanted policies of {', '.join(SIGNALS)}. Got {got}.")
    info = {
        "model_sha256": hash_params(params) if model_sha256 is None else model_sha256,
        "text": _describe(batches) if text is None else dict(text),
        "versions": versions(),
        "seed": seed,
        "width": batches[0].token_ids.shape[1],
        "tokens": _predicted(batches),
        "goal": goal.asked(),
    }
    _check_enough(info["tokens"])
    of_gates = None
    if gate_batches is not None:
        _check_enough(_predicted(gate_batches))
        of_gates = _describe(gate_batches) if gate_text is None else dict(gate_text)
    fitted = Calibration(
        entries={}, signals={}, info={**info, "goals": {}, "rank_correlation_kl": {}}
    )
    if done is not None:
        _check_same(done, info, policies)
        if not refit:
            _check_gates(done, of_gates, policies)
        fitted = done

    def study(batches: Sequence[Batch], what: str) -> list[ExitStudy]:
        say(f"{what} of the full pass")
        done_so_far = itertools.count(1)
        counted = lambda: say(f"{what}: batch {next(done_so_far)} of {len(batches)}")  # noqa: E731
        return study_exits(decoder, params, batches, mesh=mesh, progress=counted)

    studies = study(batches, "exits")
    others = studies if gate_batches is None else study(gate_batches, "exits for gates")
    fitter = SignalFitter(decoder, params, others, seed=seed)
    search = ThresholdSearch(decoder, params, studies, executor=executor, mesh=mesh)
    of_exits = {
        "exit_nll_increase_pct": search.exit_nll_increase_pct(),
        "exit_agreement": search.exit_agreement(),
    }
    fitted = dataclasses.replace(fitted, info={**fitted.info, **of_exits})
    for name in policies:
        if name in fitted.info["goals"] and not refit:
            continue
        say(f"{name}: weights")
        signal = fitter.fit(name)
        entries, record = goal.reach(search, signal, say)
        entries = {cost: search.with_row_shares(signal, fit) for cost, fit in entries.items()}
        correlations = _correlations(search, signal)
        learnt = of_gates if jax.tree.leaves(signal) else None  # Some have no weights.
        known = {"goal": record, "correlations": correlations, "gate_text": learnt}
        fitted = fitted.adding(name, signal, entries, **known)
        if keep is not None:
            keep(fitted)
        search.forget()
    if not any(fitted.entries[name] for name in policies):
        name, goals = policies[0], fitted.info["goals"]
        raise ValueError(
            f"Wanted a goal that some policy reaches; {name} gets as cheap as "
            f"{search.cheapest(fitted.signals[name]):.3f}. Got "
            f"{ ({name: goals[name] for name in policies}) }. Ask for less."
        )
    return fitted


def _check_same(done: Calibration, info: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Checks that policies can be added to a calibration.

    Raises:
      ValueError: it is of something else, or its guarantee for so many policies would no longer
        hold for more.
    """
    other = {key: done.info.get(key) for key in info if done.info.get(key) != info[key]}
    if other:
        raise ValueError(
            f"Wanted to add to a calibration with { ({key: info[key] for key in other}) }. Got one "
            f"with {other}. Name another --out, or remove what is there first."
        )
    shared = info["goal"].get("policies")
    every = [*dict.fromkeys((*done.info["goals"], *policies))]
    if shared is not None and len(every) > shared:
        raise ValueError(
            f"Wanted a guarantee for the {shared} policies that share it. Got {len(every)} with "
            f"those that were fitted before: {', '.join(every)}. Fit all of them at once, or name "
            "another --out."
        )


def _check_enough(tokens: int) -> None:
    if tokens < _LEAST:
        raise ValueError(
            f"Wanted at least {_LEAST} predicted tokens to fit policies to. Got {tokens}. Add text."
        )


def _check_gates(done: Calibration, gate_text: Any, policies: Sequence[str]) -> None:
    """Raises ValueError where a policy that is kept has its weights from another text."""
    known = done.info.get("gate_text", {})
    for name in policies:
        kept = name in done.signals and jax.tree.leaves(done.signals[name])
        if kept and known.get(name) != gate_text:
            raise ValueError(
                f"Wanted to keep {name}, with weights from {gate_text or 'the calibration text'}. "
                f"Got one with weights from {known.get(name) or 'the calibration text'}. Fit it "
                "again, or name another --out."
            )


def _predicted(batches: Sequence[Batch]) -> int:
    return int(sum(np.maximum(batch.lengths - 1, 0).sum() for batch in batches))


def _describe(batches: Sequence[Batch]) -> dict[str, Any]:
    """Returns what identifies a text of which only batches are known."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(np.ascontiguousarray(batch.token_ids).tobytes())
        digest.update(np.ascontiguousarray(batch.lengths).tobytes())
    windows = sum(int((batch.window >= 0).sum()) for batch in batches)
    return {"windows": windows, "sha256": digest.hexdigest()}


def _correlations(search: ThresholdSearch, signal: Any) -> dict[str, float | None]:
    """Returns, per exit, the rank correlation of a signal's scores with sqrt(KL to full depth)."""
    exits = search.exits
    root = np.sqrt(predicted_tokens(search.studies, [study.kl for study in search.studies]))
    scores = search.scores(signal, exits)
    found = {}
    for index, depth in enumerate(exits[:-1]):
        finite = np.isfinite(scores[index])
        correlation = rank_correlation(scores[index][finite], root[index][finite])
        found[str(depth)] = None if correlation is None else round(correlation, 4)
    return found
