# SPDX-License-Identifier: Apache-2.0
"""Rows before they were run: times that are fitted on some of them and foretold for the others.

`predict` fits `utio_jax.accounting.profit` on the half of part "profit" that is not held out, and
`utio_jax.accounting.step_profit` on the rows of part "decode" that stop tokens by chance; it
writes its predictions into all rows, and scores them on the policies', which were not fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from utio_jax.accounting.profit import Profit, Stages, expected_stages, fit_rates, routing_pays
from utio_jax.accounting.step_profit import StepRates, expected_step_depth, fit_steps, predict_step
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.texts import PLAIN
from utio_jax.core.files import conditions
from utio_jax.core.flops import token_cost

TOLERANCE = 0.1
"""Of the measured time; or within its quartiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How well times were foretold that were not fitted.

    Attributes:
      held_out: routed rows that were not fitted.
      within: of these, predicted within `TOLERANCE` or between the measured quartiles.
      decisions: of these, it is foretold rightly whether they pay; rows whose speed-up has 1
        between its quartiles are right either way.
    """

    held_out: int
    within: int
    decisions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A fitted model of profitability.

    Attributes:
      profit: the coefficients.
      rows: with their predictions.
      passes: how well it foretells passes.
      decoding: how well it foretells decoding.
    """

    profit: Profit
    rows: tuple[Row, ...]
    passes: Score
    decoding: Score

    def summary(self) -> dict[str, Any]:
        """Returns the counts, JSON-ready."""
        return {**dataclasses.asdict(self.passes), "decoding": dataclasses.asdict(self.decoding)}


def predict(subject: Subject, rows: Iterable[Row]) -> Prediction | None:
    """Returns the model fitted on the rows that are not held out; None without a grid of passes."""
    cost, rows = token_cost(subject.decoder, subject.params), [row for row in rows if row.ran]
    points = [row for row in rows if row.part == "profit" and row.seconds is not None]

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
    done = []
    for row in points:
        rates = full if row.method == "full" else routed
        known: Any = row.profit
        predicted = {**known, "predicted_seconds": rates.seconds(stages(row))}
        done.append(dataclasses.replace(row, profit=predicted))
    where, (steps, decoded) = conditions(subject.params), _predict_steps(subject, rows)
    profit = Profit(
        cost=cost,
        num_layers=subject.decoder.config.num_layers,
        routed=routed,
        full=full,
        device=where["device"],
        dtype=where["dtype"],
        steps=steps,
    )

    def pass_pays(row: Row) -> bool:
        setting = row.setting
        return routing_pays(profit, setting["batch"], setting["context"], _histogram(row))

    def step_pays(row: Row) -> bool:
        routed, plain = predict_step(steps, _histogram(row), row.setting["batch"])
        return routed < plain

    return Prediction(
        profit=profit,
        rows=(*done, *decoded),
        passes=_score([row for row in done if row.method != "full"], pass_pays),
        decoding=_score(decoded, step_pays),
    )


def _predict_steps(
    subject: Subject, rows: Iterable[Row]
) -> tuple[tuple[StepRates, ...], list[Row]]:
    """Returns the lines of decoding, and the routed rows of such batches predicted."""
    routed, points = list[Row](), list[tuple[int, float, float]]()
    plain = dict[int, float]()
    for row in rows:
        if row.part != "decode" or row.seconds is None or not row.ledger or row.fallbacks:
            continue
        if _steps(row) < 1 or row.method.startswith("uniform:"):
            continue
        batch, seconds = row.setting["batch"], row.seconds.median / _steps(row)
        if row.method == PLAIN:
            plain[batch] = seconds
            continue
        by_chance = row.method.startswith("random@")
        point = {
            "histogram": _of_steps(row),
            "predicted_seconds": None,
            "measured_seconds": row.seconds.median,
            "held_out": not by_chance,
        }
        routed.append(dataclasses.replace(row, profit=point))
        if by_chance:
            points.append((batch, expected_step_depth(_histogram(routed[-1]), batch), seconds))
    steps = fit_steps(points, plain)
    fitted, done = {each.batch for each in steps}, []
    for row in routed:
        known: Any = row.profit
        if row.setting["batch"] in fitted:
            step, _ = predict_step(steps, _histogram(row), row.setting["batch"])
            point = {**known, "predicted_seconds": step * _steps(row)}
            done.append(dataclasses.replace(row, profit=point))
    return steps, done


def _steps(row: Row) -> int:
    """Returns the steps of a decoding row: the prompt's own pass gives the first token."""
    return row.setting["output"] - 1


def _of_steps(row: Row) -> dict[str, float]:
    """Returns the histogram of a decoding row without the first tokens, which run in full."""
    full, output = str(row.setting["layers"]), row.setting["output"]
    counts = {
        depth: share * output for depth, share in (row.ledger or {})["depth_histogram"].items()
    }
    counts[full] = counts.get(full, 0.0) - 1.0
    # Shares are stored with six digits.
    left = {depth: count for depth, count in counts.items() if count > 1e-3}
    return {depth: count / sum(left.values()) for depth, count in left.items()}


def _score(rows: Iterable[Row], pays: Callable[[Row], bool]) -> Score:
    held = [row for row in rows if _is_held_out(row)]
    return Score(
        held_out=len(held),
        within=sum(map(_is_within, held)),
        decisions=sum(_is_decided(row, pays) for row in held),
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


def _is_decided(row: Row, pays: Callable[[Row], bool]) -> bool:
    if row.speedup is None:
        return False
    if row.speedup.low <= 1.0 <= row.speedup.high:
        return True
    return pays(row) == (row.speedup.median > 1.0)
