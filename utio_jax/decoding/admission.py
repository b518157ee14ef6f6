# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: insert and evict rows of a running batch.

    state = empty_state(context, batch=8, slots=512)
    fresh = begin(context, token_ids, lengths, limits, seeds, slots=512)     # two prompts
    state = admit(state, fresh, np.array([5, 2]))
    state = advance(context, state, until, widths=widths)
    state = release(state, [5])                                             # at any time

Each row gets the same tokens as from `generate` with its prompt alone. Shapes depend on the batch
and on the number of new rows: only the first admission of each number compiles. An engine reads
exact prompts into rows without `admit`, see `utio_jax.engine.prompts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from utio_jax.core.rows import put_rows
from utio_jax.decoding.base import DecodeContext
from utio_jax.decoding.loop import unread
from utio_jax.decoding.state import RELEASED, DecodeState


@partial(jax.jit, static_argnames=("batch", "slots", "alternatives"))
def empty_state(
    context: DecodeContext, *, batch: int, slots: int, alternatives: int = 0
) -> DecodeState:
    """Returns a state in which all rows are released and can take prompts."""
    one = jnp.ones((batch,), jnp.int32)
    rows = one[:, None] * 0, one, one, one.astype(jnp.uint32)
    state = unread(context, *rows, slots=slots, alternatives=alternatives)
    state = context.mode.start(context, state)
    return dataclasses.replace(state, reason=jnp.full_like(one, RELEASED))


def admit(state: DecodeState, fresh: DecodeState, rows: Int[np.ndarray, " row"]) -> DecodeState:
    """Returns the running state, donated, with new rows inserted at the given indices.

    All other rows stay bitwise the same. A padding row is dropped: its index is the number of rows
    of the state. The record of the prompt pass (`fresh.prompt`) is not kept, because prompt widths
    differ between admissions.

    Raises:
      ValueError: the states differ in structure or size, see `put_rows`.
    """
    without = partial(dataclasses.replace, prompt=None)
    return _admit(without(state), without(fresh), rows)


_admit = jax.jit(put_rows, donate_argnums=0)


def release(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """Returns the state with some rows evicted: they run no further step and can take prompts.

    Their tokens and K/V stay readable until other rows are admitted there.
    """
    freed = np.zeros(state.reason.shape, np.bool_)
    freed[[*rows]] = True
    return dataclasses.replace(state, reason=_released(state.reason, freed))


@jax.jit
def _released(reason: Int[Array, " batch"], freed: Bool[Array, " batch"]) -> Int[Array, " batch"]:
    return jnp.where(freed, RELEASED, reason)
