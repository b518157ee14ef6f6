# SPDX-License-Identifier: Apache-2.0
"""LM head at the exits of a pass, shared by exit decisions and readouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from utio_jax.core.arrays import flat, map_head
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens, has_exit_lens, logits_of
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary
from utio_jax.staircase.base import Executor, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readout:
    """Function of every token's logits at its exit, evaluated during the pass.

    Attributes:
      function: maps logits `[slot, vocab]` in float32, and blocks of `arrays`, to an array or a
        pytree of arrays `[slot, ...]`.
      arrays: `[batch, token, ...]`, for example labels.
    """

    function: Callable[..., Any]
    arrays: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder, its parameters and its executor: the fixed inputs of a pass."""

    decoder: Decoder
    params: Params
    executor: Executor

    def map_head(self, slots: Any, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Returns `function(logits, ...)` of the slots' tokens; the first array holds states."""

        def head(x: jax.Array, *arrays: jax.Array) -> Any:
            if self.executor.keeps_logits:
                return function(logits_of(self.decoder, self.params, x), *arrays)
            return map_head(self.decoder, self.params, function, x, *arrays)

        return self.executor.map_slots(slots, head, *arrays)

    def map_exit(self, slots: Any, x: jax.Array, *, depth: int) -> jax.Array:
        """Applies the exit lens of a depth to the slots' states."""
        lens = partial(apply_exit_lens, self.decoder, self.params, depth=depth)
        return self.executor.map_slots(slots, lens, x)


class Head:
    """Lazy LM head at one depth, while a segment is traced.

    The policy and the readout share the logits and the lens. Logits of whole rows are computed in
    blocks and not kept: each `map_logits` runs the head again. If the executor `keeps_logits`, the
    head runs once.

    Attributes:
      seen: tokens whose logits a policy has read; None before.
      result: the readout of these tokens; None before.
      work: work executed by the head and the lens.
    """

    def __init__(
        self,
        model: Model,
        tokens: Tokens,
        slots: Any,
        *,
        depth: int,
        asks: bool | Bool[Array, ""] = True,
        readout: Readout | None = None,
    ) -> None:
        """Prepares the head at `depth` for the tokens of `slots`; for none if `asks` is False."""
        self._model, self._tokens, self._depth, self._readout = model, tokens, depth, readout
        self._asks, self._slots = asks, model.executor.only_if(slots, asks)
        self._states: jax.Array | None = None  # Through a lens, once a policy has looked.
        self._logits: jax.Array | None = None  # Of all tokens, where they are kept.
        self.seen: Bool[Array, "batch token"] | None = None
        self.result: Any = None
        self.work = Work.of()

    @property
    def slots_asked(self) -> jax.Array:
        """Number of slots that a decision evaluates here, padding included."""
        return self._model.executor.slots_run(self._slots)

    def boundary(self, *, depth: int | None = None) -> Boundary:
        """Returns the inputs of policies and signals at this exit.

        `depth` is the depth to decide on. By default it is the number of layers run; for a branch,
        which is chosen before it runs, it is the branch's.
        """
        tokens, model = self._tokens, self._model
        return Boundary(
            x=jax.lax.stop_gradient(tokens.x),  # Decisions are thresholds: no gradient.
            positions=tokens.positions,
            live=tokens.live,
            params=jax.lax.stop_gradient(model.params),
            depth=self._depth if depth is None else depth,
            decoder=model.decoder,
            map_live=partial(model.executor.map_slots, self._slots),
            map_logits=self._look,
        )

    def _look(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Implements `Boundary.map_logits`; evaluates the readout on the same logits."""
        model, readout = self._model, self._readout
        if self._states is None and has_exit_lens(model.decoder, self._depth):
            self._states = model.map_exit(self._slots, self._tokens.x, depth=self._depth)
            self.work += Work.of(exit_maps=self.slots_asked)
        states = self._tokens.x if self._states is None else self._states
        kept = () if readout is None else readout.arrays
        heads = Work.of(heads=model.executor.heads_run(self._slots))
        self.seen = self._tokens.live & self._asks

        if model.executor.keeps_logits:
            logits = self._logits
            if logits is None:
                self.work += heads
                logits = model.map_head(self._slots, lambda logits: logits, states)
                self._logits = logits
                if readout is not None:
                    self.result = map_tokens(readout.function, logits, *readout.arrays)
            decision = map_tokens(function, logits, *arrays)
            return where_tokens(self.seen, decision, jax.tree.map(jnp.zeros_like, decision))

        def look(logits: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, Any]:
            decision = function(jax.lax.stop_gradient(logits), *blocks[len(kept) :])
            if readout is None:
                return decision, None
            return decision, readout.function(logits, *blocks[: len(kept)])

        self.work += heads
        decision, self.result = model.map_head(self._slots, look, states, *kept, *arrays)
        return decision

    def states_of(self, stops: Bool[Array, "batch token"]) -> Float[Array, "batch token dim"]:
        """Applies the exit lens to tokens that exit here; other tokens' states are undefined."""
        model, x = self._model, self._tokens.x
        if not has_exit_lens(model.decoder, self._depth):
            return x
        unmapped = stops if self._states is None else stops & ~jnp.asarray(self._asks)
        slots = model.executor.pack(0, unmapped)
        mapped = model.map_exit(slots, x, depth=self._depth)
        self.work += Work.of(exit_maps=model.executor.slots_run(slots))
        return where_tokens(unmapped, mapped, x if self._states is None else self._states)


@pytree
class Reading:
    """Inputs of the LM head and results of the readout, accumulated over the exits of a pass.

    Attributes:
      states: hidden states after the lens of each token's exit. None if the model has no lens: the
        head then reads the tokens' own states.
      unread: tokens without a readout so far.
      result: readout of tokens whose logits a policy has read; None if there are none.
    """

    states: Float[Array, "batch token dim"] | None
    unread: Bool[Array, "batch token"]
    result: Any = None

    @classmethod
    def of(cls, model: Model, tokens: Tokens, depths: tuple[int, ...]) -> Reading:
        """Returns that of a pass, all of whose live tokens are unread."""
        through_lens = any(has_exit_lens(model.decoder, depth) for depth in depths)
        return cls(states=tokens.x if through_lens else None, unread=tokens.live)

    def add(self, head: Head, stops: Bool[Array, "batch token"]) -> Reading:
        """Returns the reading with the tokens that exit at this head."""
        states, unread, result = self.states, self.unread, self.result
        if head.result is not None and head.seen is not None:
            known = stops & head.seen
            result = where_tokens(known, head.result, head.result if result is None else result)
            unread &= ~known
        if states is not None:
            states = where_tokens(stops, head.states_of(stops), states)
        return Reading(states=states, unread=unread, result=result)

    def finish(
        self, model: Model, tokens: Tokens, readout: Readout | None
    ) -> tuple[jax.Array, Any, list[Work]]:
        """Returns the head's input states, the readout of all tokens, and the work added."""
        states = tokens.x if self.states is None else self.states
        if readout is None:
            return states, None, []
        with jax.named_scope("head"):
            slots = model.executor.pack(0, self.unread)
            result = model.map_head(slots, readout.function, states, *readout.arrays)
            if self.result is not None:
                result = where_tokens(self.unread, result, self.result)
        return states, result, [Work.of(heads=model.executor.heads_run(slots))]


def where_tokens(chosen: Bool[Array, "batch token"], new: Any, old: Any) -> Any:
    """Merges pytrees of `[batch, token, ...]`: chosen tokens from `new`, all others from `old`."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 2)), new, old)

    return jax.tree.map(pick, new, old)


def map_tokens(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Applies a function of `[slot, ...]` to all tokens at once; returns `[batch, token, ...]`."""
    result = function(*flat(arrays))
    return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), result)
