# SPDX-License-Identifier: Apache-2.0
"""Suites: which parts, at which sizes; and the run that keeps every row it has measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from utio_jax.bench.parts import decode_group, lossless_group, score_group
from utio_jax.bench.results import Group, Row, save_results
from utio_jax.bench.subjects import Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """What is measured, for each model.

    Attributes:
      parts: in the order of measuring.
      models: that are measured unless others are named.
      policies: see `methods_of`; controls join them by themselves.
      score: batches and tokens per row of scoring.
      decode: batches, prompt and output lengths.
      rounds: timed turns of each program.
    """

    parts: tuple[str, ...]
    models: tuple[str, ...] = ("shipped",)
    policies: tuple[str, ...] = ("learned@0.75",)
    score: tuple[tuple[int, int], ...] = ((16, 512),)
    decode: tuple[tuple[int, int, int], ...] = ((1, 64, 56),)
    rounds: int = 5

    @property
    def cache_tokens(self) -> int:
        """Tokens of the largest cache that the suite decodes from."""
        return max((batch * (prompt + output) for batch, prompt, output in self.decode), default=0)


SUITES = {
    "quick": Suite(parts=("score", "decode", "lossless")),
    "cpu": Suite(
        parts=("score", "decode", "lossless"),
        policies=("learned@0.6", "learned@0.75", "learned@0.9", "utio_surrogate@0.75"),
        score=((4, 128), (1, 512), (16, 512)),
        decode=((1, 64, 120), (8, 64, 120), (32, 64, 120)),
        rounds=7,
    ),
    "accelerator": Suite(
        parts=("score", "decode"),
        models=("mistral-7b",),
        policies=("random@0.6",),
        score=((1, 2048), (16, 512)),
        decode=((1, 64, 64), (8, 64, 64), (32, 64, 64), (128, 64, 64), (256, 64, 64)),
    ),
}


def tiny(suite: Suite) -> Suite:
    """Returns the same suite at sizes that any machine runs at once: for a dry run."""
    return dataclasses.replace(
        suite,
        models=("tiny",),
        policies=("random@0.6",),
        score=((2, 64),),
        decode=((1, 16, 8), (2, 16, 8)),
        rounds=2,
    )


def groups_of(suite: Suite, subject: Subject) -> list[Group]:
    """Returns all groups of a model, in order."""
    named, rounds = suite.policies, suite.rounds
    makers: dict[str, Callable[[], list[Group]]] = {
        "score": lambda: [score_group(subject, shape, named, rounds) for shape in suite.score],
        "decode": lambda: [decode_group(subject, shape, named, rounds) for shape in suite.decode],
        "lossless": lambda: [lossless_group(subject, shape, rounds) for shape in suite.decode],
    }
    return [group for part in suite.parts for group in makers[part]()]


def run_groups(
    file: Path,
    groups: Iterable[Group],
    head: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    note: str = "",
) -> dict[str, Any]:
    """Measures groups, keeps the rows of each on disk as soon as they are known, and returns all.

    So an interruption, which ends the run, loses what was under way. What cannot run is recorded as
    that: a group's ValueErrors and the device's errors become notes of its rows.

    Args:
      file: to write, in place of what is there.
      groups: in order.
      head: see `save_results`.
      say: is given a line of progress.
      note: of every row.
    """
    started, rows = time.perf_counter(), dict[str, Row]()

    def save(*, complete: bool) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        return save_results(file, head, rows.values(), complete=complete, seconds=seconds)

    save(complete=False)
    try:
        for group in groups:
            say(group.title)
            found: Sequence[Row]
            try:
                found = group.measure()
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                say(f"  did not run: {reason}")
                found = [row.failed(reason) for row in group.rows]
            rows |= {row.key: row.noting(note) for row in found}
            save(complete=False)
            # The programs of a whole suite use up a process' memory maps; no group needs another's.
            jax.clear_caches()
    except KeyboardInterrupt:
        say(f"interrupted: {file} holds what was measured")
        return save(complete=False)
    return save(complete=True)


BEARABLE_PCT = 1.0  # Of loss, for what saves time.


def conclude(rows: Iterable[Row]) -> str:
    """Returns what to do on this machine, in a sentence: the fastest way at a bearable loss.

    A loss that is not known is not bearable, but for drafts, whose tokens are the full model's.
    """
    faster = [
        (row.gain, 0.0 if row.part == "lossless" else row.nll_increase_pct, row)
        for row in rows
        if row.gain is not None and row.gain > 1.0 and not row.speed_only
    ]
    unknown = [gain for gain, loss, _ in faster if loss is None]
    gains = [(gain, row) for gain, loss, row in faster if loss is not None and loss <= BEARABLE_PCT]
    if gains:
        gain, best = max(gains, key=lambda each: each[0])
        return (
            f"Fastest here at no more than +{BEARABLE_PCT:g} % of loss: {best.key}, {gain:.2f} "
            f"times as fast as {best.baseline}."
        )
    if unknown:
        return (
            f"Up to {max(unknown):.2f} times as fast as the model in full, {len(unknown)} ways at "
            "a loss that was not measured here: see --parts score, or utio-jax compare."
        )
    return "Nothing that was measured here is faster than the model in full: use that."
