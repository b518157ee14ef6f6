# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets: a logits processor that forces the end of a thought after a number of tokens.

It reads where a row is from the row's own tokens, so it keeps no state, and holds in all modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core import pytree, static
from utio_jax.decoding.state import DecodeState

__all__ = ["ThinkingBudget", "Thought"]

_NEVER = 2**30
"""Position that no row reaches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thought:
    """Thinking span of a row.

    Attributes:
      start: index of the first thinking token among the new tokens; None: thinking never began.
      tokens: number of thinking tokens, including an end that the row wrote itself.
      forced: number of forced tokens after them.
      ended_by: `"model"`, `"budget"`, or `"open"` if thinking has not ended.
    """

    start: int | None
    tokens: int = 0
    forced: int = 0
    ended_by: str = "open"

    @property
    def answer(self) -> slice:
        """Slice of the new tokens after the thought; all of them if thinking never began."""
        return slice((self.start or 0) + self.tokens + self.forced, None)


@pytree
class ThinkingBudget:
    """Logits processor that ends thinking after `max_tokens`, once a row.

    Forced tokens run through the model like all others and count in `max_new_tokens`. Other budgets
    compile nothing; other sequences do.

    Attributes:
      end_ids: token sequence with which the row itself ends thinking, e.g. the id of `</think>`.
      forced_ids: token sequence that is forced when the budget is used up, e.g. a sentence and
        `</think>`; empty: `end_ids`.
      start_ids: token sequence after which thinking begins, in the prompt or in new tokens. It has
        begun if the prompt has this sequence without `end_ids` after it. Empty: thinking begins
        with the first new token.
      max_tokens: maximum number of thinking tokens; or one for each row of `generate`.

    Raises:
      ValueError: no `end_ids`, or `max_tokens` other than integers of at least 0.
    """

    end_ids: tuple[int, ...] = static()
    forced_ids: tuple[int, ...] = static(default=())
    start_ids: tuple[int, ...] = static(default=())
    max_tokens: int | Sequence[int] | Int[Array | np.ndarray, "*batch"]

    def __post_init__(self) -> None:
        if not self.end_ids:
            raise ValueError("Wanted end_ids of at least one token. Got none.")
        # A pytree takes several for as many leaves. An empty tuple may be a leaf's shape.
        if isinstance(self.max_tokens, (list, tuple)) and self.max_tokens:
            object.__setattr__(self, "max_tokens", np.asarray(self.max_tokens))
        # Inside jit it is a tracer, and any object while pytrees are rebuilt.
        if isinstance(self.max_tokens, (int, float, np.generic, np.ndarray)):
            most = np.asarray(self.max_tokens)
            if not np.issubdtype(most.dtype, np.integer) or (most < 0).any():
                raise ValueError(
                    "Wanted max_tokens of at least 0, an integer or one for each row. Got "
                    f"{self.max_tokens}."
                )

    def __call__(
        self, logits: Float[Array, "batch vocab"], state: DecodeState
    ) -> Float[Array, "batch vocab"]:
        """Returns the logits; those of rows in which a forced token is due allow it alone."""
        forced, vocab = self.forced_ids or self.end_ids, logits.shape[-1]
        known = (*self.end_ids, *forced, *self.start_ids)
        if min(known) < 0 or max(known) >= vocab:
            raise ValueError(f"Wanted ids of a ThinkingBudget from 0 to {vocab - 1}. Got {known}.")
        if np.shape(self.max_tokens) not in ((), logits.shape[:1]):
            raise ValueError(
                f"Wanted one max_tokens, or one for each of {logits.shape[0]} rows that run "
                f"together. Got shape {np.shape(self.max_tokens)}."
            )
        slot = jnp.arange(state.token_ids.shape[1], dtype=jnp.int32)[None, :]
        prompt, length = state.prompt_lengths[:, None], state.lengths[:, None]

        def ends(
            sequence: tuple[int, ...], since: Array, until: Array
        ) -> Bool[Array, "batch slot"]:
            """Returns a mask of slots with which a sequence ends that lies within a range."""
            same = (slot + 1 - len(sequence) >= since) & (slot < until)
            for back, token in enumerate(reversed(sequence)):
                same &= jnp.roll(state.token_ids, back, axis=1) == token
            return same

        def first(mask: Bool[Array, "batch slot"]) -> Int[Array, "batch 1"]:
            return jnp.min(jnp.where(mask, slot + 1, _NEVER), axis=1, keepdims=True)

        def last(mask: Bool[Array, "batch slot"]) -> Int[Array, "batch 1"]:
            return jnp.max(jnp.where(mask, slot + 1, 0), axis=1, keepdims=True)

        began = prompt
        if self.start_ids:
            opened = last(ends(self.start_ids, 0 * prompt, prompt))
            closed = last(ends(self.end_ids, 0 * prompt, prompt))
            new = first(ends(self.start_ids, prompt, length))
            began = jnp.where(opened > closed, prompt, new)
        cut = began + jnp.reshape(jnp.asarray(self.max_tokens, jnp.int32), (-1, 1))
        ended = first(ends(self.end_ids, began, length))
        is_due = (length >= cut) & (length < cut + len(forced)) & (ended > cut)
        due = jnp.asarray(forced)[jnp.clip(length - cut, 0, len(forced) - 1)]
        is_forced = jnp.arange(vocab, dtype=jnp.int32)[None, :] == due
        alone = jnp.where(is_forced, 0.0, -jnp.inf).astype(logits.dtype)
        return jnp.where(is_due, alone, logits)

    def thought(
        self, prompt: Sequence[int] | np.ndarray, new: Sequence[int] | np.ndarray, *, row: int = 0
    ) -> Thought:
        """Returns the thinking span of a row's new tokens; `row` is its index in `generate`."""
        ids, new = [int(token) for token in prompt], [int(token) for token in new]
        budget = int(np.ravel(np.asarray(self.max_tokens))[row if np.ndim(self.max_tokens) else 0])
        opened, closed = (max(_ends(x, ids), default=0) for x in (self.start_ids, self.end_ids))
        start: int | None = 0
        if self.start_ids and not opened > closed:
            start = min(_ends(self.start_ids, new), default=None)
        if start is None:
            return Thought(start=None)
        end = min(_ends(self.end_ids, new, start), default=None)
        if end is not None and end <= start + budget:
            return Thought(start=start, tokens=end - start, ended_by="model")
        tokens = min(budget, len(new) - start)
        if tokens < budget:
            return Thought(start=start, tokens=tokens)
        forced = min(len(self.forced_ids or self.end_ids), len(new) - start - tokens)
        # A row that ended before the first forced token was due ended while it thought.
        by = "budget" if forced else "open"
        return Thought(start=start, tokens=tokens, forced=forced, ended_by=by)


def _ends(sequence: Sequence[int], ids: list[int], since: int = 0) -> list[int]:
    """Returns the indices after each occurrence of a sequence from an index on."""
    size = len(sequence)
    places = range(since + size, len(ids) + 1)
    return [end for end in places if ids[end - size : end] == [*sequence]]
