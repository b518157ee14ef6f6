# SPDX-License-Identifier: Apache-2.0
"""State of the token loop: tokens and their records, stop rules, and `emit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache
from utio_jax.core.documents import check_ids
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work

REASONS = ("running", "eos", "stop", "length", "released")
"""Finish reasons, indexed by `DecodeState.reason`. A released row can take another prompt."""
RUNNING, _EOS, _STOP, _LENGTH, RELEASED = range(5)


@pytree
class StopRules:
    """Stop rules of rows, besides their length. A single row of rules applies to all rows.

    Attributes:
      eos_ids: end tokens; padded with -1.
      sequences: stop sequences of tokens, padded on the left with -1; missing sequences are -2.
    """

    eos_ids: Int[Any, "#batch eos"] = dataclasses.field(metadata={"row_axis": 0})
    sequences: Int[Any, "#batch sequence longest"] = dataclasses.field(metadata={"row_axis": 0})


Stops = tuple[Sequence[int], Sequence[Sequence[int]]]
"""Stop rules of one row: end tokens, and token sequences."""

STOPS_ROOM = (16, 4, 16)
"""Numbers of end tokens, of stop sequences, and of tokens per sequence that fit into static shapes,
so that new rules compile nothing."""


def stop_rules(
    rows: Sequence[Stops] = (((), ()),),
    *,
    vocab_size: int = 2**31,
    room: tuple[int, ...] | None = None,
) -> StopRules:
    """Returns the stop rules of rows as arrays on the host; by default, one row without rules.

    `room` is the capacity for end tokens, sequences, and tokens of a sequence. None: the smallest
    multiples of `STOPS_ROOM` that hold all rules, so that few combinations compile.

    Raises:
      ValueError: rules exceed the capacity, a sequence is empty, or it holds ids outside the
        vocabulary, such as the padding value -1.
    """
    sizes = [len(sequence) for _, sequences in rows for sequence in sequences]
    most, count = (max(map(len, column)) for column in zip(*rows, strict=True))
    needed = max(1, most), count, max(sizes, default=0)
    if room is None:
        room = tuple(max(1, -(-n // m)) * m for n, m in zip(needed, STOPS_ROOM, strict=True))
    elif any(size > most for size, most in zip(needed, room, strict=True)):
        raise ValueError(
            f"Wanted at most {room[0]} eos_ids and {room[1]} stop_sequences of at most {room[2]} "
            f"tokens, which every slot has room for. Got {needed[0]} eos_ids and {needed[1]} "
            f"sequences of up to {needed[2]} tokens. Name the rest as stop_strings."
        )
    most, count, longest = room
    eos_ids = np.full((len(rows), most), -1, np.int32)
    padded = np.full((len(rows), count, longest), -2, np.int32)
    for row, (ends, sequences) in enumerate(rows):
        eos_ids[row, : len(ends)] = check_ids([*ends], vocab_size=2**31, what="eos_ids")
        for index, sequence in enumerate(sequences):
            if not len(sequence):
                raise ValueError("Wanted stop sequences of at least one token. Got an empty one.")
            ids = check_ids(sequence, vocab_size=vocab_size, what=f"stop sequence {index}")
            padded[row, index] = -1
            padded[row, index, longest - len(sequence) :] = ids
    return StopRules(eos_ids=eos_ids, sequences=padded)


def stops_of_rows(eos_ids: Any, sequences: Any, *, rows: int) -> list[Stops]:
    """Returns the stop rules of each row. Arguments apply to all rows, or have a list per row.

    Raises:
      ValueError: arguments are neither, or have lists for another number of rows.
    """
    for what, given in (("eos_ids", eos_ids), ("stop_sequences", sequences)):
        items = given if np.iterable(given) and not isinstance(given, str) else [""]
        nested = what == "stop_sequences"
        if not all(is_list(item) if nested else not isinstance(item, str) for item in items):
            raise ValueError(
                f"Wanted {what} as a list of {'lists of ' * nested}token ids, or such lists for "
                f"each row. Got {given!r:.60}. Strings that end a text are stop= of a model, "
                "stop_strings= elsewhere."
            )
    each_ends = any(map(is_list, eos_ids))
    each_stops = any(is_list(item) for sequence in sequences for item in sequence)
    # Empty lists, one per row: as sequences they would end nothing.
    each_stops |= len(sequences) == rows and all(is_list(s) and not len(s) for s in sequences)
    ends: Any = eos_ids if each_ends else [eos_ids] * rows
    stops: Any = sequences if each_stops else [sequences] * rows
    for what, given in (("eos_ids", ends), ("stop_sequences", stops)):
        if len(given) != rows or not all(map(is_list, given)):
            raise ValueError(
                f"Wanted {what} for all prompts, or a list of them for each of the {rows}. Got "
                f"{given!r:.80}."
            )
    return [([*ids], [*sequences]) for ids, sequences in zip(ends, stops, strict=True)]


def is_list(value: Any) -> bool:
    """Returns True for a list, tuple, set or range, and for an array of one axis or more."""
    return isinstance(value, (list, tuple, set, frozenset, range)) or np.ndim(value) > 0


@pytree
class Alternatives:
    """Most probable tokens at the position of each new token.

    Attributes:
      token_ids: token ids, in descending order of probability.
      log_probabilities: their log-probabilities in nats, before any sampling method.
    """

    token_ids: Int[Any, "*token alternative"]
    log_probabilities: Float[Any, "*token alternative"]


@pytree
class Columns:
    """Records of tokens by position: arrays with the same leading shape.

    The shape is `[row, slot]` in the loop, and `[new]` of one row on the host.

    Attributes:
      token_ids: token ids; in the loop, including prompts.
      decided: depth in layers of the distribution that each token was taken from: the exit depth of
        the token *before* it. With `Lossless`: the exit that drafted it, 0 if it was copied, or all
        layers if the full model emitted it.
      executed: number of layers that ran for each token, including those for other rows.
      log_probabilities: log-probability of each token in nats, before any sampling method.
      alternatives: most probable tokens at each position; None: not recorded.
    """

    token_ids: Int[Any, "*token"]
    decided: Int[Any, "*token"]
    executed: Int[Any, "*token"]
    log_probabilities: Float[Any, "*token"]
    alternatives: Alternatives | None = None

    @classmethod
    def empty(cls, *shape: int, alternatives: int = 0) -> Columns:
        """Returns zeros on the host with a leading shape, and `alternatives` per token."""
        ints, floats = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        best = None
        if alternatives:
            ids = np.zeros((*shape, alternatives), np.int32)
            best = Alternatives(token_ids=ids, log_probabilities=ids.astype(np.float32))
        return Columns(
            token_ids=ints, decided=ints, executed=ints, log_probabilities=floats, alternatives=best
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Concatenates consecutive parts, at least one, on the host."""
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def cut(self, *kept: int | slice) -> Columns:
        """Returns some of the tokens, copied to the host.

        On CPU, arrays on the host may be views of buffers that the next step reuses.
        """
        return jax.tree.map(lambda leaf: np.array(leaf[kept]), self)


@pytree
class PromptPass:
    """Record of a `Prefill` pass.

    Attributes:
      depths: decided depth of each prompt token in layers; 0 for padding.
      work: executed work, `[batch, segment]`: each row has the total of all rows.
    """

    depths: Int[Array, "batch token"]
    work: Work


@pytree
class DecodeState:
    """Loop-carried state of the token loop. Donated.

    Between steps, the cache holds the K/V of all tokens of a row except its last token. That token
    has been emitted, but has run no layer yet.

    Attributes:
      lengths: number of tokens of each row, including the prompt.
      prompt_lengths: number of prompt tokens of each row.
      limits: lengths at which rows end.
      reason: index into `REASONS`.
      seeds: random seeds of the rows.
      columns: prompt and emitted tokens by position; entries beyond `lengths` are undefined.
      cache: keys and values; while few rows step, of more rows than `lengths` has.
      work: executed work of decode steps.
      memory: state of the mode: any pytree of arrays with rows as first axis.
      prompt: record of the prompt pass; None if the dense program or several passes read prompts.
    """

    lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    prompt_lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    limits: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    reason: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    seeds: UInt32[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    columns: Columns = dataclasses.field(metadata={"row_axis": 0})
    cache: KVCache
    work: Work = dataclasses.field(metadata={"row_axis": 0})
    memory: Any = dataclasses.field(metadata={"row_axis": 0})
    prompt: PromptPass | None = dataclasses.field(default=None, metadata={"row_axis": 0})

    @property
    def active(self) -> Bool[Array, " batch"]:
        """Mask of rows that have not ended."""
        return self.reason == RUNNING

    @property
    def token_ids(self) -> Int[Array, "batch slot"]:
        """Prompt and emitted tokens by position."""
        return self.columns.token_ids

    @property
    def positions(self) -> Int[Array, " batch"]:
        """Position of each row's last token, the next to run."""
        return self.lengths - 1

    @property
    def last_ids(self) -> Int[Array, " batch"]:
        """Each row's last token."""
        return jax.vmap(lambda row, position: row[position])(self.token_ids, self.positions)


def emit(
    state: DecodeState,
    stops: StopRules,
    token_ids: Int[Array, "batch new"],
    counts: Int[Array, " batch"],
    *,
    logits: Float[Array, "batch new vocab"],
    decided: Int[Array, "batch new"],
    executed: Int[Array, "batch new"],
) -> DecodeState:
    """Appends new tokens to the active rows, up to the token that ends a row.

    The first `counts` tokens of a row are valid. The token that ends a row is kept.
    """
    columns = state.columns
    batch, new = token_ids.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    offsets = jnp.arange(new, dtype=jnp.int32)[None, :]
    positions = state.lengths[:, None] + offsets
    fresh = (offsets < counts[:, None]) & state.active[:, None]
    slots = jnp.where(fresh, positions, state.token_ids.shape[1])
    known = state.token_ids.at[row, slots].set(token_ids, mode="drop")

    is_eos = jnp.any(token_ids[:, :, None] == jnp.asarray(stops.eos_ids)[:, None, :], axis=-1)
    is_stop = _ends_sequence(known, positions, state.prompt_lengths, stops.sequences)
    is_last = positions + 1 >= state.limits[:, None]
    ends = (is_eos | is_stop | is_last) & fresh
    ended = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32)
    counts = jnp.where(ended, first + 1, jnp.where(state.active, counts, 0))
    reasons = jnp.where(is_eos, _EOS, jnp.where(is_stop, _STOP, _LENGTH))
    reason = jnp.take_along_axis(reasons, first[:, None], axis=1)[:, 0]

    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, :, None], axis=-1)[:, :, 0]
    best = columns.alternatives
    if best is not None:
        best = _most_probable(logits - total[:, :, None], best.token_ids.shape[-1])
    noted = Columns(
        token_ids=token_ids,
        decided=decided,
        executed=executed,
        log_probabilities=chosen - total,
        alternatives=best,
    )
    columns = dataclasses.replace(columns, token_ids=known)
    kept = jnp.where(offsets < counts[:, None], slots, known.shape[1])
    columns = jax.tree.map(lambda y, new: y.at[row, kept].set(new, mode="drop"), columns, noted)
    return dataclasses.replace(
        state,
        columns=columns,
        lengths=state.lengths + counts,
        reason=jnp.where(ended, reason, state.reason),
    )


def _most_probable(log_probabilities: Float[Array, "batch new vocab"], count: int) -> Alternatives:
    *lead, vocab = log_probabilities.shape
    # On two axes, compilers have a program for `top_k` that does not sort.
    best, ids = jax.lax.top_k(log_probabilities.reshape(-1, vocab), count)
    best, ids = (leaf.reshape(*lead, count) for leaf in (best, ids))
    return Alternatives(token_ids=ids, log_probabilities=best)


def _ends_sequence(
    known: Int[Array, "batch slot"],
    positions: Int[Array, "batch new"],
    prompt_lengths: Int[Array, " batch"],
    sequences: Int[Array | np.ndarray, "#batch sequence longest"],
) -> Bool[Array, "batch new"]:
    """Returns a mask of positions at which a stop sequence ends that has new tokens only."""
    _, count, longest = sequences.shape
    if not count:
        return jnp.zeros(positions.shape, jnp.bool_)
    back = jnp.arange(longest, dtype=jnp.int32)[None, None, :] - (longest - 1)
    places = positions[:, :, None] + back
    row = jnp.arange(known.shape[0], dtype=jnp.int32)[:, None, None]
    window = jnp.where(
        places >= prompt_lengths[:, None, None],
        known.at[row, jnp.maximum(places, 0)].get(mode="clip"),
        -3,
    )
    expected = jnp.asarray(sequences)[:, None, :, :]
    same = (window[:, :, None, :] == expected) | (expected == -1)
    return jnp.any(jnp.all(same, axis=-1), axis=-1)
