# SPDX-License-Identifier: Apache-2.0
"""Rows of a source and a target: prompts, a policy for targets alone, and their prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from utio_jax.core.decoder import Decoder, Inputs, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.policies.base import Boundary, Policy
from utio_jax.policies.depth import uniform


def source_rows(
    decoder: Decoder,
    sources: Sequence[Sequence[int] | np.ndarray],
    targets: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> list[Int[np.ndarray, " token"]]:
    """Returns rows: each source filled up, the token that opens a target, the target's tokens.

    Without targets these are the prompts of `utio_jax.generate` and of an engine.

    Raises:
      ValueError: a source is empty, longer than the model's `source_tokens`, or holds padding.
    """
    config: Any = decoder.config
    rows = []
    for index, source in enumerate(sources):
        ids = np.asarray(source, np.int32)
        if not 0 < ids.size <= config.source_tokens or (ids == config.pad_id).any():
            raise ValueError(
                f"Wanted sources of 1 to {config.source_tokens} tokens without padding "
                f"({config.pad_id}). Got source {index} of {ids.size} tokens. Cut it, or load the "
                "model with more source_tokens."
            )
        padded = np.full(config.source_tokens, config.pad_id, np.int32)
        padded[: ids.size] = ids
        target = () if targets is None else targets[index]
        rows.append(np.concatenate([padded, [config.bos_id], target]).astype(np.int32))
    return rows


@pytree
class OnTargets:
    """A policy for tokens of targets. Those of sources leave after the first layer.

    Exact under `kv="propagate"`: no layer changes what the encoder made of a source, and its keys
    and values are projected from that. `kv="drop"` would hide sources: targets get NaN.

    Attributes:
      policy: of the target's tokens.
      source_tokens: of the model's config. Static.
    """

    policy: Policy
    source_tokens: int = static()

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def causal(self) -> bool:
        return self.policy.causal

    @property
    def depths(self) -> tuple[int, ...]:
        return (1, *self.policy.depths)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        return self.policy.start(token_ids, positions)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        is_target = boundary.positions >= self.source_tokens
        if not index:
            return is_target, memory
        goes, memory = self.policy.go_deeper(index - 1, boundary, memory)
        return goes | ~is_target, memory

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        return not index or self.policy.asks(index - 1)

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return self.policy.flops(index - 1, decoder, params) if index else 0.0

    def reads_logits(self, index: int) -> bool:
        return index > 0 and self.policy.reads_logits(index - 1)


@pytree
class WholeSources(Prefill):
    """Prefill that reads rows as wholes, in engines, too, as the encoder needs them."""

    def is_exact(self, decoder: Decoder) -> bool:
        """Returns False, which makes an engine read whole prompts. The result is exact."""
        del decoder
        return False

    def check(self, decoder: Decoder, *, kv: str) -> None:
        super().check(decoder, kv="propagate" if kv == "full" else kv)


def read_sources(decoder: Decoder, mode: Mode = Plain()) -> WholeSources:
    """Returns the prefill of a T5 for a mode: targets run all layers, sources the first alone.

    Raises:
      ValueError: the mode drops keys and values of tokens that stopped, as sources do.
    """
    config: Any = decoder.config
    if mode.prompt_kv == "drop":
        raise ValueError('Wanted a mode that keeps sources in sight. Got kv="drop". Leave it out.')
    full = uniform(config.num_layers, name="full")
    policy = OnTargets(policy=full, source_tokens=config.source_tokens)
    return WholeSources(policy=policy, kv="propagate")
