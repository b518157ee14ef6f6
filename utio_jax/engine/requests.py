# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine as arrays, and engine statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from utio_jax.decoding.requests import END_REASONS, Event, Request, arrays_of
from utio_jax.decoding.sampling import rows_of
from utio_jax.decoding.state import eos_array
from utio_jax.engine.blocks import Rules


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Engine statistics: counts since the engine was made or warmed up.

    Attributes:
      mode: name of the decoding mode.
      slots: number of requests that can run at once.
      queued: number of requests that wait for a slot, or whose prompts are being read.
      running: number of requests whose prompts have been read.
      ended: number of finished requests by reason.
      blocks: number of blocks of decode steps.
      prompt_groups: number of prefill passes.
      prompt_tokens: number of tokens of prompts that have been read.
      cached_tokens: number of these tokens that came from the prefix cache.
      prefix_blocks: number of blocks in the prefix cache.
      prefix_evictions: number of blocks evicted from the prefix cache.
      padded_prompt_tokens: token slots that prefill passes ran, padding included.
      new_tokens: number of new tokens in events.
      decided: sum of the decided depths of new tokens in layers.
      executed: sum of the layers that ran for new tokens, including those for other rows.
    """

    mode: str
    slots: int
    queued: int = 0
    running: int = 0
    ended: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    blocks: int = 0
    prompt_groups: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_blocks: int = 0
    prefix_evictions: int = 0
    padded_prompt_tokens: int = 0
    new_tokens: int = 0
    decided: int = 0
    executed: int = 0

    @property
    def mean_depth_decided(self) -> float | None:
        """Mean decided depth of new tokens in layers; None without new tokens."""
        return self.decided / self.new_tokens if self.new_tokens else None

    @property
    def mean_depth_executed(self) -> float | None:
        """Mean number of layers that ran for a new token; None without new tokens."""
        return self.executed / self.new_tokens if self.new_tokens else None

    def add(self, event: Event) -> None:
        """Adds the tokens and the end of an event to the counts."""
        self.new_tokens += event.token_ids.size
        self.decided += int(event.decided.sum())
        self.executed += int(event.executed.sum())
        if event.finished is not None:
            self.ended[event.finished.reason] += 1


Fresh = tuple[dict[str, Any], Rules]
"""Arrays of requests to be inserted into rows, by the arguments of `begin`, and their rules."""


def fresh_of(
    requests: Sequence[Request],
    *,
    rows: int,
    width: int,
    own: Float[np.ndarray, " boundary"] | None,
) -> Fresh:
    """Returns requests as arrays; padding rows after the last request end at once."""
    filler = Request(number=-1, prompt=np.zeros(1, np.int32), max_new_tokens=0)
    requests = [*requests, *[filler] * (rows - len(requests))]
    thresholds = None
    if own is not None:
        thresholds = np.stack(
            [own if request.thresholds is None else request.thresholds for request in requests]
        )
    rules = Rules(
        sampling=rows_of([request.sampling for request in requests]),
        eos_ids=eos_array([request.eos_ids for request in requests]),
        thresholds=thresholds,
    )
    return arrays_of(requests, width=width), rules
