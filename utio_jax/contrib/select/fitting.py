# SPDX-License-Identifier: Apache-2.0
"""Margins for picking 1 of many, with a guarantee: in most queries the winner is full depth's.

One pass in which none leaves shows what any margins do. The ladder has the depths and margins that
cost least at 0, 1, 2, ... lost winners.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
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
    depths, layers = tuple(depths), decoder.config.num_layers
    if not depths or seen.ndim != 3 or seen.shape[1] != len(depths) + 1:
        raise ValueError(
            "Wanted scores [query, boundary, row] at each of depths, one at least, and at full "
            f"depth. Got depths={depths} and shape {seen.shape}. Make them with see_all."
        )
    groups = np.arange(len(seen)) if groups is None else groups
    if groups.shape != seen.shape[:1]:
        raise ValueError(f"Wanted a group for each of {len(seen)} queries. Got {groups.shape}.")
    none = Select(depths=depths, margins=np.full(len(depths), np.inf), mean=mean)
    sizes = np.asarray(none.check(decoder, rows=seen.shape[2]))
    bound: dict[str, Any] = {"max_risk": max_disagreement, "confidence": confidence}
    fits = halves(groups, units="queries", seed=seed, **bound)
    fit_seen, others = seen[fits], seen[~fits]
    price = partial(row_flops, decoder, params, tokens=tokens, slots=slots)

    def run(seen: np.ndarray, how: Select) -> tuple[float, np.ndarray]:
        counts, lost = replay(seen[:, [*map(depths.index, how.depths), -1]], how.margins)
        spent = sizes[np.searchsorted(sizes, counts)] @ price((*how.depths, layers))
        return float(spent.sum() / (len(seen) * sizes[-1] * price((layers,))[0])), lost

    limit = int(np.ceil(2 * max_disagreement * len(fit_seen))) + 1
    settings, costs = zip(
        *_ladder(fit_seen, none, partial(run, fit_seen), limit=limit), strict=True
    )
    risks = np.stack([run(others, how)[1] for how in settings])
    return fit_with_guarantee(risks, settings=settings, costs=costs, **bound)


def replay(
    seen: Float[np.ndarray, "query boundary row"], margins: Float[Array | np.ndarray, " margin"]
) -> tuple[Int[np.ndarray, "query boundary"], Bool[np.ndarray, " query"]]:
    """Returns the number of candidates in each segment under margins, and the lost queries.

    Lost is one whose winner at full depth leaves. `seen` are scores at the margins' depths, and at
    full depth; NaN where there is no candidate.
    """
    full = seen[:, -1]
    alive = ~np.isnan(full)
    counts = [alive.sum(axis=1)]
    for index, margin in enumerate(np.asarray(margins).tolist()):
        alive = survivors(seen[:, index], alive, margin)
        counts.append(alive.sum(axis=1))
    kept = np.take_along_axis(alive, np.nanargmax(full, axis=1)[:, None], 1)[:, 0]
    return np.stack(counts, axis=1), np.logical_not(kept)


_Run = Callable[[Select], tuple[float, np.ndarray]]
"""Maps margins to FLOPs over full depth's, padded to widths, and to which queries are lost."""

_Try = tuple[Select, float, int]
"""Margins, what they cost, and how many winners they lose."""


def _ladder(seen: np.ndarray, none: Select, run: _Run, *, limit: int) -> list[tuple[Select, float]]:
    """Returns settings and their costs, safest first, each cheaper than those before."""
    early, full = seen[:, :-1], seen[:, -1]
    bars = np.where(np.isnan(full)[:, None], -np.inf, early).max(axis=2)
    won = np.take_along_axis(early, np.nanargmax(full, axis=1)[:, None, None], 2)[..., 0]
    gaps = np.sort(np.maximum(bars - won, 0), axis=0)[::-1].T  # [depth, query], largest first.
    tries: list[_Try] = []
    for size in range(1, min(_MOST_DEPTHS, len(gaps)) + 1):
        for some in itertools.combinations(range(len(gaps)), size):
            shallow = dataclasses.replace(none, depths=tuple(none.depths[place] for place in some))
            tries += _path(gaps[list(some)], shallow, run, limit=limit)
    tries.sort(key=lambda attempt: (attempt[2], attempt[1]))  # By lost winners, the cheapest first.
    safe = tries[0][0]
    wider = [dataclasses.replace(safe, margins=safe.margins * factor) for factor in _WIDER]
    rungs = [(how, run(how)[0]) for how in wider]
    for how, cost, _ in tries:
        if cost < rungs[-1][1]:
            rungs.append((how, cost))
    return rungs


def _path(gaps: np.ndarray, setting: Select, run: _Run, *, limit: int) -> Iterator[_Try]:
    """Yields margins at the depths of `setting`, their cost and lost winners, from none lost on.

    Greedily: each step gives up the winners farthest from the best at one depth, where a lost
    winner saves most. `gaps` `[depth, query]`: distance of each winner, in descending order.
    """
    places = np.arange(len(gaps))

    def tried(given: np.ndarray) -> _Try:
        how = dataclasses.replace(setting, margins=gaps[places, given])
        cost, lost = run(how)
        return how, cost, int(lost.sum())

    ahead = [(0.0, 0 * places, tried(0 * places))]
    while ahead:
        _, given, now = max(ahead, key=lambda step: step[0])
        yield now
        ahead = []
        for place, step in itertools.product(places, _STEPS):
            more = given + step * (places == place)
            if more[place] < gaps.shape[1] and (attempt := tried(more))[2] <= limit:
                gain = (now[1] - attempt[1]) / max(attempt[2] - now[2], 0.5)
                ahead.append((gain, more, attempt))
