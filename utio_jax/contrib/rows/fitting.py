# SPDX-License-Identifier: Apache-2.0
"""Margins of `Select` with a guarantee: one pass in which none leaves shows what any would do.

Half of the queries make a ladder of margins, the other half tests it (Learn-then-Test). Margins are
so many standard deviations of what a depth leaves open, the same number at all depths in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
from utio_jax.calibration.risk import risks_of_groups
from utio_jax.contrib.rows.selecting import Select, read_context, select, survivors
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import token_cost

_DEVIATIONS = tuple(np.linspace(5, 0, 41).tolist())  # Of margins on a ladder, safest first.

Query = tuple[Any, np.ndarray, np.ndarray]
"""Token ids of a context, candidates `[row, token]`, their lengths `[row]`."""


def fit_select(
    decoder: Decoder,
    params: Params,
    queries: Sequence[Query],
    *,
    depths: Sequence[int],
    slots: int,
    max_disagreement: float = 0.01,
    confidence: float = 0.95,
    groups: Sequence[Any] | Int[np.ndarray, " query"] | None = None,
) -> Fitted:
    """Returns the cheapest `Select` whose winners are full depth's, at a confidence.

    At most `max_disagreement` of queries like these lose their winner. Each is drawn on its own;
    queries of one document are not, so name it in `groups`, by a number or a text. A group stays in
    one half, and counts as one unit: its risk is the share of its queries that lose, and the bound
    is on the mean over groups. A rung's cost is in FLOPs over full depth's for all candidates, the
    context and padding apart. Without a cheaper rung the ladder is empty.

    Nothing else was fitted on these queries. They have one shape; contexts are padded to `slots`.
    A setting uses some of `depths`.

    Raises:
      ValueError: no depths or ones that the model lacks, a group for another number of queries, or
        fewer groups than the guarantee takes.
    """
    names = np.arange(len(queries)) if groups is None else np.asarray(groups)
    _, groups = np.unique(names, return_inverse=True)
    if not depths or groups.shape != (len(queries),):
        raise ValueError(
            f"Wanted at least one depth, and a group for each of {len(queries)} queries. Got "
            f"depths={depths}, groups of shape {groups.shape}."
        )
    bound: dict[str, Any] = {"max_risk": max_disagreement, "confidence": confidence}
    fits = halves(groups, units="queries", bound="max_disagreement", **bound)
    seen = see_all(decoder, params, queries, depths=depths, slots=slots)
    cost, ends = token_cost(decoder, params), np.asarray([*depths, decoder.config.num_layers])
    keys = slots + queries[0][1].shape[1]
    layers = np.diff(np.asarray(cost.layers(np.asarray([0, *ends]), keys)))
    reads = np.where(ends > 0, cost.read(ends), 0.0)

    def price(margins: np.ndarray) -> float:
        counts, _ = replay(seen[fits], margins)
        heads = reads * np.append(np.isfinite(margins), True)
        full = counts[:, 0].sum() * (layers.sum() + reads[-1])
        return float((counts * (layers + heads)).sum() / full)

    apart = seen[fits, :-1] - seen[fits, -1:]
    spread = np.nanstd(apart - np.nanmean(apart, axis=2, keepdims=True), axis=(0, 2))
    ladder, tested = ladder_of(spread, price), groups[~fits]
    if not ladder:
        return Fitted(chosen=None, ladder=(), tested=len(np.unique(tested)))
    margins, costs = zip(*ladder, strict=True)
    settings = [
        Select(depths=tuple(ends[:-1][used].tolist()), margins=some[used])
        for some in margins
        for used in [np.isfinite(some)]
    ]
    risks = np.stack([replay(seen[~fits], some)[1] for some in margins])
    if len(np.unique(groups)) < len(groups):  # Queries of one document are not independent.
        risks = risks_of_groups(risks.astype(float), np.ones_like(tested), tested)
    return fit_with_guarantee(risks, settings=settings, costs=costs, **bound)


def see_all(
    decoder: Decoder,
    params: Params,
    queries: Sequence[Query],
    *,
    depths: Sequence[int],
    slots: int,
) -> Float[np.ndarray, "query boundary row"]:
    """Returns all candidates' scores at some depths and at full depth; NaN for padding."""
    none = Select(depths=tuple(depths), margins=np.full(len(depths), np.inf))
    tables = []
    for ids, candidates, lengths in queries:
        context = read_context(decoder, params, ids, slots=slots)
        tables.append(select(decoder, params, context, candidates, lengths, none).seen)
    return np.stack(tables)


def ladder_of(
    spread: Float[np.ndarray, " depth"], price: Callable[[np.ndarray], float]
) -> list[tuple[Float[np.ndarray, " depth"], float]]:
    """Returns margins and their costs, safest first, each cheaper than those before.

    `spread` is a standard deviation at each depth; margins are infinite at depths out of use.
    """
    places, rungs = range(len(spread)), list[tuple[np.ndarray, float]]()
    used = [some for size in places for some in itertools.combinations(places, size + 1)]
    for deviations in _DEVIATIONS:
        tries = [np.where(np.isin(places, some), deviations * spread, np.inf) for some in used]
        cost, margins = min(((price(margins), margins) for margins in tries), key=lambda x: x[0])
        if cost < (rungs[-1][1] if rungs else 1.0):
            rungs.append((margins, cost))
    return rungs


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
