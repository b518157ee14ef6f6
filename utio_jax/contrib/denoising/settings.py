# SPDX-License-Identifier: Apache-2.0
"""Settings of denoising: the canvas, what a step decides, when it stops, and which tokens run.

All are frozen and hashable: part of the compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, DecoderConfig, check_softmax, is_integer

_FAR = 1e6  # Beyond any position.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canvas:
    """The row of a masked diffusion model, and how it is filled: the prompt, then masks.

    Attributes:
      mask_id: token that stands for what is not decided.
      block: tokens that are filled before those after them; 0: all new tokens are one block.
      attention: `"full"`: tokens see the whole row, and blocks count from the prompt's end.
        `"block"`: tokens see their own block and those before it, and blocks count from the row's
        start (SDAR, arXiv 2510.06303). K/V of finished blocks are exact where a step runs a whole
        block: a smaller `Best.count` leaves some from unfinished content.
      shift: whether logits at a token predict the token after it, as in models grown from
        autoregressive ones (Dream).
    """

    mask_id: int
    block: int = 0
    attention: Literal["full", "block"] = "full"
    shift: bool = False

    def check(self, decoder: Decoder) -> None:
        """Raises ValueError where the canvas and the decoder do not fit each other."""
        config = decoder.config
        check_softmax(decoder, why="for denoising", remedy="Take another model.")
        if config.causal:
            raise ValueError(
                "Wanted a decoder with causal=False in its config, whose tokens see those after "
                f"them. Got {type(decoder).__name__} with causal=True. Load a mask model by "
                "utio_jax.contrib.denoising.load_denoiser."
            )
        if not (is_integer(self.mask_id) and self.mask_id < config.vocab_size):
            raise ValueError(
                f"Wanted a mask_id below the vocabulary's {config.vocab_size}. Got "
                f"{self.mask_id!r}."
            )
        least = int(self.attention == "block")
        if self.attention not in ("full", "block") or not is_integer(self.block, least):
            raise ValueError(
                'Wanted attention="full", or attention="block" with a block of at least 1. Got '
                f"attention={self.attention!r}, block={self.block}."
            )

    def blocks_of(
        self, positions: Int[Array, "row token"], lengths: Int[Array, " row"]
    ) -> Int[Array, "row token"]:
        """Returns the index of each position's block; below 0 in prompts under full attention."""
        if self.attention == "block":
            return positions // self.block
        after = positions - lengths[:, None]
        return after // self.block if self.block else jnp.where(after < 0, -1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reveal:
    """The masks that a step decides: the most confident ones.

    Attributes:
      count: tokens of a row in each step, at least.
      threshold: probability from which a prediction is decided as well (Fast-dLLM, arXiv
        2505.22618); None: `count` alone.
      growth: factor of `count` from step to step of a block; 2 is Ascending Step-Size (ASS, arXiv
        2509.23924).
      end_factor: of an end token's probability at a block's beginning, rising linearly to 1 at its
        end: EOS Early Rejection (EOSER, same paper: 0.4, with ASS 0.01). 1: none.
    """

    count: int = 1
    threshold: float | None = None
    growth: float = 1.0
    end_factor: float = 1.0

    def __post_init__(self) -> None:
        shares = (self.end_factor, self.threshold or 0.0)
        whole = is_integer(self.count, 1)
        if not (whole and self.growth >= 1 and all(0 <= share <= 1 for share in shares)):
            raise ValueError(
                "Wanted a whole count and a growth of at least 1, a threshold and an end_factor "
                f"from 0 to 1. Got {self}."
            )

    def number(self, since: Int[Array, " row"]) -> Int[Array, " row"]:
        """Returns the number of tokens to decide in a block's step `since`, counted from 0."""
        # Beyond any canvas nothing changes, and integers end.
        return jnp.minimum(self.count * self.growth**since, 2.0**30).astype(since.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sched:
    """Decides a whole block once its mean logit margin passes a falling threshold (2512.02892).

    The margin is the difference of the two largest logits; a decided token's is its decision's.

    Attributes:
      high: threshold where nothing is decided, in logits.
      low: threshold where all is; between them it is linear in the share that is decided.
    """

    high: float = 7.5
    low: float = 2.5

    def __post_init__(self) -> None:
        if not self.high >= self.low:
            raise ValueError(f"Wanted high >= low. Got {self}.")

    def sure(self, span: jax.Array, masks: jax.Array, last: Any) -> Bool[Array, " row"]:
        """Returns the rows whose block is decided at once.

        `span` are its new tokens, `masks` those not decided, `last` the last `Predictions`.
        """
        total = jnp.maximum(jnp.sum(span, axis=1), 1)
        mean = jnp.sum(jnp.where(span, last.margin, 0), axis=1) / total
        return mean >= self.low + (self.high - self.low) * jnp.sum(masks, axis=1) / total


def near(state: Any) -> Float[Array, "row token"]:
    """Scores positions by their distance to the last decided ones: the nearest run first."""
    position = jnp.arange(state.ids.shape[1], dtype=jnp.float32)[None]
    newly = (state.decided_at >= 0) & (state.decided_at == state.step - 1)
    before = jax.lax.cummax(jnp.where(newly, position, -_FAR), axis=1)
    after = jax.lax.cummin(jnp.where(newly, position, _FAR), axis=1, reverse=True)
    return -jnp.minimum(jnp.minimum(position - before, after - position), state.ids.shape[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """A number of tokens per row, by a score; those that must run come first. Ties: leftmost first.

    Attributes:
      count: slots of each row, a static number.
      score: `near`, or another function of the loop's `State` that returns a finite score for each
        position; the highest run. None: only tokens whose content changed run. In the upper layers
        a token that predicts a mask has that mask's score.
    """

    count: int
    score: Callable[[Any], Any] | None = near

    def __post_init__(self) -> None:
        if not is_integer(self.count, 1):
            raise ValueError(f"Wanted a count of at least 1. Got {self}.")


_LOWER, _UPPER = ("all", "block"), ("all", "predicting")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refresh:
    """The tokens that run layers in a step; the others keep K/V, states and predictions.

    A row's first step runs all tokens. A token whose content changed must run the lower layers, and
    comes first wherever there are slots.

    Attributes:
      lower: tokens that run layers [0, split): all, those of the block, or some.
      upper: tokens that run the other layers: all, those that predict a mask of the block, or some
        of these.
      split: number of lower layers; None: as many as make all keys and values, which is the least.
        So upper layers of tokens that predict nothing change nothing. The number of layers: a token
        runs all or none.
      at_blocks: whether a block's first step runs all tokens, but those of finished blocks under
        `attention="block"` (DualCache of Fast-dLLM: `lower="block", at_blocks=True`).
    """

    lower: Best | Literal["all", "block"] = "all"
    upper: Best | Literal["all", "predicting"] = "predicting"
    split: int | None = None
    at_blocks: bool = False

    def __post_init__(self) -> None:
        parts = (("lower", self.lower, _LOWER), ("upper", self.upper, _UPPER))
        for name, value, allowed in parts:
            if not isinstance(value, Best) and value not in allowed:
                raise ValueError(
                    f"Wanted {name} to be a Best or one of {', '.join(allowed)}. Got {value!r}."
                )
        if isinstance(self.upper, Best) and self.upper.score is None:
            raise ValueError("Wanted a score of masks for upper, such as `near`. Got None.")

    def split_of(self, config: DecoderConfig) -> int:
        """Returns the number of lower layers in a model."""
        layers = config.num_layers
        least = min(config.kv_complete + 1, layers)
        split = least if self.split is None else self.split
        if not least <= split <= layers:
            own = f"{least}, where all K/V are made"
            raise ValueError(f"Wanted a split from {own}, to the {layers} layers. Got {split}.")
        return split
