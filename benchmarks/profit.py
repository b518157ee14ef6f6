# SPDX-License-Identifier: Apache-2.0
"""Fits what `utio-jax generate --profit FILE` reads: rates of passes and steps on this machine.

    python benchmarks/profit.py --out out/profit.json [--model FOLDER]

Passes: a grid of batches, contexts and depth histograms, all programs taking turns, with injected
depths; fitted on half of the points, scored on the other (within 10 % or the measured quartiles,
and whether routing pays). Steps of decoding: policies that stop tokens by chance. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.accounting.profit import Profit, Stages, expected_stages, fit_rates, routing_pays
from utio_jax.accounting.step_profit import StepRates, expected_step_depth, fit_steps
from utio_jax.bench.parts import decode_group
from utio_jax.bench.rows import Row
from utio_jax.bench.subjects import Subject
from utio_jax.bench.timing import Spread, Timing, time_programs
from utio_jax.cli.bench_subjects import subject_named
from utio_jax.core.files import conditions
from utio_jax.core.flops import token_cost
from utio_jax.policies.depth import given_depths
from utio_jax.staircase.score import full_depth, run_score, score_dense

SHARES = (
    (0.0, 0.0, 1.0),  # Every token goes on: what splitting costs by itself.
    (0.1, 0.2, 0.7),
    (0.3, 0.4, 0.3),
    (0.7, 0.2, 0.1),
)
"""Of tokens that stop at the first exit, at a middle one, and at the last layer."""

BUDGETS = ("random@0.5", "random@0.6", "random@0.75")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A pass of one shape and histogram.

    Attributes:
      batch: rows.
      context: tokens per row.
      histogram: share of tokens at each depth.
      held_out: whether it is kept out of the fit.
    """

    batch: int
    context: int
    histogram: Mapping[int, float]
    held_out: bool

    @property
    def is_full(self) -> bool:
        """Whether no token is asked anywhere."""
        return len(self.histogram) == 1


def grid(exits: Sequence[int], batches: Sequence[int], contexts: Sequence[int]) -> list[Point]:
    """Returns all points; every shape and every histogram is in both halves."""
    depths = (exits[0], exits[len(exits) // 2], exits[-1])
    shares = [{exits[-1]: 1.0}, *(dict(zip(depths, each, strict=True)) for each in SHARES)]
    return [
        Point(
            batch=batch,
            context=context,
            histogram=histogram,
            held_out=(down + across + index) % 2 == 1,
        )
        for down, batch in enumerate(batches)
        for across, context in enumerate(contexts)
        for index, histogram in enumerate(shares)
    ]


def programs_of(subject: Subject, point: Point) -> list[Any]:
    """Returns the point's programs: both of full depth, or one with exactly its shares."""
    shape = (point.batch, point.context)
    read = subject.batch(*shape)
    ids, lengths = jnp.asarray(read.token_ids), jnp.asarray(read.lengths)
    arguments = (subject.decoder, subject.params, ids, lengths)
    if point.is_full:
        dense = jax.jit(score_dense, static_argnums=0)
        full = partial(run_score, *arguments, policy=full_depth(subject.decoder))
        return [partial(dense, *arguments), full]
    total, shares = shape[0] * shape[1], [*point.histogram.values()]
    counts = np.diff(np.round(np.cumsum(shares) * total).astype(int), prepend=0)
    depths = np.repeat([*point.histogram], counts).astype(np.int32)
    dealt = np.random.default_rng(0).permutation(depths).reshape(shape)
    policy = given_depths(jnp.asarray(dealt), depths=tuple(point.histogram))
    return [partial(run_score, *arguments, policy=policy)]


def time_points(subject: Subject, points: Sequence[Point], *, rounds: int) -> list[Timing]:
    """Returns every point's time, of its faster program; all programs take turns."""
    made = {
        f"{number} {which}": program
        for number, point in enumerate(points)
        for which, program in enumerate(programs_of(subject, point))
    }
    times = time_programs(made, rounds=rounds)
    of = lambda n: [time for name, time in times.items() if name.split()[0] == str(n)]  # noqa: E731
    return [min(of(n), key=lambda time: time.median) for n in range(len(points))]


def fit(
    subject: Subject,
    points: Sequence[Point],
    times: Sequence[Timing],
    steps: tuple[StepRates, ...] = (),
) -> tuple[Profit, dict[str, int]]:
    """Returns the coefficients, and how many of the points that were held out they foretell."""
    cost = token_cost(subject.decoder, subject.params)

    def stages(point: Point) -> Stages:
        shape = {"batch": point.batch, "context": point.context}
        return expected_stages(cost, point.histogram, **shape)

    pairs = list(zip(points, times, strict=True))
    rates = {}
    for is_full in (True, False):
        chosen = [(p, t) for p, t in pairs if p.is_full == is_full and not p.held_out]
        rates[is_full] = fit_rates([stages(p) for p, _ in chosen], [t.median for _, t in chosen])
    where = conditions(subject.params)
    profit = Profit(
        cost=cost,
        num_layers=subject.decoder.config.num_layers,
        routed=rates[False],
        full=rates[True],
        device=where["device"],
        dtype=where["dtype"],
        steps=steps,
    )
    full = {(p.batch, p.context): time for p, time in pairs if p.is_full}
    score = {"held_out": 0, "within": 0, "decisions": 0}
    for point, time in pairs:
        if point.is_full or not point.held_out:
            continue
        predicted, spread = rates[False].seconds(stages(point)), time.spread
        speedup = Spread.of(time.ratios_over(full[point.batch, point.context]))
        near = abs(predicted - spread.median) <= 0.1 * spread.median
        pays = routing_pays(profit, point.batch, point.context, point.histogram)
        score["held_out"] += 1
        score["within"] += near or spread.low <= predicted <= spread.high
        either = speedup.low <= 1.0 <= speedup.high
        score["decisions"] += either or pays == (speedup.median > 1.0)
    return profit, score


def decoding_rates(rows: Sequence[Row]) -> tuple[StepRates, ...]:
    """Returns a line per batch through the rows of part "decode" that stop tokens by chance."""
    points, plain = list[tuple[int, float, float]](), dict[int, float]()
    for row in rows:
        batch, output = row.setting["batch"], row.setting["output"]
        if row.seconds is None or output < 2 or not row.own:
            continue
        # The prompt's own pass gives the first token, at full depth.
        seconds = row.seconds.median / (output - 1)
        if row.method == "plain":
            plain[batch] = seconds
        elif row.method.startswith("random@"):
            shares = {int(d): s for d, s in (row.ledger or {})["depth_histogram"].items()}
            counts = {depth: share * output for depth, share in shares.items()}
            counts[row.setting["layers"]] = counts.get(row.setting["layers"], 0.0) - 1.0
            left = {depth: count for depth, count in counts.items() if count > 1e-3}
            histogram = {depth: count / sum(left.values()) for depth, count in left.items()}
            points.append((batch, expected_step_depth(histogram, batch), seconds))
    return fit_steps(points, plain)


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--out", type=Path, default=Path("out/profit.json"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32], help="batches")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    subject = subject_named(args.model, dtype="float32")
    rows = list[Row]()
    for batch in args.decode:
        shape = (batch, args.prompt, args.output)
        rows += decode_group(subject, shape, BUDGETS, args.rounds).measure()
        jax.clear_caches()
    points = grid(subject.decoder.config.exits, args.batches, args.contexts)
    times = time_points(subject, points, rounds=args.rounds)
    profit, score = fit(subject, points, times, decoding_rates(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    profit.save(args.out)
    print(json.dumps({"out": str(args.out), "batches": args.decode, **score}))


if __name__ == "__main__":
    main()
