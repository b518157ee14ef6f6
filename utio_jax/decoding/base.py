# SPDX-License-Identifier: Apache-2.0
"""What a decoding mode is, and the plainest one.

A mode is a frozen dataclass with `start` (its memory, after prefill) and `step` (one round of the
token loop). Policies and thresholds travel inside it as leaves of a pytree, so that new ones
compile nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.sampling import DRAW, Sampling, draw, token_keys
from utio_jax.decoding.segments import decode_step
from utio_jax.decoding.state import DecodeState, StopRules, emit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same from round to round.

    Attributes:
      decoder: the model.
      params: its parameters.
      sampling: how tokens are drawn.
      stops: what ends a row.
      width: key slots that attention reads, more than every position of the round. Static.
    """

    decoder: Decoder
    params: Params
    sampling: Sampling
    stops: StopRules
    width: int


@runtime_checkable
class Mode(Protocol):
    """How a token loop spends its layers."""

    @property
    def name(self) -> str:
        """The stable string that ledgers carry."""
        ...

    @property
    def block(self) -> int:
        """The most tokens that one row may run ahead of its last one, that one included."""
        ...

    @property
    def kv(self) -> str:
        """What new tokens see of a prompt token that stopped early; `"full"`: none may have."""
        ...

    def check(self, decoder: Decoder) -> None:
        """Raises ValueError where the mode and the model do not fit."""
        ...

    def segments(self, decoder: Decoder) -> int:
        """Returns the number of watermarks per row."""
        ...

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        """Returns the state with the mode's memory, once the prompts are in the cache."""
        ...

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        """Returns the state after at least one more token in every active row."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Every token at full depth."""

    @property
    def name(self) -> str:
        return "plain"

    @property
    def block(self) -> int:
        return 1

    @property
    def kv(self) -> str:
        return "propagate"

    def check(self, decoder: Decoder) -> None:
        del decoder  # Every decoder can.

    def segments(self, decoder: Decoder) -> int:
        return 1

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        return state

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        active, width = state.active, setting.width
        logits, cache = decode_step(
            setting.decoder,
            setting.params,
            state.last_ids,
            state.cache,
            active=active,
            width=width,
        )
        layers = jnp.int32(setting.decoder.config.num_layers)
        key_slots = layers * float(width)
        tally = state.tally.add(
            active, steps=1, token_layers=layers, key_slots=key_slots, attended=key_slots, heads=1
        )
        state = dataclasses.replace(state, cache=cache, tally=tally)
        depth = jnp.full_like(state.lengths, layers)
        return emit_drawn(setting, state, logits, decided=depth, executed=depth)


def emit_drawn(
    setting: Setting,
    state: DecodeState,
    logits: Float[Array, "batch vocab"],
    *,
    decided: Int[Array, " batch"],
    executed: Int[Array, " batch"],
) -> DecodeState:
    """Returns the state with one token per active row, drawn from `logits`."""
    with jax.named_scope("sample"):
        keys = token_keys(state.seeds, state.lengths[:, None], DRAW)
        new = draw(setting.sampling, logits[:, None, :], keys)
    one = jnp.ones_like(state.lengths)
    return emit(
        state,
        setting.stops,
        new,
        one,
        logits=logits[:, None, :],
        decided=decided[:, None],
        executed=executed[:, None],
    )
