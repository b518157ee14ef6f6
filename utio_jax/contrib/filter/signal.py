# SPDX-License-Identifier: Apache-2.0
"""Filtering by loss with a cascade: rows stop once it is clear on which side of a limit they lie.

    signal = UncertainBand(limit=1.2, slopes=..., offsets=..., exits=(4, 6, 8, 16))
    policy = signal.policy(margins=[0.3, 0.2, 0.1])
    found = score(decoder, params, token_ids, lengths, policy, kv="drop")
    signal.judge(found).above                  # [row]: is the row's mean loss above the limit?

As filters of corpora by perplexity, monitors and moderation ask. At each exit the rows' mean loss
there says what full depth's will be, by a line that is fitted for each exit; rows whose estimate is
farther from the limit than a margin are decided, and only the band around the limit goes deeper.
`fit_band` finds lines and margins with a guarantee.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.arrays import next_token_nll
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import SignalBase, exit_index


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
        # A row's tokens are live together, so that one with a live successor predicts it.
        live = boundary.live
        predicts = live & jnp.pad(live[:, 1:], ((0, 0), (0, 1)))
        means = _row_means(boundary.map_logits(next_token_nll, memory), predicts)
        place = exit_index(self.exits, boundary.depth, self.name)
        estimate = self.offsets[place] + self.slopes[place] * means
        distance = jnp.where(predicts.any(axis=1), jnp.abs(estimate - self.limit), 0.0)
        return jnp.broadcast_to(-distance[:, None], live.shape), memory

    def reads_logits(self, index: int) -> bool:
        return True

    def policy(self, margins: Sequence[float] | Float[Array, " boundary"]) -> Thresholded:
        """Returns the policy under which rows farther than a margin from the limit stop.

        Args:
          margins: in nats, one for each exit but the last; infinity: none stops there.

        Raises:
          ValueError: another number of margins, or one below 0; a line too many or too few, or
            another one than the identity for full depth.
        """
        lines = [np.shape(self.slopes), np.shape(self.offsets)]
        if lines != [(len(self.exits),)] * 2:
            raise ValueError(
                f"Wanted a slope and an offset for each of the exits {self.exits}, full depth's 1 "
                f"and 0 included. Got shapes {lines[0]} and {lines[1]}."
            )
        last = float(np.asarray(self.slopes)[-1]), float(np.asarray(self.offsets)[-1])
        if last != (1.0, 0.0):
            raise ValueError(
                f"Wanted a slope of 1 and an offset of 0 for full depth, {self.exits[-1]} layers: "
                f"its loss is what others estimate. Got {last[0]} and {last[1]}."
            )
        nats = np.asarray(margins, np.float32)
        if nats.shape != (len(self.exits) - 1,) or not (nats >= 0).all():
            raise ValueError(
                f"Wanted a margin of at least 0 nats for each of the exits {self.exits[:-1]}. Got "
                f"{nats.tolist()}. Use infinity where no row shall stop."
            )
        return Thresholded(signal=self, thresholds=jnp.asarray(-nats), depths=self.exits)

    def judge(self, scores: Any) -> Judged:
        """Returns on which side of the limit each row lies, from what `score` has found.

        Args:
          scores: `utio_jax.Scores` under a policy of this signal, on the host or a device.

        Raises:
          ValueError: depths that this signal has no line for.
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
        lines = [np.asarray(each, np.float64)[place] for each in (self.offsets, self.slopes)]
        estimate = np.where(counts > 0, lines[0] + lines[1] * means, np.nan)
        return Judged(estimate=estimate, above=estimate > float(self.limit), depths=depths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Rows beside a limit.

    Attributes:
      estimate: of the full-depth mean loss, in nats; it is that of rows that ran full depth. NaN
        for rows that predict nothing, which are above no limit.
      above: whether it exceeds the limit.
      depths: layers that each row has run.
    """

    estimate: Float[np.ndarray, " row"]
    above: Bool[np.ndarray, " row"]
    depths: Int[np.ndarray, " row"]


def _row_means(values: jax.Array, counted: jax.Array) -> Float[Array, " batch"]:
    total = jnp.sum(jnp.where(counted, values, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(counted, axis=1), 1)
