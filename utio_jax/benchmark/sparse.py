# SPDX-License-Identifier: Apache-2.0
"""Part "sparse": scoring one long row, all or half of its tokens attending to a history alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.attention.history import History
from utio_jax.benchmark.passes import run_dense
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.timing import Timing, time_programs
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import ideal_flops, pass_flops, token_cost
from utio_jax.evaluation.flops import attention_flops
from utio_jax.policies.signals import Chance, Position
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import full_depth, run_score
from utio_jax.staircase.sparse import SparseAttention

HISTORY = History(recent=316, sinks=4)

SHARES = {"dense": 0.0, "all": 1.0, "half": 0.5}
"""Tokens that attend sparsely, by program."""


# It computes twice the other's scores, all at once: 34 GB of them at 16k tokens and 32 heads.
_PLAIN_AT_MOST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseTime:
    """One program's time and FLOPs.

    Attributes:
      timing: in the same rounds as the others.
      flops: executed.
      flops_choosing: of these, for choosing who attends to what.
      flops_ideal: with nothing padded and nothing chosen.
    """

    timing: Timing
    flops: float
    flops_choosing: float
    flops_ideal: float


def sparse_choices(history: History) -> dict[str, SparseAttention | None]:
    """Returns which tokens attend to a history alone, by the names in `SHARES`; half by chance."""
    choose = partial(SparseAttention, history=history)
    return {
        "dense": None,
        "all": choose(signal=Position(), thresholds=jnp.asarray([jnp.inf])),
        "half": choose(signal=Chance(key=jax.random.key(1)), thresholds=jnp.asarray([0.5])),
    }


def time_sparse(
    decoder: Decoder,
    params: Params,
    *,
    tokens: int,
    history: History = HISTORY,
    rounds: int = 5,
    executor: Executor = MicroBatches(),
    others: Mapping[str, Any] | None = None,
) -> dict[str, SparseTime]:
    """Returns times of scoring one row of random tokens, by the names in `SHARES`.

    Dense is the same executor, which skips the keys after each block of queries; `"plain"`, up to
    4,096 tokens, the plain program, which holds all scores at once.

    Args:
      decoder: the model.
      params: its parameters.
      tokens: of the row.
      history: what sparse tokens see.
      rounds: timed turns.
      executor: how live slots are run.
      others: programs that take turns with these; their FLOPs are 0.
    """
    layers = decoder.config.num_layers
    choices = sparse_choices(history)
    drawn = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (1, tokens))
    ids, lengths = jnp.asarray(drawn, jnp.int32), jnp.full(1, tokens)
    programs: dict[str, Any] = {
        name: partial(
            run_score,
            decoder,
            params,
            ids,
            lengths,
            policy=full_depth(decoder),
            executor=executor,
            attention=choice,
        )
        for name, choice in choices.items()
    }
    works = {name: program().work for name, program in programs.items()}
    if tokens <= _PLAIN_AT_MOST:
        programs["plain"] = partial(run_dense, decoder, params, ids, lengths)
    times = time_programs(programs | dict(others or {}), rounds=rounds)
    cost, found = token_cost(decoder, params), {}
    for name, timing in times.items():
        if name not in choices:
            found[name] = SparseTime(timing=timing, flops=0.0, flops_choosing=0.0, flops_ideal=0.0)
            continue
        choice, work = choices[name], works[name]
        gates = 0.0
        if choice is not None:
            gates = attention_flops(choice, decoder, params, work, segments=1)
        found[name] = SparseTime(
            timing=timing,
            flops=pass_flops(cost, work, gates=gates),
            flops_choosing=gates,
            flops_ideal=ideal_flops(
                cost,
                np.full((1, tokens), layers),
                key_widths=executor.key_widths(tokens),
                deepest=layers,
                keep_frozen=True,
                sparse_layers=np.full((1, tokens), SHARES[name] * layers),
                history=history.size,
            ),
        )
    return found


def sparse_group(
    bench: Bench, subject: Subject, context: int, *, history: History = HISTORY
) -> Group:
    """Returns rows of scoring one row as long as the context."""
    setting = {
        "batch": 1,
        "prompt": context,
        "context": context,
        "layers": subject.decoder.config.num_layers,
    }
    long = dataclasses.replace(subject, documents=None)
    rows = tuple(
        dataclasses.replace(
            plan(long, "sparse", name, {"context": context}, baseline="dense"), setting=setting
        )
        for name in ("dense", "sparse all", "sparse half")
    )

    def measure() -> list[Row]:
        wide = subject.stretched(context)
        found = time_sparse(
            wide.decoder, wide.params, tokens=context, history=history, rounds=bench.rounds
        )
        fulls = [name for name in ("dense", "plain") if name in found]
        dense = min(fulls, key=lambda name: found[name].timing.median)
        return [
            timed(
                dataclasses.replace(row, baseline=dense, note=wide.note),
                one.timing,
                bench,
                against=found[dense].timing,
                speedup_ideal=found["dense"].flops / one.flops_ideal,
                flops_ratio=one.flops / found["dense"].flops,
                flops=one.flops,
                tokens=context,
            ).noting(
                f"a sparse token sees {history.size} keys at most; which are sparse is injected"
            )
            for row in rows
            for one in (found[row.method.removeprefix("sparse ")],)
        ]

    return Group(title=f"sparse {subject.name} {context}", rows=rows, measure=measure)
