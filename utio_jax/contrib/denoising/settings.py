# SPDX-License-Identifier: Apache-2.0
"""Settings of denoising: the canvas, what a step decides, when it stops, and which tokens run.

All are frozen and hashable: part of the compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, DecoderConfig, check_softmax

Score = Literal["age", "near", "decided", "random", "confidence", "entropy", "left"]
"""Order in which tokens run: longest not run, nearest to the last decided, only those whose content
changed, by chance, by the last prediction's probability or entropy, or in text order."""

Schedule = Literal["linear", "cosine", "exponential"]
"""Course of a threshold from its first to its last value."""


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
      seed_first: whether a block's first token is decided alone, before the others (Fast-dLLM v2,
        arXiv 2509.26328).
    """

    mask_id: int
    block: int = 0
    attention: Literal["full", "block"] = "full"
    shift: bool = False
    seed_first: bool = False

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
        if not 0 <= self.mask_id < config.vocab_size:
            raise ValueError(
                f"Wanted a mask_id below the vocabulary's {config.vocab_size}. Got {self.mask_id}."
            )
        if self.attention not in ("full", "block") or self.block < (self.attention == "block"):
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
        whole = isinstance(self.count, int) and self.count >= 1
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
      low: threshold where all is.
      schedule: between them, over the share of the block that is decided.
    """

    high: float = 7.5
    low: float = 2.5
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule) or not self.high >= self.low:
            raise ValueError(
                f"Wanted high >= low and a schedule of {', '.join(get_args(Schedule))}. Got {self}."
            )

    def threshold(self, progress: Float[Array, " row"]) -> Float[Array, " row"]:
        """Returns the threshold at a share of decided tokens."""
        left = {
            "linear": 1 - progress,
            "cosine": (1 + jnp.cos(math.pi * progress)) / 2,
            "exponential": (jnp.exp(-4 * progress) - math.exp(-4)) / (1 - math.exp(-4)),
        }[self.schedule]
        return self.low + (self.high - self.low) * left

    def sure(self, span: jax.Array, masks: jax.Array, last: Any) -> Bool[Array, " row"]:
        """Returns the rows whose block is decided at once.

        `span` are its new tokens, `masks` those not decided, `last` the last `Predictions`.
        """
        total = jnp.maximum(jnp.sum(span, axis=1), 1)
        progress = 1 - jnp.sum(masks, axis=1) / total
        mean = jnp.sum(jnp.where(span, last.margin, 0), axis=1) / total
        return mean >= self.threshold(progress)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stable:
    """Decides a whole block once no prediction of its masks has changed for some predictions.

    Attributes:
      steps: predictions in a row with the same result, after the first.
    """

    steps: int = 2

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Wanted steps of at least 1. Got steps={self.steps}.")

    def sure(self, span: jax.Array, masks: jax.Array, last: Any) -> Bool[Array, " row"]:
        """Returns the rows whose block is decided at once, see `Sched.sure`."""
        del span
        return jnp.all(~masks | (last.same >= self.steps), axis=1)


Stop = Sched | Stable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """A number of tokens per row, by a score; those that must run come first. Ties: leftmost first.

    Attributes:
      score: the order.
      count: slots of each row, a static number.
      among: the lower layers' score picks among all tokens, or those that predict a mask of the
        block. These have the score of their mask, as in the upper layers.
    """

    score: Score
    count: int
    among: Literal["all", "masks"] = "all"

    def __post_init__(self) -> None:
        known = self.score in get_args(Score) and self.among in _AMONG
        if not known or self.count not in _COUNTS:
            raise ValueError(
                f"Wanted a score of {', '.join(get_args(Score))}, a count of at least 1 and among "
                f"of {', '.join(_AMONG)}. Got {self}."
            )


_COUNTS = range(1, 2**31)
_AMONG, _LOWER, _UPPER = ("all", "masks"), ("all", "block"), ("all", "predicting")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refresh:
    """The tokens that run layers in a step; the others keep K/V, states and predictions.

    A row's first step runs all tokens. A token whose content changed must run the lower layers, and
    comes first wherever there are slots.

    Attributes:
      lower: tokens that run layers [0, split): all, those of the block, or some.
      upper: tokens that run the other layers: all, those that predict a mask of the block, or some
        of these.
      split: number of lower layers; None: as many as make all keys and values. Where upper layers
        read K/V made below, upper layers of tokens that predict nothing change nothing. The number
        of layers: a token runs all or none.
      every: steps between steps that run all tokens; 0: only the first does. Finished blocks of
        `attention="block"` never run again.
      at_blocks: whether a block's first step runs all tokens (DualCache of Fast-dLLM:
        `lower="block", at_blocks=True`).
    """

    lower: Best | Literal["all", "block"] = "all"
    upper: Best | Literal["all", "predicting"] = "predicting"
    split: int | None = None
    every: int = 0
    at_blocks: bool = False

    def __post_init__(self) -> None:
        parts = (("lower", self.lower, _LOWER), ("upper", self.upper, _UPPER))
        for name, value, allowed in parts:
            if not isinstance(value, Best) and value not in allowed:
                raise ValueError(
                    f"Wanted {name} to be a Best or one of {', '.join(allowed)}. Got {value!r}."
                )
        if isinstance(self.upper, Best) and self.upper.score == "decided":
            raise ValueError('Wanted a score of masks for upper, such as "near". Got "decided".')
        if not isinstance(self.every, int) or self.every < 0:
            raise ValueError(f"Wanted a whole every of at least 0. Got every={self.every}.")

    def split_of(self, config: DecoderConfig) -> int:
        """Returns the number of lower layers in a model."""
        layers = config.num_layers
        split = min(config.kv_complete + 1, layers) if self.split is None else self.split
        if not 1 <= split <= layers:
            raise ValueError(f"Wanted a split from 1 to the {layers} layers. Got split={split}.")
        return split
