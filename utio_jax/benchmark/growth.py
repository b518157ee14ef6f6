# SPDX-License-Identifier: Apache-2.0
"""Part "growth": how time grows with tokens, depth, batch, context, buckets and block size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from utio_jax.benchmark.decoding import STAGE_REPEATS, stage_program
from utio_jax.benchmark.passes import dealt_depths, pass_programs
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Method, Subject, methods_of
from utio_jax.benchmark.timing import Timing, time_programs
from utio_jax.policies.depth import given_depths, uniform
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import run_score

AXES = ("prompt", "layers", "batch", "context", "buckets", "block")


def growth_group(
    bench: Bench,
    subject: Subject,
    axis: str,
    values: Sequence[int],
    *,
    batch: int,
    width: int,
    name: str,
) -> Group:
    """Returns a row per program and value of one axis, all taking turns.

    - `prompt`, `batch`: full depth and a routed policy.
    - `layers`: truncation at each exit.
    - `context`: one decoding step of so many slots.
    - `buckets`: half of the tokens at the first exit and half at the last, by policies with
      boundaries between: what a boundary costs that nobody stops at.
    - `block`: micro-batches of so many slots.

    Args:
      bench: what it is measured with.
      subject: the model.
      axis: one of `AXES`.
      values: of it. For layers and buckets empty: the model's exits say.
      batch: rows, unless they are varied.
      width: tokens per row, unless they are varied.
      name: of the routed policy, see `methods_of`.
    """
    exits = subject.decoder.config.exits
    known = {"layers": exits, "buckets": tuple(range(2, len(exits) + 1))}
    points = [
        _Point(axis=axis, value=value, setting=_setting(subject, axis, value, batch, width))
        for value in known.get(axis, values)
    ]
    methods = {"prompt": ("full", name), "batch": ("full", name), "layers": ("uniform",)}
    labels = methods.get(axis, ("full", "given") if axis in ("buckets", "block") else ("step",))
    rows = {
        (point.value, label): plan(subject, "growth", label, point.setting)
        for point in points
        for label in labels
    }

    def measure() -> list[Row]:
        programs: dict[tuple[int, str], Any] = {}
        for point in points:
            programs |= {
                (point.value, label): program
                for label, program in point.programs(subject, name).items()
            }
        names = {str(pair): pair for pair in programs}
        times = time_programs(
            {text: programs[pair] for text, pair in names.items()}, rounds=bench.rounds
        )
        by_pair = {pair: times[text] for text, pair in names.items()}
        return [_row(bench, row, by_pair, *pair) for pair, row in rows.items()]

    title = f"growth {subject.name} {axis}"
    return Group(title=title, rows=tuple(rows.values()), measure=measure)


def _setting(subject: Subject, axis: str, value: int, batch: int, width: int) -> dict[str, Any]:
    if axis == "context":
        return {"batch": batch, "context": value, "axis": axis}
    setting = {"batch": batch, "prompt": width, axis: value}
    layers = {} if axis == "layers" else {"layers": subject.decoder.config.num_layers}
    return {**setting, **layers, "context": setting["prompt"], "axis": axis}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Point:
    """One value of an axis."""

    axis: str
    value: int
    setting: Mapping[str, Any]

    def programs(self, subject: Subject, name: str) -> dict[str, Any]:
        """Returns the point's programs by label."""
        batch = self.setting["batch"]
        if self.axis == "context":
            wide = subject.stretched(self.value)
            stage = partial(stage_program, wide.decoder, wide.params)
            return {"step": stage(batch=batch, tokens=1, width=self.value)}
        width = self.setting["prompt"]
        if self.axis == "layers":
            cut = Method(label="uniform", policy=uniform(self.value))
            return {"uniform": pass_programs(subject, batch, width, [cut])["uniform"]}
        if self.axis in ("prompt", "batch"):
            named = [m for m in methods_of(subject, [name], width=width) if m.label == name]
            if not named or named[0].policy is None:
                raise ValueError(
                    named[0].missing if named else f"{name} is no policy with a budget"
                )
            return pass_programs(subject, batch, width, named)
        exits = subject.decoder.config.exits
        if len(exits) == 1:
            raise ValueError(f"{subject.name} has no exit before its last layer")
        halves = {exits[0]: 0.5, exits[-1]: 0.5}
        buckets = self.value if self.axis == "buckets" else 2
        policy = given_depths(
            jnp.asarray(dealt_depths(halves, (batch, width))),
            depths=(*exits[: buckets - 1], exits[-1]),
        )
        given = Method(label="given", policy=policy)
        programs = pass_programs(subject, batch, width, [given])
        if self.axis == "block":
            programs["given"] = partial(
                run_score,
                *programs["given"].args,
                policy=policy,
                executor=MicroBatches(block=self.value, query_block=min(128, self.value)),
            )
        return programs


def _row(
    bench: Bench, row: Row, times: Mapping[tuple[int, str], Timing], value: int, label: str
) -> Row:
    timing = times[value, label]
    if label == "step":
        return timed(row, timing, bench, calls=STAGE_REPEATS, tokens=row.setting["batch"])
    tokens = row.setting["batch"] * row.setting["prompt"]
    fulls = [name for name in ("full", "full dense") if (value, name) in times]
    if not fulls:
        return timed(row, timing, bench, tokens=tokens)
    fastest = min(fulls, key=lambda name: times[value, name].median)
    if label == "full":  # The curve of full depth is its fastest program's.
        timing = times[value, fastest]
    row = dataclasses.replace(row, baseline=fastest)
    if label == "given":
        row = row.noting("depths are injected: half of the tokens at the first exit")
    return timed(row, timing, bench, against=times[value, fastest], tokens=tokens)
