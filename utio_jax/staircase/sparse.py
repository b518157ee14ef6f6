# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for low-importance tokens: the scores that steer depth, with own thresholds."""

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
    """Tokens whose score does not exceed a segment's threshold attend to a window with sinks.

    The signal is asked at the start of each segment, of the tokens that run in it; at depth 0 one
    that is known before the pass. As for depth, NaN is important; at a threshold of +inf all tokens
    are sparse, at -inf none, and at neither is the signal asked.

    Attributes:
      signal: scores tokens, the higher the more important.
      thresholds: one per segment, in the score's unit; or one fewer, for all segments but the
        first, which is dense then.
      history: what sparse tokens see. Static.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    history: History = static()

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

    def choose(
        self, segment: int, depths: tuple[int, ...], start: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        """Returns which tokens attend sparsely in a segment, and the signal's memory."""
        index = self.index_of(segment, depths)
        if index < 0:
            return jnp.zeros_like(start.live), memory
        score, memory = self.signal(index, start, memory)
        return start.live & ~exceeds(score, self.thresholds[index]), memory


class Packing:
    """How the live tokens of each segment are packed into slots, while a pass is traced: all dense.

    The one place where a pass chooses what tokens attend to. `SparsePacking` asks a signal at the
    start of a segment, `utio_jax.contrib.throttle.ThrottlePacking` at its end.

    Attributes:
      work: what the last segment's choice executed.
    """

    def __init__(self, model: Model) -> None:
        """Prepares a pass."""
        self._model, self.work = model, Work.of()

    def pack(self, segment: int, tokens: Tokens) -> Any:
        """Returns the slots of a segment, once it is known which of its tokens attend sparsely."""
        causal = self._model.decoder.config.causal
        return self._model.executor.pack(segment, tokens.live, causal=causal)

    def asks(self, index: int) -> bool:
        """Returns whether `look` needs the head at a boundary, even if the policy does not."""
        del index
        return False

    def look(self, index: int, boundary: Boundary) -> None:
        """Looks at boundary number `index`, on behalf of the segments behind it."""

    def chosen(self) -> SparseQueries | None:
        """Returns which tokens attended sparsely, by segment; None where none could."""
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
