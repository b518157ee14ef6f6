# SPDX-License-Identifier: Apache-2.0
"""Rows on two sides of a limit of their loss: those whose side is clear leave at an exit.

At each exit a line estimates full depth's mean loss from a row's loss there; only rows whose
estimate is near the limit go deeper, see docs/contrib/rows.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.arrays import next_token_nll
from utio_jax.core.decoder import Decoder, Params, check_no_branches
from utio_jax.core.documents import Batch, check_tokens
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import SignalBase, exit_index
from utio_jax.staircase.score import exit_nll, labels_of

STOPS = "rows that stop by their loss at an exit"


@pytree
class UncertainBand(SignalBase):
    """Minus the distance, in nats, between the limit and a row's estimated full-depth mean loss.

    All tokens of a row have one score, so rows stop as a whole. It looks at the whole row, hence is
    not causal: for scoring alone. Rows that have stopped are not read, so `kv="drop"` gives what
    `kv="propagate"` gives and costs less. Rows that predict nothing lie on the limit.

    Attributes:
      limit: mean negative log-likelihood per predicted token, in nats.
      slopes: slope of the line from each exit's mean loss to full depth's.
      offsets: value of that line at 0, in nats.
      exits: depths in layers; the last one is full depth, whose line is the identity. Static.
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
        check_no_branches(boundary.decoder, what=STOPS)  # They are chosen before they run.
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
          ValueError: another number of margins, or one below 0.
        """
        nats = np.asarray(margins, np.float32)
        if nats.shape != (len(self.exits) - 1,) or not (nats >= 0).all():
            raise ValueError(
                f"Wanted a margin of at least 0 nats for each of the exits {self.exits[:-1]}. Got "
                f"{nats.tolist()}. Use infinity where no row shall stop."
            )
        return Thresholded(signal=self, thresholds=jnp.asarray(-nats), depths=self.exits)

    def judge(self, scores: Any) -> Judged:
        """Returns the side of the limit of each row, from the result of `score` at its exits."""
        predicted, depths = np.asarray(scores.predicted), np.asarray(scores.depths).max(axis=1)
        losses, counts = -np.asarray(scores.log_likelihood, np.float64), predicted.sum(axis=1)
        means = np.where(predicted, losses, 0).sum(axis=1) / np.maximum(counts, 1)
        place = np.searchsorted(self.exits, depths).clip(max=len(self.exits) - 1)
        estimate = np.asarray(self.offsets)[place] + np.asarray(self.slopes)[place] * means
        estimate = np.where(counts > 0, estimate, np.nan)
        return Judged(estimate=estimate, above=estimate > float(self.limit), depths=depths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Rows compared with a limit: estimates of full depth's mean loss in nats, and layers run.

    NaN for rows that predict nothing, which are above no limit.
    """

    estimate: Float[np.ndarray, " row"]
    above: Bool[np.ndarray, " row"]
    depths: Int[np.ndarray, " row"]


def row_losses(
    decoder: Decoder, params: Params, batches: Sequence[Batch]
) -> Float[np.ndarray, "exit row"]:
    """Returns each row's mean loss at each exit, nats per predicted token; NaN where none is.

    Raises:
      ValueError: ids outside the vocabulary, lengths outside the rows, or a model with branches,
        which are chosen before their losses are known.
    """
    check_no_branches(decoder, what=STOPS)
    vocab = decoder.config.vocab_size
    rows = [check_tokens(batch.token_ids, batch.lengths, vocab_size=vocab) for batch in batches]
    return np.concatenate([np.asarray(_means(decoder, params, *pair)) for pair in rows], axis=1)


@partial(jax.jit, static_argnums=0)
def _means(decoder: Decoder, params: Params, ids: Any, lengths: Any) -> jax.Array:
    _, predicted = labels_of(ids, lengths)
    total = exit_nll(decoder, params, ids, lengths).sum(axis=2)
    return total / predicted.sum(axis=1)[None, :]
