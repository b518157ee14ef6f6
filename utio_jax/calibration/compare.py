# SPDX-License-Identifier: Apache-2.0
"""All policies on one text: does a policy do better than truncating the model, and why?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.calibration.goals import several_budgets
from utio_jax.calibration.search import forget_programs
from utio_jax.calibration.studies import ExitStudy, predicted_tokens, study_exits
from utio_jax.calibration.thresholds import fit_thresholds, leave_at
from utio_jax.core.calls import takes_decoder
from utio_jax.core.decoder import Decoder, Params, is_integer
from utio_jax.core.documents import Batch, check_batches
from utio_jax.core.flops import depth_flops, token_cost
from utio_jax.core.rows import place
from utio_jax.evaluation.evaluate import Quality, evaluate
from utio_jax.evaluation.intervals import DocumentSums, check_enough, margin_test
from utio_jax.evaluation.ledger import Ledger
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import (
    Thresholded,
    check_any_rows,
    given_depths,
    random_depths,
    shared_program,
)
from utio_jax.policies.signals import KnownBefore
from utio_jax.policies.store import CONTROLS, Calibration, Thresholds
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import positions_of
from utio_jax.staircase.score import Comparison, Scores

Label = tuple[str, Any]
"""A policy's name, and its budget or depth if it has one."""

Policies = Sequence[Policy] | Mapping[str, Policy]
"""Policies, by name or called by their own."""

CHANCE = "random as"
"""Before a policy's name: the control with its histogram of depths."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A ledger row, compared with its controls.

    Attributes:
      ledger: quality and cost; times are None.
      hull_margin_pct: margin below the uniform-exit frontier at equal FLOPs, in % of the loss at
        full depth; positive is better. Given with its 95 % interval over documents, see
        `margin_test`. None for uniform exits, and for costs below the cheapest one.
      hull_margin_p_value: two-sided p-value of a margin of 0, of this row alone.
    """

    ledger: Ledger
    hull_margin_pct: tuple[float, float, float] | None = None
    hull_margin_p_value: float | None = None

    @property
    def name(self) -> str:
        """The unique name of the row: the policy, with its budget or depth."""
        ledger = self.ledger
        if ledger.budget is not None:
            return f"{ledger.policy} at {ledger.budget:g}"
        depths = ledger.depth_histogram or {}
        return f"uniform {next(iter(depths))}" if ledger.policy == "uniform" else ledger.policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON-ready values."""
        short = lambda value: None if value is None else float(f"{value:.4g}")  # noqa: E731
        margin = self.hull_margin_pct
        return {
            "name": self.name,
            **self.ledger.to_dict(),
            "hull_margin_pct": None if margin is None else [short(value) for value in margin],
            "hull_margin_p_value": short(self.hull_margin_p_value),
        }


@takes_decoder("model.compare(texts)")
def compare(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    document_of_window: np.ndarray,
    calibration: Calibration | None,
    *,
    budgets: float | Iterable[float] | None = None,
    policies: Policies = (),
    executor: Executor = MicroBatches(),
    mesh: Mesh | None = None,
    draws: int = 2000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[ComparisonRow]:
    """Returns a row per exit for `uniform`, and per budget for `oracle_kl` and calibrated policies.

    Policies run over all exits and pay for those in use: one program for all budgets,
    and for all policies that differ in numbers alone. Full depth runs once.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text, all of one shape; none of it may have been calibrated on.
      document_of_window: `[window]`, the document that each of `Batch.window` is cut from.
        Intervals take documents to be independent: give near-duplicates one number.
      calibration: the fitted policies; None: there are none.
      budgets: one of the calibration's or several; all by default.
      policies: others to judge, each next to random depths of its own histogram; by name, or called
        by their own.
      executor: of live slots.
      mesh: splits the rows of every pass over its axis "data".
      draws: number of draws of documents; with fewer than 20 a row its p-value decides nothing.
      seed: of the draws.
      progress: called with what happens next.

    Raises:
      ValueError: batches of several shapes or of other windows, fewer than five documents, or no
        draws. Or a model without exits, budgets that no policy has, or policies of one name.
    """
    check_batches(batches, instead="model.compare(texts)", one_shape=True)
    say = progress if progress is not None else lambda _: None
    if calibration is None:
        calibration = Calibration(entries={}, signals={}, info={})
    others = _named_policies(policies, taken=[*CONTROLS, *calibration.entries])
    known = sorted({budget for fitted in calibration.entries.values() for budget in fitted})
    chosen = known if budgets is None else sorted(set(several_budgets(budgets)))
    if not set(chosen) <= set(known) or not (chosen or others):
        if not known:
            raise ValueError(
                "Wanted a calibration, or policies of your own. Got neither. Fit one: "
                "model.calibrate(texts), or name policies=[...]."
            )
        raise ValueError(f"Wanted some of the budgets {known}, as calibrated. Got {chosen}.")
    # Before the passes, not after them.
    if not is_integer(draws, 1):
        raise ValueError(f"Wanted at least 1 of draws, an integer. Got draws={draws!r}.")
    windows = [row for batch in batches for row in batch.window.tolist() if row >= 0]
    if (count := max(windows, default=-1) + 1) > len(document_of_window):
        raise ValueError(
            f"Wanted the document of each of {count} windows. Got {len(document_of_window)}. "
            "utio_jax.core.sample_batches returns both: take them from one call."
        )
    document_of_window = np.asarray(document_of_window)
    check_enough(len(set(document_of_window[windows].tolist())))
    params = place(params, mesh)
    done = itertools.count(1)
    counted = lambda: say(f"exits: batch {next(done)} of {len(batches)}")  # noqa: E731
    studies = study_exits(decoder, params, batches, mesh=mesh, progress=counted)
    of_text = partial(_read, decoder, params, batches, document_of_window)
    read = partial(of_text, executor=executor, mesh=mesh, full_passes={}, say=say)
    exits, shape = decoder.config.exits, batches[0].token_ids.shape

    say("uniform")
    given = {
        ("uniform" if depth < exits[-1] else "full", float(depth)): [
            given_depths(jnp.full(shape, depth), depths=exits)
        ]
        * len(batches)
        for depth in exits
    }
    uniform = read(given)
    of_exits = [sums for _, sums in uniform.values()]

    def row_of(label: Label, result: tuple[Quality, DocumentSums]) -> ComparisonRow:
        (name, budget), (quality, sums) = label, result
        tested = margin_test(of_exits, sums, draws=draws, seed=seed)
        return ComparisonRow(
            ledger=quality.ledger(name, budget=budget, num_layers=exits[-1]),
            hull_margin_pct=None if tested is None else tested.interval,
            hull_margin_p_value=None if tested is None else tested.p_value,
        )

    rows = [
        ComparisonRow(ledger=quality.ledger(name, budget=None, num_layers=exits[-1]))
        for (name, _), (quality, _) in uniform.items()
    ]
    say("oracle_kl")
    oracles = {
        ("oracle_kl", budget): policies
        for budget in chosen
        for policies in [hindsight_policies(decoder, params, studies, budget, executor=executor)]
        if policies
    }
    rows += [row_of(*pair) for pair in read(oracles).items()]

    of_name: dict[str, dict[Label, Policy]] = {
        name: {
            (name, budget): calibration.policy(name, budget, exits=exits)
            for budget in chosen
            if budget in fitted
        }
        for name, fitted in calibration.fitted.items()
    }
    of_policy: dict[str, list[ComparisonRow]] = {}
    groups = _by_program(of_name, batches[0])
    for number, group in enumerate(groups):
        for name in group:
            say(f"{name} (program {number + 1} of {len(groups)})")
            of_policy[name] = [row_of(*pair) for pair in read(of_name[name]).items()]
        forget_programs()
    rows += [row for name in of_name for row in of_policy.get(name, ())]
    for name, policy in others.items():
        say(name)
        result = read({(name, None): policy})[name, None]
        rows.append(row_of((name, None), result))
        histogram, label = result[0].histogram, (f"{CHANCE} {name}", None)
        depths = exits if {*policy.depths} <= {*exits} else policy.depths
        counts = jnp.asarray([histogram.get(depth, 0) for depth in depths], jnp.float32)
        chance = random_depths(counts / jnp.sum(counts), key=jax.random.key(0), depths=depths)
        rows.append(row_of(label, read({label: chance})[label]))
        forget_programs()
    return rows


def _named_policies(policies: Policies, *, taken: Sequence[str]) -> dict[str, Policy]:
    """Returns policies by name.

    Raises:
      TypeError: one policy instead of several, or something that is no policy.
      ValueError: a duplicate name, or a policy for given rows.
    """
    single = isinstance(policies, str) or hasattr(policies, "depths")
    named = isinstance(policies, Mapping)
    listed = [policies] if single else [*(policies.values() if named else policies)]
    if wrong := [one for one in listed if single or not hasattr(one, "depths")]:
        raise TypeError(
            "Wanted a list of policies, such as [uniform(8)], or a dictionary of them. Got "
            f"{wrong[0]!r:.80}. Those of the calibration are compared without being named."
        )
    pairs = [*policies.items()] if named else [(policy.name, policy) for policy in policies]
    names = [*taken, *(name for name, _ in pairs)]
    if doubled := [name for name, _ in pairs if names.count(name) > 1]:
        raise ValueError(
            f"Wanted policies with a name each, none of {', '.join(taken)}. Got {doubled}. Name "
            "them: policies={'mine': policy}."
        )
    for policy in listed:
        check_any_rows(policy, instead="Call evaluate, with one policy for each batch.")
    return dict(pairs)


def hindsight_policies(
    decoder: Decoder,
    params: Params,
    studies: Sequence[ExitStudy],
    budget: float,
    *,
    executor: Executor = MicroBatches(),
) -> list[Thresholded]:
    """Returns `oracle_kl`, one policy per batch, fitted on the text that it reads.

    A control: depths from what stopping at each exit really does to each token. They look at full
    depth, so they are no policies to use: `causal` is False. Thresholds are fitted as for any
    signal, on KL to full depth itself as the score. Strong, yet no bound: what frozen K/V do to
    other tokens is not in it.

    `studies` have batches of one width. `budget` is a target `flops_ratio`, without padding; below
    the first exit's there are no policies.
    """
    harm = predicted_tokens(studies, [study.kl for study in studies])
    cost, exits = token_cost(decoder, params), decoder.config.exits
    width = studies[0].predicted.shape[1]
    flops = partial(depth_flops, cost, width=width, key_widths=executor.key_widths(width))
    fits: list[tuple[float, Thresholds]] = []
    for last in range(2, len(exits) + 1):  # No token pays for K/V beyond the deepest exit in use.
        shares = flops(exits[:last]) / flops(exits)[-1]
        if budget < shares[0]:
            continue
        fit = fit_thresholds(
            harm[: last - 1],
            harm[:last],
            depths=exits[:last],
            cost_of_depth=shares,
            cost_of_gate=np.zeros(last - 1),
            budget=budget,
        )
        left = leave_at(harm[: last - 1], np.asarray(fit.thresholds, np.float32))
        fits.append((float(harm[left, np.arange(left.size)].mean()), fit))
    if not fits:
        return []
    best = min(fits, key=lambda pair: pair[0])[1]
    layers, cuts = np.asarray(best.depths, np.int32), np.asarray(best.thresholds, np.float32)
    decided = [layers[leave_at(study.kl[: len(cuts)], cuts)] for study in studies]
    return [given_depths(jnp.asarray(depths), depths=exits, name="oracle_kl") for depths in decided]


def _by_program(policies: Mapping[str, Mapping[Label, Policy]], batch: Batch) -> list[list[str]]:
    """Returns the names of policies, grouped by shared programs.

    First those whose scores are known before the pass: the uniform exits have compiled theirs.
    """
    ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
    positions, _ = positions_of(ids, lengths)
    groups: dict[Any, list[str]] = {}
    for name, of_budget in policies.items():
        for policy in [*of_budget.values()][:1]:
            program = shared_program(policy, ids, positions)
            leaves, treedef = jax.tree.flatten(program)
            before = isinstance(getattr(program, "signal", None), KnownBefore)
            key = (not before, treedef, tuple(jnp.shape(leaf) for leaf in leaves))
            groups.setdefault(key, []).append(name)
    return [names for _, names in sorted(groups.items(), key=lambda item: item[0][0])]


def _read(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    document_of_window: np.ndarray,
    policies: Mapping[Label, Policy | Sequence[Policy]],
    *,
    executor: Executor,
    mesh: Mesh | None,
    full_passes: dict[int, Scores],
    say: Callable[[str], None],
) -> dict[Label, tuple[Quality, DocumentSums]]:
    """Returns the quality of policies, one or one per batch, and their sums by document.

    Executed FLOPs, padding and gates included, are shared out by tokens' decided depths. Of the
    same batches `full_passes` keeps those at full depth from call to call.
    """
    labels = {str(label): label for label in policies}
    documents = int(document_of_window.max()) + 1
    nll = {name: np.zeros(documents) for name in labels}
    parts = {name: np.zeros(documents) for name in labels}
    every, width = range(decoder.config.num_layers + 1), batches[0].token_ids.shape[1]
    cost, key_widths = token_cost(decoder, params), executor.key_widths(width)
    of_depth = depth_flops(cost, every, width=width, key_widths=key_widths)

    def observe(name: str, batch: Batch, comparison: Comparison, depths: np.ndarray) -> None:
        rows = np.flatnonzero(batch.window >= 0)
        document = document_of_window[batch.window[rows]]
        lost = np.asarray(comparison.nll, np.float64)[rows]
        paid = np.where(depths > 0, of_depth[depths], 0.0)[rows]
        np.add.at(nll[name], document, lost.sum(axis=1))
        np.add.at(parts[name], document, paid.sum(axis=1))

    names, done = sorted({name for name, _ in policies}), itertools.count(1)
    passes = len(policies) * len(batches)
    counted = lambda: say(f"{', '.join(names)}: pass {next(done)} of {passes}")  # noqa: E731
    total = evaluate(
        decoder,
        params,
        batches,
        {name: policies[label] for name, label in labels.items()},
        executor=executor,
        mesh=mesh,
        observe=observe,
        full_passes=full_passes,
        progress=counted,
    )
    read = {}
    for name, label in labels.items():
        seen = parts[name] > 0
        flops = total[name].flops * parts[name][seen] / parts[name].sum()
        read[label] = total[name], DocumentSums(nll=nll[name][seen], flops=flops)
    return read
