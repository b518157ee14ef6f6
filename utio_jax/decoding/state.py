# SPDX-License-Identifier: Apache-2.0
"""The state of a token loop, what a step adds to it, and where a row ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache
from utio_jax.core.documents import check_ids
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.decoding.thinking_state import ThinkingRules, ThinkingState, follow, measures

REASONS = ("running", "eos", "stop", "length", "released")
"""Why a row ended, indexed by `DecodeState.reason`; a released one is free for another prompt."""
_RUNNING, _EOS, _STOP, _LENGTH, RELEASED = range(5)


@pytree
class StopRules:
    """What ends a row besides its length.

    Attributes:
      eos_ids: each of these ends it at once; padded with -1.
      sequences: token sequences that end it, padded on the left with -1.
      thinking: how long each row may think; None: no row has a rule.
    """

    eos_ids: Int[Array, " eos"]
    sequences: Int[Array, "sequence longest"]
    thinking: ThinkingRules | None = dataclasses.field(default=None, metadata={"row_axis": 0})


@pytree
class PerRowStopRules:
    """What ends each row besides its length: `StopRules` of its own.

    Attributes:
      eos_ids: each of a row's ends it at once; padded with -1.
      sequences: token sequences that end it, padded on the left with -1; where a row has fewer of
        them than others, sequences of -2, which nothing ends with.
      thinking: how long each may think; None: no row has a rule.
    """

    eos_ids: Int[Array, "batch eos"] = dataclasses.field(metadata={"row_axis": 0})
    sequences: Int[Array, "batch sequence longest"] = dataclasses.field(metadata={"row_axis": 0})
    thinking: ThinkingRules | None = dataclasses.field(default=None, metadata={"row_axis": 0})


def stop_rules(
    eos_ids: Sequence[int], sequences: Sequence[Sequence[int]] = (), *, vocab_size: int = 2**31
) -> StopRules:
    """Returns the rules as arrays.

    Raises:
      ValueError: a sequence is empty, or holds something else than ids of the vocabulary, as -1,
        which stands for any token.
    """
    if len(eos_ids):
        check_ids(eos_ids, vocab_size=2**31, what="eos_ids")
    longest = max((len(sequence) for sequence in sequences), default=0)
    padded = np.full((len(sequences), longest), -1, np.int32)
    for index, (row, sequence) in enumerate(zip(padded, sequences, strict=True)):
        if not len(sequence):
            raise ValueError("Wanted stop sequences of at least one token. Got an empty one.")
        what = f"stop sequence {index}"
        row[longest - len(sequence) :] = check_ids(sequence, vocab_size=vocab_size, what=what)
    # Room for four, or eight ...: another number of them should not compile another program.
    ends = np.full((max(4, -(-len(eos_ids) // 4) * 4),), -1, np.int32)
    ends[: len(eos_ids)] = eos_ids
    return StopRules(eos_ids=jax.device_put(ends), sequences=jax.device_put(padded))


def per_row_stop_rules(rules: Sequence[StopRules]) -> PerRowStopRules:
    """Returns the rules of rows, one each, as arrays.

    Raises:
      ValueError: none.
    """
    if not len(rules):
        raise ValueError("Wanted stop rules for each row. Got none.")
    ends = [np.asarray(each.eos_ids) for each in rules]
    sequences = [np.asarray(each.sequences) for each in rules]
    count, longest = np.max([each.shape for each in sequences], axis=0)
    eos_ids = np.full((len(rules), max(each.size for each in ends)), -1, np.int32)
    padded = np.full((len(rules), count, longest), -2, np.int32)
    for row, (end, mine) in enumerate(zip(ends, sequences, strict=True)):
        eos_ids[row, : end.size] = end
        padded[row, : len(mine)] = -1
        padded[row, : len(mine), longest - mine.shape[1] :] = mine
    return PerRowStopRules(eos_ids=jax.device_put(eos_ids), sequences=jax.device_put(padded))


def check_stops(
    eos_ids: Sequence[int] | Sequence[Sequence[int]],
    sequences: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
    *,
    rows: int,
    vocab_size: int,
) -> StopRules | PerRowStopRules:
    """Returns the rules of all rows, or of each, where either is a list of what ends each row.

    Lists that say the same of all rows are rules of all rows.

    Raises:
      ValueError: lists of more or fewer rows, or see `stop_rules`.
    """
    each_ends = any(map(_is_list, eos_ids))
    each_stops = any(_is_list(item) for sequence in sequences for item in sequence)
    # A list for each row, all of them empty; as sequences they would end nothing.
    each_stops |= len(sequences) == rows and all(_is_list(s) and not len(s) for s in sequences)
    if not each_ends and not each_stops:
        return stop_rules(eos_ids, sequences, vocab_size=vocab_size)  # type: ignore[arg-type]
    ends: Any = eos_ids if each_ends else [eos_ids] * rows
    stops: Any = sequences if each_stops else [sequences] * rows
    for what, given in (("eos_ids", ends), ("stop_sequences", stops)):
        if len(given) != rows or not all(map(_is_list, given)):
            raise ValueError(
                f"Wanted {what} for all prompts, or a list of them for each of the {rows}. Got "
                f"{given!r:.80}."
            )
    pairs = [([*mine], [[*each] for each in row]) for mine, row in zip(ends, stops, strict=True)]
    rules = [stop_rules(*pair, vocab_size=vocab_size) for pair in pairs]
    return rules[0] if all(pair == pairs[0] for pair in pairs) else per_row_stop_rules(rules)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset, range)) or np.ndim(value) > 0


@pytree
class ViewTally:
    """What throttled tokens read.

    Attributes:
      layers: in which each token saw no more than its row's view, by its own position.
      key_slots: those of `Tally.key_slots` that were read from views.
    """

    layers: Int[Array, "batch slot"]
    key_slots: Float[Array, " batch"]


@pytree
class AlternativeTally:
    """The most probable tokens at the place of each new one, by its own position.

    Attributes:
      token_ids: descending by probability.
      log_probabilities: in nats, under the model's distribution before any sampling method.
    """

    token_ids: Int[Array, "batch slot alternative"]
    log_probabilities: Float[Array, "batch slot alternative"]

    def put(
        self,
        rows: Int[Array, "batch 1"],
        slots: Int[Array, "batch new"],
        log_probabilities: Float[Array, "batch new vocab"],
    ) -> AlternativeTally:
        """Returns the tally with the best of these distributions at some slots of each row."""
        count = self.token_ids.shape[-1]
        *lead, vocab = log_probabilities.shape
        # By rows of one axis: what compilers have a program for that does not sort.
        best, ids = jax.lax.top_k(log_probabilities.reshape(-1, vocab), count)
        best, ids = (leaf.reshape(*lead, count) for leaf in (best, ids))
        return AlternativeTally(
            token_ids=self.token_ids.at[rows, slots].set(ids, mode="drop"),
            log_probabilities=self.log_probabilities.at[rows, slots].set(best, mode="drop"),
        )


@pytree
class Tally:
    """What decoding did and cost. The first token of every row is prefill's and costs nothing here.

    Attributes:
      decided: layers behind the distribution that each token was taken from, by the token's
        position: the depth of the token *before* it. Under `Lossless`: the exit that guessed it, 0
        where it was copied from the text, or all layers.
      executed: layers that really ran for it, those for the sake of other rows included.
      log_probability: of each token in nats, under the model's distribution before any sampling
        method.
      steps: rounds of the loop that the row took part in.
      drafts: drafts that were verified.
      accepted: those that were right.
      token_layers: token slots that ran a layer, padding and rejected drafts included.
      frozen_layers: K/V-only projections of frozen states.
      mapped_layers: layers whose K/V were mapped from frozen states.
      key_slots: key slots read, summed over layers; times `bytes_per_slot` these are bytes. A
        float: it outgrows int32.
      attended: key slots attended over, summed over queries and layers: what attention computes. At
        least `key_slots`, which the queries of one pass share.
      heads: token slots that went through the vocabulary head.
      draft_heads: those that went through a head of fewer tokens, to draft.
      exit_maps: states of an exit that were mapped for it, see `utio_jax.core.decoder.HasExitLens`.
      views: of throttled tokens; None where there are none.
      alternatives: to each token; None where nobody asked for them.
    """

    decided: Int[Array, "batch slot"]
    executed: Int[Array, "batch slot"]
    log_probability: Float[Array, "batch slot"]
    steps: Int[Array, " batch"]
    drafts: Int[Array, " batch"]
    accepted: Int[Array, " batch"]
    token_layers: Int[Array, " batch"]
    frozen_layers: Int[Array, " batch"]
    mapped_layers: Int[Array, " batch"]
    key_slots: Float[Array, " batch"]
    attended: Float[Array, " batch"]
    heads: Int[Array, " batch"]
    draft_heads: Int[Array, " batch"]
    exit_maps: Int[Array, " batch"]
    views: ViewTally | None = None
    alternatives: AlternativeTally | None = None

    def add(self, active: Bool[Array, " batch"], **amounts: Any) -> Tally:
        """Returns the tally with the amounts, scalar or per row, added for the active rows."""
        grown = {}
        for name, amount in amounts.items():
            old = getattr(self, name)
            grown[name] = old + jnp.where(active, amount, 0).astype(old.dtype)
        return dataclasses.replace(self, **grown)


def empty_tally(batch: int, slots: int, *, alternatives: int = 0) -> Tally:
    """Returns a tally of nothing, with room for so many alternatives to each token."""
    names = {field.name for field in dataclasses.fields(Tally)} - {"views", "alternatives"}
    counts: dict[str, Any] = {name: jnp.zeros((batch,), jnp.int32) for name in names}
    counts["key_slots"] = counts["attended"] = jnp.zeros((batch,), jnp.float32)
    counts["decided"] = counts["executed"] = jnp.zeros((batch, slots), jnp.int32)
    counts["log_probability"] = jnp.zeros((batch, slots), jnp.float32)
    if alternatives:
        shape = batch, slots, alternatives
        counts["alternatives"] = AlternativeTally(
            token_ids=jnp.zeros(shape, jnp.int32),
            log_probabilities=jnp.zeros(shape, jnp.float32),
        )
    return Tally(**counts)


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
    """Everything that a token loop carries. Donated: the caller keeps only what comes back.

    Between steps the K/V of all tokens of a row but its last are in the cache; the last one has
    been emitted, but has run no layer yet.

    Attributes:
      token_ids: prompt and emitted tokens by position; what lies beyond `lengths` means nothing.
      lengths: tokens of each row, prompt included.
      prompt_lengths: those of the prompt.
      limits: lengths at which rows end.
      reason: index into `REASONS`.
      seeds: one per row.
      cache: keys and values.
      tally: what it cost so far.
      memory: what the mode remembers, any pytree; its fields say where rows lie.
      prompt: how prompts were read, where not by the dense program, and where all rows were read
        together.
      thinking: how far rows have come with it; None where none has a rule.
    """

    token_ids: Int[Array, "batch slot"] = dataclasses.field(metadata={"row_axis": 0})
    lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    prompt_lengths: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    limits: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    reason: Int[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    seeds: UInt32[Array, " batch"] = dataclasses.field(metadata={"row_axis": 0})
    cache: KVCache
    tally: Tally = dataclasses.field(metadata={"row_axis": 0})
    memory: Any
    prompt: PromptPass | None = dataclasses.field(default=None, metadata={"row_axis": 0})
    thinking: ThinkingState | None = dataclasses.field(default=None, metadata={"row_axis": 0})

    @property
    def active(self) -> Bool[Array, " batch"]:
        """Rows that have not ended."""
        return self.reason == _RUNNING

    @property
    def positions(self) -> Int[Array, " batch"]:
        """Position of each row's last token, the next to run."""
        return self.lengths - 1

    @property
    def last_ids(self) -> Int[Array, " batch"]:
        """Each row's last token."""
        return jax.vmap(lambda row, position: row[position])(self.token_ids, self.positions)


@pytree
class Emitted:
    """What rows had emitted before their prompts were read here: they go on where others stopped.

    Attributes:
      prompt_lengths: tokens that are the prompt's own; behind them stands what was emitted.
      last: the last token that was emitted, which no layer has run yet; -1: none was.
    """

    prompt_lengths: Int[Array, " batch"]
    last: Int[Array, " batch"]


def emit(
    state: DecodeState,
    stops: StopRules | PerRowStopRules,
    token_ids: Int[Array, "batch new"],
    counts: Int[Array, " batch"],
    *,
    logits: Float[Array, "batch new vocab"],
    decided: Int[Array, "batch new"],
    executed: Int[Array, "batch new"],
) -> DecodeState:
    """Returns the state with new tokens in the active rows, cut where a row ends.

    The token that ends a row is kept. Where thinking has to end, the token that comes next of the
    forced sequence stands instead of the first new one, and further ones are dropped.

    Args:
      state: before.
      stops: what ends a row.
      token_ids: new tokens of each row, in order.
      counts: how many of them are real.
      logits: of the distributions that they were taken from.
      decided: see `Tally`, per new token.
      executed: likewise.
    """
    batch, new = token_ids.shape
    thinking, rules, limits = state.thinking, stops.thinking, state.limits
    if thinking is not None and rules is not None:
        token_ids, counts = thinking.forced(rules, state.lengths, token_ids, counts)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    offsets = jnp.arange(new, dtype=jnp.int32)[None, :]
    positions = state.lengths[:, None] + offsets
    fresh = (offsets < counts[:, None]) & state.active[:, None]
    slots = jnp.where(fresh, positions, state.token_ids.shape[1])
    known = state.token_ids.at[row, slots].set(token_ids, mode="drop")

    eos_ids, sequences = stops.eos_ids, stops.sequences
    if isinstance(stops, StopRules):
        eos_ids, sequences = eos_ids[None], sequences[None]
    is_eos = jnp.any(token_ids[:, :, None] == eos_ids[:, None, :], axis=-1)
    is_stop = _ends_sequence(known, positions, state.prompt_lengths, sequences)
    is_last = positions + 1 >= state.limits[:, None]
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    if thinking is not None and rules is not None:
        starts, stops_at = (jnp.asarray(ids)[:, None] for ids in (rules.start, rules.end))
        found = follow(
            rules,
            thinking,
            token_ids,
            positions,
            fresh,
            limits,
            starts=_ends_sequence(known, positions, state.prompt_lengths, starts),
            ends=_ends_sequence(known, positions, state.prompt_lengths, stops_at),
            uncertainty=measures(rules, logits, total),
        )
        thinking, limits, is_last = found.state, found.limits, found.last
        fresh, counts = found.kept, jnp.sum(found.kept, axis=1, dtype=jnp.int32)
    ends = (is_eos | is_stop | is_last) & fresh
    ended = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32)
    counts = jnp.where(ended, first + 1, jnp.where(state.active, counts, 0))
    reasons = jnp.where(is_eos, _EOS, jnp.where(is_stop, _STOP, _LENGTH))
    reason = jnp.take_along_axis(reasons, first[:, None], axis=1)[:, 0]

    kept = jnp.where(offsets < counts[:, None], slots, state.token_ids.shape[1])
    chosen = jnp.take_along_axis(logits, token_ids[:, :, None], axis=-1)[:, :, 0]
    likelihood, alternatives = chosen - total, state.tally.alternatives
    if alternatives is not None:
        alternatives = alternatives.put(row, kept, logits - total[:, :, None])
    tally = dataclasses.replace(
        state.tally,
        alternatives=alternatives,
        log_probability=state.tally.log_probability.at[row, kept].set(likelihood, mode="drop"),
        decided=state.tally.decided.at[row, kept].set(decided, mode="drop"),
        executed=state.tally.executed.at[row, kept].set(executed, mode="drop"),
    )
    return dataclasses.replace(
        state,
        token_ids=known,
        lengths=state.lengths + counts,
        limits=limits,
        reason=jnp.where(ended, reason, state.reason),
        tally=tally,
        thinking=thinking,
    )


def end_rows(state: DecodeState, stop_when: Callable[[int, np.ndarray], bool]) -> DecodeState:
    """Returns the state with the rows ended for which the caller says so, on the host.

    Args:
      state: between two steps.
      stop_when: called with the number of each active row, and its new tokens.
    """
    known, starts, ends, reason = (
        np.asarray(leaf)
        for leaf in (state.token_ids, state.prompt_lengths, state.lengths, state.reason)
    )
    ended = [
        int(reason[row]) == _RUNNING and stop_when(row, known[row, starts[row] : ends[row]].copy())
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
    sequences: Int[Array, "#batch sequence longest"],
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
    wanted = sequences[:, None, :, :]
    same = (window[:, :, None, :] == wanted) | (wanted == -1)
    return jnp.any(jnp.all(same, axis=-1), axis=-1)
