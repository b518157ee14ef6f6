# SPDX-License-Identifier: Apache-2.0
"""Rows that come and go while others run: what a server of requests needs of the token loop.

    state = empty_state(setting, batch=8, slots=512)
    fresh = begin(setting, token_ids, lengths, limits, seeds, slots=512)     # two prompts
    state = admit(state, fresh, np.array([5, 2]))
    state = advance(setting, state, until, widths=widths)
    state = release(state, [5])                                             # or once it has ended

Each row gets the tokens that `generate` gives its prompt alone. Shapes are those of the batch and
of the fresh rows, so after the first admission of as many rows nothing compiles.

Long prompts may be read a chunk at a time, so that rows that run beside them go on in between:

    row, last = open_prompt(setting, token_ids, lengths, limits, seeds, slots=512)
    for start in range(0, lengths.max(), 64):
        row, last = read_chunk(decoder, params, row, last, start, chunk=64, width=...)
    row = close_prompt(setting, row, last)    # what `begin` makes of whole prompts at full depth

Where upper layers read keys and values made below, tokens run the layers that make them, and the
last one alone those above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.rows import put_rows
from utio_jax.decoding.base import Setting
from utio_jax.decoding.loop import first_tokens, unread
from utio_jax.decoding.segments import block_at, run_segment
from utio_jax.decoding.state import RELEASED, DecodeState
from utio_jax.staircase.forward import project_states


@partial(jax.jit, static_argnames=("batch", "slots", "alternatives"))
def empty_state(
    setting: Setting,
    hook: Any = None,
    *,
    batch: int,
    slots: int,
    alternatives: int = 0,
) -> DecodeState:
    """Returns a state of released rows alone, into which prompts are admitted."""
    one = jnp.ones((batch,), jnp.int32)
    rows = one[:, None] * 0, one, one, one.astype(jnp.uint32), hook
    state = unread(setting, *rows, slots=slots, alternatives=alternatives)
    state = setting.mode.start(setting, state)
    return dataclasses.replace(state, reason=jnp.full_like(one, RELEASED))


def admit(state: DecodeState, fresh: DecodeState, rows: Int[np.ndarray, " row"]) -> DecodeState:
    """Returns the running state, donated, with freshly begun rows put into some of its rows.

    All other rows stay as they are, bit by bit. A fresh row that only fills up goes nowhere: name
    the number of rows of the state. How prompts were read (`fresh.prompt`) is not kept: widths of
    prompts differ from one admission to the next.

    Raises:
      ValueError: states of other structures or sizes, see `put_rows`.
    """
    without = partial(dataclasses.replace, prompt=None)
    return _admit(without(state), without(fresh), rows)


_admit = jax.jit(put_rows, donate_argnums=0)


def release(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """Returns the state with some rows free for other prompts: they take part in no further step.

    What they have written stays readable until something is admitted there.
    """
    freed = np.zeros(state.reason.shape, np.bool_)
    freed[[*rows]] = True
    return dataclasses.replace(state, reason=_released(state.reason, freed))


@jax.jit
def _released(reason: Int[Array, " batch"], freed: Bool[Array, " batch"]) -> Int[Array, " batch"]:
    return jnp.where(freed, RELEASED, reason)


@partial(jax.jit, static_argnames=("slots", "alternatives"))
def open_prompt(
    setting: Setting, *rows: Any, slots: int, alternatives: int = 0
) -> tuple[DecodeState, Float[Array, "batch dim"]]:
    """Returns the state of prompts that no layer has read yet, and room for their last states."""
    state = unread(setting, *rows, slots=slots, alternatives=alternatives)
    x = setting.decoder.embed(setting.params, state.token_ids[:, 0], state.lengths * 0)
    return state, jnp.zeros_like(x)


@partial(jax.jit, static_argnames=("decoder", "chunk", "width"), donate_argnames=("state", "last"))
def read_chunk(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    last: Float[Array, "batch dim"],
    start: Int[Array, ""],
    *,
    chunk: int,
    width: int,
) -> tuple[DecodeState, Float[Array, "batch dim"]]:
    """Returns the state once `chunk` tokens from `start` on have left their keys and values.

    They attend to `width` slots. `last` is the state of each prompt's last token, once it is read.
    Both are donated.
    """
    ahead = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    lengths = state.lengths[:, None]
    valid = jnp.broadcast_to(ahead, (lengths.shape[0], chunk)) < lengths
    positions = jnp.where(valid, ahead, 0)  # Some decoders have no position behind the last.
    token_ids = jnp.take_along_axis(state.token_ids, positions, axis=1)
    x, block = decoder.embed(params, token_ids, positions), block_at(decoder, positions, valid)
    with jax.named_scope("prefill_chunk"):
        stop = _enough(decoder)
        x, cache = run_segment(
            decoder, params, state.cache, x, block, start=0, stop=stop, width=width
        )
        if stop < decoder.config.num_layers:
            cache, _ = project_states(
                decoder,
                params,
                cache,
                x,
                block.places,
                block.at,
                start=stop,
                stop=decoder.config.num_layers,
            )
    mine = valid & (ahead == lengths - 1)
    found = jnp.sum(jnp.where(mine[:, :, None], x, 0), axis=1, dtype=x.dtype)
    last = jnp.where(jnp.any(mine, axis=1)[:, None], found, last)
    return dataclasses.replace(state, cache=cache), last


def _enough(decoder: Decoder) -> int:
    """Returns the layers after which a token's keys and values are complete, or all layers."""
    config = decoder.config
    return config.kv_complete if config.kv_source else config.num_layers


@partial(jax.jit, donate_argnames="state")
def close_prompt(
    setting: Setting, state: DecodeState, last: Float[Array, "batch dim"]
) -> DecodeState:
    """Returns the state after the first new token of each row, its prompt having been read."""
    decoder, params = setting.decoder, setting.params
    if _enough(decoder) < decoder.config.num_layers:
        positions = state.positions[:, None]
        x, cache = run_segment(
            decoder,
            params,
            state.cache,
            last[:, None],
            block_at(decoder, positions, jnp.ones_like(positions, jnp.bool_)),
            start=_enough(decoder),
            stop=decoder.config.num_layers,
            width=state.token_ids.shape[1],
        )
        last, state = x[:, 0], dataclasses.replace(state, cache=cache)
    logits = decoder.unembed(params, last).astype(jnp.float32)
    depth = jnp.full_like(state.lengths, decoder.config.num_layers)
    return first_tokens(setting, state, logits, depth=depth)
