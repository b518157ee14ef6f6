# SPDX-License-Identifier: Apache-2.0
"""UTIO's cascade: one score per token steers its depth, its attention and the K/V that it loads.

cascade = Cascade(buckets=policy, dense_above=1.2, history=History(recent=98, sinks=4))
scores = score(decoder, params, ids, lengths, cascade.policy, attention=cascade.attention)
new = generate(decoder, params, prompts, mode=cascade.mode())

score            0 ------- t1 ------- t2 -------- t3 ------>
depth            | d1       | d2       | d3        | d4        `bucket_tokens`
attention        | V-Slash: sinks and recent | everything      `dense_above` between t2 and t3
K/V of a cache   | a compact view            | everything
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Inputs
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary, exceeds
from utio_jax.policies.depth import Thresholded, check_thresholds
from utio_jax.policies.signals import SignalBase
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Model
from utio_jax.staircase.microbatches import PackedSlots
from utio_jax.staircase.reference import FrozenKV
from utio_jax.utio.attention.kv_throttle import Throttled
from utio_jax.utio.attention.vertical_slash import History, SlashChoices, VerticalSlash


@pytree
class Cascade:
    """One score per token for depth, attention and K/V.

    The score is computed once per boundary, for all three. It is known at the first exit: whole
    rows run the layers before it densely; in decoding, the first score of the token before counts
    there.

    Attributes:
      buckets: a signal, thresholds between depth buckets, and the buckets' depths, such as
        `model.calibration.policy("utio_surrogate", 0.75)`.
      dense_above: the score above which a token attends to everything, in the signal's unit; one
        for all segments, or one each. -inf: all tokens; +inf: no token.
      history: keys that the others attend to. Static.
    """

    buckets: Thresholded
    dense_above: Float[Array, "*segment"] | float
    history: History = static()

    @property
    def policy(self) -> Thresholded:
        """Depth policy of the same decisions as `buckets`, which hands its score on.

        Raises:
          TypeError: `buckets` has no signal with thresholds.
        """
        if not isinstance(self.buckets, Thresholded):
            raise TypeError(
                "Wanted buckets of one signal with thresholds: Thresholded(signal=...). Got "
                f"{type(self.buckets).__name__}."
            )
        return _SharedPolicy(**vars(self.buckets))

    @property
    def attention(self) -> VerticalSlash:
        """V-Slash of whole rows by the score of `policy`: for `score`, `evaluate` and `Prefill`."""
        return self._slash(first=1)

    def mode(self, *, kv: FrozenKV = "propagate") -> Throttled:
        """Returns the decoding mode: a depth and a share of the K/V per token."""
        return Throttled(policy=self.policy, kv=kv, attention=self._slash(first=0))

    def _slash(self, *, first: int) -> VerticalSlash:
        limits, segments = jnp.asarray(self.dense_above, jnp.float32), len(self.buckets.depths)
        if limits.shape not in ((), (1,), (segments,)):
            raise ValueError(
                f"Wanted one dense_above, or one for each of {segments} segments, the first "
                f"included. Got shape {limits.shape}."
            )
        limits = jnp.broadcast_to(limits, (segments,))
        check_thresholds(limits, of="dense_above of a cascade")
        free = SignalBase(name="cascade", causal=self.buckets.signal.causal)  # Never asked.
        return _SharedSlash(signal=free, thresholds=limits[first:], history=self.history)


class _Scored(NamedTuple):
    """Memory of `_SharedPolicy`: its signal's, and the latest score."""

    own: Any
    score: Float[Array, "batch token"] | None


@pytree
class _SharedPolicy(Thresholded):
    """A policy whose memory holds its latest score; that is asked for at every boundary."""

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> _Scored:
        return _Scored(super().start(token_ids, positions), None)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: _Scored
    ) -> tuple[Bool[Array, "batch token"], _Scored]:
        score, own = self.signal(index, boundary, memory.own)
        return exceeds(score, self.thresholds[index]), _Scored(own, score)

    def asks(self, index: int) -> bool:
        return True


@pytree
class _SharedSlash(VerticalSlash):
    """V-Slash by the score of the depth policy."""

    def score(
        self, index: int, boundary: Boundary, memory: Any, policy_memory: Any
    ) -> tuple[Float[Array, "batch token"], Any]:
        if not isinstance(policy_memory, _Scored) or policy_memory.score is None:
            raise ValueError(
                "Wanted the depth policy of the same cascade. Got another. Pass cascade.policy "
                "with attention=cascade.attention."
            )
        return policy_memory.score, memory

    def look(
        self, index: int, boundary: Boundary, choices: SlashChoices, policy_memory: Any
    ) -> SlashChoices:
        score, _ = self.score(index, boundary, choices.memory, policy_memory)
        return dataclasses.replace(choices, score=score)

    def look_back(
        self,
        model: Model,
        segment: int,
        tokens: Tokens,
        slots: PackedSlots,
        choices: SlashChoices,
    ) -> tuple[Float[Array, "batch token"], SlashChoices, Work]:
        """Returns the score that the policy computed at the end of the segment before."""
        if choices.score is None:
            raise ValueError(
                "Wanted a first segment that is dense: no score is known before it. Got the "
                "attention of cascade.mode(). Pass cascade.attention for whole rows."
            )
        return choices.score, choices, Work.of()
