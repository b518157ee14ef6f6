# SPDX-License-Identifier: Apache-2.0
"""State of the token loop: tokens and their records, end tokens, and `emit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work

REASONS = ("running", "eos", "length", "released")
"""Finish reasons, indexed by `DecodeState.reason`. A released row is free, or the host ended it."""
RUNNING, _EOS, _LENGTH, RELEASED = range(4)


EOS_ROOM = 16
"""Number of end tokens of a row that fits into static shapes, so that others compile nothing."""


def eos_array(rows: Sequence[Sequence[int]] = ((),)) -> Int[np.ndarray, "batch eos"]:
    """Returns the end tokens of rows on the host, padded with -1; by default, one row without any.

    A single row applies to all rows. The width is a multiple of `EOS_ROOM`.
    """
    width = max(1, -(-max(map(len, rows)) // EOS_ROOM)) * EOS_ROOM
    result = np.full((len(rows), width), -1, np.int32)
    for row, ends in zip(result, rows, strict=True):
        row[: len(ends)] = ends
    return result


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
    eos_ids: Int[Array | np.ndarray, "#batch eos"],
    token_ids: Int[Array, "batch new"],
    counts: Int[Array, " batch"],
    *,
    logits: Float[Array, "batch new vocab"],
    decided: Int[Array, "batch new"],
    executed: Int[Array, "batch new"],
) -> DecodeState:
    """Appends new tokens to the active rows, up to the token that ends a row.

    The first `counts` tokens of a row are valid. The token that ends a row is kept. `eos_ids`
    are padded with -1.
    """
    columns = state.columns
    batch, new = token_ids.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    offsets = jnp.arange(new, dtype=jnp.int32)[None, :]
    positions = state.lengths[:, None] + offsets
    fresh = (offsets < counts[:, None]) & state.active[:, None]
    slots = jnp.where(fresh, positions, state.token_ids.shape[1])
    known = state.token_ids.at[row, slots].set(token_ids, mode="drop")

    is_eos = jnp.any(token_ids[:, :, None] == jnp.asarray(eos_ids)[:, None, :], axis=-1)
    is_last = positions + 1 >= state.limits[:, None]
    ends = (is_eos | is_last) & fresh
    ended = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32)
    counts = jnp.where(ended, first + 1, jnp.where(state.active, counts, 0))
    reasons = jnp.where(is_eos, _EOS, _LENGTH)
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
