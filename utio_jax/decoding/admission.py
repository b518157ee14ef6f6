# SPDX-License-Identifier: Apache-2.0
"""Rows that come and go while others run: what a server of requests needs of the token loop.

    state = empty_state(setting, batch=8, slots=512)
    fresh = begin(setting, token_ids, lengths, limits, seeds, slots=512)     # two prompts
    state = admit(state, fresh, [5, 2], mode=mode)
    state = advance(setting, state, until, widths=widths)
    state = release(state, [5])                                             # or once it has ended

Rows neither see nor feel each other: each gets the tokens that `generate` gives its prompt alone.
What rows bring of their own, the setting's `PerRowSampling` and `StopRules`, is put into the
batch's by `put_rows` of `utio_jax.devices.rows`. Shapes are those of the batch and of the fresh
rows, so after the first admission of as many rows nothing compiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from utio_jax.decoding.base import Mode, Setting
from utio_jax.decoding.loop import unread
from utio_jax.decoding.state import RELEASED, DecodeState, RowHook
from utio_jax.devices.rows import PerDevice, put_rows


@partial(jax.jit, static_argnames=("batch", "slots", "alternatives"))
def empty_state(
    setting: Setting,
    hook: RowHook | None = None,
    *,
    batch: int,
    slots: int,
    alternatives: int = 0,
) -> DecodeState:
    """Returns a state of released rows alone, into which prompts are admitted.

    Args:
      setting: that all rows will decode in.
      hook: of as many rows; None: no row will have one.
      batch: rows.
      slots: tokens that a row can hold: prompt, new tokens, and `mode.block` more.
      alternatives: to each new token, that are noted.
    """
    one = jnp.ones((batch,), jnp.int32)
    rows = one[:, None] * 0, one, one, one.astype(jnp.uint32), hook
    state = unread(setting, *rows, slots=slots, alternatives=alternatives)
    state = setting.mode.start(setting, state)
    return dataclasses.replace(state, reason=jnp.full_like(one, RELEASED))


def admit(
    state: DecodeState, fresh: DecodeState, rows: Sequence[int] | np.ndarray, *, mode: Mode
) -> DecodeState:
    """Returns the running state with freshly begun rows put into some of its rows.

    Whatever was there is overwritten, whether it had been released or not; all other rows stay as
    they are, bit by bit. How prompts were read (`fresh.prompt`) is not kept: widths of prompts
    differ from one admission to the next.

    Args:
      state: running, or `empty_state`. Donated.
      fresh: from `begin`, in the same mode and with the same `slots`.
      rows: where its rows go, each once. A fresh row that only fills up goes nowhere: name the
        number of rows of the state.
      mode: of both.

    Raises:
      ValueError: rows that do not exist, are named twice, or are not as many as the fresh ones;
        other slots or another mode; or a state on a mesh.
    """
    batch, slots = state.token_ids.shape
    chosen = _checked(rows, batch=batch, nowhere=True)
    if isinstance(state.memory, PerDevice) or isinstance(fresh.memory, PerDevice):
        raise ValueError(
            "Wanted states of one device. Got one that was begun on a mesh. Keep a state for each "
            "device, and admit a prompt to one of them."
        )
    if fresh.token_ids.shape != (chosen.size, slots):
        raise ValueError(
            f"Wanted one place for each fresh row, and fresh rows of the state's {slots} slots. "
            f"Got {chosen.size} places for {fresh.token_ids.shape[0]} rows of "
            f"{fresh.token_ids.shape[1]} slots. Begin them with slots={slots}."
        )
    without = partial(dataclasses.replace, prompt=None)
    state, fresh = without(state), without(fresh)
    if jax.tree.structure(state) != jax.tree.structure(fresh):
        raise ValueError(
            "Wanted fresh rows that were begun in the running state's mode. Got a state of another "
            f"structure: it remembers {type(fresh.memory).__name__}, the running one "
            f"{type(state.memory).__name__}."
        )
    return _admit(mode, state, fresh, chosen)


@partial(jax.jit, donate_argnames="state")
def _admit(
    mode: Mode, state: DecodeState, fresh: DecodeState, rows: Int[Array, " row"]
) -> DecodeState:
    memory = mode.admit(state.memory, fresh.memory, rows)
    without = partial(dataclasses.replace, memory=None)
    return dataclasses.replace(put_rows(without(state), without(fresh), rows), memory=memory)


def release(state: DecodeState, rows: Sequence[int] | np.ndarray) -> DecodeState:
    """Returns the state with some rows free for other prompts: they take part in no further step.

    What they have written stays readable until something is admitted there.

    Raises:
      ValueError: rows that do not exist, or are named twice.
    """
    batch = state.reason.shape[0]
    freed = np.zeros((batch,), np.bool_)
    freed[_checked(rows, batch=batch)] = True
    return dataclasses.replace(state, reason=_released(state.reason, freed))


@jax.jit
def _released(reason: Int[Array, " batch"], freed: Bool[Array, " batch"]) -> Int[Array, " batch"]:
    return jnp.where(freed, RELEASED, reason)


def _checked(
    rows: Sequence[int] | np.ndarray, *, batch: int, nowhere: bool = False
) -> Int[np.ndarray, " row"]:
    """Returns the numbers of rows as int32.

    Raises:
      ValueError: some do not exist, or are named twice.
    """
    found = np.asarray(rows)
    if not found.size:
        found = found.astype(np.int32).reshape(0)
    real = found[found != batch] if nowhere else found
    if (
        found.ndim != 1
        or not np.issubdtype(found.dtype, np.integer)
        or (real.size and not 0 <= real.min() <= real.max() < batch)
        or np.unique(real).size != real.size
    ):
        raise ValueError(
            f"Wanted numbers of rows from 0 to {batch - 1}, each once"
            f"{f', or {batch} for nowhere' if nowhere else ''}. Got {np.asarray(rows).tolist()}."
        )
    return found.astype(np.int32)
