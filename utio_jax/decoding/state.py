# SPDX-License-Identifier: Apache-2.0
"""The state of a token loop, what a step adds to it, and where a row ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
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
"""Why a row ended, indexed by `DecodeState.reason`; a released one is free for another prompt."""
RUNNING, _EOS, _STOP, _LENGTH, RELEASED = range(5)


@pytree
class StopRules:
    """What ends rows besides their length, one row of rules each; a single one is all rows'.

    Attributes:
      eos_ids: each ends a row at once; padded with -1.
      sequences: of tokens that end it, padded on the left with -1; missing ones are of -2.
    """

    eos_ids: Int[Any, "#batch eos"] = dataclasses.field(metadata={"row_axis": 0})
    sequences: Int[Any, "#batch sequence longest"] = dataclasses.field(metadata={"row_axis": 0})


Stops = tuple[Sequence[int], Sequence[Sequence[int]]]
"""What ends a row: tokens, and token sequences."""

STOPS_ROOM = (8, 4, 16)
"""End tokens, stop sequences and tokens of one that rows have places for: static shapes, so that
none compiles anything."""


def stop_rules(
    rows: Sequence[Stops] = (((), ()),),
    *,
    vocab_size: int = 2**31,
    room: tuple[int, int, int] | None = None,
) -> StopRules:
    """Returns the rules of rows, one each, as arrays on the host; by default: nothing ends them.

    There is `room` for end tokens, sequences, and tokens of a sequence; None: the least multiples
    of `STOPS_ROOM` that hold all, so that few numbers and lengths of them compile other programs.

    Raises:
      ValueError: more than there is room for, or a sequence is empty, or holds something else than
        ids of the vocabulary, as -1, which stands for any token.
    """
    sizes = [len(sequence) for _, sequences in rows for sequence in sequences]
    most, count = (max(map(len, each)) for each in zip(*rows, strict=True))
    found = max(1, most), count, max(sizes, default=0)
    if room is None:
        ends, several, longest = (
            max(1, -(-n // m)) for n, m in zip(found, STOPS_ROOM, strict=True)
        )
        room = ends * STOPS_ROOM[0], several * STOPS_ROOM[1], longest * STOPS_ROOM[2]
    elif any(one > most for one, most in zip(found, room, strict=True)):
        raise ValueError(
            f"Wanted at most {room[0]} eos_ids and {room[1]} stop_sequences of at most {room[2]} "
            f"tokens, which every slot has room for. Got {found[0]} eos_ids and {found[1]} "
            f"sequences of up to {found[2]} tokens. Name the rest as stop_strings."
        )
    most, count, longest = room
    eos_ids = np.full((len(rows), most), -1, np.int32)
    padded = np.full((len(rows), count, longest), -2, np.int32)
    for row, (ends, sequences) in enumerate(rows):
        if len(ends):
            eos_ids[row, : len(ends)] = check_ids([*ends], vocab_size=2**31, what="eos_ids")
        for index, sequence in enumerate(sequences):
            if not len(sequence):
                raise ValueError("Wanted stop sequences of at least one token. Got an empty one.")
            what = f"stop sequence {index}"
            padded[row, index] = -1
            padded[row, index, longest - len(sequence) :] = check_ids(
                sequence, vocab_size=vocab_size, what=what
            )
    return StopRules(eos_ids=eos_ids, sequences=padded)


def check_stops(
    eos_ids: Sequence[int] | Sequence[Sequence[int]],
    sequences: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
    *,
    rows: int,
    vocab_size: int,
) -> StopRules:
    """Returns the rules of each row, where either argument is of all rows, or a list for each."""
    return stop_rules(stops_of_rows(eos_ids, sequences, rows=rows), vocab_size=vocab_size)


def stops_of_rows(eos_ids: Any, sequences: Any, *, rows: int) -> list[Stops]:
    """Returns what ends each row, see `check_stops`. Raises ValueError for more or fewer lists."""
    each_ends = any(map(_is_list, eos_ids))
    each_stops = any(_is_list(item) for sequence in sequences for item in sequence)
    # A list for each row, all of them empty; as sequences they would end nothing.
    each_stops |= len(sequences) == rows and all(_is_list(s) and not len(s) for s in sequences)
    ends: Any = eos_ids if each_ends else [eos_ids] * rows
    stops: Any = sequences if each_stops else [sequences] * rows
    for what, given in (("eos_ids", ends), ("stop_sequences", stops)):
        if len(given) != rows or not all(map(_is_list, given)):
            raise ValueError(
                f"Wanted {what} for all prompts, or a list of them for each of the {rows}. Got "
                f"{given!r:.80}."
            )
    return [([*mine], [*each]) for mine, each in zip(ends, stops, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset, range)) or np.ndim(value) > 0


@pytree
class Alternatives:
    """The most probable tokens at the place of each new one, whichever was drawn.

    Attributes:
      token_ids: descending by probability.
      log_probabilities: in nats, under the model's distribution before any sampling method.
    """

    token_ids: Int[Any, "*token alternative"]
    log_probabilities: Float[Any, "*token alternative"]


@pytree
class Columns:
    """What is noted of tokens, by their own positions: arrays that lead alike.

    In the loop these are `[row, slot]`, on the host `[new]` of one row.

    Attributes:
      token_ids: in the loop those of prompts, too.
      decided: layers behind the distribution that each token was taken from: the depth of the token
        *before* it. Under `Lossless`: the exit that guessed it, 0 where it was copied, or all.
      executed: layers that ran for it, those for the sake of other rows included.
      log_probabilities: of each in nats, under the model's distribution before any sampling method.
      alternatives: to each; None where they are not kept.
    """

    token_ids: Int[Any, "*token"]
    decided: Int[Any, "*token"]
    executed: Int[Any, "*token"]
    log_probabilities: Float[Any, "*token"]
    alternatives: Alternatives | None = None

    @classmethod
    def empty(cls, *shape: int, alternatives: int = 0) -> Columns:
        """Returns zeros that lead with a shape, on the host, with so many alternatives to each."""
        ints, floats = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        best = None
        if alternatives:
            best = Alternatives(
                token_ids=np.zeros((*shape, alternatives), np.int32),
                log_probabilities=np.zeros((*shape, alternatives), np.float32),
            )
        return Columns(
            token_ids=ints,
            decided=ints,
            executed=ints,
            log_probabilities=floats,
            alternatives=best,
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Returns the tokens of parts that follow each other, at least one; on the host."""
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def cut(self, *kept: int | slice) -> Columns:
        """Returns some of the tokens, copied to the host.

        A copy: on CPU, arrays on the host may be views of buffers that the next step reuses.
        """
        return jax.tree.map(lambda leaf: np.array(leaf[kept]), self)

    def put(
        self, rows: Int[Array, "batch 1"], slots: Int[Array, "batch new"], fresh: Columns
    ) -> Columns:
        """Returns the columns with those of new tokens at some slots of each row."""
        return jax.tree.map(lambda old, new: old.at[rows, slots].set(new, mode="drop"), self, fresh)


@pytree
class Tally:
    """What decoding cost. The first token of every row is prefill's and costs nothing here.

    Attributes:
      steps: rounds of the loop that the row took part in.
      drafts: that were verified.
      accepted: those that were right.
      token_layers: token slots that ran a layer, padding and rejected drafts included.
      frozen_layers: K/V-only projections of frozen states.
      mapped_layers: layers whose K/V were mapped from frozen states.
      heads: token slots that went through the vocabulary head.
      exit_maps: states of an exit that a lens mapped.
      key_slots: read, summed over layers; times `bytes_per_slot` these are bytes. Outgrows int32.
      attended: key slots attended over, summed over queries and layers: what attention computes.
    """

    steps: Int[Any, " batch"]
    drafts: Int[Any, " batch"]
    accepted: Int[Any, " batch"]
    token_layers: Int[Any, " batch"]
    frozen_layers: Int[Any, " batch"]
    mapped_layers: Int[Any, " batch"]
    heads: Int[Any, " batch"]
    exit_maps: Int[Any, " batch"]
    key_slots: Float[Any, " batch"]
    attended: Float[Any, " batch"]

    @classmethod
    def empty(cls, batch: int) -> Tally:
        """Returns a tally of nothing."""
        floats = ("key_slots", "attended")
        return cls(
            **{
                each.name: jnp.zeros((batch,), jnp.float32 if each.name in floats else jnp.int32)
                for each in dataclasses.fields(cls)
            }
        )

    def add(self, active: Bool[Array, " batch"], **amounts: Any) -> Tally:
        """Returns the tally with the amounts, scalar or per row, added for the active rows."""
        grown = {}
        for name, amount in amounts.items():
            old = getattr(self, name)
            grown[name] = old + jnp.where(active, amount, 0).astype(old.dtype)
        return dataclasses.replace(self, **grown)


@pytree
class PromptPass:
    """How prompts were read by a `Prefill`.

    Attributes:
      depths: decided layers of each prompt token; 0 for padding.
      work: what the pass executed, `[batch, segment]`: that of all rows, noted in each.
    """

    depths: Int[Array, "batch token"]
    work: Work


@pytree
class DecodeState:
    """Everything that a token loop carries. Donated.

    Between steps the K/V of all tokens of a row but its last are in the cache; that one has been
    emitted, but has run no layer yet.

    Attributes:
      lengths: tokens of each row, prompt included.
      prompt_lengths: those of the prompt.
      limits: lengths at which rows end.
      reason: index into `REASONS`.
      seeds: of the rows.
      columns: prompt and emitted tokens by position; what lies beyond `lengths` means nothing.
      cache: keys and values.
      tally: what it cost.
      memory: what the mode remembers: any pytree of arrays that lead with rows.
      prompt: how prompts were read, where not by the dense program, and all rows together.
      hook: what may put other tokens into rows than were drawn, and end them, see
        `utio_jax.decoding.thinking.ThinkingRows`; None where no row has one.
    """

    lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    prompt_lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    limits: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    reason: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    seeds: UInt32[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    columns: Columns = dataclasses.field(metadata={"row_axis": 0})
    cache: KVCache
    tally: Tally = dataclasses.field(metadata={"row_axis": 0})
    memory: Any = dataclasses.field(metadata={"row_axis": 0})
    prompt: PromptPass | None = dataclasses.field(default=None, metadata={"row_axis": 0})
    hook: Any = dataclasses.field(default=None, metadata={"row_axis": 0})

    @property
    def active(self) -> Bool[Array, " batch"]:
        """Rows that have not ended."""
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
    """Returns the state with new tokens in the active rows, cut where a row ends.

    The first `counts` of its new tokens are real. The one that ends a row is kept. What a hook
    forces stands instead of the first, and further ones are dropped.
    """
    hook, limits, columns = state.hook, state.limits, state.columns
    if hook is not None:
        token_ids, counts = hook.force(state.lengths, token_ids, counts)
    batch, new = token_ids.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    offsets = jnp.arange(new, dtype=jnp.int32)[None, :]
    positions = state.lengths[:, None] + offsets
    fresh = (offsets < counts[:, None]) & state.active[:, None]
    slots = jnp.where(fresh, positions, state.token_ids.shape[1])
    known = state.token_ids.at[row, slots].set(token_ids, mode="drop")

    ends_with = partial(_ends_sequence, known, positions, state.prompt_lengths)
    is_eos = jnp.any(token_ids[:, :, None] == jnp.asarray(stops.eos_ids)[:, None, :], axis=-1)
    is_stop = ends_with(stops.sequences)
    if hook is not None:
        hook, fresh = hook.follow(positions, fresh, ends_with)
        limits, counts = hook.limited(limits), jnp.sum(fresh, axis=1, dtype=jnp.int32)
    is_last = positions + 1 >= limits[:, None]
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
    kept = jnp.where(offsets < counts[:, None], slots, known.shape[1])
    return dataclasses.replace(
        state,
        columns=dataclasses.replace(columns, token_ids=known).put(row, kept, noted),
        lengths=state.lengths + counts,
        limits=limits,
        reason=jnp.where(ended, reason, state.reason),
        hook=hook,
    )


def _most_probable(log_probabilities: Float[Array, "batch new vocab"], count: int) -> Alternatives:
    *lead, vocab = log_probabilities.shape
    # By rows of one axis: what compilers have a program for that does not sort.
    best, ids = jax.lax.top_k(log_probabilities.reshape(-1, vocab), count)
    best, ids = (leaf.reshape(*lead, count) for leaf in (best, ids))
    return Alternatives(token_ids=ids, log_probabilities=best)


def end_rows(state: DecodeState, stop_when: Callable[[int, np.ndarray], bool]) -> DecodeState:
    """Returns the state with the rows ended for which `stop_when(row, new_tokens)`, on the host."""
    known, starts, ends, reason = (
        np.asarray(leaf)
        for leaf in (state.token_ids, state.prompt_lengths, state.lengths, state.reason)
    )
    ended = [
        int(reason[row]) == RUNNING and stop_when(row, known[row, starts[row] : ends[row]].copy())
        for row in range(len(reason))
    ]
    if not any(ended):
        return state
    reason = np.where(ended, np.int32(_STOP), reason)
    # Where it was, or the next step would compile again.
    home = state.reason.sharding if state.reason.committed else None
    return dataclasses.replace(state, reason=jax.device_put(reason, home))


def _ends_sequence(
    known: Int[Array, "batch slot"],
    positions: Int[Array, "batch new"],
    prompt_lengths: Int[Array, " batch"],
    sequences: Int[Array | np.ndarray, "#batch sequence longest"],
) -> Bool[Array, "batch new"]:
    """Returns whether a stop sequence, wholly of new tokens, ends at each position."""
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
    wanted = jnp.asarray(sequences)[:, None, :, :]
    same = (window[:, :, None, :] == wanted) | (wanted == -1)
    return jnp.any(jnp.all(same, axis=-1), axis=-1)
