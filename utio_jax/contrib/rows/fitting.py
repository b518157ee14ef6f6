# SPDX-License-Identifier: Apache-2.0
"""Margins of cascades with a guarantee: one pass in which no row leaves shows what any would do.

Half of the units make a ladder of margins, the other half tests it (Learn-then-Test). Margins are
so many standard deviations of what an exit leaves open, the same number at all depths in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
from utio_jax.calibration.thresholds import leave_at
from utio_jax.contrib.rows.band import STOPS, UncertainBand
from utio_jax.contrib.rows.selecting import Select, read_context, select, survivors
from utio_jax.core.decoder import Decoder, Params, check_no_branches
from utio_jax.core.flops import token_cost

_DEVIATIONS = tuple(np.linspace(5, 0, 41).tolist())  # Of margins on a ladder, safest first.
_MOST_DEPTHS = 3

Query = tuple[Any, np.ndarray, np.ndarray]
"""Token ids of a context, candidates `[row, token]`, their lengths `[row]`."""


def ladder_of(
    spread: Float[np.ndarray, " depth"], price: Callable[[np.ndarray], float]
) -> list[tuple[Float[np.ndarray, " depth"], float]]:
    """Returns margins and their costs, safest first, each cheaper than those before.

    `spread` is a standard deviation at each depth; margins are infinite at depths out of use.
    """
    places, rungs = range(len(spread)), list[tuple[np.ndarray, float]]()
    sizes = range(1, min(_MOST_DEPTHS, len(spread)) + 1)
    used = [some for size in sizes for some in itertools.combinations(places, size)]
    for deviations in _DEVIATIONS:
        tries = [np.where(np.isin(places, some), deviations * spread, np.inf) for some in used]
        cost, margins = min(((price(margins), margins) for margins in tries), key=lambda x: x[0])
        if cost < (rungs[-1][1] if rungs else 1.0):
            rungs.append((margins, cost))
    return rungs


def see_all(
    decoder: Decoder,
    params: Params,
    queries: Iterable[Query],
    *,
    depths: Sequence[int],
    mean: bool = True,
    slots: int | None = None,
) -> Float[np.ndarray, "query boundary row"]:
    """Returns all candidates' scores at some depths and at full depth; NaN for padding.

    Queries have one shape, contexts padded to `slots`; `depths` and `mean` are those of `Select`.
    """
    none = Select(depths=tuple(depths), margins=np.full(len(depths), np.inf), mean=mean)
    tables = []
    for ids, candidates, lengths in queries:
        context = read_context(decoder, params, ids, slots=slots)
        tables.append(select(decoder, params, context, candidates, lengths, none).seen)
    return np.stack(tables)


def fit_select(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    seen: Float[np.ndarray, "query boundary row"],
    *,
    depths: Sequence[int],
    tokens: int,
    slots: int,
    max_disagreement: float = 0.01,
    confidence: float = 0.95,
    mean: bool = True,
    groups: Int[np.ndarray, " query"] | None = None,
    seed: int = 0,
) -> Fitted:
    """Returns the cheapest `Select` whose winners are full depth's, at a confidence.

    At most `max_disagreement` of queries like these lose their winner. Each is drawn on its own: of
    one document draw one or a few, and name it in `groups`, which stay in one half. A rung's cost
    is in FLOPs over full depth's for all candidates, the context and padding apart.

    `seen` are scores of queries on which nothing else was fitted, from `see_all` at `depths` and
    with `mean`. Candidates have `tokens`, contexts `slots`.

    Raises:
      ValueError: scores of another shape than depths and queries say, or fewer queries than the
        guarantee takes.
    """
    if not depths or seen.ndim != 3 or seen.shape[1] != len(depths) + 1:
        raise ValueError(
            "Wanted scores [query, boundary, row] at each of depths, one at least, and at full "
            f"depth. Got depths={depths} and shape {seen.shape}. Make them with see_all."
        )
    fits, bound = _halves(len(seen), groups, "queries", max_disagreement, confidence, seed)
    cost, ends = token_cost(decoder, params), np.asarray([*depths, decoder.config.num_layers])
    layers = np.diff(np.asarray(cost.layers(np.asarray([0, *ends]), slots + tokens)))
    reads = np.where(ends > 0, cost.read(ends), 0.0)

    def run(seen: np.ndarray, margins: np.ndarray) -> tuple[float, np.ndarray]:
        counts, lost = replay(seen, margins)
        heads = reads * np.append(np.isfinite(margins), True)
        full = counts[:, 0].sum() * (layers.sum() + reads[-1])
        return float((counts * (layers + heads)).sum() / full), lost

    apart = seen[fits, :-1] - seen[fits, -1:]
    spread = np.nanstd(apart - np.nanmean(apart, axis=2, keepdims=True), axis=(0, 2))
    margins, costs = zip(*ladder_of(spread, lambda m: run(seen[fits], m)[0]), strict=True)
    used = [np.flatnonzero(np.isfinite(m)).tolist() for m in margins]
    settings = [
        Select(depths=tuple(depths[place] for place in some), margins=m[some], mean=mean)
        for m, some in zip(margins, used, strict=True)
    ]
    risks = np.stack([run(seen[~fits], m)[1] for m in margins])
    return fit_with_guarantee(risks, settings=settings, costs=costs, **bound)


def replay(
    seen: Float[np.ndarray, "query boundary row"], margins: Float[np.ndarray, " margin"]
) -> tuple[Int[np.ndarray, "query boundary"], Bool[np.ndarray, " query"]]:
    """Returns the number of candidates in each segment under margins, and the lost queries.

    Lost is one whose winner at full depth leaves. `seen` are scores at the margins' depths, and at
    full depth; NaN where there is no candidate.
    """
    full = seen[:, -1]
    alive = ~np.isnan(full)
    counts = [alive.sum(axis=1)]
    for index, margin in enumerate(margins.tolist()):
        alive = survivors(seen[:, index], alive, margin)
        counts.append(alive.sum(axis=1))
    kept = np.take_along_axis(alive, np.nanargmax(full, axis=1)[:, None], 1)[:, 0]
    return np.stack(counts, axis=1), np.logical_not(kept)


def fit_band(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    losses: Float[np.ndarray, "exit row"],
    *,
    limit: float,
    tokens: int,
    max_disagreement: float = 0.02,
    confidence: float = 0.95,
    groups: Int[np.ndarray, " row"] | None = None,
    seed: int = 0,
) -> Fitted:
    """Returns the cheapest policy by which rows end on full depth's side, at a confidence.

    At most `max_disagreement` of rows like these end on the other side, with a limit that was set
    before. As in `fit_select`, draw one row or a few of a document. Lines from an exit's loss to
    full depth's are least squares. A rung's cost is in FLOPs over full depth's for all rows, heads
    included: what `score` executes under `kv="drop"`, padding apart.

    Losses are those of rows on which nothing else was fitted, from `row_losses`; the limit is in
    nats per token; `tokens` is the rows' width, for the cost.

    Raises:
      ValueError: losses of another shape than the model's exits say or not finite, fewer rows than
        the guarantee takes, or a model with branches.
    """
    check_no_branches(decoder, what=STOPS)
    exits = decoder.config.exits
    is_table = losses.ndim == 2 and losses.shape[0] == len(exits) > 1
    if not is_table or not np.isfinite(losses).all() or not np.isfinite(limit):
        raise ValueError(
            f"Wanted finite losses [exit, row] at the model's exits {exits}, two at least, and a "
            f"finite limit. Got shape {losses.shape} and limit={limit}. Make them with row_losses, "
            "and leave out rows that predict nothing."
        )
    fits, bound = _halves(losses.shape[1], groups, "rows", max_disagreement, confidence, seed)
    fitted, full = losses[:, fits], losses[-1, fits]
    lines = [np.polyfit(exit_losses, full, 1) for exit_losses in fitted[:-1]]
    slopes, offsets = np.transpose([*lines, (1.0, 0.0)])
    signal = UncertainBand(
        limit=np.asarray(limit, np.float32),
        slopes=slopes.astype(np.float32),
        offsets=offsets.astype(np.float32),
        exits=exits,
    )
    estimates = offsets[:, None] + slopes[:, None] * losses
    distances, ends = np.abs(estimates[:-1] - limit), np.asarray(exits)
    cost = token_cost(decoder, params)
    layers, heads = np.asarray(cost.layers(ends, tokens)), np.asarray(cost.read(ends))

    def price(margins: np.ndarray) -> float:
        spent = layers + np.cumsum(heads * np.append(np.isfinite(margins), True))
        stops = leave_at(-distances[:, fits], -margins)
        return float(spent[stops].mean() / (layers[-1] + heads[-1]))

    rungs = ladder_of((estimates[:-1, fits] - full).std(axis=1), price)
    stops = [leave_at(-distances[:, ~fits], -margins) for margins, _ in rungs]
    sides = np.take_along_axis(estimates[:, ~fits], np.stack(stops), 0) > limit
    settings = [signal.policy(margins.tolist()) for margins, _ in rungs]
    costs = [ratio for _, ratio in rungs]
    wrong = sides != (losses[-1, ~fits] > limit)
    return fit_with_guarantee(wrong, settings=settings, costs=costs, **bound)


def _halves(
    count: int, groups: Any, units: str, max_risk: float, confidence: float, seed: int
) -> tuple[Bool[np.ndarray, " unit"], dict[str, Any]]:
    """Returns the units of the fitting half, and the bound."""
    groups = np.arange(count) if groups is None else groups
    if groups.shape != (count,):
        raise ValueError(f"Wanted a group for each of {count} {units}. Got {groups.shape}.")
    bound: dict[str, Any] = {"max_risk": max_risk, "confidence": confidence}
    return halves(groups, units=units, seed=seed, **bound), bound
