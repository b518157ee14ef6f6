# SPDX-License-Identifier: Apache-2.0
"""Margins for picking 1 of many, with a guarantee: in most queries the winner is full depth's.

    seen = see_all(decoder, params, queries, depths=decoder.config.exits[:-1])
    fitted = fit_select(decoder, params, seen, depths=..., tokens=16, slots=128)
    how = fitted.chosen          # for `select`; None: only full depth keeps it

One pass in which none leaves shows what any margins do. Half of the queries make a ladder: depths
and margins that cost least at 0, 1, 2, ... lost winners; the other half tests it, safest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_ladder, halves
from utio_jax.contrib.select.selecting import Select, read_context, row_flops, select, survivors
from utio_jax.core.decoder import Decoder, Params

_WIDER = (2.0, 1.5, 1.25)  # Margins over the widest that any winner needed: the ladder's safe end.
_STEPS = (1, 3)  # Winners that a step of the ladder gives up at one depth.
_MOST_DEPTHS = 3

Query = tuple[Any, np.ndarray, np.ndarray]
"""Token ids of a context, candidates `[row, token]`, their lengths `[row]`."""


def see_all(
    decoder: Decoder,
    params: Params,
    queries: Iterable[Query],
    *,
    depths: Sequence[int],
    mean: bool = True,
    slots: int | None = None,
) -> Float[np.ndarray, "query boundary row"]:
    """Returns all candidates' scores at some depths and at full depth; NaN where there is none.

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

    At most `max_disagreement` of the queries lose their winner. The guarantee is about queries like
    these, each drawn on its own: of one document, draw one or a few, and name it in `groups`, which
    stay in one half. A rung's cost is in FLOPs over full depth's for all candidates, on the fitting
    half, the context's pass apart.

    `seen` are scores of queries on which nothing else was fitted, from `see_all` at `depths` and
    with `mean`; candidates and contexts have the static widths `tokens` and `slots`.

    Raises:
      ValueError: scores of another shape than depths and queries say, or fewer queries than the
        guarantee takes.
    """
    depths = tuple(depths)
    if seen.ndim != 3 or seen.shape[1] != len(depths) + 1:
        raise ValueError(
            f"Wanted scores [query, boundary, row] at each of depths={depths} and at full depth. "
            f"Got shape {seen.shape}. Make them with see_all."
        )
    if groups is not None and groups.shape != seen.shape[:1]:
        raise ValueError(f"Wanted a group for each of {len(seen)} queries. Got {groups.shape}.")
    chance = Select(depths=depths, margins=np.zeros(len(depths)))
    sizes = np.asarray(chance.check(decoder, rows=seen.shape[2]))
    fits = halves(
        np.arange(len(seen)) if groups is None else groups,
        units="queries",
        max_risk=max_disagreement,
        confidence=confidence,
        seed=seed,
    )

    def price(counts: np.ndarray, mine: tuple[int, ...]) -> float:
        layers = decoder.config.num_layers
        each, whole = (
            row_flops(decoder, params, ends, tokens=tokens, slots=slots)
            for ends in ((*mine, layers), (layers,))
        )
        padded = sizes[np.searchsorted(sizes, counts)]
        return float((padded @ each).sum() / (len(counts) * sizes[-1] * whole[0]))

    limit = int(np.ceil(2 * max_disagreement * fits.sum())) + 1
    ladder = _ladder(seen[fits], depths, price, limit=limit)
    tried = seen[~fits]
    lost = np.stack(
        [replay(tried[:, _of(mine, depths)], margins)[1] for mine, margins, _ in ladder]
    )
    settings = [Select(depths=mine, margins=margins, mean=mean) for mine, margins, _ in ladder]
    costs, bound = [ratio for *_, ratio in ladder], {"max_risk": max_disagreement}
    return fit_ladder(settings, costs, lost, confidence=confidence, **bound)


def replay(
    seen: Float[np.ndarray, "query boundary row"],
    margins: Float[Array | np.ndarray, " margin"],
) -> tuple[Int[np.ndarray, "query boundary"], Bool[np.ndarray, " query"]]:
    """Returns how many candidates run each segment under some margins, and which queries are lost.

    Lost is one whose winner at full depth leaves. `seen` are scores at the margins' depths, and at
    full depth; NaN where there is no candidate.
    """
    full = seen[:, -1]
    alive = ~np.isnan(full)
    counts = []
    for index, margin in enumerate(np.asarray(margins).tolist()):
        counts.append(alive.sum(axis=1))
        alive = survivors(seen[:, index], alive, margin)
    counts.append(alive.sum(axis=1))
    kept = np.take_along_axis(alive, np.nanargmax(full, axis=1)[:, None], 1)[:, 0]
    return np.stack(counts, axis=1), np.logical_not(kept)


_Price = Callable[[np.ndarray, tuple[int, ...]], float]
"""Maps counts of candidates and depths to FLOPs over full depth's, padded to widths."""


_Try = tuple[tuple[int, ...], np.ndarray, float]


def _ladder(seen: np.ndarray, depths: tuple[int, ...], price: _Price, *, limit: int) -> list[_Try]:
    """Returns depths, margins and costs, safest first, each cheaper than those before."""
    best: dict[int, _Try] = {}
    for size in range(1, min(_MOST_DEPTHS, len(depths)) + 1):
        for mine in itertools.combinations(depths, size):
            some = seen[:, _of(mine, depths)]
            for margins, ratio, lost in _path(some, mine, price, limit=limit):
                if lost not in best or ratio < best[lost][2]:
                    best[lost] = (mine, margins, ratio)
    safe, widest, _ = best[0]
    rungs: list[_Try] = []
    for factor in _WIDER:
        counts, _ = replay(seen[:, _of(safe, depths)], widest * factor)
        rungs.append((safe, widest * factor, price(counts, safe)))
    for lost in sorted(best):
        if best[lost][2] < rungs[-1][2]:
            rungs.append(best[lost])
    return rungs


def _path(
    seen: np.ndarray, depths: tuple[int, ...], price: _Price, *, limit: int
) -> Iterator[tuple[np.ndarray, float, int]]:
    """Yields margins, their cost and lost winners: from none lost on, greedily.

    Each step gives up the winners that are farthest behind at one depth: where a lost winner buys
    most.
    """
    full = seen[:, -1]
    best = np.nanargmax(full, axis=1)
    bars = np.where(np.isnan(full)[:, None], -np.inf, seen[:, :-1]).max(axis=2)
    behind = bars - np.take_along_axis(seen[:, :-1], best[:, None, None], 2)[..., 0]
    steps = np.sort(np.maximum(behind, 0), axis=0)[::-1].T  # [depth, given up]

    def tried(given: tuple[int, ...]) -> tuple[np.ndarray, float, int]:
        margins = steps[np.arange(len(depths)), np.asarray(given)]
        counts, lost = replay(seen, margins)
        return margins, price(counts, depths), int(lost.sum())

    given = (0,) * len(depths)
    now = tried(given)
    yield now
    while True:
        ahead = []
        for index, step in itertools.product(range(len(depths)), _STEPS):
            more = tuple(n + step * (i == index) for i, n in enumerate(given))
            if more[index] < len(seen):
                found = tried(more)
                if found[2] <= limit:
                    gain = (now[1] - found[1]) / max(found[2] - now[2], 0.5)
                    ahead.append((gain, more, found))
        if not ahead:
            return
        _, given, now = max(ahead, key=lambda each: each[0])
        yield now


def _of(mine: tuple[int, ...], depths: tuple[int, ...]) -> list[int]:
    """Returns where some depths, and full depth, are among all."""
    return [*(depths.index(depth) for depth in mine), len(depths)]
