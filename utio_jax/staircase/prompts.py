# SPDX-License-Identifier: Apache-2.0
"""Early-exit prefill: only the important tokens of a prompt run all layers.

Prompt tokens matter only through their K/V. Most of them may exit early if two conditions hold.
The K/V of skipped layers must be good (`kv="mapped"`). Important tokens must run all layers: the
first tokens (sinks), the last token, which predicts the first new one, and the most important.

    token    0 1 2 3 4 5 6 7 8 9 | 10 11     # a prompt of ten tokens, two that continue it
    [20,30)  # # . . # . . . # # |  #  #     # "#" computed, "." shown by maps
    [0, 20)  # # # # # # # # # # |  #  #

Tokens are ranked within the whole prompt, so such a policy is not causal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.arrays import invert
from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary, Signal
from utio_jax.policies.signals import KnownBefore

EVERYTHING = jnp.iinfo(jnp.int32).max
"""A number of tokens that no prompt has."""


@pytree
class PromptImportance:
    """Exit policy for prompts: at each exit the most important share of tokens continues.

    The first `sinks` tokens and the last prompt token always continue and count towards the share.
    Tokens after the prompt always continue. NaN scores continue first.

    Attributes:
      signal: importance score of tokens, evaluated at each exit; higher is more important.
      deep: share of the prompt's tokens that continues at each exit; 1 equals full depth.
      at_least: minimum number of tokens that continue; shorter prompts run in full.
      prompt_tokens: maximum prompt length, one for all rows or one per row. Later tokens do not
        belong to the prompt. Unlimited by default.
      depths: exits, ending at the last layer. Static.
      sinks: number of first tokens that always continue. Static.
    """

    signal: Signal
    deep: Float[Array, " boundary"]
    at_least: Int[Array, ""] | int = 16
    prompt_tokens: Int[Array, "*row"] | int = dataclasses.field(
        default=EVERYTHING, metadata={"row_axis": 0}
    )
    depths: tuple[int, ...] = static()
    sinks: int = static(default=4)

    def __post_init__(self) -> None:
        check_depths(self.depths)
        # While pytrees are rebuilt they may be anything.
        if type(self.deep) in (list, tuple) and all(
            isinstance(share, (int, float, np.number)) for share in self.deep
        ):
            if not all(0 <= share <= 1 for share in self.deep):
                raise ValueError(
                    "Wanted shares of prompt tokens that go deeper, from 0 to 1. "
                    f"Got deep={self.deep}. For example: [0.15]."
                )
            object.__setattr__(self, "deep", jax.device_put(np.asarray(self.deep, np.float32)))
        for field in ("at_least", "prompt_tokens"):  # Counts, not numbers of any kind.
            count = getattr(self, field)
            if isinstance(count, int):
                object.__setattr__(self, field, jax.device_put(np.int32(count)))

    @classmethod
    def exact(cls, decoder: Decoder) -> PromptImportance | None:
        """Returns the policy that is exact for a model with shared K/V; None for other models.

        If upper layers read the K/V of lower layers (`DecoderConfig.kv_source`), other tokens only
        need the first `kv_complete` layers of a token. Only the last prompt token runs all layers,
        since the next token is drawn from it (YOCO, arXiv 2405.05254, section 2.3).
        """
        config = decoder.config
        if not config.shares_kv:
            return None
        depths = max(1, config.kv_complete), config.num_layers  # 0: the first layer makes all K/V.
        deep = jax.device_put(np.zeros(1, np.float32))
        return cls(signal=Recency(), deep=deep, at_least=0, sinks=0, depths=depths)

    @property
    def name(self) -> str:
        return f"prompt_{self.signal.name}"

    @property
    def causal(self) -> bool:
        return False

    def most_deep(self, width: int) -> tuple[int, ...] | None:
        """Returns the maximum number of tokens that continue at each exit, for prompts of `width`.

        Runs on the host. None if rows contain tokens after the prompt, which all continue.
        """
        if np.min(np.asarray(self.prompt_tokens)) < width:
            return None
        shares = np.asarray(self.deep, np.float32) * np.float32(width)
        chosen = np.maximum(np.ceil(shares), np.asarray(self.at_least))
        return tuple(min(width, int(count) + self.sinks + 1) for count in chosen)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        if jnp.shape(self.deep) != (len(self.depths) - 1,):
            raise ValueError(
                f"Wanted a share of deeper tokens for each of depths={self.depths} but the last. "
                f"Got shares of shape {jnp.shape(self.deep)}."
            )
        return self.signal.start(token_ids, positions), None

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        memory, lengths = memory
        if lengths is None:  # All real tokens are live at the first exit.
            real = jnp.sum(boundary.live, axis=1, dtype=jnp.int32)
            lengths = jnp.minimum(real, self.prompt_tokens)
        prompt = boundary.live & (boundary.positions < lengths[:, None])
        asked = dataclasses.replace(boundary, live=prompt)
        score, memory = self.signal(index, asked, memory)
        always = boundary.positions < self.sinks
        always |= boundary.positions == lengths[:, None] - 1
        score = jnp.where(always | jnp.isnan(score), jnp.inf, score)
        score = jnp.where(prompt, score, -jnp.inf)
        count = jnp.ceil(self.deep[index] * lengths.astype(jnp.float32)).astype(jnp.int32)
        count = jnp.maximum(count, self.at_least)
        goes = prompt & (rank_of(score) < count[:, None]) | prompt & always
        return goes | boundary.live & ~prompt, (memory, lengths)

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        return self.signal.remembers or self.deep[index] < 1.0

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return self.signal.flops(index, decoder, params)

    def reads_logits(self, index: int) -> bool:
        return self.signal.reads_logits(index)


def rank_of(score: Float[Array, "batch token"]) -> Int[Array, "batch token"]:
    """Returns each token's rank within its row: highest score first; of equal scores, latest first.

    >>> rank_of(jnp.array([[0.5, 2.0, 0.5]]))
    Array([[2, 0, 1]], dtype=int32)
    """
    order = jnp.argsort(score[:, ::-1], axis=1, stable=True, descending=True)
    return invert((score.shape[1] - 1 - order).astype(jnp.int32))


@pytree
class Recency(KnownBefore):
    """Position as importance: later prompt tokens rank higher. Known before the pass; free."""

    name: str = static(default="sinks_recent")
    causal: bool = static(default=False)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return positions.astype(jnp.float32)
