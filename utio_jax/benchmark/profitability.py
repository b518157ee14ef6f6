# SPDX-License-Identifier: Apache-2.0
"""Part "profit": a grid of batches, contexts and depth histograms, half to fit and half to score.

Depths are injected (`GivenDepths`), so that the histogram is exactly the one in question. All
histograms of a shape take turns with full depth. `predict` then fits `utio_jax.profit` on one half
of the points and writes its predictions into all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from utio_jax.artifacts import conditions
from utio_jax.benchmark.passes import given_depths, pass_programs
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Method, Subject
from utio_jax.cost import token_cost
from utio_jax.policies import GivenDepths
from utio_jax.profit import Profit, Stages, expected_stages, fit_rates, routing_pays
from utio_jax.timing import time_programs

SHARES = (
    (0.0, 0.0, 1.0),  # Everyone goes on: what splitting costs by itself.
    (0.1, 0.2, 0.7),
    (0.3, 0.4, 0.3),
    (0.7, 0.2, 0.1),
)
"""Of tokens that stop at the first exit, at a middle one, and at the last layer."""

TOLERANCE = 0.1
"""Of the measured time; or within its quartiles."""


def profit_groups(
    bench: Bench, subject: Subject, batches: Sequence[int], contexts: Sequence[int]
) -> list[Group]:
    """Returns a group per batch and context, each with every histogram."""
    exits = subject.decoder.config.exits
    depths = tuple(sorted({exits[0], exits[len(exits) // 2], exits[-1]}))
    if len(depths) < 3:
        row = plan(subject, "profit", "given", {}, baseline="full")
        reason = f"{subject.name} has {len(exits)} exits; the histograms need 3"
        return [Group(title="profit", rows=(row,), measure=lambda: [row.failed(reason)])]
    return [
        _group(bench, subject, depths, (batch, context), row + column)
        for row, batch in enumerate(batches)
        for column, context in enumerate(contexts)
    ]


def _group(
    bench: Bench, subject: Subject, depths: tuple[int, ...], shape: tuple[int, int], diagonal: int
) -> Group:
    batch, context = shape
    setting = {"batch": batch, "prompt": context}
    full = {depths[-1]: 1.0}
    histograms = {
        "given:" + "-".join(f"{100 * share:.0f}" for share in shares): dict(
            zip(depths, shares, strict=True)
        )
        for shares in SHARES
    }

    def planned(label: str, histogram: Mapping[int, float], held_out: bool) -> Row:
        row = plan(subject, "profit", label, setting, baseline="full")
        return dataclasses.replace(
            row,
            setting={**setting, "context": context, "layers": subject.decoder.config.num_layers},
            profit=_point(histogram, None, held_out),
        )

    # A chequerboard: every shape and every histogram is in both halves.
    rows = [planned("full", full, held_out=diagonal % 2 == 1)]
    rows += [
        planned(label, histogram, held_out=(diagonal + index) % 2 == 1)
        for index, (label, histogram) in enumerate(histograms.items())
    ]

    def measure() -> list[Row]:
        methods = [
            Method(
                label=label,
                policy=GivenDepths(
                    depth_of_token=jnp.asarray(given_depths(histogram, shape)), depths=depths
                ),
            )
            for label, histogram in histograms.items()
        ]
        times = time_programs(pass_programs(subject, *shape, methods), rounds=bench.rounds)
        fastest = min(("full", "full dense"), key=lambda name: times[name].median)
        done = []
        for row in rows:
            timing = times[fastest if row.method == "full" else row.method]
            known: Any = row.profit
            row = dataclasses.replace(
                row,
                baseline=fastest,
                profit={**known, "measured_seconds": timing.median},
            )
            done.append(
                timed(row, timing, bench, against=times[fastest], tokens=batch * context).noting(
                    "depths are injected"
                )
            )
        return done

    return Group(
        title=f"profit {subject.name} {batch} x {context}", rows=tuple(rows), measure=measure
    )


def _point(
    histogram: Mapping[int, float], measured: float | None, held_out: bool
) -> dict[str, Any]:
    return {
        "histogram": {str(depth): share for depth, share in histogram.items()},
        "predicted_seconds": None,
        "measured_seconds": measured,
        "held_out": held_out,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A fitted model of profitability, and how well it foretells what it was not fitted on.

    Attributes:
      profit: the coefficients.
      rows: with their predictions.
      held_out: routed points that were not fitted.
      within: of these, predicted within `TOLERANCE` or between the measured quartiles.
      decisions: of these, `routing_pays` is right about; points whose speed-up has 1 between its
        quartiles are right either way.
    """

    profit: Profit
    rows: tuple[Row, ...]
    held_out: int
    within: int
    decisions: int

    def summary(self) -> dict[str, Any]:
        """Returns the counts, JSON-ready."""
        return {name: getattr(self, name) for name in ("held_out", "within", "decisions")}


def predict(subject: Subject, rows: Iterable[Row]) -> Prediction | None:
    """Returns the model fitted on the rows that are not held out; None without such rows."""
    cost = token_cost(subject.decoder, subject.params)
    points = [row for row in rows if row.profit and row.ran and row.seconds is not None]

    def stages(row: Row) -> Stages:
        return expected_stages(
            cost,
            _histogram(row),
            batch=row.setting["batch"],
            context=row.setting["context"],
        )

    def fit(is_full: bool) -> Any:
        chosen = [
            row for row in points if (row.method == "full") == is_full and not _is_held_out(row)
        ]
        seconds = [row.seconds.median for row in chosen if row.seconds is not None]
        return fit_rates([stages(row) for row in chosen], seconds) if chosen else None

    full, routed = fit(True), fit(False)
    if full is None or routed is None:
        return None
    where = conditions(subject.params)
    profit = Profit(
        cost=cost,
        num_layers=subject.decoder.config.num_layers,
        routed=routed,
        full=full,
        device=where["device"],
        dtype=where["dtype"],
    )
    done = []
    for row in points:
        rates = full if row.method == "full" else routed
        known: Any = row.profit
        predicted = {**known, "predicted_seconds": rates.seconds(stages(row))}
        done.append(dataclasses.replace(row, profit=predicted))
    held = [row for row in done if row.method != "full" and _is_held_out(row)]
    return Prediction(
        profit=profit,
        rows=tuple(done),
        held_out=len(held),
        within=sum(map(_is_within, held)),
        decisions=sum(_is_decided(profit, row) for row in held),
    )


def _histogram(row: Row) -> dict[int, float]:
    return {int(depth): share for depth, share in (row.profit or {})["histogram"].items()}


def _is_held_out(row: Row) -> bool:
    return bool((row.profit or {})["held_out"])


def _is_within(row: Row) -> bool:
    predicted, seconds = (row.profit or {})["predicted_seconds"], row.seconds
    assert seconds is not None
    near = abs(predicted - seconds.median) <= TOLERANCE * seconds.median
    return near or seconds.low <= predicted <= seconds.high


def _is_decided(profit: Profit, row: Row) -> bool:
    if row.speedup is None:
        return False
    if row.speedup.low <= 1.0 <= row.speedup.high:
        return True
    setting = row.setting
    pays = routing_pays(profit, setting["batch"], setting["context"], _histogram(row))
    return pays == (row.speedup.median > 1.0)
