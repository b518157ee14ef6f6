# SPDX-License-Identifier: Apache-2.0
"""Decode steps of looped models: one turn of all rows, whichever turn each row is in.

All turns have the same weights, so rows at different turns share one pass over them (continuous
depth batching, arXiv 2608.09444). A step runs the layers once. Rows whose token stops go through
the head, and begin their next token in the next step: no row waits for the turns of another.

    step       0  1  2  3  4  5        three rows; "a0": turn 0 of a row's token a
    row 0      a0 a1 b0 c0 c1 c2
    row 1      a0 b0 b1 b2 b3 c0
    row 2      a0 a1 a2 b0 c0 c1

K/V lie in the cache by turn and layer, so each row reads and writes at layers of its own turn. In
later turns a token that stopped shows the K/V of its last one (`staircase.frozen.LastTurn`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import logits_of
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import DecodeContext, emit_drawn
from utio_jax.decoding.cached import Block, CachedRows, RowSlots, block_of, on_packed_rows
from utio_jax.decoding.state import RELEASED, DecodeState
from utio_jax.policies.base import Boundary, Policy, decisions_of
from utio_jax.staircase.base import Sources, Tokens
from utio_jax.staircase.forward import InPlace, forward


@pytree
class Progress:
    """Progress of each row's last token.

    Attributes:
      turn: turns that it has run.
      x: its state after them; undefined before the first.
      asked: memory of the policy after each of its questions.
    """

    turn: Int[Array, " batch"]
    x: Float[Array, "batch 1 dim"]
    asked: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _OwnTurn:
    """`KVAccess` of rows at turns of their own.

    Attributes:
      block: positions of the tokens, one per row.
      decoder: the model.
      ahead: layers by which each row's K/V lie further in the cache than those of turn 0.
      width: slots to attend over. Static.
    """

    block: Block
    decoder: Any
    ahead: Int[Array, " batch"]
    width: int

    def write(
        self, cache: KVCache, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache, None]:
        # To the layers of all later turns, too: those that run write theirs in their place. Of a
        # token that stops there is nothing to copy, for which XLA would copy the whole cache.
        config = self.decoder.config
        turns = config.turn_layers * jnp.arange(config.turns, dtype=jnp.int32)
        layers = (index + self.ahead)[:, None] + turns[None]  # Beyond the last: dropped.

        def repeated(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf[:, None], (leaf.shape[0], config.turns, *leaf.shape[1:]))

        at = {name: repeated(getattr(self.block, name)[:, 0]) for name in ("positions", "valid")}
        return cache.write(layers, repeated(keys), repeated(values), **at), None

    def read(self, cache: KVCache, sources: Sources) -> tuple[jax.Array, jax.Array]:
        (index,) = sources
        rows = jnp.arange(self.ahead.shape[0], dtype=jnp.int32)
        return read(cache, (index + self.ahead,), width=self.width, rows=rows)

    def attend(self, index: Any, queries: jax.Array, seen: Any) -> jax.Array:
        mix, slots = mixer_at(self.decoder, index), jnp.arange(self.width, dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (queries.shape[0], self.width))
        visible = mix.visible(self.block.positions, slots)
        keys, values = seen
        return flat(mix(queries[:, None], keys, values, visible))


def begin_turns(policy: Policy, context: DecodeContext, state: DecodeState) -> DecodeState:
    """Returns the state with the `Progress` of rows whose last token has run no turn."""
    turn = jnp.zeros_like(state.lengths)

    def look() -> tuple[jax.Array, tuple[Any, ...]]:
        tokens = _tokens(context, state)
        logits = logits_of(context.decoder, context.params, tokens.x[:, 0])
        return tokens.x, _decide(policy, context, state, tokens, logits)[1]

    shapes = jax.eval_shape(look)
    x, asked = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    if any(leaf.shape[:1] != turn.shape for leaf in jax.tree.leaves(asked)):
        raise ValueError(
            "Wanted a policy whose memory has the rows as first axis, for tokens at turns of their "
            f"own. Got policy {policy.name!r}."
        )
    return dataclasses.replace(state, memory=Progress(turn=turn, x=x, asked=asked))


def run_turn(policy: Policy, context: DecodeContext, state: DecodeState) -> DecodeState:
    """Runs one turn of every row's last token, and draws the next token of rows that stop."""
    decoder, params, progress = context.decoder, context.params, state.memory
    size, active = decoder.config.turn_layers, state.active
    tokens = _tokens(context, state)
    block = block_of(tokens)
    with jax.named_scope("turn"):
        x, cache = forward(
            decoder,
            params,
            jnp.where((progress.turn == 0)[:, None, None], tokens.x, progress.x),
            tokens.places,
            state.cache,
            slots=InPlace(active),
            attention=_OwnTurn(block, decoder, progress.turn * size, context.width),
            start=0,
            stop=size,
            layers=context.layers,
        )
    depth = (progress.turn + 1) * size
    tokens = dataclasses.replace(tokens, x=x, depth=depth[:, None])
    asks = any(policy.reads_logits(index) for index in range(len(policy.depths) - 1))
    logits, heads = _head(context, x, active) if asks else (None, jnp.zeros_like(depth))
    goes, asked = _decide(policy, context, state, tokens, logits, progress.asked)
    stops = active & ~goes
    if logits is None:
        logits, heads = _head(context, x, stops)
    ran: dict[str, Any] = {"steps": 1, "heads": heads, "queries": size, "keys_values": size}
    ran |= dict.fromkeys(("key_slots", "kv_reads"), size * float(context.width))
    work = state.work.add(active, **ran)
    turn = jnp.where(active, jnp.where(stops, 0, progress.turn + 1), progress.turn)
    memory = Progress(turn=turn, x=x, asked=asked)
    state = dataclasses.replace(state, cache=cache, work=work, memory=memory)
    # Rows whose tokens go on are as if they had ended: they emit nothing.
    emits = dataclasses.replace(state, reason=jnp.where(stops, state.reason, RELEASED))
    new = emit_drawn(context, emits, logits, decided=depth, executed=depth)
    return dataclasses.replace(new, reason=jnp.where(stops, new.reason, state.reason))


def _tokens(context: DecodeContext, state: DecodeState) -> Tokens:
    """Returns each row's last token at depth 0."""
    ids, positions = state.last_ids[:, None], state.positions[:, None]
    return Tokens.at(context.decoder, context.params, ids, positions, state.active[:, None])


def _decide(
    policy: Policy,
    context: DecodeContext,
    state: DecodeState,
    tokens: Tokens,
    logits: Float[Array, "batch vocab"] | None,
    asked: tuple[Any, ...] | None = None,
) -> tuple[Bool[Array, " batch"], tuple[Any, ...]]:
    """Returns which rows run a further turn, and the policy's memory after each question.

    A row is asked where its depth is the question's. `asked` is the memory so far; None: none yet.
    """
    rows, memories = CachedRows(width=context.width), list[Any]()
    goes = tokens.depth < policy.depths[-1]
    memory = policy.start(state.last_ids[:, None], tokens.positions)
    for question, at in enumerate(policy.depths[:-1]):
        live = tokens.live & (tokens.depth == at)
        slots = rows.only_if(RowSlots(live=live), policy.asks(question))
        boundary = Boundary(
            x=tokens.x,
            positions=tokens.positions,
            live=live,
            params=context.params,
            depth=at,
            decoder=context.decoder,
            map_live=partial(rows.map_slots, slots),
            map_logits=partial(_map_logits, rows, slots, logits),
        )
        further, memory = decisions_of(policy, question, boundary, memory)
        goes &= ~live | further
        if asked is None:
            memories.append(memory)
            continue
        answered = partial(_choose, live[:, 0])
        memories.append(jax.tree.map(answered, memory, asked[question]))
        memory = asked[question]  # Of rows that were asked in an earlier step.
    return goes[:, 0], tuple(memories)


def _choose(rows: Bool[Array, " batch"], new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(rows.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def _map_logits(
    rows: CachedRows, slots: RowSlots, logits: jax.Array | None, function: Any, *arrays: jax.Array
) -> Any:
    assert logits is not None, "the policy reads none"
    return rows.map_slots(slots, function, logits[:, None], *arrays)


def _head(
    context: DecodeContext, x: Float[Array, "batch 1 dim"], chosen: Bool[Array, " batch"]
) -> tuple[Float[Array, "batch vocab"], Int[Array, " batch"]]:
    """Returns the logits of some rows, and which rows the head ran for, packed by quarters."""
    run = partial(logits_of, context.decoder, context.params)
    shape = jax.eval_shape(run, x[:, 0])

    def head(x: jax.Array, rows: jax.Array | None = None) -> jax.Array:
        if rows is None:
            return run(x[:, 0])
        return jnp.zeros(shape.shape, shape.dtype).at[rows].set(run(x[rows, 0]))

    with jax.named_scope("head"):
        logits, ran = on_packed_rows(chosen, head, lambda x: jnp.zeros(shape.shape, shape.dtype), x)
    return logits, ran.astype(jnp.int32)
