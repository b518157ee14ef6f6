# SPDX-License-Identifier: Apache-2.0
"""Filtering by loss with a cascade: rows exit once their side of a limit is clear.

At each exit a line estimates full depth's mean loss from a row's loss there; only rows whose
estimate is near the limit go deeper, see docs/contrib/filter.md. One pass over all exits shows what
any margins do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
from utio_jax.calibration.thresholds import leave_at
from utio_jax.core.arrays import next_token_nll
from utio_jax.core.decoder import Decoder, Params, check_no_branches
from utio_jax.core.documents import Batch, check_tokens
from utio_jax.core.flops import token_cost
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import SignalBase, exit_index
from utio_jax.staircase.score import exit_nll, labels_of

__all__ = [
    "Judged",
    "UncertainBand",
    "fit_band",
    "row_losses",
]


_STOPS = "rows that stop by their loss at an exit"


@pytree
class UncertainBand(SignalBase):
    """Minus the distance, in nats, between the limit and a row's estimated full-depth mean loss.

    All tokens of a row have one score, so rows stop as a whole. It looks at the whole row, hence is
    not causal: for scoring alone. Rows that have stopped are not read, so `kv="drop"` gives what
    `kv="propagate"` gives and costs less. Rows that predict nothing have the limit itself for an
    estimate.

    Attributes:
      limit: mean negative log-likelihood per predicted token, in nats.
      slopes: of the line from an exit's mean loss to full depth's, one for each exit.
      offsets: its value at 0, in nats.
      exits: in layers; the last one is full depth, whose line is the identity. Static.
    """

    limit: Float[Array | np.ndarray, ""] | float
    slopes: Float[Array | np.ndarray, " exit"]
    offsets: Float[Array | np.ndarray, " exit"]
    exits: tuple[int, ...] = static()
    name: str = static(default="uncertain_band")
    causal: bool = static(default=False)

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Int[Array, "batch token"]:
        return jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))

    def __call__(
        self, index: int, boundary: Boundary, memory: Int[Array, "batch token"]
    ) -> tuple[Float[Array, "batch token"], Int[Array, "batch token"]]:
        check_no_branches(boundary.decoder, what=_STOPS)  # They are chosen before they run.
        # A row's tokens are live together, so that one with a live successor predicts it.
        live = boundary.live
        predicts = live & jnp.pad(live[:, 1:], ((0, 0), (0, 1)))
        losses = jnp.where(predicts, boundary.map_logits(next_token_nll, memory), 0.0)
        means = jnp.sum(losses, axis=1) / jnp.maximum(jnp.sum(predicts, axis=1), 1)
        place = exit_index(self.exits, boundary.depth, self.name)
        estimate = self.offsets[place] + self.slopes[place] * means
        distance = jnp.where(predicts.any(axis=1), jnp.abs(estimate - self.limit), 0.0)
        return jnp.broadcast_to(-distance[:, None], live.shape), memory

    def reads_logits(self, index: int) -> bool:
        return True

    def policy(self, margins: Sequence[float] | Float[Array, " boundary"]) -> Thresholded:
        """Returns the policy under which rows farther than a margin from the limit stop.

        Margins are in nats, one for each exit but the last; infinity: none stops there.

        Raises:
          ValueError: another number of margins, or one below 0; a line too many or too few, or
            another one than the identity for full depth.
        """
        lines = [np.asarray(values) for values in (self.slopes, self.offsets)]
        shapes = [values.shape for values in lines]
        if shapes != [(len(self.exits),)] * 2 or [float(values[-1]) for values in lines] != [1, 0]:
            raise ValueError(
                f"Wanted a slope and an offset for each of the exits {self.exits}, of full depth 1 "
                f"and 0: its loss is what others estimate. Got {[x.tolist() for x in lines]}."
            )
        nats = np.asarray(margins, np.float32)
        if nats.shape != (len(self.exits) - 1,) or not (nats >= 0).all():
            raise ValueError(
                f"Wanted a margin of at least 0 nats for each of the exits {self.exits[:-1]}. Got "
                f"{nats.tolist()}. Use infinity where no row shall stop."
            )
        return Thresholded(signal=self, thresholds=jnp.asarray(-nats), depths=self.exits)

    def judge(self, scores: Any) -> Judged:
        """Returns the side of the limit of each row, from the result of `score`.

        Raises ValueError for depths that this signal has no line for.
        """
        predicted, depths = np.asarray(scores.predicted), np.asarray(scores.depths).max(axis=1)
        losses = -np.asarray(scores.log_likelihood, np.float64)
        counts = predicted.sum(axis=1)
        means = np.where(predicted, losses, 0).sum(axis=1) / np.maximum(counts, 1)
        known = np.isin(depths[counts > 0], self.exits)
        if not known.all():
            raise ValueError(
                f"Wanted rows that stopped at the exits {self.exits}. Got some at "
                f"{sorted({*depths[counts > 0][~known].tolist()})}. Score them under its policy."
            )
        place = np.searchsorted(self.exits, depths).clip(max=len(self.exits) - 1)
        lines = [np.asarray(values, np.float64)[place] for values in (self.offsets, self.slopes)]
        estimate = np.where(counts > 0, lines[0] + lines[1] * means, np.nan)
        return Judged(estimate=estimate, above=estimate > float(self.limit), depths=depths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Rows compared with a limit: estimates of full depth's mean loss in nats, and layers run.

    NaN for rows that predict nothing, which are above no limit.
    """

    estimate: Float[np.ndarray, " row"]
    above: Bool[np.ndarray, " row"]
    depths: Int[np.ndarray, " row"]


_MOST_EXITS = 3
_DEVIATIONS = tuple(np.linspace(5, 0, 41).tolist())
"""Margins on a ladder, in standard deviations of what an exit's line leaves open; safest first."""


def row_losses(
    decoder: Decoder, params: Params, batches: Sequence[Batch]
) -> Float[np.ndarray, "exit row"]:
    """Returns each row's mean loss at each exit, nats per predicted token; NaN where none is.

    Rows might stop at the model's exits; those of one width compile one program.

    Raises:
      ValueError: ids outside the vocabulary, lengths outside the rows, no batch, or a model with
        branches, which are chosen before their losses are known.
    """
    check_no_branches(decoder, what=_STOPS)
    if not batches:
        raise ValueError("Wanted at least one batch of rows. Got none.")
    batches_losses = []
    for batch in batches:
        vocab_size = decoder.config.vocab_size
        ids, lengths = check_tokens(batch.token_ids, batch.lengths, vocab_size=vocab_size)
        batches_losses.append(np.asarray(_means(decoder, params, ids, lengths)))
    return np.concatenate(batches_losses, axis=1)


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
    seed: int = 0,
) -> Fitted:
    """Returns the cheapest policy by which rows end on full depth's side, at a confidence.

    A rung's cost is in FLOPs over full depth's for all rows, heads included, on the fitting half:
    what `score` executes under `kv="drop"`, padding apart.

    At most `max_disagreement` of all rows end on the other side. The guarantee is about rows like
    these, each drawn on its own, with a limit that was set before. Rows of one document are not
    independent, and keeping them in one half (`groups`) does not make them so: draw one or a few.
    Lines from an exit's loss to full depth's are least squares; margins are so many standard
    deviations of what a line leaves open, the same number at all exits in use, up to three.

    Losses are those of rows on which nothing else was fitted, from `row_losses`; the limit is in
    nats per token; `tokens` is the rows' width, for the cost.

    Raises:
      ValueError: losses of another shape than the model's exits say or not finite, fewer rows than
        the guarantee takes, or a model with branches.
    """
    check_no_branches(decoder, what=_STOPS)
    exits = decoder.config.exits
    if losses.ndim != 2 or losses.shape[0] != len(exits) or len(exits) < 2:
        raise ValueError(
            f"Wanted losses [exit, row] at the model's exits {exits}, two at least. Got shape "
            f"{losses.shape}. Make them with row_losses."
        )
    if not np.isfinite(limit):
        raise ValueError(f"Wanted a finite limit in nats per token. Got limit={limit}.")
    if not np.isfinite(losses).all():
        raise ValueError(
            "Wanted finite losses. Got NaN or infinities. Leave out rows that predict nothing: "
            "those of less than two tokens."
        )
    if groups is not None and groups.shape != losses.shape[1:]:
        raise ValueError(f"Wanted a group for each of {losses.shape[1]} rows. Got {groups.shape}.")
    bound: dict[str, Any] = {"max_risk": max_disagreement, "confidence": confidence}
    groups = np.arange(losses.shape[1]) if groups is None else groups
    fits = halves(groups, units="rows", seed=seed, **bound)
    fit_losses = losses[:, fits]
    lines = [np.polyfit(exit_losses, fit_losses[-1], 1) for exit_losses in fit_losses[:-1]]
    slopes, offsets = np.transpose([*lines, (1.0, 0.0)])
    signal = UncertainBand(
        limit=np.asarray(limit, np.float32),
        slopes=slopes.astype(np.float32),
        offsets=offsets.astype(np.float32),
        exits=exits,
    )
    estimates = offsets[:, None] + slopes[:, None] * losses
    open_ = (estimates[:-1, fits] - fit_losses[-1]).std(axis=1)
    cost = token_cost(decoder, params)

    def price(stops: np.ndarray, asked: np.ndarray) -> float:
        """Returns the mean cost over full depth's; each exit that a row reaches costs a head."""
        heads = np.cumsum(np.asarray(cost.read(np.asarray(exits))) * np.append(asked, True))
        whole = cost.layers(np.asarray(exits), tokens) + heads
        return float(whole[stops].mean() / (cost.layers(exits[-1], tokens) + cost.read(exits[-1])))

    ladder: list[tuple[np.ndarray, float]] = []
    distances = np.abs(estimates[:-1, fits] - limit)
    for factor in _DEVIATIONS:
        margins, ratio = _cheapest(distances, factor * open_, price)
        if not ladder or ratio < ladder[-1][1]:
            ladder.append((margins, ratio))
    others = estimates[:, ~fits]  # The last row is full depth.
    stops = [leave_at(-np.abs(others[:-1] - limit), -margins) for margins, _ in ladder]
    ends = np.take_along_axis(others, np.stack(stops), 0)
    wrong = (ends > limit) != (others[-1] > limit)
    settings = [signal.policy(margins.tolist()) for margins, _ in ladder]
    ratios = [ratio for _, ratio in ladder]
    fitted = fit_with_guarantee(wrong, settings=settings, costs=ratios, **bound)
    idle = fitted.chosen is not None and np.isinf(fitted.chosen.thresholds).all()
    return fitted._replace(chosen=None) if idle else fitted  # That is full depth.


def _cheapest(
    distances: np.ndarray, margins: np.ndarray, price: Callable[..., float]
) -> tuple[np.ndarray, float]:
    """Returns margins, infinite at unused exits, and their cost."""
    best, cheapest = np.full(len(margins), np.inf), 1.0
    for size in range(1, min(_MOST_EXITS, len(margins)) + 1):
        for some in itertools.combinations(range(len(margins)), size):
            asked = np.isin(np.arange(len(margins)), some)
            tried = np.where(asked, margins, np.inf)
            ratio = price(leave_at(-distances, -tried), asked)
            if ratio < cheapest:
                best, cheapest = tried, ratio
    return best, cheapest
