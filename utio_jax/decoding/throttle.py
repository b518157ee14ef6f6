# SPDX-License-Identifier: Apache-2.0
"""Which tokens read a compact view of the history instead of all of it, and what that costs.

easy = Throttle(history=History(recent=98), signal=signal, thresholds=thresholds)
mode = Adaptive(policy=policy, throttle=easy)

layers     [0, d1)          [d1, d2)          [d2, L)
decided    at d1, by the    at d1             at d2
by         token before
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.history import History
from utio_jax.core.decoder import Decoder, Params, check_softmax
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.base import Setting
from utio_jax.decoding.state import DecodeState, ViewTally
from utio_jax.decoding.throttle_attention import open_view
from utio_jax.policies.base import Boundary, Policy, Signal, exceeds


@pytree
class Throttle:
    """Low-importance tokens read sinks and recent tokens; the others everything.

    Decided anew for each segment of the depth policy: a token whose score at a boundary is at most
    the threshold runs the layers up to the next one throttled. In the first layers it has no score
    yet; what counts there is the first score of the token before it. The first token after a prompt
    has none before it, and reads everything.

    Attributes:
      history: what they see, in tokens. Static.
      signal: scores tokens at the policy's boundaries: the one that steers depth, or another.
      thresholds: one per segment, in the score's unit. -inf throttles no token, +inf every one, the
        first included; the first threshold is compared with the score at the first boundary of the
        token before.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    history: History = static()

    def check(self, policy: Policy, decoder: Decoder) -> None:
        """Raises ValueError where it does not fit the depth policy or the model, or looks ahead."""
        check_softmax(
            decoder,
            why="of which each query may see keys of its own, in any order",
            remedy="Leave the throttle out.",
        )
        if not self.signal.causal:
            raise ValueError(
                "Wanted a causal signal: decoding cannot look at later tokens. "
                f"Got signal {self.signal.name!r}."
            )
        values = np.asarray(self.thresholds)
        if values.shape != (len(policy.depths),):
            raise ValueError(
                f"Wanted a threshold for each of the policy's depths={policy.depths}: one per "
                f"segment. Got thresholds of shape {values.shape}."
            )
        if len(policy.depths) == 1 and not np.all(np.isinf(values)):
            raise ValueError(
                "Wanted a policy with a boundary, where tokens get their scores. Got depths="
                f"{policy.depths} and thresholds={values.tolist()}. To let all tokens run every "
                "layer, take never_stops(depths); or throttle all (inf) or none (-inf)."
            )

    def open(self, setting: Setting, state: DecodeState, *, layers: int) -> DecodeState:
        """Returns the state with views of the first `layers`, once the prompts are in the cache."""
        batch, slots = state.token_ids.shape
        views = ViewTally(
            layers=jnp.zeros((batch, slots), jnp.int32), key_slots=jnp.zeros((batch,), jnp.float32)
        )
        return dataclasses.replace(
            state,
            cache=open_view(state.cache, self.history, state.lengths, layers=layers),
            tally=dataclasses.replace(state.tally, views=views),
        )

    def begin(self, state: DecodeState, scores: Float[Array, " batch"]) -> Watch:
        """Returns which tokens are throttled at first.

        Args:
          state: before the round.
          scores: of each row's last token but one, at the first boundary; NaN for none.
        """
        positions = state.positions
        none = jnp.zeros_like(positions)
        return Watch(
            low=~exceeds(scores, self.thresholds[0])[:, None],
            scores=scores,
            memory=self.signal.start(state.last_ids[:, None], positions[:, None]),
            layers=none,
            key_slots=none.astype(jnp.float32),
        )

    def look(self, index: int, boundary: Boundary, watch: Watch) -> Watch:
        """Returns who is throttled after boundary number `index`."""
        scores, memory = self.signal(index, boundary, watch.memory)
        return dataclasses.replace(
            watch,
            low=~exceeds(scores, self.thresholds[index + 1]),
            scores=scores[:, 0] if index == 0 else watch.scores,
            memory=memory,
        )

    def flops(self, policy: Policy, decoder: Decoder, params: Params) -> float:
        """Returns what the scores of one token at all boundaries cost, heads apart."""
        return sum(self.signal.flops(i, decoder, params) for i in range(len(policy.depths) - 1))


@pytree
class Watch:
    """Who is throttled in the segment to come, and what the round has read from views so far.

    Attributes:
      low: tokens of low importance.
      scores: at the first boundary.
      memory: the signal's.
      layers: that each row's token ran throttled.
      key_slots: read from each row's view, summed over layers.
    """

    low: Bool[Array, "batch 1"]
    scores: Float[Array, " batch"]
    memory: Any
    layers: Int[Array, " batch"]
    key_slots: Float[Array, " batch"]

    def after(
        self, live: Bool[Array, "batch 1"], *, layers: int, width: int, size: int
    ) -> tuple[Watch, Float[Array, " batch"]]:
        """Returns the watch after a segment, and the key slots that each row read per layer.

        Where any row needs its view, one call reads those of all rows; unthrottled rows read all
        their slots besides.

        Args:
          live: tokens that ran the segment.
          layers: of the segment.
          width: slots that unthrottled rows read.
          size: of a view.
        """
        low = live & self.low
        of_views = jnp.any(low) * jnp.full(self.layers.shape, float(size))
        watch = dataclasses.replace(
            self,
            layers=self.layers + layers * low[:, 0],
            key_slots=self.key_slots + layers * of_views,
        )
        return watch, of_views + (live & ~low)[:, 0] * float(width)

    def close(self, state: DecodeState) -> DecodeState:
        """Returns the state with the round in its tally, at the positions of the tokens it ran."""
        views = state.tally.views
        assert views is not None
        rows = jnp.arange(self.layers.shape[0], dtype=jnp.int32)
        slots = jnp.where(state.active, state.positions, views.layers.shape[1])
        views = dataclasses.replace(
            views,
            layers=views.layers.at[rows, slots].set(self.layers, mode="drop"),
            key_slots=views.key_slots + jnp.where(state.active, self.key_slots, 0.0),
        )
        return dataclasses.replace(state, tally=dataclasses.replace(state.tally, views=views))
