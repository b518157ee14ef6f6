# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill into the rows of a running batch: blocks of several prompts in one pass.

Prompts are cut into blocks of a few tokens. A pass runs a fixed number of tokens in blocks of any
rows and positions: several short prompts, a part of a long one, or the tokens after cached
prefixes. Projections and MLP run over all tokens, one after the other. Attention runs block by
block over the row's K/V in the cache. There is one program for each number of tokens, whatever the
prompt lengths.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.mixing import mix_apart, mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.rows import Rows, map_rows, over_rows, put_rows
from utio_jax.decoding.base import DecodeContext, emit_drawn
from utio_jax.decoding.cached import block_at, run_segment
from utio_jax.decoding.loop import unread
from utio_jax.decoding.state import RELEASED, RUNNING, DecodeState
from utio_jax.engine.blocks import Rules
from utio_jax.engine.requests import Fresh
from utio_jax.staircase.base import Sources
from utio_jax.staircase.forward import InPlace, forward, project_states, write_at


@pytree
class PromptBlocks:
    """Blocks of consecutive prompt tokens, each of one row of the cache.

    On a mesh, those of all devices one after the other; rows and slots are the device's own.

    Attributes:
      rows: row of the cache of each block.
      starts: position of each block's first token.
      stops: position after its last token; padding blocks have no token.
      ends: True for blocks with the last token of a prompt, which a new token follows.
      offsets: slot of the pass of each block's first token, ascending.
      count: number of blocks in use on each device, which precede padding blocks.
      slot_rows: row of the token in each slot of the pass.
      slot_positions: position of that token; -1: padding.
      size: capacity of a block in tokens. Static.
    """

    rows: Int[Any, " block"]
    starts: Int[Any, " block"]
    stops: Int[Any, " block"]
    ends: Bool[Any, " block"]
    offsets: Int[Any, " block"]
    count: Int[Any, " device"]
    slot_rows: Int[Any, " slot"]
    slot_positions: Int[Any, " slot"]
    size: int = static()

    @classmethod
    def of(cls, spans: list[tuple[int, int, int, bool]], *, tokens: int, size: int) -> PromptBlocks:
        """Returns a pass of blocks `(row, start, stop, is_end)` as padded arrays on the host.

        On CPU tokens lie close together. There may be twice as many blocks as full ones would fit.
        On accelerators each block takes `size` slots.
        """
        apart = here().static_shapes
        table = np.zeros((5, most_blocks(tokens, size)), np.int32)
        slots = np.zeros((2, tokens), np.int32)
        slots[1] = -1
        offset = 0
        for number, (row, start, stop, is_end) in enumerate(spans):
            table[:, number] = row, start, stop, is_end, offset
            slots[0, offset : offset + stop - start] = row
            slots[1, offset : offset + stop - start] = np.arange(start, stop)
            offset += size if apart else stop - start
        rows, starts, stops, ends, offsets = table
        return cls(
            rows=rows,
            starts=starts,
            stops=stops,
            ends=ends.astype(bool),
            offsets=offsets,
            count=np.full(1, len(spans), np.int32),
            slot_rows=slots[0],
            slot_positions=slots[1],
            size=size,
        )


def most_blocks(tokens: int, size: int) -> int:
    """Returns the number of blocks that a pass may have."""
    if here().static_shapes:
        return tokens // size
    # The last block takes all of its slots, each block before it at least one.
    return min(2 * tokens // size, tokens - size + 1)


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """K/V writes and attention of prompt blocks in a cache, one block at a time, for `forward`.

    A block attends over the smallest of a few widths that holds its last token. It takes `size`
    slots of the pass, also where the next block's tokens begin earlier: their output follows and
    overwrites what this block has put there. Slots after a row's last token are written too; they
    are overwritten before they are read.
    """

    decoder: Decoder
    blocks: PromptBlocks
    widths: tuple[int, ...]

    def write(
        self, cache: KVCache, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache, None]:
        """Returns the cache with a layer's K/V, one contiguous copy for each block."""
        blocks, size = self.blocks, self.blocks.size

        def one(block: jax.Array, leaves: Any) -> Any:
            start = cache.start(index, blocks.rows[block], blocks.starts[block])
            at = blocks.offsets[block]
            new = (jax.lax.dynamic_slice_in_dim(y, at, size) for y in (keys, values))
            return tuple(
                jax.lax.dynamic_update_slice(
                    leaf, cache.by_slot(y)[None, None].astype(leaf.dtype), start
                )
                for leaf, y in zip(leaves, new, strict=True)
            )

        keys, values = jax.lax.fori_loop(0, self.blocks.count[0], one, cache.arrays)
        return dataclasses.replace(cache, keys=keys, values=values), None

    def read(self, cache: KVCache, sources: Sources) -> tuple[KVCache, Sources]:
        """Returns the cache itself, from which blocks read in place."""
        return cache, sources

    def attend(self, index: Any, queries: jax.Array, seen: tuple[KVCache, Sources]) -> jax.Array:
        """Returns the attention output of the queries of all blocks in use."""
        (cache, sources), mix, size = seen, mixer_at(self.decoder, index), self.blocks.size

        def one(block: jax.Array, mixed: jax.Array) -> jax.Array:
            at = self.blocks.offsets[block]
            own = jax.lax.dynamic_slice_in_dim(queries, at, size)
            positions = self.blocks.starts[block] + jnp.arange(size, dtype=jnp.int32)

            def over(width: int) -> jax.Array:
                row, spans = self.blocks.rows[block], ((0, width),)
                keys_values = [cache.row(source, row, spans) for source in sources]
                visible = mix.visible(positions, jnp.arange(width, dtype=jnp.int32))
                return mix_apart(mix, own, keys_values, visible)

            end = self.blocks.starts[block] + size
            reach = jnp.sum(end > jnp.asarray(self.widths[:-1], jnp.int32), dtype=jnp.int32)
            new = jax.lax.switch(reach, [partial(over, width) for width in self.widths])
            return jax.lax.dynamic_update_slice_in_dim(mixed, new, at, 0)

        return jax.lax.fori_loop(0, self.blocks.count[0], one, queries)


@partial(jax.jit, static_argnames=("widths", "mesh"), donate_argnames="state")
def read_blocks(
    context: DecodeContext,
    state: DecodeState,
    rules: Rules,
    passes: Rows,
    *,
    widths: tuple[int, ...],
    mesh: Mesh | None = None,
) -> tuple[DecodeState, Rules]:
    """Reads blocks of prompts; returns the state, donated, and the rules of its rows.

    A row whose prompt ends gets its first new token and is running. All other rows are unchanged.
    K/V equal those of a full-depth prefill. Tokens run only the layers that their K/V need; the
    last token of a prompt runs all layers.

    `passes` are the prompts that begin in this pass (`Fresh`), their rows, and `PromptBlocks`, by
    device; rows are those of the device. Padding has the number of rows and is dropped. `widths`
    are numbers of key slots to attend over, ascending, static.
    """

    def on_device(context: DecodeContext, state: DecodeState, rules: Rules, passes: Rows) -> Any:
        fresh, rows, blocks = passes.tree
        state, rules = _open(context, state, rules, fresh, rows)
        context = dataclasses.replace(context, sampling=rules.sampling, eos_ids=rules.eos_ids)
        with jax.named_scope("prefill_blocks"):
            last, cache = _run(context, state, blocks, widths=widths)
        logits = context.decoder.unembed(context.params, last).astype(jnp.float32)
        return _first_tokens(context, state, cache, blocks, logits), rules

    return over_rows(mesh, on_device, context, state, rules, passes)


def _open(
    context: DecodeContext, state: DecodeState, rules: Rules, fresh: Fresh, rows: Int[Any, " fresh"]
) -> tuple[DecodeState, Rules]:
    """Inserts prompts into rows, which do not run yet; returns the state and the rules of rows."""
    arrays, own = fresh
    best = state.columns.alternatives
    sizes = {
        "slots": state.token_ids.shape[1],
        "alternatives": 0 if best is None else best.token_ids.shape[-1],
    }
    new = unread(context, **arrays, **sizes)
    new = dataclasses.replace(new, reason=jnp.full_like(new.lengths, RELEASED))
    known = dataclasses.replace(state, memory=None)
    opened, rules = put_rows((known, rules), (new, own), rows)
    # K/V and memory are written later; under jit the empty ones cost nothing.
    return dataclasses.replace(opened, cache=state.cache, memory=state.memory), rules


def _run(
    context: DecodeContext, state: DecodeState, blocks: PromptBlocks, *, widths: tuple[int, ...]
) -> tuple[Float[Array, "block dim"], KVCache]:
    """Runs blocks; returns the hidden state of each block's last token, and the cache."""
    decoder, params = context.decoder, context.params
    config = decoder.config
    apart = here().static_shapes
    shape = (-1, blocks.size) if apart else (1, -1)
    ahead = jnp.asarray(blocks.slot_positions).reshape(shape)
    valid = ahead >= 0
    positions = jnp.maximum(ahead, 0)  # Padding is at -1.
    token_ids = state.token_ids[jnp.asarray(blocks.slot_rows).reshape(shape), positions]
    x = decoder.embed(params, token_ids, positions)
    rows = jnp.asarray(blocks.rows)
    block = block_at(decoder, positions, valid, rows=rows if apart else None)
    stop = config.kv_complete if config.shares_kv else config.num_layers
    cache = state.cache
    if apart:
        x, cache = run_segment(
            decoder, params, cache, x, block, start=0, stop=stop, width=widths[-1]
        )
        put: Any = write_at(block.at)
    else:
        device = jax.tree.map(jnp.asarray, blocks)
        attention = _BlockAttention(decoder, device, widths)
        x, cache = forward(
            decoder,
            params,
            x,
            block.places,
            cache,
            slots=InPlace(flat(valid)),
            attention=attention,
            start=0,
            stop=stop,
        )
        put = attention.write
    lengths = jnp.asarray(blocks.stops) - jnp.asarray(blocks.starts)
    last = flat(x)[jnp.asarray(blocks.offsets) + jnp.maximum(lengths - 1, 0)][:, None]
    if stop < config.num_layers:
        cache, _ = project_states(
            decoder, params, cache, x, block.places, put, start=stop, stop=config.num_layers
        )
        ends = jnp.asarray(blocks.ends)[:, None]
        where = jnp.where(ends, jnp.asarray(blocks.stops)[:, None] - 1, 0)
        last, cache = run_segment(
            decoder,
            params,
            cache,
            last,
            block_at(decoder, where, ends, rows=rows),
            start=stop,
            stop=config.num_layers,
            width=widths[-1],
        )
    return last[:, 0], cache


def _first_tokens(
    context: DecodeContext,
    state: DecodeState,
    cache: KVCache,
    blocks: PromptBlocks,
    logits: Float[Array, "block vocab"],
) -> DecodeState:
    """Draws the first new token of the rows whose prompts end, and returns the state."""
    num_rows, num_layers = state.lengths.shape[0], context.decoder.config.num_layers
    rows = jnp.where(jnp.asarray(blocks.ends), jnp.asarray(blocks.rows), num_rows)
    begins = jnp.zeros((num_rows,), jnp.bool_).at[rows].set(True, mode="drop")
    by_row = jnp.zeros((num_rows, logits.shape[-1]), logits.dtype)
    by_row = by_row.at[rows].set(logits, mode="drop")

    def pick(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        if old is new:
            return new
        return jnp.where(begins.reshape(*(1,) * axis, -1, *(1,) * (new.ndim - axis - 1)), new, old)

    reason = jnp.where(begins, RUNNING, RELEASED)
    alone = dataclasses.replace(state, cache=cache, reason=reason)
    alone = context.mode.start(context, alone)
    depth = jnp.full_like(state.lengths, num_layers)
    new = emit_drawn(context, alone, by_row, decided=depth, executed=depth)
    # All else was written for rows that begin alone: to choose there would copy it.
    before = dataclasses.replace(new, memory=state.memory, reason=state.reason)
    return map_rows(pick, before, new)
