# SPDX-License-Identifier: Apache-2.0
"""Margins for filtering rows by loss, with a guarantee: most end on full depth's side of the limit.

    losses = row_losses(decoder, params, batches)             # [exit, row], from one full pass
    fitted = fit_band(decoder, params, losses, limit=1.2, tokens=128)
    found = score(decoder, params, token_ids, lengths, fitted.chosen, kv="drop")
    fitted.chosen.signal.judge(found).above

A row's loss at an exit depends on nothing but the row, so one pass over all exits says what any
margins would have done. Half of the rows fit lines and a ladder of margins; the other half tests it
from the safe end by `fit_ladder`, where a row is one unit, its risk 0 or 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_ladder, halves
from utio_jax.contrib.filter.signal import UncertainBand
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch, check_tokens
from utio_jax.core.flops import token_cost
from utio_jax.staircase.score import exit_nll, labels_of

_DEVIATIONS = tuple(np.linspace(5, 0, 41).tolist())
"""Margins on a ladder, in standard deviations of what an exit's line leaves open; safest first."""


def row_losses(
    decoder: Decoder, params: Params, batches: Sequence[Batch]
) -> Float[np.ndarray, "exit row"]:
    """Returns each row's mean loss at each exit, nats per predicted token; NaN where none is.

    Rows might stop at the model's exits; those of one width compile one program.

    Raises:
      ValueError: ids outside the vocabulary, lengths outside the rows, or no batch.
    """
    if not batches:
        raise ValueError("Wanted at least one batch of rows. Got none.")
    found = []
    for batch in batches:
        vocab_size = decoder.config.vocab_size
        ids, lengths = check_tokens(batch.token_ids, batch.lengths, vocab_size=vocab_size)
        found.append(np.asarray(_means(decoder, params, ids, lengths)))
    return np.concatenate(found, axis=1)


@partial(jax.jit, static_argnums=0)
def _means(decoder: Decoder, params: Params, ids: Any, lengths: Any) -> jax.Array:
    _, predicted = labels_of(ids, lengths)
    total = exit_nll(decoder, params, ids, lengths).sum(axis=2)
    return total / predicted.sum(axis=1)[None, :]


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
    at_most: int = 3,
    seed: int = 0,
) -> Fitted:
    """Returns the cheapest policy by which rows end on full depth's side, at a confidence.

    A rung's cost is in FLOPs over full depth's for all rows, heads included, on the fitting half:
    what `score` executes under `kv="drop"`, padding apart.

    The guarantee is about rows like these, each drawn on its own, with a limit that was set before:
    the test takes rows for independent. Many rows of one document are not, and keeping them in one
    half (`groups`) does not make them so: of one document, draw one or a few.
    Lines from an exit's loss to full depth's are least squares. Margins are so many standard
    deviations of what a line leaves open, the same number at all exits in use; which exits that
    are, up to `at_most`, is what costs least.

    Losses are those of rows on which nothing else was fitted, from `row_losses`; the limit, in nats
    per token, divides them; `tokens` is their width, for the cost. At most `max_disagreement` of
    all rows may end on the other side.

    Raises:
      ValueError: losses of another shape than the model's exits say or not finite, or fewer rows
        than the guarantee takes.
    """
    exits = decoder.config.exits
    if losses.ndim != 2 or losses.shape[0] != len(exits) or len(exits) < 2:
        raise ValueError(
            f"Wanted losses [exit, row] at the model's exits {exits}, two at least. Got shape "
            f"{losses.shape}. Make them with row_losses."
        )
    if not np.isfinite(losses).all():
        raise ValueError(
            "Wanted finite losses. Got NaN or infinities. Leave out rows that predict nothing: "
            "those of less than two tokens."
        )
    if groups is not None and groups.shape != losses.shape[1:]:
        raise ValueError(f"Wanted a group for each of {losses.shape[1]} rows. Got {groups.shape}.")
    rows = np.arange(losses.shape[1])
    fits = halves(
        rows if groups is None else groups,
        units="rows",
        max_risk=max_disagreement,
        confidence=confidence,
        seed=seed,
    )
    mine, others = losses[:, fits], losses[:, ~fits]
    lines = [np.polyfit(each, mine[-1], 1) for each in mine[:-1]]
    slopes, offsets = np.transpose([*lines, (1.0, 0.0)])
    signal = UncertainBand(
        limit=np.asarray(limit, np.float32),
        slopes=slopes.astype(np.float32),
        offsets=offsets.astype(np.float32),
        exits=exits,
    )
    estimates = offsets[:, None] + slopes[:, None] * losses
    open_ = (estimates[:-1, fits] - mine[-1]).std(axis=1)
    cost = token_cost(decoder, params)

    def price(stops: np.ndarray, asked: np.ndarray) -> float:
        """Returns the mean over rows, of full depth's; an exit that is asked costs a head."""
        heads = np.cumsum(np.asarray(cost.read(np.asarray(exits))) * np.append(asked, True))
        whole = cost.layers(np.asarray(exits), tokens) + heads
        return float(whole[stops].mean() / (cost.layers(exits[-1], tokens) + cost.read(exits[-1])))

    ladder: list[tuple[np.ndarray, float]] = []
    for factor in _DEVIATIONS:
        margins, ratio = _cheapest(
            np.abs(estimates[:-1, fits] - limit), factor * open_, price, at_most
        )
        if not ladder or ratio < ladder[-1][1]:
            ladder.append((margins, ratio))
    wrong = np.stack(
        [_wrong(estimates[:, ~fits], others[-1], limit, margins) for margins, _ in ladder]
    )
    settings = [signal.policy(margins) for margins, _ in ladder]
    ratios, bound = [ratio for _, ratio in ladder], {"max_risk": max_disagreement}
    found = fit_ladder(settings, ratios, wrong, confidence=confidence, **bound)
    idle = found.chosen is not None and np.isinf(found.chosen.thresholds).all()
    return found._replace(chosen=None) if idle else found  # That is full depth.


def stops_of(
    distances: Float[np.ndarray, "boundary row"], margins: Float[np.ndarray, " boundary"]
) -> Int[np.ndarray, " row"]:
    """Returns the exit at which each row stops: the first farther from the limit than its margin.

    Distances of estimates from the limit, in nats, and margins are of each exit but the last.
    """
    stops = distances >= margins[:, None]
    return np.concatenate([stops, np.ones((1, stops.shape[1]), np.bool_)]).argmax(axis=0)


def _cheapest(
    distances: np.ndarray, margins: np.ndarray, price: Callable[..., float], at_most: int
) -> tuple[np.ndarray, float]:
    """Returns margins, infinite at exits not in use, and what they cost."""
    best, cheapest = np.full(len(margins), np.inf), 1.0
    for size in range(1, min(at_most, len(margins)) + 1):
        for some in itertools.combinations(range(len(margins)), size):
            asked = np.isin(np.arange(len(margins)), some)
            tried = np.where(asked, margins, np.inf)
            ratio = price(stops_of(distances, tried), asked)
            if ratio < cheapest:
                best, cheapest = tried, ratio
    return best, cheapest


def _wrong(
    estimates: np.ndarray, full: np.ndarray, limit: float, margins: np.ndarray
) -> Bool[np.ndarray, " row"]:
    """Returns which rows end on the other side than at full depth."""
    stops = stops_of(np.abs(estimates[:-1] - limit), margins)
    last = np.take_along_axis(estimates, stops[None], 0)[0]
    return (last > limit) != (full > limit)
