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

import dataclasses
import itertools
from collections.abc import Sequence
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

    Args:
      decoder: the model; its exits are where rows might stop.
      params: its parameters.
      batches: rows of one width compile one program.

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

    Args:
      decoder: the model.
      params: its parameters.
      losses: of rows on which nothing else was fitted, from `row_losses`.
      limit: mean loss that divides the rows, nats per token.
      tokens: width of rows, for the cost.
      max_disagreement: share of rows that may end on the other side, in (0, 1).
      confidence: in (0, 1).
      groups: of rows that stay in one half, as those of one document; None: each on its own.
      at_most: exits in use, full depth apart.
      seed: of the draw of the halves.

    Raises:
      ValueError: losses of another shape than the model's exits say or not finite, or fewer rows
        than the guarantee takes.
    """
    exits = decoder.config.exits
    _check(losses, exits, groups)
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
    price = _Price(decoder, params, tokens)
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

    Args:
      distances: of estimates from the limit, in nats, at each exit but the last.
      margins: of these exits.
    """
    stops = distances >= margins[:, None]
    return np.concatenate([stops, np.ones((1, stops.shape[1]), np.bool_)]).argmax(axis=0)


@dataclasses.dataclass(frozen=True)
class _Price:
    """FLOPs of rows by where they stop."""

    decoder: Decoder
    params: Params
    tokens: int

    def ratio(self, stops: np.ndarray, asked: np.ndarray) -> float:
        """Returns the mean over rows, of full depth's; an exit that is asked costs a head."""
        exits, cost = self.decoder.config.exits, token_cost(self.decoder, self.params)
        heads = np.cumsum(np.asarray(cost.read(np.asarray(exits))) * np.append(asked, True))
        whole = cost.layers(np.asarray(exits), self.tokens) + heads
        full = cost.layers(exits[-1], self.tokens) + cost.read(exits[-1])
        return float(whole[stops].mean() / full)


def _cheapest(
    distances: np.ndarray, margins: np.ndarray, price: _Price, at_most: int
) -> tuple[np.ndarray, float]:
    """Returns margins, infinite at exits not in use, and what they cost."""
    best, cheapest = np.full(len(margins), np.inf), 1.0
    for size in range(1, min(at_most, len(margins)) + 1):
        for some in itertools.combinations(range(len(margins)), size):
            asked = np.isin(np.arange(len(margins)), some)
            tried = np.where(asked, margins, np.inf)
            ratio = price.ratio(stops_of(distances, tried), asked)
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


def _check(
    losses: np.ndarray,
    exits: tuple[int, ...],
    groups: np.ndarray | None,
) -> None:
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
        raise ValueError(
            f"Wanted a group for each of {losses.shape[1]} rows. Got shape {groups.shape}."
        )
