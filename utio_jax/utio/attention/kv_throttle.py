# SPDX-License-Identifier: Apache-2.0
"""K/V throttling: decoding in which tokens of low importance load a compact view of the cache.

    easy = VerticalSlash(signal=signal, thresholds=thresholds, history=History(recent=98))
    mode = Throttled(policy=policy, attention=easy)

    layers     [0, d1)          [d1, d2)          [d2, L)
    decided    at d1, by the    at d1             at d2
    by         token before

The view is two slices of a row of the cache, which keeps every token: sinks, and recent tokens. One
batched call gathers and reads those of all rows; then a loop with a traced trip count goes over the
dense rows alone, and reads each one's slots where they are: a gather would copy them, a mask read
those of all rows.

    slot       0 1 2 3 4 5 6 7 8 9 . .    # a row of ten tokens, recent=4, sinks=2
    dense      # # # # # # # # # # # #    # the width of the step
    throttled  # #         # # # #
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, Spans
from utio_jax.attention.mixing import mix_apart, mixer_at
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
from utio_jax.staircase.pattern import AttentionPattern, check_pattern
from utio_jax.utio.attention.vertical_slash import History, VerticalSlash, sees_history


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
        check_pattern(attention, VerticalSlash)
        attention.check(decoder, policy.depths)
        if not attention.signal.causal:
            raise ValueError(
                "Wanted a causal signal: a decode step shows it one token of a row. "
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
        scores = jnp.full(state.lengths.shape, jnp.nan, jnp.float32)
        memory = ThrottledMemory(shown=state.memory.shown, scores=scores)
        return dataclasses.replace(state, memory=memory)

    def rows(self, **options: Any) -> CachedRows:
        return ThrottledRows(history=self.attention.history, **options)

    def pattern(self, memory: Any) -> AttentionPattern:
        return ThrottledStep(attention=self.attention, scores=memory.scores)

    def remember(self, chosen: Any, *, shown: Int[Array, "batch slot"] | None) -> Memory:
        return ThrottledMemory(shown=shown, scores=chosen)


@pytree
class ThrottledSlots(RowSlots):
    """The rows that run a segment; the `throttled` ones read their history alone."""

    throttled: Bool[Array, "batch 1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThrottledRows(CachedRows):
    """All rows together; the throttled ones read their `history` alone.

    Where any row is throttled, one call reads the histories of all rows; dense rows read all their
    slots besides. Where a history is as long as the step's slots, it hides nothing, and all rows
    are dense.
    """

    history: History

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
        live, span, block = slots.live, self.span(slots, layers), block_of(tokens)
        low = slots.throttled & (self.history.size < self.width)
        where = {"width": self.width, "shown": self.shown}
        attend = history_attention(decoder, block, self.history, runs=live, low=low, **where)
        x, kv = run_layers(decoder, params, cache.kv, tokens.x, block, attend, runs=live, **span)
        views = jnp.any(live & low) * float(self.history.size)
        read = views + (live & ~low)[:, 0] * float(self.width)
        return x, cache.after(kv, decoder.config, layers, runs=jnp.any(live), read=read)

    def attended(self, spent: RowCache) -> Float[Array, ""]:
        # Rows of a batch differ, and its FLOPs are those of a row times rows: each has the mean.
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
    """Pattern of a decoding step whose throttled tokens read their history alone.

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


def history_attention(
    decoder: Decoder,
    block: Block,
    history: History,
    *,
    width: int,
    runs: Bool[Array, "batch 1"],
    low: Bool[Array, "batch 1"],
    shown: Int[Array, "batch slot"] | None = None,
) -> AttendOver:
    """Returns attention for `run_layers` in which rows that are `low` read their history alone."""
    runs &= block.valid
    order, count = chosen_first((runs & ~low)[:, 0])
    some = jnp.any(runs & low).astype(jnp.int32)
    rows, slots = (jnp.arange(size, dtype=jnp.int32) for size in (len(runs), width))

    def attention(cache: KVCache, sources: Sources) -> Attend:
        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix, seen_from = mixer_at(decoder, index), shows_from(decoder.config, index)

            def of_row(row: jax.Array, seen: History | None) -> jax.Array:
                positions = block.positions[row]
                if seen is None:
                    spans: Spans = ((0, width),)
                    visible = mix.visible(positions, slots)
                else:
                    recent = min(seen.recent, width)
                    spans, visible = sees_history(seen, mix, positions, recent, width)
                if shown is not None:
                    depths = [jax.lax.dynamic_slice_in_dim(shown[row], *span) for span in spans]
                    visible &= (jnp.concatenate(depths) > seen_from)[None, :]
                keys_values = [cache.row(layer, row, spans) for layer in sources]
                return mix_apart(mix, queries[row], keys_values, visible).astype(attended.dtype)

            def views(_: jax.Array, attended: jax.Array) -> jax.Array:
                return jax.vmap(partial(of_row, seen=history))(rows)

            def dense(number: jax.Array, attended: jax.Array) -> jax.Array:
                new = of_row(order[number], None)
                return jax.lax.dynamic_update_index_in_dim(attended, new, order[number], 0)

            # A loop of no or one turn: where all rows are dense no view is read. (A conditional
            # would copy what it passes on.)
            attended = jnp.zeros(queries.shape, cache.values.dtype)
            attended = jax.lax.fori_loop(0, some, views, attended)
            return jax.lax.fori_loop(0, count, dense, attended)

        return attend

    return attention
