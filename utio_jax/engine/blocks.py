# SPDX-License-Identifier: Apache-2.0
"""A block of decoding steps on the device, and the one array in which it reports to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree
from utio_jax.core.rows import put_rows
from utio_jax.decoding.base import Mode
from utio_jax.decoding.loop import advance
from utio_jax.decoding.sampling import PerRowSampling
from utio_jax.decoding.segments import Layers
from utio_jax.decoding.state import REASONS, DecodeState, PerRowStopRules
from utio_jax.engine.depths import with_thresholds

_TALLIED = ("steps", "token_layers", "drafts", "accepted")


@pytree
class Rules:
    """What each slot's request brings of its own.

    Attributes:
      sampling: a method for each.
      stops: what ends each.
      thresholds: of each one's depth policy; None where the mode has none.
    """

    sampling: PerRowSampling
    stops: PerRowStopRules
    thresholds: Float[Array | np.ndarray, "slot boundary"] | None = dataclasses.field(
        default=None, metadata={"row_axis": 0}
    )


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
      rules: sampling, stops and thresholds of each.
      state: running. Donated.
      steps: new tokens of each row that goes on, at least.
      layers: each one's parameters apart, or None.
      widths: of keys that a step may read, see `utio_jax.attention.cache.key_widths`.
      room: new tokens that a row may report. Static; `block_room` is always enough.
    """
    # The first token of all is prefill's, or was emitted elsewhere: no block has reported it.
    unseen = state.tally.steps == 0
    since = jnp.where(unseen, state.lengths - 1, state.lengths)
    fresh = state.lengths - state.prompt_lengths
    state = advance(
        decoder,
        params,
        with_thresholds(mode, rules.thresholds),
        rules.sampling,
        rules.stops,
        state,
        fresh + steps,
        layers,
        widths=widths,
    )
    tally = state.tally
    chosen = tally.alternatives
    counts = [since, state.lengths, state.reason, *(getattr(tally, name) for name in _TALLIED)]
    slots = since[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    bits = jax.lax.bitcast_convert_type(tally.log_probability, jnp.int32)
    notes = [
        leaf.at[rows, slots].get(mode="clip")
        for leaf in (state.token_ids, tally.decided, tally.executed, bits)
    ]
    if chosen is not None:
        bits = jax.lax.bitcast_convert_type(chosen.log_probabilities, jnp.int32)
        notes += [
            leaf.at[rows, slots].get(mode="clip").reshape(slots.shape[0], -1)
            for leaf in (chosen.token_ids, bits)
        ]
    if state.thinking is not None:
        bits = jax.lax.bitcast_convert_type(state.thinking.uncertainty, jnp.int32)
        notes.append(bits.at[rows, slots].get(mode="clip"))
        now = state.thinking.progress
        notes.append(jnp.stack([now.began, now.forced_at, now.ended, now.cause], axis=1))
    return state, jnp.concatenate([jnp.stack(counts, axis=1), *notes], axis=1)


def block_room(mode: Mode, steps: int) -> int:
    """Returns the most tokens that a row can have to report after a block of so many steps."""
    return steps * mode.block + 1


def report_columns(room: int) -> int:
    """Returns how many columns of a report, the first, say what rows are: counts and tokens."""
    return 3 + len(_TALLIED) + room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternatives:
    """The most probable tokens at the place of each new one, whichever was drawn.

    Attributes:
      token_ids: descending by probability.
      log_probabilities: in nats, under the model's distribution before any sampling method.
    """

    token_ids: Int[np.ndarray, "new alternative"]
    log_probabilities: Float[np.ndarray, "new alternative"]

    def cut(self, kept: slice) -> Alternatives:
        """Returns those of some tokens."""
        return Alternatives(
            token_ids=self.token_ids[kept], log_probabilities=self.log_probabilities[kept]
        )

    @classmethod
    def joined(cls, parts: Sequence[Alternatives]) -> Alternatives:
        """Returns those of parts that follow each other, at least one."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )

    @classmethod
    def none(cls, count: int) -> Alternatives | None:
        """Returns those of no token: `count` for each; None for a count of 0."""
        if not count:
            return None
        ids, values = np.zeros((0, count), np.int32), np.zeros((0, count), np.float32)
        return cls(token_ids=ids, log_probabilities=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReport:
    """What one row has to report of a block.

    Attributes:
      token_ids: new tokens.
      decided: layers behind each, see `utio_jax.decoding.Generated`.
      executed: layers that really ran for it.
      log_probabilities: of each, in nats.
      reason: `"running"`, or why the row ended.
      alternatives: to each token; None where there are none.
      counts: `steps`, `token_layers`, `drafts` and `accepted` of the row since it was admitted.
      uncertainty: of the distribution that each token was taken from; None where requests bring no
        `Thinking`.
      progress: `began`, `forced_at`, `ended` and `cause` of the row's thinking; likewise.
    """

    token_ids: Int[np.ndarray, " new"]
    decided: Int[np.ndarray, " new"]
    executed: Int[np.ndarray, " new"]
    log_probabilities: Float[np.ndarray, " new"]
    reason: str
    alternatives: Alternatives | None
    counts: dict[str, int]
    uncertainty: Float[np.ndarray, " new"] | None = None
    progress: tuple[int, ...] | None = None

    def first(self, count: int) -> RowReport:
        """Returns the report of the first tokens alone."""
        return self._cut(slice(count))

    def without_first(self) -> RowReport:
        """Returns the report of all tokens but the first."""
        return self._cut(slice(1, None))

    def _cut(self, kept: slice) -> RowReport:
        names = ("token_ids", "decided", "executed", "log_probabilities")
        cut: dict[str, Any] = {name: getattr(self, name)[kept] for name in names}
        if self.alternatives is not None:
            cut["alternatives"] = self.alternatives.cut(kept)
        if self.uncertainty is not None:
            cut["uncertainty"] = self.uncertainty[kept]
        return dataclasses.replace(self, **cut)


def read_report(
    report: Int[np.ndarray, "slot column"],
    slot: int,
    *,
    room: int,
    alternatives: int = 0,
    thinking: bool = False,
) -> RowReport:
    """Returns what one slot's row reports, of so many alternatives to each token.

    Args:
      report: of a block.
      slot: whose row it is.
      room: of the block.
      alternatives: to each token.
      thinking: whether rows report of it.
    """
    row = np.array(report[slot])  # A copy: on CPU the array is a view of the device's.
    head = 3 + len(_TALLIED)
    since, length, reason = map(int, row[:3])
    tokens, decided, executed, bits = (
        row[head + number * room :][: length - since] for number in range(4)
    )
    chosen = None
    if alternatives:
        size = room * alternatives
        ids, values = (
            row[head + 4 * room + number * size :][:size].reshape(room, alternatives)
            for number in range(2)
        )
        chosen = Alternatives(token_ids=ids, log_probabilities=values.view(np.float32))
        chosen = chosen.cut(slice(length - since))
    noted, progress = None, None
    if thinking:
        noted = row[-4 - room : -4][: length - since].view(np.float32)
        progress = tuple(int(place) for place in row[-4:])
    return RowReport(
        alternatives=chosen,
        token_ids=tokens,
        decided=decided,
        executed=executed,
        log_probabilities=bits.view(np.float32),
        reason=REASONS[reason],
        counts={name: int(n) for name, n in zip(_TALLIED, row[3:head], strict=True)},
        uncertainty=noted,
        progress=progress,
    )
