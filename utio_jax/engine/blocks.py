# SPDX-License-Identifier: Apache-2.0
"""A block of decoding steps on the device, and the one array in which it reports to the host."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import Mode
from utio_jax.decoding.loop import advance
from utio_jax.decoding.sampling import PerRowSampling
from utio_jax.decoding.segments import Layers
from utio_jax.decoding.state import REASONS, DecodeState, PerRowStopRules
from utio_jax.devices.rows import put_rows

_TALLIED = ("steps", "token_layers", "drafts", "accepted")


@pytree
class Rules:
    """What each slot's request brings of its own.

    Attributes:
      sampling: a method for each.
      stops: what ends each.
    """

    sampling: PerRowSampling
    stops: PerRowStopRules


@partial(jax.jit, donate_argnames="rules")
def put_rules(rules: Rules, fresh: Rules, rows: Int[Array | np.ndarray, " row"]) -> Rules:
    """Returns the rules with those of other requests in some slots; slots that are none go nowhere.

    Args:
      rules: of all slots. Donated.
      fresh: of as many requests as `rows` names.
      rows: slots.
    """
    return put_rows(rules, fresh, rows)


@partial(jax.jit, static_argnames=("decoder", "widths", "room"), donate_argnames="state")
def run_block(  # noqa: PLR0913 (static and traced apart, for jit)
    decoder: Decoder,
    params: Params,
    mode: Mode,
    rules: Rules,
    state: DecodeState,
    steps: Int[Array, ""],
    layers: Layers,
    *,
    widths: tuple[int, ...],
    room: int,
) -> tuple[DecodeState, Int[Array, "slot column"]]:
    """Returns the state after `steps` more tokens of every running row, and what it has to report.

    Args:
      decoder: the model.
      params: its parameters.
      mode: of all rows.
      rules: sampling and stops of each.
      state: running. Donated.
      steps: new tokens of each row that goes on, at least.
      layers: each one's parameters apart, or None.
      widths: of keys that a step may read, see `utio_jax.attention.cache.key_widths`.
      room: new tokens that a row may report. Static; `block_room` is always enough.
    """
    # The first token of all is prefill's: no block has reported it.
    unseen = state.tally.steps == 0
    since = jnp.where(unseen, state.prompt_lengths, state.lengths)
    fresh = state.lengths - state.prompt_lengths
    state = advance(
        decoder,
        params,
        mode,
        rules.sampling,
        rules.stops,
        state,
        fresh + steps,
        layers,
        widths=widths,
    )
    tally = state.tally
    counts = [since, state.lengths, state.reason, *(getattr(tally, name) for name in _TALLIED)]
    slots = since[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    bits = jax.lax.bitcast_convert_type(tally.log_probability, jnp.int32)
    notes = [
        leaf.at[rows, slots].get(mode="clip")
        for leaf in (state.token_ids, tally.decided, tally.executed, bits)
    ]
    return state, jnp.concatenate([jnp.stack(counts, axis=1), *notes], axis=1)


def block_room(mode: Mode, steps: int) -> int:
    """Returns the most tokens that a row can have to report after a block of so many steps."""
    return steps * mode.block + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReport:
    """What one row has to report of a block.

    Attributes:
      token_ids: new tokens.
      decided: layers behind each, see `utio_jax.decoding.Generated`.
      executed: layers that really ran for it.
      log_probabilities: of each, in nats.
      reason: `"running"`, or why the row ended.
      counts: `steps`, `token_layers`, `drafts` and `accepted` of the row since it was admitted.
    """

    token_ids: Int[np.ndarray, " new"]
    decided: Int[np.ndarray, " new"]
    executed: Int[np.ndarray, " new"]
    log_probabilities: Float[np.ndarray, " new"]
    reason: str
    counts: dict[str, int]


def read_report(report: Int[np.ndarray, "slot column"], slot: int, *, room: int) -> RowReport:
    """Returns what one slot's row reports."""
    row = np.array(report[slot])  # A copy: on CPU the array is a view of the device's.
    head = 3 + len(_TALLIED)
    since, length, reason = map(int, row[:3])
    tokens, decided, executed, bits = (
        row[head + number * room :][: length - since] for number in range(4)
    )
    return RowReport(
        token_ids=tokens,
        decided=decided,
        executed=executed,
        log_probabilities=bits.view(np.float32),
        reason=REASONS[reason],
        counts={name: int(n) for name, n in zip(_TALLIED, row[3:head], strict=True)},
    )
