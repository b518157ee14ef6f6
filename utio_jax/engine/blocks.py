# SPDX-License-Identifier: Apache-2.0
"""Block of decode steps on the device, and its report to the host as one array."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree
from utio_jax.core.rows import Rows, first_rows, over_rows, put_first_rows
from utio_jax.core.work import Work
from utio_jax.decoding.base import DecodeContext, Mode
from utio_jax.decoding.loop import advance
from utio_jax.decoding.requests import RowReport
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.state import REASONS, DecodeState


@pytree
class Rules:
    """Per-slot options of requests.

    Attributes:
      sampling: sampling parameters of each slot.
      eos_ids: end tokens of each slot, see `eos_array`.
      thresholds: thresholds of each slot's depth policy; None if the mode has none.
    """

    sampling: SamplingParams
    eos_ids: Int[Array | np.ndarray, "slot eos"] = dataclasses.field(metadata={"row_axis": 0})
    thresholds: Float[Array | np.ndarray, "slot boundary"] | None = dataclasses.field(
        default=None, metadata={"row_axis": 0}
    )


@partial(jax.jit, static_argnames=("widths", "room", "rows", "mesh"), donate_argnames="state")
def run_block(
    context: DecodeContext,
    thresholds: Float[Array | np.ndarray, "slot boundary"] | None,
    state: DecodeState,
    steps: Int[Array, ""],
    *,
    widths: tuple[int, ...],
    room: int,
    rows: int,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, Int[Array, "row column"]]:
    """Runs `steps` more tokens of every running row; returns the state, donated, and its report.

    If the mode `counts_steps`, so many steps.

    Only the first `rows` rows of the state step and report, static: no other row may be running.
    K/V are not copied. A row reports at most `room` new tokens, static; `block_room` is always
    enough. On a mesh, `rows` are the first ones of each device.
    """
    if mesh is not None:

        def on_device(context: DecodeContext, slots: Rows, steps: Int[Array, ""]) -> Any:
            run = partial(run_block, widths=widths, room=room, rows=rows)
            thresholds, state = slots.tree
            state, report = run(context, thresholds, state, steps)
            return state, Rows(report)

        state, report = over_rows(mesh, on_device, context, Rows((thresholds, state)), steps)
        return state, report.tree
    whole = state
    if rows < state.lengths.shape[0]:
        state, sampling = first_rows((state, context.sampling), rows)
        state = dataclasses.replace(state, cache=whole.cache)
        context = dataclasses.replace(context, sampling=sampling, eos_ids=context.eos_ids[:rows])
        thresholds = None if thresholds is None else thresholds[:rows]
    # Prefill emitted the first token of a row: reported until the row steps.
    unseen = state.work.steps == 0
    since = jnp.where(unseen, state.lengths - 1, state.lengths)
    by_steps = context.mode.counts_steps(context.decoder)
    done = state.work.steps if by_steps else state.lengths - state.prompt_lengths
    if thresholds is not None:
        policy = context.mode.policy.per_row(jnp.asarray(thresholds))
        mode = dataclasses.replace(context.mode, policy=policy)
        context = dataclasses.replace(context, mode=mode)
    state = advance(context, state, done + steps, widths=widths, by_steps=by_steps)
    slots = since[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    new = [jnp.asarray(y).at[row, slots].get(mode="clip") for y in jax.tree.leaves(state.columns)]
    noted = [since, state.lengths, state.reason, *jax.tree.leaves(state.work), *new]
    if rows < whole.lengths.shape[0]:
        state = put_first_rows(whole, state)  # A cache that is whole is passed on as it is.
    return state, jnp.concatenate([_as_integers(leaf) for leaf in noted], axis=1)


def _as_integers(leaf: jax.Array) -> Int[Array, "slot column"]:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.int32)
    return leaf.reshape(leaf.shape[0], -1)


def row_counts(slots: int, *, mesh: Mesh | None = None) -> tuple[int, ...]:
    """Returns the numbers of rows that a block may run: powers of 4, half of many slots, and all.

    Accelerators run all: their steps read the weights, whatever the number of rows. So does a mesh,
    where rows do not move to another device.

    >>> row_counts(16), row_counts(8), row_counts(1)
    ((1, 4, 8, 16), (1, 4, 8), (1,))
    """
    if here().static_shapes or mesh is not None:
        return (slots,)
    below = {4**n for n in range(16)} | ({slots // 2} if slots >= 16 else set())
    return (*sorted(count for count in below if count < slots), slots)


def block_room(mode: Mode, steps: int) -> int:
    """Returns the maximum number of tokens that a row reports after a block of `steps` steps."""
    return steps * mode.block + 1


def read_report(
    report: Int[np.ndarray, "slot column"], slot: int, *, known: int, room: int, state: DecodeState
) -> RowReport:
    """Returns the report of one slot's row; its first `known` tokens have been reported before."""
    row = np.array(report[slot])  # A copy: on CPU, the array is a view of a device buffer.
    since, length, reason = map(int, row[:3])
    new, at = slice(known - since, length - since), 3 + len(dataclasses.fields(Work))

    def take(leaf: Any, *shape: int) -> np.ndarray:
        nonlocal at
        at, start = at + math.prod(shape), at
        return row[start:at].view(leaf.dtype).reshape(shape)

    def work() -> Work:
        counts = iter(row[3:])
        return jax.tree.map(lambda leaf: np.asarray(next(counts)).view(leaf.dtype), Work.of())

    columns = jax.tree.map(lambda leaf: take(leaf, room, *leaf.shape[2:])[new], state.columns)
    return RowReport(columns=columns, work=work, length=length, reason=REASONS[reason])
