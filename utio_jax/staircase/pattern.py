# SPDX-License-Identifier: Apache-2.0
"""Attention patterns: which keys each token of a pass sees, and its slots."""

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


@pytree
class AttentionPattern:
    """Dense attention, and the base of patterns under which some tokens see fewer keys.

    `utio_jax.utio.VerticalSlash` is one. A pass hands the pattern's choices, which `start` returns,
    from segment to segment: `pack` may choose at the start of a segment, `look` at the end of the
    one before.
    """

    def check(self, decoder: Decoder, depths: tuple[int, ...]) -> None:
        """Raises ValueError if the pattern does not fit a model, or the depths of a policy."""

    def choose_executor(
        self, executor: Executor | Literal["auto"], policy: Policy, width: int
    ) -> Executor:
        """Resolves `executor="auto"` for rows of `width` tokens."""
        return choose_executor(executor, policy, width)

    def start(
        self, model: Model, tokens: Tokens, token_ids: jax.Array, depths: tuple[int, ...]
    ) -> Any:
        """Returns the choices before a pass whose segments end at `depths`, a pytree."""
        return None

    def pack(
        self, model: Model, segment: int, tokens: Tokens, choices: Any
    ) -> tuple[Any, Any, Work]:
        """Returns the slots of a segment's live tokens, the choices, and the work of choosing."""
        causal = model.decoder.config.causal
        return model.executor.pack(segment, tokens.live, causal=causal), choices, Work.of()

    def asks(self, index: int) -> bool:
        """Returns True if `look` needs the LM head at an exit, even if the policy does not."""
        return False

    def look(self, index: int, boundary: Boundary, choices: Any, policy_memory: Any) -> Any:
        """Returns the choices after exit number `index`.

        `policy_memory` is what the policy remembers after its decision there.
        """
        return choices

    def chosen(self, choices: Any) -> Any:
        """Returns the choices for `StaircaseResult.chosen`; None: there are none."""
        return None

    def flops(self, decoder: Decoder, params: Params, work: Work, *, segments: int) -> float:
        """Returns the FLOPs of a pass's choices, without the LM heads that they read."""
        return 0.0

    def spared_keys(
        self, chosen: Any, depths: Sequence[int], keys: Float[np.ndarray, " token"]
    ) -> float:
        """Returns the query-key pairs that dense attention has, and this pattern has not.

        Args:
          chosen: what `chosen` returned, on the host.
          depths: ends of the pass's segments.
          keys: number of keys that dense attention reads for each position.
        """
        return 0.0


DENSE = AttentionPattern()
"""Every token attends to everything that its layer shows it."""


def check_pattern(attention: Any, kind: type[AttentionPattern] = AttentionPattern) -> None:
    """Raises TypeError for an attention of another kind."""
    if not isinstance(attention, kind):
        raise TypeError(
            f"Wanted attention={kind.__name__}(...). Got {type(attention).__name__}. A History is "
            "a part of VerticalSlash(history=...); of a Cascade take cascade.attention."
        )
