# SPDX-License-Identifier: Apache-2.0
"""What an engine has done, in counts."""

from __future__ import annotations

import dataclasses

from utio_jax.engine.requests import END_REASONS, Event


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """What an engine has done since it was made, or warmed up.

    Attributes:
      mode: name of the decoding mode.
      slots: requests that can run at once.
      queued: requests that wait for a slot.
      running: requests that have one.
      ended: how many requests ended, by reason.
      blocks: that were run.
      prompt_groups: passes that read prompts.
      prompt_tokens: of admitted prompts.
      padded_prompt_tokens: token slots that these passes ran, padding included.
      new_tokens: handed out.
      decided: layers behind these, summed.
      executed: layers that ran for them, those for the sake of other rows included, summed.
    """

    mode: str
    slots: int
    queued: int = 0
    running: int = 0
    ended: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    blocks: int = 0
    prompt_groups: int = 0
    prompt_tokens: int = 0
    padded_prompt_tokens: int = 0
    new_tokens: int = 0
    decided: int = 0
    executed: int = 0

    @property
    def mean_depth_decided(self) -> float | None:
        """Layers behind a new token; None where there is none."""
        return self.decided / self.new_tokens if self.new_tokens else None

    @property
    def mean_depth_executed(self) -> float | None:
        """Layers that ran for a new token; None where there is none."""
        return self.executed / self.new_tokens if self.new_tokens else None

    def add(self, event: Event) -> None:
        """Counts what an event brings."""
        self.new_tokens += event.token_ids.size
        self.decided += int(event.decided.sum())
        self.executed += int(event.executed.sum())
        if event.finished is not None:
            self.ended[event.finished.reason] += 1
