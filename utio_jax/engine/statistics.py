# SPDX-License-Identifier: Apache-2.0
"""What an engine has done, and how long its requests waited: counts, and percentiles of seconds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from utio_jax.engine.requests import END_REASONS, Finished

_KEPT = 4096
"""Requests whose times count for percentiles: the latest ones."""

_TIMES = ("seconds_in_queue", "seconds_to_first_token", "seconds_between_tokens", "longest_pause")
"""Of `Finished`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of seconds, over the latest requests. None where there were none."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Percentiles:
        """Returns the percentiles of those that are known."""
        known = [each for each in seconds if each is not None]
        if not known:
            return cls()
        return cls(
            **dict(
                zip(("p50", "p95", "p99"), np.percentile(known, (50, 95, 99)).tolist(), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
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
      new_tokens: of ended requests.
      mean_depth_decided: layers behind a new token; None where there is none.
      mean_depth_executed: layers that ran for one, those for the sake of other rows included.
      seconds_in_queue: from `submit` until the prompt was begun to be read.
      seconds_to_first_token: from `submit`.
      seconds_between_tokens: mean of each request.
      longest_pause: between two events with tokens, of each request.
    """

    mode: str
    slots: int
    queued: int
    running: int
    ended: dict[str, int]
    blocks: int
    prompt_groups: int
    prompt_tokens: int
    padded_prompt_tokens: int
    new_tokens: int
    mean_depth_decided: float | None
    mean_depth_executed: float | None
    seconds_in_queue: Percentiles
    seconds_to_first_token: Percentiles
    seconds_between_tokens: Percentiles
    longest_pause: Percentiles


class Recorder:
    """Adds up what happens; holds times of the latest requests alone."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self.blocks = self.groups = self.prompt_tokens = self.padded = 0
        self._tokens = self._decided = self._executed = 0
        self._ended: collections.Counter[str] = collections.Counter()
        self._times = collections.deque[tuple[float | None, ...]](maxlen=_KEPT)

    def add(self, finished: Finished) -> None:
        """Notes a request that has ended."""
        self._ended[finished.reason] += 1
        self._tokens += finished.token_ids.size
        self._decided += int(finished.decided.sum())
        self._executed += int(finished.executed.sum())
        self._times.append(tuple(getattr(finished, name) for name in _TIMES))

    def stats(self, *, mode: str, slots: int, queued: int, running: int) -> EngineStats:
        """Returns it all."""
        columns = zip(*self._times, strict=True) if self._times else [()] * len(_TIMES)
        times = dict(zip(_TIMES, map(Percentiles.of, columns), strict=True))
        tokens = self._tokens
        return EngineStats(
            mode=mode,
            slots=slots,
            queued=queued,
            running=running,
            ended={reason: self._ended[reason] for reason in END_REASONS},
            blocks=self.blocks,
            prompt_groups=self.groups,
            prompt_tokens=self.prompt_tokens,
            padded_prompt_tokens=self.padded,
            new_tokens=tokens,
            mean_depth_decided=self._decided / tokens if tokens else None,
            mean_depth_executed=self._executed / tokens if tokens else None,
            **times,
        )
