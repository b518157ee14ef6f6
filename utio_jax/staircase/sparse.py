# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for low-importance tokens, by a score and thresholds of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.history import History
from utio_jax.core.decoder import check_softmax
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary, Signal, exceeds
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Head, Model


@pytree
class SparseAttention:
    """Sparse attention (a window with sinks) for tokens at or below a segment's threshold.

    The signal scores a segment's tokens at its start; at depth 0 it must be known before the pass.
    NaN scores are important and attend densely. A threshold of +inf makes all tokens sparse, -inf
    none; at both, the signal is not evaluated.

    Attributes:
      signal: importance score of tokens; higher is more important.
      thresholds: one per segment, in the score's unit; or one fewer: the first segment is dense.
      history: keys that sparse tokens attend to. Static.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    history: History = static()

    def index_of(self, segment: int, depths: tuple[int, ...]) -> int:
        """Returns the index of a segment's threshold; -1 for a dense segment.

        Raises:
          ValueError: the number of thresholds does not fit these depths.
        """
        missing = len(depths) - self.thresholds.shape[0]
        if missing not in (0, 1):
            raise ValueError(
                f"Wanted a threshold of attention for each segment of depths={depths}, or for each "
                f"but the first. Got thresholds of shape {self.thresholds.shape}."
            )
        return segment - missing

    def asks(self, segment: int, depths: tuple[int, ...]) -> bool | Bool[Array, ""]:
        """Returns True if the signal is evaluated at the start of a segment."""
        index = self.index_of(segment, depths)
        return index >= 0 and (self.signal.remembers or jnp.isfinite(self.thresholds[index]))

    def choose(
        self, segment: int, depths: tuple[int, ...], start: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        """Returns a mask of the segment's sparse tokens, and the signal's memory."""
        index = self.index_of(segment, depths)
        if index < 0:
            return jnp.zeros_like(start.live), memory
        score, memory = self.signal(index, start, memory)
        return start.live & ~exceeds(score, self.thresholds[index]), memory


class Packing:
    """Packs the live tokens of each segment into slots while a pass is traced; all attend densely.

    Subclasses choose sparse tokens: `SparsePacking` with a signal at the start of a segment,
    `utio_jax.contrib.throttle.ThrottlePacking` at its end.

    Attributes:
      work: work executed for the last segment's choice.
    """

    def __init__(self, model: Model) -> None:
        """Prepares a pass."""
        self._model, self.work = model, Work.of()

    def pack(self, segment: int, tokens: Tokens) -> Any:
        """Chooses a segment's sparse tokens and returns its slots."""
        causal = self._model.decoder.config.causal
        return self._model.executor.pack(segment, tokens.live, causal=causal)

    def asks(self, index: int) -> bool:
        """Returns True if `look` needs the LM head at an exit, even if the policy does not."""
        del index
        return False

    def look(self, index: int, boundary: Boundary) -> None:
        """Reads exit number `index`, to choose sparse tokens in the next segments."""

    def chosen(self) -> SparseQueries | None:
        """Returns the sparse tokens by segment; None for dense packing."""
        return None


class SparsePacking(Packing):
    """Packs tokens by `SparseAttention`: each segment's dense tokens, then its sparse ones."""

    def __init__(
        self,
        model: Model,
        attention: SparseAttention,
        depths: tuple[int, ...],
        token_ids: jax.Array,
        positions: jax.Array,
    ) -> None:
        """Prepares a pass whose segments end at `depths`."""
        check_softmax(
            model.decoder,
            why="of which each query may see keys of its own",
            remedy="Leave the sparse attention out.",
        )
        super().__init__(model)
        self._attention, self._depths = attention, depths
        self._memory = attention.signal.start(token_ids, positions)
        self._chosen: list[jax.Array] = []

    def pack(self, segment: int, tokens: Tokens) -> Any:
        slots = super().pack(segment, tokens)
        executor, attention, depths = self._model.executor, self._attention, self._depths
        with jax.named_scope("attention"):
            depth, asks = (0, *depths)[segment], attention.asks(segment, depths)
            head = Head(self._model, tokens, slots, depth=depth, asks=asks)
            chosen, self._memory = attention.choose(segment, depths, head.boundary(), self._memory)
            self.work = head.work + Work.of(choices=head.slots_asked)
            self._chosen.append(chosen)
            if attention.index_of(segment, depths) < 0:
                return slots
            sparse = SparseQueries(sparse=chosen, history=attention.history)
            causal = self._model.decoder.config.causal
            return executor.pack(segment, tokens.live, sparse, causal=causal)

    def chosen(self) -> SparseQueries:
        return SparseQueries(sparse=jnp.stack(self._chosen), history=self._attention.history)
