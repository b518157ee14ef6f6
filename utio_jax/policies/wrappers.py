# SPDX-License-Identifier: Apache-2.0
"""Signals around signals: who may not stop yet, and thresholds that move with the position.

A threshold that moves by a known amount is a score that moves the other way, so all of these adjust
the inner score, and cost what it costs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Inputs, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary, Signal


@pytree
class _Wrapper:
    signal: Signal
    prefix: ClassVar[str] = ""

    def adjust(
        self, score: Float[Array, "batch token"], boundary: Boundary
    ) -> Float[Array, "batch token"]:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return f"{self.prefix}_{self.signal.name}"

    @property
    def causal(self) -> bool:
        return self.signal.causal

    @property
    def remembers(self) -> bool:
        return self.signal.remembers

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        return self.signal.start(token_ids, positions)

    def __call__(self, index: int, boundary: Boundary, memory: Any) -> tuple[jax.Array, Any]:
        score, memory = self.signal(index, boundary, memory)
        return self.adjust(score, boundary), memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return self.signal.flops(index, decoder, params)

    def reads_logits(self, index: int) -> bool:
        return self.signal.reads_logits(index)


@pytree
class DepthFloor(_Wrapper):
    """Nobody stops before a depth, while the inner signal sees all boundaries, and is paid there.

    For signals that gather evidence below the floor. Others do the same for less without these
    depths: `Thresholded(depths=...)`.

    Attributes:
      signal: the inner one.
      depth: the first at which tokens may stop, in layers. Static.
    """

    depth: int = static()
    prefix: ClassVar[str] = "floor"

    def adjust(
        self, score: Float[Array, "batch token"], boundary: Boundary
    ) -> Float[Array, "batch token"]:
        return score if boundary.depth >= self.depth else jnp.full_like(score, jnp.inf)


@pytree
class KeepFirst(_Wrapper):
    """The first tokens of every sequence run to the end: many later ones attend to them.

    Attributes:
      signal: the inner one.
      count: positions 0 to count - 1 are kept.
    """

    count: int | Int[Array, ""]
    prefix: ClassVar[str] = "keep_first"

    def adjust(
        self, score: Float[Array, "batch token"], boundary: Boundary
    ) -> Float[Array, "batch token"]:
        return jnp.where(boundary.positions < self.count, jnp.inf, score)


@pytree
class PositionDecay(_Wrapper):
    """Strict at the start of a sequence, where an error spreads furthest; looser later.

    CALM's decaying threshold (Schuster et al. 2022) asks at position t for a confidence
    of `0.9 lambda + 0.1 exp(-tau t / N)`: the constant part is the policy's threshold, the decaying
    one is added to the score.

    Attributes:
      signal: the inner one.
      amplitude: at position 0, in the score's unit.
      decay: per position, `tau / N`.
    """

    amplitude: float | Float[Array, ""]
    decay: float | Float[Array, ""]
    prefix: ClassVar[str] = "decay"

    def adjust(
        self, score: Float[Array, "batch token"], boundary: Boundary
    ) -> Float[Array, "batch token"]:
        positions = boundary.positions.astype(jnp.float32)
        return score + self.amplitude * jnp.exp(-self.decay * positions)
