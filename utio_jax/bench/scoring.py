# SPDX-License-Identifier: Apache-2.0
"""Ledger rows: quality, cost and time of policies next to their controls, in one run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.methods import Method
from utio_jax.bench.timing import Timed, time_programs, timed_ledger
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.evaluation.evaluate import Quality, evaluate
from utio_jax.policies.depth import full_by_program, shared_program
from utio_jax.policies.signals import Chance, Position
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE
from utio_jax.staircase.reference import positions_of
from utio_jax.staircase.score import run_score, score_dense


def measure_policies(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    methods: Sequence[Method],
    *,
    executor: Executor | Literal["auto"] = "auto",
    rounds: int = 5,
    timed: Collection[str] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timed]:
    """Returns every method's quality, cost and time, by label.

    Quality and FLOPs come from all batches. Times come from the first batch, programs taking turns,
    against the faster of the repository's two full-depth programs: `"full"`, the staircase in which
    no token stops, or `"full dense"`, the plain one. `speedup_ideal` is that batch's.

    All methods have policies, and one is full depth, labelled "full". `executor` is that of
    `evaluate`: `"auto"` runs what `score` runs. `timed` are labels of those
    to time next to it; None: all. `progress` is called once per method and batch, and after each
    timed or warming turn.
    """
    policies: dict[str, Any] = {method.label: method.policy for method in methods}
    if "full" not in policies:
        raise ValueError("Wanted methods that contain full depth, the baseline. Got none.")
    look = partial(
        evaluate, decoder, params, policies=policies, executor=executor, progress=progress
    )
    first = look(batches[:1])
    others = look(batches[1:]) if len(batches) > 1 else dict.fromkeys(policies, Quality())

    ids, lengths = jnp.asarray(batches[0].token_ids), jnp.asarray(batches[0].lengths)
    rows = ids, positions_of(ids, lengths)[0]
    dense = jax.jit(score_dense, static_argnums=0)
    # Called as `evaluate` calls it: arguments that are left out would be another program.
    options: dict[str, Any] = {"kv": "propagate", "executor": executor, "mesh": None}
    scored = partial(run_score, decoder, params, ids, lengths, attention=DENSE, **options)
    width = batches[0].token_ids.shape[1]
    packed = [
        policy
        for policy in policies.values()
        if isinstance(choose_executor(executor, policy, width), MicroBatches)
    ]
    programs: dict[str, Callable[[], object]] = {}
    for label, policy in policies.items():
        if timed is not None and label not in (*timed, "full"):
            continue
        if label == "full":
            policy = full_by_program(packed, decoder.config.num_layers) or policy
        # Chance and positions cost nothing to know: one program serves all of their tables.
        free = isinstance(getattr(policy, "signal", None), (Chance, Position))
        policy = shared_program(policy, *(rows if free else ()))
        programs[label] = partial(scored, policy=policy)
    programs["full dense"] = partial(dense, decoder, params, ids, lengths)
    times = time_programs(programs, rounds=rounds, progress=progress)
    baseline = min(("full", "full dense"), key=lambda name: times[name].median)
    measured = {}
    for method in methods:
        label = method.label
        row = (first[label] + others[label]).ledger(
            policies[label].name, budget=method.budget, num_layers=decoder.config.num_layers
        )
        if label not in times:
            measured[label] = Timed(ledger=row)
            continue
        measured[label] = timed_ledger(
            row,
            times[label],
            against=times[baseline],
            baseline=baseline,
            ideal=first[label].flops_full / first[label].flops_ideal,
        )
    return measured


def full_rows(
    documents: Sequence[np.ndarray], *, rows: int, width: int, batches: int, vocab_size: int
) -> list[Batch]:
    """Returns batches of full rows (no padding), drawn over the joined documents.

    Raises:
      ValueError: the documents hold less than one batch, or batches < 1.
    """
    ids = np.concatenate(documents)
    windows = len(ids) // width
    if windows < rows:
        raise ValueError(
            f"Wanted text of at least {rows * width} tokens. Got {len(ids)}. Add files."
        )
    read, _ = sample_batches(
        [ids[: windows * (width - 1) + 1]],  # Windows overlap by a token: the last is full, too.
        rows=rows,
        width=width,
        vocab_size=vocab_size,
        batches=min(batches, windows // rows),
    )
    return read
