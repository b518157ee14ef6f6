# SPDX-License-Identifier: Apache-2.0
"""Depth policies: frozen dataclasses that decide who runs deeper.

All policies of the literature are one class, `Thresholded`, around one of the signals in
`utio_jax.policies.signals` and `utio_jax.policies.learned`, perhaps wrapped by
`utio_jax.policies.wrappers`. The other three need no signal: they are controls and tools.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.core.decoder import Decoder, Params, check_depths
from utio_jax.policies.base import Boundary, Signal, exceeds
from utio_jax.policies.signals import Position, draw_per_token


def _static(**kwargs: Any) -> Any:
    return dataclasses.field(metadata={"static": True}, **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every token runs `depth` layers: the model truncated at one exit, or the full model.

    Attributes:
      depth: layers for everyone. Static.
    """

    depth: int = _static()
    causal: bool = _static(default=True)
    name: str = _static(default="uniform")

    def __post_init__(self) -> None:
        check_depths((self.depth,))

    @property
    def depths(self) -> tuple[int, ...]:
        return (self.depth,)

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> None:
        return None

    def go_deeper(
        self, index: int, boundary: Boundary, memory: None
    ) -> tuple[Bool[Array, "batch token"], None]:
        raise AssertionError("a uniform policy has no boundary")

    def asks(self, index: int) -> bool:
        return True

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenDepths:
    """Depths decided beforehand, by the caller: `depth_of_token` holds layers per token.

    A depth that is not in `depths` runs to the next deeper one that is.
    """

    depth_of_token: Int[Array, "batch token"] = dataclasses.field(metadata={"row_axis": 0})
    depths: tuple[int, ...] = _static()
    causal: bool = _static(default=False)
    name: str = _static(default="given")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Int[Array, "batch token"]:
        if token_ids.shape != self.depth_of_token.shape:
            raise ValueError(
                f"Wanted one depth per token of {token_ids.shape}. Got {self.depth_of_token.shape}."
            )
        return self.depth_of_token

    def go_deeper(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory > self.depths[index], memory

    def asks(self, index: int) -> bool:
        return True

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random:
    """The control: depths drawn from a histogram, independent of the token.

    Every token's draw depends on the key, its position and its id alone: causal, and the same
    whoever shares the batch.

    Attributes:
      fractions: probability of each depth, shallowest first.
      key: a PRNG key.
      depths: where tokens may stop. Static.
    """

    fractions: Float[Array, " depth"]
    key: PRNGKeyArray
    depths: tuple[int, ...] = _static()
    causal: bool = _static(default=True)
    name: str = _static(default="random")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Float[Array, "batch token"]:
        return draw_per_token(self.key, token_ids, positions)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory >= jnp.cumsum(self.fractions)[index], memory

    def asks(self, index: int) -> bool:
        return True

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholded:
    """Tokens go deeper while a signal's score exceeds the boundary's threshold.

    A score of NaN or +inf goes deeper whatever the finite threshold: a broken score saves no work.

    Attributes:
      signal: scores tokens at each boundary.
      thresholds: one per boundary, in the score's unit; +inf stops everybody, -inf nobody. At these
        the signal is not even asked, unless it remembers what it saw at earlier boundaries.
      depths: where tokens may stop, one more than thresholds. Static.
    """

    signal: Signal
    thresholds: Float[Array, " boundary"]
    depths: tuple[int, ...] = _static()

    @property
    def name(self) -> str:
        return self.signal.name

    @property
    def causal(self) -> bool:
        return self.signal.causal

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Any:
        if self.thresholds.shape != (len(self.depths) - 1,):
            raise ValueError(
                f"Wanted a threshold for each of depths={self.depths} but the last. "
                f"Got thresholds of shape {self.thresholds.shape}."
            )
        return self.signal.start(token_ids, positions)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        score, memory = self.signal(index, boundary, memory)
        return exceeds(score, self.thresholds[index]), memory

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        return self.signal.remembers or jnp.isfinite(self.thresholds[index])

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return self.signal.flops(index, decoder, params)

    def reads_logits(self, index: int) -> bool:
        return self.signal.reads_logits(index)


def never_stops(depths: tuple[int, ...], *, name: str = "full") -> Thresholded:
    """Returns a policy that runs every token to the last depth, with boundaries on the way.

    Others may look at tokens there: a throttle, for one.
    """
    nobody = jnp.full(len(depths) - 1, -jnp.inf, jnp.float32)
    return Thresholded(signal=Position(name=name), thresholds=nobody, depths=depths)
