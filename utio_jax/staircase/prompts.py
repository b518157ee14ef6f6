# SPDX-License-Identifier: Apache-2.0
"""Prompt compression in depth: only the important tokens of a prompt run all layers.

Of a prompt only what it shows to later tokens counts. So most of its tokens may stop early, if what
they show in the layers that they skip is good (`kv="mapped"`), and if the right ones go deep: the
first (sinks), the last one, from which the first new token is drawn, and those that matter.

    token    0 1 2 3 4 5 6 7 8 9 | 10 11     # a prompt of ten tokens, two that continue it
    [20,30)  # # . . # . . . # # |  #  #     # "#" computed, "." shown by maps
    [0, 20)  # # # # # # # # # # |  #  #

Tokens are chosen by rank within the prompt, which looks ahead: such a policy is not causal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary, Signal
from utio_jax.policies.signals import Chance, KnownBefore
from utio_jax.staircase.buckets import invert
from utio_jax.staircase.heat import AttentionHeat, PromptSurrogate
from utio_jax.staircase.reference import FrozenKV, check_kv

_EVERYTHING = jnp.iinfo(jnp.int32).max

SIGNALS = ("sinks_recent", "heat", "surrogate", "random", "none")
"""What may choose the tokens that go deep, see `PromptChoice`."""


@pytree
class PromptImportance:
    """At each boundary a share of a prompt's tokens goes deeper: the most important, by rank.

    The first `sinks` tokens and the last one always do, and so does everything behind the prompt.
    They count among the share. Scores of NaN go deeper first.

    Attributes:
      signal: scores tokens, the higher the more important; asked at each boundary.
      deep: share of the prompt's tokens that goes deeper at each boundary; 1: all, and there is no
        difference from full depth.
      at_least: tokens that go deeper however small the share is: shorter prompts run in full.
      prompt_tokens: of all rows, or of each, at most; what lies behind is no prompt. By default all
        is.
      depths: where tokens may stop, ending at the last layer. Static.
      sinks: see above. Static.
    """

    signal: Signal
    deep: Float[Array, " boundary"]
    at_least: Int[Array, ""] | int = 16
    prompt_tokens: Int[Array, "*row"] | int = _EVERYTHING
    depths: tuple[int, ...] = static()
    sinks: int = static(default=4)

    def __post_init__(self) -> None:
        check_depths(self.depths)
        for field in ("at_least", "prompt_tokens"):  # Counts, not numbers of any kind.
            count = getattr(self, field)
            if isinstance(count, int):
                object.__setattr__(self, field, jnp.asarray(count, jnp.int32))

    @property
    def name(self) -> str:
        return f"prompt_{self.signal.name}"

    @property
    def causal(self) -> bool:
        return False

    def most_deep(self, width: int) -> tuple[int, ...] | None:
        """Returns how many tokens of a prompt of `width` go deeper at each boundary, at most.

        On the host. None where more of a row than the prompt is read, which all goes deep.
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
        if lengths is None:  # At the first boundary all real tokens are live.
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
    """Returns each token's rank within its row, the highest score first; of equals the later first.

    >>> rank_of(jnp.array([[0.5, 2.0, 0.5]]))
    Array([[2, 0, 1]], dtype=int32)
    """
    order = jnp.argsort(score[:, ::-1], axis=1, stable=True, descending=True)
    return invert((score.shape[1] - 1 - order).astype(jnp.int32))


@pytree
class Recency(KnownBefore):
    """The position: later tokens of a prompt matter more. Before the pass, free."""

    name: str = static(default="sinks_recent")
    causal: bool = static(default=False)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return positions.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """How prompts are read: where tokens stop, which and how many go on, what the others show.

    The last token always goes deep. So do the first four, and all of a prompt of at most 16 tokens,
    but for `by="none"`.

    Attributes:
      stop: depth at which the others stop.
      deep: share of a prompt's tokens that goes deep; 1: all, full depth.
      by: `"sinks_recent"`: the latest; `"heat"`: those that the prompt's last queries look at;
        `"surrogate"`: by UTIO's three signals; `"random"`: any, the control; `"none"`: the last
        token alone, whatever `deep` says.
      kv: what the others show in the layers that they skip: `"mapped"`, `"propagate"` or `"drop"`.
      flops_ratio: of a prompt, over full depth, as far as it was measured.
      nll_increase_pct: loss of what follows, over full depth's, as far as it was measured.
    """

    stop: int
    deep: float
    by: str = "sinks_recent"
    kv: FrozenKV = "mapped"
    flops_ratio: float | None = None
    nll_increase_pct: float | None = None

    def __post_init__(self) -> None:
        check_kv(self.kv, ("mapped", "propagate", "drop"))
        if self.by not in SIGNALS:
            raise ValueError(
                f"Wanted prompt tokens chosen by one of {', '.join(SIGNALS)}. Got {self.by!r}."
            )
        if not 0 <= self.deep <= 1:
            raise ValueError(
                "Wanted a share of prompt tokens that go deep, from 0 to 1. "
                f"Got {self.deep}. For example: 0.15."
            )

    @property
    def label(self) -> str:
        """Stop, share, signal, kv."""
        share = "" if self.by == "none" else f" {self.deep:g}"
        return f"{self.stop} {self.by}{share} {self.kv}"

    def to_json(self) -> dict[str, Any]:
        """Returns its fields as JSON can hold them; `choices_of` reads them back."""
        found = dataclasses.asdict(self)
        for name in ("flops_ratio", "nll_increase_pct"):
            found[name] = None if found[name] is None else round(found[name], 4)
        return found

    def policy(self, decoder: Decoder, *, prompt_tokens: int = _EVERYTHING) -> PromptImportance:
        """Returns the policy.

        Args:
          decoder: the model.
          prompt_tokens: of each row, at most; what lies behind runs in full.

        Raises:
          ValueError: a stop at which the model skips nothing.
        """
        layers = decoder.config.num_layers
        if not 0 < self.stop < layers:
            raise ValueError(
                f"Wanted prompts to stop at a depth between 1 and {layers - 1} of this model. "
                f"Got {self.stop}."
            )
        signals: dict[str, Signal] = {
            "heat": AttentionHeat(),
            "surrogate": PromptSurrogate(),
            "random": Chance(key=jax.random.key(0), name="random", causal=False),
        }
        nothing = self.by == "none"
        return PromptImportance(
            signal=signals.get(self.by, Recency()),
            deep=jnp.asarray([0.0 if nothing else self.deep], jnp.float32),
            at_least=0 if nothing else 16,
            prompt_tokens=prompt_tokens,
            depths=(self.stop, layers),
            sinks=0 if nothing else 4,
        )


def choices_of(stored: Any, *, source: str) -> tuple[PromptChoice, ...]:
    """Returns choices from what JSON held; raises ValueError where it is something else."""
    try:
        return tuple(PromptChoice(**each) for each in stored)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Wanted ways of reading prompts in {source}. They cannot be read: {error}. Fit again: "
            "utio-jax fit-prompt."
        ) from error
