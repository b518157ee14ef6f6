# SPDX-License-Identifier: Apache-2.0
"""Who attends sparsely: the scores that steer depth, held against thresholds of attention's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.attention.heavy_hitters import blind_hitters, heavy_hitters
from utio_jax.attention.history import History
from utio_jax.attention.vertical_slash import SparseQueries
from utio_jax.core.decoder import Places
from utio_jax.policies.base import Boundary, Signal, exceeds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Tokens whose score does not exceed a segment's threshold see their history alone in it.

    The signal is asked at the start of each segment, of the tokens that run in it. One that is
    known before the pass may be asked at depth 0 as well; others leave the first segment dense.
    As for depth, NaN is important; at a threshold of +inf everybody is sparse, at -inf nobody, and
    at neither is the signal asked.

    Heavy hitters belong to a segment: they come from the queries and keys of its first layer.

    Attributes:
      signal: scores tokens, the higher the more important.
      thresholds: one per segment, in the score's unit; or one fewer, for all segments but the
        first, which is dense then.
      blind: a PRNG key that draws the verticals instead of heat: the control.
      history: what sparse tokens see. Static.
      chunk: positions that share a set of heavy hitters, which is as old as the chunk. Static.
      sample: queries of each chunk that are asked for heat. Static.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    blind: PRNGKeyArray | None = None
    history: History = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(default=128, metadata={"static": True})
    sample: int = dataclasses.field(default=16, metadata={"static": True})

    def __post_init__(self) -> None:
        if not 1 <= self.sample <= self.chunk:
            raise ValueError(
                "Wanted chunks of at least one position, and a sample of them. "
                f"Got chunk={self.chunk}, sample={self.sample}."
            )

    def index_of(self, segment: int, depths: tuple[int, ...]) -> int:
        """Returns which threshold is a segment's; -1 for one that is simply dense.

        Raises:
          ValueError: the thresholds fit no pass with these depths.
        """
        missing = len(depths) - self.thresholds.shape[0]
        if missing not in (0, 1):
            raise ValueError(
                f"Wanted a threshold of attention for each segment of depths={depths}, or for each "
                f"but the first. Got thresholds of shape {self.thresholds.shape}."
            )
        return segment - missing

    def asks(self, segment: int, depths: tuple[int, ...]) -> bool | Bool[Array, ""]:
        """Returns whether the signal is asked at the start of a segment."""
        index = self.index_of(segment, depths)
        return index >= 0 and (self.signal.remembers or jnp.isfinite(self.thresholds[index]))

    def reads_logits(self, segment: int, depths: tuple[int, ...]) -> bool:
        """Returns whether the signal looks at the prediction before a segment."""
        index = self.index_of(segment, depths)
        return index >= 0 and self.signal.reads_logits(index)

    def choose(
        self,
        segment: int,
        depths: tuple[int, ...],
        start: Boundary,
        memory: Any,
        places: Places,
        shown: Bool[Array, "batch token"],
    ) -> tuple[SparseQueries, Any]:
        """Returns who sees which history in a segment, and the signal's memory.

        Args:
          segment: of the pass.
          depths: at which its segments end.
          start: of the segment.
          memory: the signal's.
          places: of all tokens.
          shown: keys that anybody may see in the segment.
        """
        index = self.index_of(segment, depths)
        if index < 0:
            return self._nobody(shown), memory
        score, memory = self.signal(index, start, memory)
        sparse = start.live & ~exceeds(score, self.thresholds[index])
        verticals = self._verticals(start, places, shown, sparse)
        return dataclasses.replace(self._nobody(shown), sparse=sparse, verticals=verticals), memory

    def _verticals(
        self,
        boundary: Boundary,
        places: Places,
        shown: Bool[Array, "batch token"],
        sparse: Bool[Array, "batch token"],
    ) -> Int[Array, "batch chunk vertical"]:
        """Returns sinks and heavy hitters; heat is measured only where anybody is sparse."""
        none = self._nobody(shown).verticals
        sinks = jnp.arange(self.history.sinks, dtype=jnp.int32)
        found = jnp.broadcast_to(sinks, (*none.shape[:2], self.history.sinks))
        if self.history.heavy == 0:
            return found
        if self.blind is not None:
            heavy = blind_hitters(self.blind, shown, history=self.history, chunk=self.chunk)
        else:

            def measure() -> jax.Array:
                return heavy_hitters(
                    boundary.decoder,
                    boundary.params,
                    boundary.depth,
                    boundary.x,
                    places,
                    shown,
                    history=self.history,
                    chunk=self.chunk,
                    sample=self.sample,
                )

            heavy = jax.lax.cond(jnp.any(sparse), measure, lambda: none[..., self.history.sinks :])
        return jnp.concatenate([found, heavy], axis=-1)

    def heats(self, chosen: SparseQueries) -> Int[Array, ""]:
        """Returns how often `choose` measured heat: once, or not at all."""
        if self.history.heavy == 0 or self.blind is not None:
            return jnp.int32(0)
        return jnp.any(chosen.sparse).astype(jnp.int32)

    def _nobody(self, live: Bool[Array, "batch token"]) -> SparseQueries:
        """Returns the choice that all attend densely."""
        batch, width = live.shape
        size = self.history.sinks + min(self.history.heavy, width)
        none = jnp.full((batch, -(-width // self.chunk), size), width, jnp.int32)
        return SparseQueries(
            sparse=jnp.zeros_like(live), verticals=none, history=self.history, chunk=self.chunk
        )
