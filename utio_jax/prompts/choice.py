# SPDX-License-Identifier: Apache-2.0
"""Settings of early-exit prefill by name, as `utio-jax fit-prompt` measures and stores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from utio_jax.core.decoder import Decoder
from utio_jax.policies.base import Signal
from utio_jax.policies.signals import Chance
from utio_jax.staircase.prompts import EVERYTHING, PromptImportance, Recency
from utio_jax.staircase.reference import FrozenKV, check_kv
from utio_jax.utio.signals import AttentionHeat, PromptSurrogate

SIGNALS: dict[str, Callable[[], Signal]] = {
    "sinks_recent": Recency,
    "random": lambda: Chance(key=jax.random.key(0), name="random", causal=False),
    "heat": AttentionHeat,
    "surrogate": PromptSurrogate,
    "none": Recency,
}
"""Signals that rank prompt tokens, by the names of `PromptChoice.by`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """Settings of early-exit prefill: exit, share of deep tokens, ranking, K/V strategy.

    The last token always runs all layers. Except with `by="none"`, so do the first four tokens, and
    all tokens of prompts of up to 16.

    Attributes:
      stop: depth at which all other tokens exit.
      deep: share of a prompt's tokens that runs all layers; 1 is full depth.
      by: ranking of tokens. `"sinks_recent"`: latest first. `"heat"`: by attention of the prompt's
        last queries. `"surrogate"`: by UTIO's three signals. `"random"`: the control. `"none"`:
        only the last token runs all layers, for any `deep`.
      kv: K/V in skipped layers: `"mapped"`, `"propagate"` or `"drop"`.
      flops_ratio: FLOPs of a prompt over those at full depth; None if not measured.
      nll_increase_pct: increase of the loss of the continuation over full depth, in percent; None
        if not measured.
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

    @classmethod
    def exact(cls, decoder: Decoder) -> PromptChoice | None:
        """Returns the choice of `PromptImportance.exact`; None where there is none."""
        policy = PromptImportance.exact(decoder)
        if policy is None:
            return None
        return cls(stop=policy.depths[0], deep=0.0, by="none", kv="propagate")

    @property
    def label(self) -> str:
        """Short text for tables: exit, ranking, share, K/V strategy."""
        share = "" if self.by == "none" else f" {self.deep:g}"
        return f"{self.stop} {self.by}{share} {self.kv}"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, which `choices_of` reads."""
        fields = dataclasses.asdict(self)
        for name in ("flops_ratio", "nll_increase_pct"):
            fields[name] = None if fields[name] is None else round(fields[name], 4)
        return fields

    def policy(self, decoder: Decoder, *, prompt_tokens: int = EVERYTHING) -> PromptImportance:
        """Returns the exit policy of these settings; tokens after `prompt_tokens` run all layers.

        Raises:
          ValueError: `stop` is not between 1 and the number of layers minus 1.
        """
        layers = decoder.config.num_layers
        if not 0 < self.stop < layers:
            raise ValueError(
                f"Wanted prompts to stop at a depth between 1 and {layers - 1} of this model. "
                f"Got {self.stop}."
            )
        nothing = self.by == "none"
        return PromptImportance(
            signal=SIGNALS[self.by](),
            deep=jax.device_put(np.asarray([0.0 if nothing else self.deep], np.float32)),
            at_least=0 if nothing else 16,
            prompt_tokens=prompt_tokens,
            depths=(self.stop, layers),
            sinks=0 if nothing else 4,
        )


def choices_of(stored: Any, *, source: str) -> tuple[PromptChoice, ...]:
    """Parses settings stored as JSON; raises ValueError if they are malformed."""
    try:
        return tuple(PromptChoice(**fields) for fields in stored)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Wanted ways of reading prompts in {source}. They cannot be read: {error}. Fit again: "
            "utio-jax fit-prompt."
        ) from error
