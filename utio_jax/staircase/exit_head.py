# SPDX-License-Identifier: Apache-2.0
"""The vocabulary head at the exits of a pass: one for decisions and results, once per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from utio_jax.core.arrays import flat, map_head
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens, has_exit_lens
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary
from utio_jax.staircase.base import Executor, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readout:
    """What a pass wants to know of every token's prediction at its decided depth.

    Attributes:
      function: maps logits `[slot, vocab]` in float32, and blocks of `arrays`, to an array or a
        pytree of arrays `[slot, ...]`.
      arrays: `[batch, token, ...]`, for example labels.
    """

    function: Callable[..., Any]
    arrays: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with its parameters and what runs it: the fixed parts of a pass."""

    decoder: Decoder
    params: Params
    executor: Executor

    def map_head(self, slots: Any, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Returns `function(logits, ...)` of the slots' tokens; the first array holds states."""

        def head(x: jax.Array, *arrays: jax.Array) -> Any:
            if self.executor.keeps_logits:
                return function(self.decoder.unembed(self.params, x).astype(jnp.float32), *arrays)
            return map_head(self.decoder, self.params, function, x, *arrays)

        return self.executor.map_slots(slots, head, *arrays)

    def map_exit(self, slots: Any, x: jax.Array, *, depth: int) -> jax.Array:
        """Returns the slots' states as the head reads them at a depth."""
        lens = partial(apply_exit_lens, self.decoder, self.params, depth=depth)
        return self.executor.map_slots(slots, lens, x)


class Head:
    """The vocabulary head at one depth, while a segment is traced; it runs nothing until asked.

    A policy that looks at logits and the readout get the same ones, and a lens maps states for
    both. Logits of whole rows are made in blocks and not kept: looking twice runs the head twice.
    Where the executor `keeps_logits`, it runs once.

    Attributes:
      seen: tokens whose logits were looked at.
      found: what the readout made of these; None where nothing was looked at.
      work: what all of it executed.
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
        """Prepares the head at `depth` for the tokens of `slots`; with `asks` False for none."""
        self._model, self._tokens, self._depth, self._readout = model, tokens, depth, readout
        self._asks, self._slots = asks, model.executor.only_if(slots, asks)
        self._states: jax.Array | None = None  # Through a lens, once a policy has looked.
        self._logits: jax.Array | None = None  # Of all tokens, where they are kept.
        self.seen: Bool[Array, "batch token"] | None = None
        self.found: Any = None
        self.work = Work.of()

    @property
    def slots_asked(self) -> jax.Array:
        """How many slots a decision here evaluates, padding included."""
        return self._model.executor.slots_run(self._slots)

    def boundary(self, *, depth: int | None = None) -> Boundary:
        """Returns what a policy or a signal may look at here.

        `depth` is the one in question, if it is not the layers run: a branch's, before it runs.
        """
        tokens, model = self._tokens, self._model
        return Boundary(
            x=jax.lax.stop_gradient(tokens.x),  # Decisions are thresholds: nothing flows through.
            positions=tokens.positions,
            live=tokens.live,
            params=jax.lax.stop_gradient(model.params),
            depth=self._depth if depth is None else depth,
            decoder=model.decoder,
            map_live=partial(model.executor.map_slots, self._slots),
            map_logits=self._look,
        )

    def _look(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """Is `Boundary.map_logits`; the readout gets the same logits."""
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
                    self.found = _map_tokens(readout.function, logits, *readout.arrays)
            decision = _map_tokens(function, logits, *arrays)
            return where_tokens(self.seen, decision, jnp.zeros_like(decision))

        def look(logits: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, Any]:
            decision = function(jax.lax.stop_gradient(logits), *blocks[len(kept) :])
            if readout is None:
                return decision, None
            return decision, readout.function(logits, *blocks[: len(kept)])

        self.work += heads
        decision, self.found = model.map_head(self._slots, look, states, *kept, *arrays)
        return decision

    def states_of(self, stops: Bool[Array, "batch token"]) -> Float[Array, "batch token dim"]:
        """Returns states as the head reads them, of tokens that stop here; others' mean nothing."""
        model, x = self._model, self._tokens.x
        if not has_exit_lens(model.decoder, self._depth):
            return x
        rest = stops if self._states is None else stops & ~jnp.asarray(self._asks)
        slots = model.executor.pack(0, rest)
        mapped = model.map_exit(slots, x, depth=self._depth)
        self.work += Work.of(exit_maps=model.executor.slots_run(slots))
        return where_tokens(rest, mapped, x if self._states is None else self._states)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What the head reads of every token at its depth, and what a readout made of it so far.

    Attributes:
      states: mapped by the lens of each token's exit; None where there is no lens: then they are
        the tokens' own.
      found: the readout's, of tokens that a policy looked at before they stopped; None: of none.
      unread: tokens of which the readout knows nothing yet.
    """

    states: Float[Array, "batch token dim"] | None
    found: Any
    unread: Bool[Array, "batch token"]

    @classmethod
    def start(cls, model: Model, tokens: Tokens, depths: tuple[int, ...]) -> Reading:
        """Returns the reading of nothing yet."""
        through_lens = any(has_exit_lens(model.decoder, depth) for depth in depths)
        return cls(states=tokens.x if through_lens else None, found=None, unread=tokens.live)

    def add(self, head: Head, stops: Bool[Array, "batch token"]) -> Reading:
        """Returns the reading with the tokens that stop at this head."""
        states, found, unread = self.states, self.found, self.unread
        if head.found is not None and head.seen is not None:
            known = stops & head.seen
            found = where_tokens(known, head.found, head.found if found is None else found)
            unread = unread & ~known
        if states is not None:
            states = where_tokens(stops, head.states_of(stops), states)
        return Reading(states=states, found=found, unread=unread)

    def finish(
        self, model: Model, tokens: Tokens, readout: Readout | None
    ) -> tuple[jax.Array, Any, list[Work]]:
        """Returns the states that the head reads, what was read of them, and the work of that."""
        states = tokens.x if self.states is None else self.states
        if readout is None:
            return states, None, []
        with jax.named_scope("head"):
            slots = model.executor.pack(0, self.unread)
            found = model.map_head(slots, readout.function, states, *readout.arrays)
            if self.found is not None:
                found = where_tokens(self.unread, found, self.found)
        return states, found, [Work.of(heads=model.executor.heads_run(slots))]


def where_tokens(chosen: Bool[Array, "batch token"], new: Any, old: Any) -> Any:
    """Returns pytrees of `[batch, token, ...]` merged: the chosen tokens' entries from `new`."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 2)), new, old)

    return jax.tree.map(pick, new, old)


def _map_tokens(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns a function of arrays `[slot, ...]` for all tokens at once, `[batch, token, ...]`."""
    found = function(*flat(arrays))
    return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), found)
