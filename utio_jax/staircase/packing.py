# SPDX-License-Identifier: Apache-2.0
"""Packing of a pass's live tokens, and the attention pattern that says which keys they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary, Policy
from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.exit_head import Model


class Packing:
    """Packs the live tokens of each segment into slots while a pass is traced; all attend densely.

    Subclasses choose tokens that see fewer keys: at the start of a segment (`pack`), or at the end
    of the one before (`look`).

    Attributes:
      work: work executed for the last segment's choice.
    """

    def __init__(self, model: Model) -> None:
        """Prepares a pass."""
        self._model, self.work = model, Work.of()

    def pack(self, segment: int, tokens: Tokens) -> Any:
        """Returns the slots of a segment's live tokens."""
        causal = self._model.decoder.config.causal
        return self._model.executor.pack(segment, tokens.live, causal=causal)

    def asks(self, index: int) -> bool:
        """Returns True if `look` needs the LM head at an exit, even if the policy does not."""
        return False

    def look(self, index: int, boundary: Boundary, memory: Any) -> None:
        """Reads exit number `index`, and what the policy remembers after its decision there."""

    def chosen(self) -> Any:
        """Returns the choices made, with leaves `[segment, batch, token]`; None: none."""
        return None


@pytree
class AttentionPattern:
    """Dense attention, and the base of patterns under which some tokens see fewer keys.

    `utio_jax.utio.VerticalSlash` is one.
    """

    def check(self, decoder: Decoder, depths: tuple[int, ...]) -> None:
        """Raises ValueError if the pattern does not fit a model, or the depths of a policy."""

    def choose_executor(
        self, executor: Executor | Literal["auto"], policy: Policy, width: int
    ) -> Executor:
        """Resolves `executor="auto"` for rows of `width` tokens."""
        return choose_executor(executor, policy, width)

    def packing(
        self, model: Model, tokens: Tokens, token_ids: jax.Array, depths: tuple[int, ...]
    ) -> Packing:
        """Returns the packing of a pass whose segments end at `depths`."""
        return Packing(model)

    def flops(self, decoder: Decoder, params: Params, work: Work, *, segments: int) -> float:
        """Returns the FLOPs of a pass's choices, without the LM heads that they read."""
        return 0.0

    def spared_keys(
        self, chosen: Any, depths: Sequence[int], keys: Float[np.ndarray, " token"]
    ) -> float:
        """Returns the query-key pairs that dense attention has, and this pattern has not.

        Args:
          chosen: of `Packing.chosen`, on the host.
          depths: ends of the pass's segments.
          keys: number of keys that dense attention reads for each position.
        """
        return 0.0


DENSE = AttentionPattern()
"""Every token attends to everything that its layer shows it."""
