# SPDX-License-Identifier: Apache-2.0
"""The control among signals."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from utio_jax.decoding.sampling import draw_per_token
from utio_jax.policies.base import Boundary
from utio_jax.policies.signals import SignalBase, static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chance(SignalBase):
    """The control: a draw from [0, 1) per token, the same at every boundary. Before the pass, free.

    Attributes:
      key: a PRNG key.
    """

    key: PRNGKeyArray
    name: str = static(default="chance")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Float[Array, "batch token"]:
        return draw_per_token(self.key, token_ids, positions)

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory, memory
