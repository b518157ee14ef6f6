# SPDX-License-Identifier: Apache-2.0
"""Suites: which parts, at which sizes; and the run that keeps every row it has measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from utio_jax.attention.history import History
from utio_jax.benchmark.engines import engine_group
from utio_jax.benchmark.execution import execution_groups
from utio_jax.benchmark.growth import growth_group
from utio_jax.benchmark.passes import memory_group, score_group
from utio_jax.benchmark.prompts import prompt_group
from utio_jax.benchmark.results import Recorder
from utio_jax.benchmark.rows import Bench, Group
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.sparse import sparse_group
from utio_jax.benchmark.startup import compile_group
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.texts import decode_group, lossless_group
from utio_jax.benchmark.throttling import throttle_group

HISTORY = History(recent=316, sinks=4)
"""What throttled and sparse tokens see."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """What is measured, for each model.

    Attributes:
      name: of the suite.
      parts: in the order of measuring; "execution" stands for `utio_jax.benchmark.execution`.
      models: that are measured unless others are named.
      policies: see `methods_of`; controls join them by themselves.
      score: batches and tokens per row of scoring; the last one also of "compile" and "memory".
      decode: batches, prompt and output lengths.
      prompts: batches, prompt and output lengths, of prompts that mostly stop early.
      lengths: tokens of a row that is scored with sparse attention.
      contexts: tokens of caches that are decoded from, some rows throttled.
      rows: of these.
      growth: values of each axis; its fixed batch and length are those of the first `score`.
      history: what throttled and sparse tokens see.
      rounds: timed turns of each program.
      minutes: after which no further group begins; None has no end.
    """

    name: str
    parts: tuple[str, ...]
    models: tuple[str, ...] = ("shipped",)
    policies: tuple[str, ...] = ("learned@0.6",)
    score: tuple[tuple[int, int], ...] = ((16, 512),)
    decode: tuple[tuple[int, int, int], ...] = ((1, 64, 56),)
    prompts: tuple[tuple[int, int, int], ...] = ((1, 448, 64),)
    lengths: tuple[int, ...] = (2048,)
    contexts: tuple[int, ...] = (2048,)
    rows: int = 8
    growth: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    history: History = HISTORY
    rounds: int = 5
    minutes: float | None = None

    @property
    def cache_tokens(self) -> int:
        """Tokens of the largest cache that the suite decodes from."""
        caches = [batch * (prompt + output) for batch, prompt, output in self.decode]
        if "throttle" in self.parts:
            caches += [self.rows * context for context in self.contexts]
        return max(caches, default=0)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="quick",
            parts=("score", "decode", "lossless", "prompt", "compile", "memory", "growth"),
            growth={"context": (128, 256, 512)},
        ),
        Suite(
            name="cpu",
            parts=(
                *("score", "decode", "lossless", "engine", "prompt", "sparse", "throttle"),
                *("compile", "memory", "growth", "execution"),
            ),
            policies=("learned@0.5", "learned@0.6", "learned@0.75", "utio_surrogate@0.6"),
            score=((4, 128), (1, 512), (16, 512)),
            decode=((1, 64, 120), (8, 64, 120), (32, 64, 120)),
            prompts=((1, 448, 64), (8, 448, 64)),
            lengths=(2048, 8192),
            contexts=(2048, 8192),
            growth={
                "prompt": (64, 128, 256, 512),
                "layers": (),
                "batch": (1, 4, 16),
                "context": (128, 256, 512, 1024, 2048),
                "buckets": (),
                "block": (64, 128, 256, 512, 1024),
            },
            rounds=7,
        ),
        Suite(
            name="accelerator",
            # What answers most per second comes first: a run that is out of time keeps it.
            parts=("execution", "score", "decode", "throttle", "growth", "sparse"),
            # Grouped queries: the cache of 4 x 64k tokens takes 34 GB in bfloat16; Llama's 137.
            models=("mistral-7b",),
            policies=("random@0.6",),
            score=((1, 2048), (16, 512)),
            decode=((1, 64, 64), (8, 64, 64), (32, 64, 64), (128, 64, 64), (256, 64, 64)),
            lengths=(4096, 16_384),
            contexts=(4096, 16_384, 65_536),
            rows=4,
            growth={"block": (64, 128, 256, 512, 1024)},
            minutes=9.0,
        ),
    )
}


def tiny(suite: Suite) -> Suite:
    """Returns the same suite at sizes that any machine runs at once: for a dry run."""
    sizes = {4096: 64, 16_384: 128, 65_536: 256}
    return dataclasses.replace(
        suite,
        models=("tiny",),
        policies=("random@0.6",),
        score=((2, 64),),
        decode=((1, 16, 8), (2, 16, 8)),
        prompts=((2, 48, 8),),
        lengths=(64,),
        contexts=tuple(dict.fromkeys(sizes.get(context, 64) for context in suite.contexts)),
        rows=2,
        growth={
            axis: {"block": (32, 64), "context": (64,)}.get(axis, (32, 64)) if values else ()
            for axis, values in suite.growth.items()
        },
        history=History(recent=20, sinks=2),
        rounds=2,
    )


def groups_of(suite: Suite, subject: Subject, bench: Bench) -> list[Group]:
    """Returns all groups of a model, in order."""
    named = suite.policies
    batch, width = suite.score[-1]
    first = suite.score[0]
    makers: dict[str, Callable[[], list[Group]]] = {
        "score": lambda: [score_group(bench, subject, *shape, named) for shape in suite.score],
        "decode": lambda: [decode_group(bench, subject, shape, named) for shape in suite.decode],
        "lossless": lambda: [lossless_group(bench, subject, shape) for shape in suite.decode],
        "engine": lambda: [
            engine_group(bench, subject, shape, named) for shape in suite.decode if shape[0] > 1
        ],
        "prompt": lambda: [prompt_group(bench, subject, shape) for shape in suite.prompts],
        "sparse": lambda: [
            sparse_group(bench, subject, tokens, history=suite.history) for tokens in suite.lengths
        ],
        "throttle": lambda: [
            throttle_group(bench, subject, context, suite.rows, history=suite.history)
            for context in suite.contexts
        ],
        "compile": lambda: [compile_group(subject, batch, width, named[:1])],
        "memory": lambda: [memory_group(subject, batch, width, named[:1])],
        "growth": lambda: [
            growth_group(
                bench, subject, axis, values, batch=first[0], width=first[1], name=named[0]
            )
            for axis, values in suite.growth.items()
        ],
        "execution": lambda: execution_groups(
            bench,
            subject,
            tokens=width,
            batch=suite.decode[-1][0],
            context=suite.contexts[0],
        ),
    }
    return [group for part in suite.parts for group in makers[part]()]


def run_groups(
    groups: Iterable[Group],
    recorder: Recorder,
    *,
    started: float,
    say: Callable[[str], None],
    note: str = "",
    minutes: float | None = None,
) -> bool:
    """Measures groups that the recorder does not have; returns whether all are measured.

    What cannot run is recorded as that: a group's ValueErrors and the device's errors become notes
    of its rows.

    Args:
      groups: in order.
      recorder: keeps each group's rows as soon as they are known.
      started: when the run began, of `time.perf_counter`.
      say: tells what comes next.
      note: of every row.
      minutes: after which no further group begins.
    """
    complete = True
    for group in groups:
        if all(row.key in recorder.rows for row in group.rows):
            continue
        if minutes is not None and time.perf_counter() - started > 60 * minutes:
            say(f"out of time: {group.title} is left to --resume")
            complete = False
            continue
        say(group.title)
        rows: Sequence[Row]
        try:
            rows = group.measure()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            say(f"  did not run: {reason}")
            rows = [row.failed(reason) for row in group.rows]
        recorder.add([row.noting(note) for row in rows], seconds=time.perf_counter() - started)
        # The programs of a whole suite use up a process' memory maps; no group needs another's.
        jax.clear_caches()
    return complete


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run in a line: counts, and what each part's first routed row says."""
    rows = results["rows"]
    return {
        "row_count": len(rows),
        "did_not_run": sum(not row["ran"] for row in rows),
        "fell_back": sum(bool(row["fallbacks"]) for row in rows),
        "speedups": {
            row["key"]: row["speedup"]["median"]
            for row in rows
            if row["speedup"] is not None and row["part"] in ("score", "decode", "lossless")
        },
    }
