# SPDX-License-Identifier: Apache-2.0
"""Ledger rows: quality, cost and time of policies next to their controls, in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.subjects import Method
from utio_jax.bench.timing import Timing, time_programs
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.files import conditions
from utio_jax.evaluation.evaluate import Quality, evaluate
from utio_jax.evaluation.ledger import Ledger
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import run_score, score_dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """One policy next to full depth, from one run: quality of all batches, time of the first.

    `baseline` says which full-depth program was the fastest, `"full"`, the staircase with one
    stage, or `"full dense"`, the plain one; `fastest` is its timing, in the same rounds.
    """

    ledger: Ledger
    timing: Timing
    baseline: str
    fastest: Timing


def measure_policies(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    methods: Sequence[Method],
    *,
    executor: Executor = MicroBatches(),
    rounds: int = 5,
    progress: Callable[[], None] | None = None,
) -> dict[str, Scored]:
    """Returns every method's quality, cost and time, by label.

    Quality and FLOPs come from all batches. Times come from the first batch, programs taking turns,
    against the faster of the repository's two full-depth programs; `speedup_ideal` is that batch's.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text; timing uses the first.
      methods: with policies; must contain full depth, labelled "full".
      executor: how live slots are run.
      rounds: timed turns of each program.
      progress: called `count_steps` times in all.
    """
    policies = {each.label: each.policy for each in methods if each.policy is not None}
    if "full" not in policies:
        raise ValueError("Wanted methods that contain full depth, the baseline. Got none.")
    look = partial(
        evaluate, decoder, params, policies=policies, executor=executor, progress=progress
    )
    first = look(batches[:1])
    rest = look(batches[1:]) if len(batches) > 1 else dict.fromkeys(policies, Quality())

    ids, lengths = jnp.asarray(batches[0].token_ids), jnp.asarray(batches[0].lengths)
    dense = jax.jit(score_dense, static_argnums=0)
    scored = partial(run_score, decoder, params, ids, lengths, kv="propagate", executor=executor)
    programs: dict[str, Callable[[], object]] = {
        label: partial(scored, policy=policy) for label, policy in policies.items()
    }
    programs["full dense"] = partial(dense, decoder, params, ids, lengths)
    times = time_programs(programs, rounds=rounds, progress=progress)
    baseline = min(("full", "full dense"), key=lambda name: times[name].median)
    fastest, found = times[baseline], {}
    for label, budget in ((each.label, each.budget) for each in methods if each.label in policies):
        row = (first[label] + rest[label]).ledger(
            policies[label].name, budget=budget, num_layers=decoder.config.num_layers
        )
        timing = times[label]
        speedup = timing.speedup_over(fastest)
        ideal = first[label].flops_full / first[label].flops_ideal
        row = dataclasses.replace(
            row,
            seconds_full=fastest.median,
            seconds=timing.median,
            speedup=speedup,
            speedup_ideal=ideal,
            efficiency=speedup / ideal,
            compiles=timing.compiles,
            **conditions(params),
        )
        found[label] = Scored(ledger=row, timing=timing, baseline=baseline, fastest=fastest)
    return found


def count_steps(methods: Sequence[Method], batches: Sequence[Batch], *, rounds: int) -> int:
    """Returns how often `measure_policies` calls `progress`."""
    return len(methods) * len(batches) + (len(methods) + 1) * (rounds + 1)


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
