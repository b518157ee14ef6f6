# SPDX-License-Identifier: Apache-2.0
"""K/V throttling: decoding in which tokens of low importance load a compact view of the cache.

    easy = VerticalSlash(signal=signal, thresholds=thresholds, history=History(recent=98))
    mode = Throttled(policy=policy, attention=easy)

    layers     [0, d1)          [d1, d2)          [d2, L)
    decided    at d1, by the    at d1             at d2
    by         token before

The view holds copies of sinks and recent tokens. In one batched call every row attends to its view;
then a loop with a traced trip count goes over the dense rows alone, and reads each one's slots
where they are: a gather would copy them, a mask read those of all rows.

    position   0 1 2 3 4 5 6 7 8 9        # a row of ten tokens, recent=4, sinks=2
    places     0 1 | 8 9 6 7              # sinks | ring: position p lies at p mod 4

The cache keeps every token. A new token takes the ring's oldest place; one that its layer skipped
(kv="drop") leaves an older token there, which `visible_history` hides.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, side_by_side
from utio_jax.attention.mixing import NOWHERE, mix_apart, mixer_at
from utio_jax.core.decoder import Decoder, Params, check_not_looped
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.decoding.adaptive import Adaptive, Memory
from utio_jax.decoding.base import DecodeContext
from utio_jax.decoding.cached import (
    Attend,
    AttendOver,
    Block,
    CachedRows,
    RowCache,
    RowSlots,
    block_of,
    chosen_first,
    run_layers,
)
from utio_jax.decoding.state import DecodeState
from utio_jax.policies.base import Boundary
from utio_jax.staircase.base import Sources, Tokens
from utio_jax.staircase.exit_head import Model
from utio_jax.staircase.forward import shows_from
from utio_jax.staircase.pattern import AttentionPattern
from utio_jax.utio.attention.vertical_slash import History, VerticalSlash, visible_history


@pytree
class ThrottledMemory(Memory):
    """State of the mode from round to round.

    Attributes:
      scores: of each row's last token at the first boundary.
    """

    scores: Float[Array, " batch"]


@pytree
class Throttled(Adaptive):
    """Early-exit decoding in which some tokens read a compact view of the cache.

    A token whose score at a boundary of the policy makes it sparse sees its history alone in the
    layers up to the next boundary. In the first layers, what counts is the first score of the token
    before. The first token after a prompt reads everything.

    Attributes:
      attention: selects these tokens. Its signal is asked at the policy's boundaries; a threshold
        of +inf throttles every token, the first included.
    """

    attention: VerticalSlash

    def leaves_exact_kv(self, decoder: Decoder) -> bool:
        return False

    def gate_flops(self, decoder: Decoder, params: Params) -> float:
        boundaries, signal = range(len(self.policy.depths) - 1), self.attention.signal
        looks = sum(signal.flops(index, decoder, params) for index in boundaries)
        return super().gate_flops(decoder, params) + looks

    def packs(self, decoder: Decoder) -> bool:
        return False

    def check(self, decoder: Decoder) -> None:
        super().check(decoder)
        check_not_looped(decoder, what="throttled keys and values")
        policy, attention = self.policy, self.attention
        attention.check(decoder, policy.depths)
        if not attention.signal.causal:
            raise ValueError(
                "Wanted a causal signal: decoding cannot look at later tokens. "
                f"Got signal {attention.signal.name!r}."
            )
        values = np.asarray(attention.thresholds)
        if len(policy.depths) == 1 and not np.all(np.isinf(values)):
            raise ValueError(
                "Wanted a policy with a boundary, where tokens get their scores. Got depths="
                f"{policy.depths} and thresholds={values.tolist()}. To let all tokens run every "
                "layer, take uniform(depths[-1], exits=depths); or throttle all (inf) or none "
                "(-inf)."
            )

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        state = super().start(context, state)
        layers, history = self.policy.depths[-1], self.attention.history
        scores = jnp.full(state.lengths.shape, jnp.nan, jnp.float32)
        return dataclasses.replace(
            state,
            cache=open_view(state.cache, history, state.lengths, layers=layers),
            memory=ThrottledMemory(shown=state.memory.shown, scores=scores),
        )

    def rows(self, **options: Any) -> CachedRows:
        return ThrottledRows(**options)

    def pattern(self, memory: Any) -> AttentionPattern:
        return ThrottledStep(attention=self.attention, scores=memory.scores)

    def remember(self, chosen: Any, *, shown: Int[Array, "batch slot"] | None) -> Memory:
        return ThrottledMemory(shown=shown, scores=chosen)


@pytree
class ThrottledSlots(RowSlots):
    """The rows that run a segment; the `throttled` ones read their view alone."""

    throttled: Bool[Array, "batch 1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThrottledRows(CachedRows):
    """All rows together; the throttled ones read a compact view of their history.

    Where any row needs its view, one call reads those of all rows; unthrottled rows read all their
    slots besides.
    """

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: Any,
        layers: tuple[int, int],
        cache: Any = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        live, low, span = slots.live, slots.throttled, self.span(slots, layers)
        block, where = block_of(tokens), {"width": self.width, "shown": self.shown}
        attend = view_attention(decoder, block, runs=live, dense=~low, **where)
        x, kv = run_layers(decoder, params, cache.kv, tokens.x, block, attend, runs=live, **span)
        ran = span["stop"] - span["start"]
        views = jnp.any(live & low) * jnp.full(live.shape[:1], float(cache.kv.view.history.size))
        read = ran * (views + (live & ~low)[:, 0] * float(self.width))
        made = jnp.any(live).astype(jnp.int32) * len(decoder.config.kv_made(*layers))
        return x, cache.after(kv, queries=ran, keys_values=made, key_slots=read)

    def attended(self, spent: RowCache) -> Float[Array, ""]:
        # Views are read side by side: what attention computes is the batch's mean.
        return jnp.mean(spent.work.key_slots)


@pytree
class _StepChoices:
    """Choices of a step: scores at the first boundary, throttled tokens, the signal's memory."""

    scores: Float[Array, " batch"]
    low: Bool[Array, "batch 1"]
    memory: Any
    depths: tuple[int, ...] = static()


@pytree
class ThrottledStep(AttentionPattern):
    """Pattern of a decoding step whose throttled tokens read a view.

    Attributes:
      attention: selects these tokens.
      scores: scores of each row's token before this one, at the first boundary.
    """

    attention: VerticalSlash
    scores: Float[Array, " batch"]

    def start(
        self, model: Model, tokens: Tokens, token_ids: jax.Array, depths: tuple[int, ...]
    ) -> _StepChoices:
        return _StepChoices(
            scores=self.scores,
            low=self.attention.low(self.scores[:, None], 0, depths),
            memory=self.attention.signal.start(token_ids, tokens.positions),
            depths=depths,
        )

    def pack(
        self, model: Model, segment: int, tokens: Tokens, choices: _StepChoices
    ) -> tuple[ThrottledSlots, _StepChoices, Work]:
        return ThrottledSlots(live=tokens.live, throttled=choices.low), choices, Work.of()

    def asks(self, index: int) -> bool:
        return True

    def look(
        self, index: int, boundary: Boundary, choices: _StepChoices, policy_memory: Any
    ) -> _StepChoices:
        scores, memory = self.attention.score(index, boundary, choices.memory, policy_memory)
        low = self.attention.low(scores, index + 1, choices.depths)
        first = scores[:, 0].astype(jnp.float32) if index == 0 else choices.scores
        return dataclasses.replace(choices, scores=first, low=low, memory=memory)

    def chosen(self, choices: _StepChoices) -> Float[Array, " batch"]:
        """Returns the scores of this step's tokens at the first boundary."""
        return choices.scores


@pytree
class View:
    """Keys and values of sinks and recent tokens, in the first layers of a cache.

    Attributes:
      keys: copies of the cache's.
      values: of the same shape.
      positions: of the tokens at each place; `NOWHERE` where there is none.
      history: number of sinks and recent places. Static.
    """

    keys: Float[Array, "layer batch place kv_head head_dim"]
    values: Float[Array, "layer batch place kv_head head_dim"]
    positions: Int[Array, "layer batch place"]
    history: History = static()

    def remember(
        self,
        layer: int | Int[Array, ""],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        *,
        positions: Int[Array, "batch token"],
        valid: Bool[Array, "batch token"],
        rows: Int[Array, " batch"],
    ) -> View:
        """Returns the view with one layer's K/V of new tokens; layers beyond it are ignored.

        No more tokens at a time than the ring has places. `rows` are the view's that they belong
        to.
        """
        places = jnp.where(valid, place_of(self.history, positions), self.history.size)

        def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
            return leaf.at[layer, rows[:, None], places].set(new.astype(leaf.dtype), mode="drop")

        return dataclasses.replace(
            self,
            keys=put(self.keys, keys),
            values=put(self.values, values),
            positions=put(self.positions, positions),
        )


def place_of(history: History, positions: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
    """Returns the places of new tokens: sinks have places of their own, others share the ring."""
    ring = history.sinks + positions % history.recent
    return jnp.where(positions < history.sinks, positions, ring)


def places_at(history: History, lengths: Int[Array, " batch"]) -> Int[Array, "batch place"]:
    """Returns the positions at each place after `lengths` tokens."""
    places = jnp.arange(history.size, dtype=jnp.int32)[None, :]
    last = lengths[:, None] - 1
    ring = last - (last - (places - history.sinks)) % history.recent
    ring = jnp.where(ring >= history.sinks, ring, NOWHERE)
    sinks = jnp.where(places <= last, places, NOWHERE)
    return jnp.where(places < history.sinks, sinks, ring)


@pytree
class ViewedCache(KVCache):
    """A K/V cache with a view, which takes in what is written."""

    view: View = dataclasses.field(metadata={"row_axis": 1})

    def write(
        self,
        layer: int | Int[Array, ""],
        keys: Float[Array, "batch token kv_head head_dim"],
        values: Float[Array, "batch token kv_head head_dim"],
        *,
        positions: Int[Array, "batch token"],
        valid: Bool[Array, "batch token"],
        rows: Int[Array, " batch"] | None = None,
    ) -> ViewedCache:
        rows = jnp.arange(positions.shape[0], dtype=jnp.int32) if rows is None else rows
        at = {"positions": positions, "valid": valid, "rows": rows}
        written = super().write(layer, keys, values, **at)
        view = self.view.remember(layer, keys, values, **at)
        return dataclasses.replace(self, keys=written.keys, values=written.values, view=view)


def open_view(
    cache: KVCache, history: History, lengths: Int[Array, " batch"], *, layers: int
) -> ViewedCache:
    """Returns the cache with a view of its sinks and recent tokens."""
    positions = places_at(history, lengths)
    batch = positions.shape[0]
    layers = min(layers, cache.keys.shape[0])
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(batch, dtype=jnp.int32)[None, :, None]
    at = (layer, row, *cache.at(positions[None]))
    view = View(
        keys=cache.keys.at[at].get(mode="clip"),
        values=cache.values.at[at].get(mode="clip"),
        positions=jnp.broadcast_to(positions[None], (layers, batch, history.size)),
        history=history,
    )
    return ViewedCache(
        keys=cache.keys, values=cache.values, heads_first=cache.heads_first, view=view
    )


def view_attention(
    decoder: Decoder,
    block: Block,
    *,
    width: int,
    runs: Bool[Array, "batch 1"],
    dense: Bool[Array, "batch 1"],
    shown: Int[Array, "batch slot"] | None = None,
) -> AttendOver:
    """Returns attention for `run_layers` in which only dense rows read their whole history."""
    runs &= block.valid
    dense &= runs
    order, count = chosen_first(dense[:, 0])
    some = jnp.any(runs & ~dense).astype(jnp.int32)
    rows, slots = (jnp.arange(size, dtype=jnp.int32) for size in (len(runs), width))
    at = partial(jax.lax.dynamic_index_in_dim, keepdims=False)

    def attention(cache: Any, sources: Sources) -> Attend:
        view: View = cache.view

        def at_layers(leaf: jax.Array) -> list[jax.Array]:
            return [at(leaf, layer) for layer in sources]

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix, seen_from = mixer_at(decoder, index), shows_from(decoder.config, index)

            def by_view(_: jax.Array, attended: jax.Array) -> jax.Array:
                positions, *others = at_layers(view.positions)
                for other in others:  # Under "drop" layers may have taken in different tokens.
                    positions = jnp.where(other == positions, positions, NOWHERE)
                visible = visible_history(view.history, block.positions, positions, mix.window)
                if shown is not None:
                    depths = shown.at[rows[:, None], positions].get(mode="clip")
                    visible &= (depths > seen_from)[:, None, :]
                kept = (view.keys, view.values)
                keys, values = (side_by_side(at_layers(leaf)) for leaf in kept)
                return mix(queries, keys, values, visible)

            def by_row(number: jax.Array, attended: jax.Array) -> jax.Array:
                row = order[number]
                seen = [cache.row(layer, row, ((0, width),)) for layer in sources]
                visible = mix.visible(at(block.positions, row), slots)
                if shown is not None:
                    visible &= (at(shown, row)[:width] > seen_from)[None, :]
                new = mix_apart(mix, at(queries, row), seen, visible).astype(attended.dtype)
                return jax.lax.dynamic_update_index_in_dim(attended, new, row, 0)

            # A loop of no or one turn: where all rows are dense no view is read. (A conditional
            # would copy what it passes on.)
            attended = jnp.zeros(queries.shape, view.values.dtype)
            attended = jax.lax.fori_loop(0, some, by_view, attended)
            return jax.lax.fori_loop(0, count, by_row, attended)

        return attend

    return attention
