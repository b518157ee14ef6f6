# SPDX-License-Identifier: Apache-2.0
"""Part "profit": a grid of batches, contexts and depth histograms, half to fit and half to score.

Depths are injected (`given_depths`), so that the histogram is exactly the one in question.
`utio_jax.benchmark.predictions` fits and scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from utio_jax.benchmark.passes import dealt_depths, pass_programs
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Method, Subject
from utio_jax.benchmark.timing import Timing, time_programs
from utio_jax.policies.depth import given_depths

SHARES = (
    (0.0, 0.0, 1.0),  # Everyone goes on: what splitting costs by itself.
    (0.1, 0.2, 0.7),
    (0.3, 0.4, 0.3),
    (0.7, 0.2, 0.1),
)
"""Of tokens that stop at the first exit, at a middle one, and at the last layer."""


def profit_group(
    bench: Bench, subject: Subject, batches: Sequence[int], contexts: Sequence[int]
) -> Group:
    """Returns rows of every batch, context and histogram, all of them taking turns.

    One group: shapes that were measured one after the other would each have met another load of
    the machine, and a fit across them would be one of that.
    """
    exits, title = subject.decoder.config.exits, f"profit {subject.name}"
    depths = tuple(sorted({exits[0], exits[len(exits) // 2], exits[-1]}))
    if len(depths) < 3:
        row = plan(subject, "profit", "given", {}, baseline="full")
        reason = f"{subject.name} has {len(exits)} exits; the histograms need 3"
        return Group(title=title, rows=(row,), measure=lambda: [row.failed(reason)])
    shapes = [
        _Shape(subject=subject, batch=batch, context=context, depths=depths, diagonal=down + across)
        for down, batch in enumerate(batches)
        for across, context in enumerate(contexts)
    ]

    def measure() -> list[Row]:
        programs = {
            f"{label} {shape.batch} {shape.context}": program
            for shape in shapes
            for label, program in shape.programs().items()
        }
        times = time_programs(programs, rounds=bench.rounds)
        return [row for shape in shapes for row in shape.measured(bench, times)]

    rows = tuple(row for shape in shapes for row in shape.rows())
    return Group(title=title, rows=rows, measure=measure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """A batch and a context, with every histogram.

    Attributes:
      subject: the model.
      batch: rows.
      context: tokens per row.
      depths: at which tokens stop.
      diagonal: of the chequerboard of what is held out.
    """

    subject: Subject
    batch: int
    context: int
    depths: tuple[int, ...]
    diagonal: int

    @property
    def histograms(self) -> dict[str, dict[int, float]]:
        """Full depth, then those of `SHARES`, by label."""
        given = {
            "given:" + "-".join(f"{100 * share:.0f}" for share in shares): dict(
                zip(self.depths, shares, strict=True)
            )
            for shares in SHARES
        }
        return {"full": {self.depths[-1]: 1.0}, **given}

    def rows(self) -> list[Row]:
        """Returns the rows as planned: every shape and every histogram is in both halves."""
        setting = {"batch": self.batch, "prompt": self.context}
        more = {"context": self.context, "layers": self.subject.decoder.config.num_layers}
        return [
            dataclasses.replace(
                plan(self.subject, "profit", label, setting, baseline="full"),
                setting={**setting, **more},
                profit=_point(histogram, held_out=(self.diagonal + index) % 2 == 1),
            )
            for index, (label, histogram) in enumerate(self.histograms.items())
        ]

    def programs(self) -> dict[str, Any]:
        """Returns the programs by label, with both of full depth."""
        shape = (self.batch, self.context)
        methods = [
            Method(
                label=label,
                policy=given_depths(
                    jnp.asarray(dealt_depths(histogram, shape)), depths=self.depths
                ),
            )
            for label, histogram in self.histograms.items()
            if label != "full"
        ]
        return pass_programs(self.subject, *shape, methods)

    def measured(self, bench: Bench, times: Mapping[str, Timing]) -> list[Row]:
        """Returns the rows with their times; full depth's is that of its fastest program."""
        mine = lambda label: times[f"{label} {self.batch} {self.context}"]  # noqa: E731
        fastest = min(("full", "full dense"), key=lambda label: mine(label).median)
        done = []
        for row in self.rows():
            timing = mine(fastest if row.method == "full" else row.method)
            known: Any = row.profit
            row = dataclasses.replace(
                row, baseline=fastest, profit={**known, "measured_seconds": timing.median}
            )
            tokens = self.batch * self.context
            row = timed(row, timing, bench, against=mine(fastest), tokens=tokens)
            done.append(row.noting("depths are injected"))
        return done


def _point(histogram: Mapping[int, float], *, held_out: bool) -> dict[str, Any]:
    return {
        "histogram": {str(depth): share for depth, share in histogram.items()},
        "predicted_seconds": None,
        "measured_seconds": None,
        "held_out": held_out,
    }
