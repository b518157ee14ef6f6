# SPDX-License-Identifier: Apache-2.0
"""Ledger rows: quality, cost and time of policies next to their controls, in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.timing import Timing, routing_only, time_programs
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.files import conditions
from utio_jax.evaluation.evaluate import Quality, evaluate
from utio_jax.evaluation.ledger import Ledger, uniform_hull
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import uniform
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.score import Comparison, full_depth, run_score, score_dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row to measure.

    Attributes:
      policy: that decides depths.
      budget: that it was fitted for, if any.
      depth: that all tokens run, if that is what it decides.
    """

    policy: Policy
    budget: float | None = None
    depth: int | None = None

    @property
    def label(self) -> str:
        """A name that no other entry has."""
        if self.budget is not None:
            return f"{self.policy.name}@{self.budget:g}"
        if self.policy.name == "full":
            return "full"
        return f"{self.policy.name}:{self.depth or self.policy.depths[-1]}"


def control_entries(decoder: Decoder) -> list[Entry]:
    """Returns full depth and one `uniform` per earlier exit: what every policy is read against.

    One program serves all of these: a boundary where nobody is asked costs next to nothing.
    """
    exits = decoder.config.exits
    return [
        Entry(policy=full_depth(decoder)),
        *(Entry(policy=uniform(depth, exits=exits), depth=depth) for depth in exits[:-1]),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One entry next to full depth, from one run.

    Attributes:
      entry: what was measured.
      ledger: quality of all batches, time of the first.
      quality: of the first batch, the one that is timed.
      timing: of the entry.
      baseline: which full-depth program was the fastest: `"full"`, the staircase with one stage, or
        `"full dense"`, the plain one.
      fastest: its timing, in the same rounds.
      routing: packing and unpacking alone; None where there is none.
    """

    entry: Entry
    ledger: Ledger
    quality: Quality
    timing: Timing
    baseline: str
    fastest: Timing
    routing: Timing | None


def measure_entries(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    entries: Sequence[Entry],
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    rounds: int = 5,
    progress: Callable[[], None] | None = None,
) -> list[Measured]:
    """Returns every entry's quality, cost and time.

    Quality and FLOPs come from all batches. Times come from the first batch, programs taking turns,
    against the faster of the repository's two full-depth programs; `speedup_ideal` is that batch's.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text; timing uses the first.
      entries: what to measure; must contain full depth.
      kv: what others see of frozen tokens.
      executor: how live slots are run.
      rounds: timed turns of each program.
      progress: called `count_steps` times in all.
    """
    policies = {entry.label: entry.policy for entry in entries}
    if "full" not in policies:
        raise ValueError("Wanted entries that contain full depth, the baseline. Got none.")
    depths_of: dict[str, np.ndarray] = {}

    def remember(name: str, batch: Batch, _: Comparison, depths: np.ndarray) -> None:
        if batch is batches[0]:
            depths_of[name] = depths

    look = partial(
        evaluate, decoder, params, policies=policies, kv=kv, executor=executor, progress=progress
    )
    first = look(batches[:1], observe=remember)
    rest = look(batches[1:]) if len(batches) > 1 else dict.fromkeys(policies, Quality())

    ids, lengths = jnp.asarray(batches[0].token_ids), jnp.asarray(batches[0].lengths)
    dense = jax.jit(score_dense, static_argnums=0)
    programs: dict[str, Callable[[], object]] = {
        label: partial(
            run_score, decoder, params, ids, lengths, policy=policy, kv=kv, executor=executor
        )
        for label, policy in policies.items()
    }
    programs["full dense"] = partial(dense, decoder, params, ids, lengths)
    times = time_programs(programs, rounds=rounds, progress=progress)
    baseline = min(("full", "full dense"), key=lambda name: times[name].median)
    routing = time_programs(
        {
            label: partial(
                routing_only,
                jnp.asarray(depths_of[label]),
                depths=policy.depths,
                dim=decoder.config.embed_dim,
                executor=executor,
            )
            for label, policy in policies.items()
            if len(policy.depths) > 1
        }
        or {"none": lambda: None},
        rounds=rounds,
    )
    measured = []
    for entry in entries:
        row = (first[entry.label] + rest[entry.label]).ledger(
            entry.policy.name, budget=entry.budget, num_layers=decoder.config.num_layers
        )
        timed = (times[entry.label], times[baseline], routing.get(entry.label))
        measured.append(
            Measured(
                entry=entry,
                ledger=_with_times(row, first[entry.label], *timed, params),
                quality=first[entry.label],
                timing=times[entry.label],
                baseline=baseline,
                fastest=times[baseline],
                routing=routing.get(entry.label),
            )
        )
    return measured


def measure(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    entries: Sequence[Entry],
    *,
    rounds: int = 5,
    **options: Any,
) -> list[Ledger]:
    """Returns one ledger row per entry, plus `uniform_hull` at every budget that occurs.

    Arguments are those of `measure_entries`.
    """
    found = measure_entries(decoder, params, batches, entries, rounds=rounds, **options)
    rows = [each.ledger for each in found]
    hull = uniform_hull(rows)
    budgets = sorted({entry.budget for entry in entries if entry.budget is not None})
    return rows + [_hull_row(rows[0], budget, hull(budget)) for budget in budgets]


def count_steps(entries: Sequence[Entry], batches: Sequence[Batch], *, rounds: int) -> int:
    """Returns how often `measure` calls `progress`."""
    return len(entries) * len(batches) + (len(entries) + 1) * (rounds + 1)


def _with_times(
    row: Ledger,
    timed: Quality,
    timing: Timing,
    fastest: Timing,
    routing: Timing | None,
    params: Params,
) -> Ledger:
    speedup, ideal = timing.speedup_over(fastest), timed.flops_full / timed.flops_ideal
    return dataclasses.replace(
        row,
        seconds_full=fastest.median,
        seconds=timing.median,
        speedup=speedup,
        speedup_ideal=ideal,
        efficiency=speedup / ideal,
        routing_overhead_pct=100 * routing.median / timing.median if routing is not None else None,
        compiles=timing.compiles,
        **conditions(params),
    )


def _hull_row(full: Ledger, budget: float, increase_pct: float | None) -> Ledger:
    """Returns a row of what is interpolated; the rest of it was not measured."""
    nll = (
        None
        if increase_pct is None or full.nll_full is None
        else full.nll_full * (1 + increase_pct / 100)
    )
    return Ledger(
        policy="uniform_hull",
        budget=budget,
        tokens=full.tokens,
        num_layers=full.num_layers,
        nll_full=full.nll_full,
        nll=nll,
        nll_increase_pct=increase_pct,
        flops_ratio=None if increase_pct is None else budget,
        device=full.device,
        dtype=full.dtype,
        versions=full.versions,
    )


def cut_batches(
    documents: Sequence[np.ndarray],
    *,
    batches: int,
    seed: int,
    rows: int = 16,
    width: int = 512,
) -> list[Batch]:
    """Returns batches of full windows, drawn without replacement from the joined documents.

    Args:
      documents: token ids.
      batches: at most so many.
      seed: of the draws.
      rows: of a batch.
      width: of a window, in tokens; at most the model's context.

    Raises:
      ValueError: the documents hold less than one batch, or batches < 1.
    """
    ids = np.concatenate(documents)
    windows = len(ids) // width
    if windows < rows or batches < 1:
        raise ValueError(
            f"Wanted at least one batch, and text of at least {rows * width} tokens. "
            f"Got batches={batches}, {len(ids)} tokens. Add files."
        )
    count = min(batches, windows // rows)
    chosen = np.random.default_rng(seed).permutation(windows)[: count * rows].reshape(count, rows)
    return [
        Batch(
            token_ids=np.stack([ids[w * width : (w + 1) * width] for w in each]).astype(np.int32),
            lengths=np.full(rows, width, np.int32),
            window=np.arange(index * rows, (index + 1) * rows),
        )
        for index, each in enumerate(chosen)
    ]
