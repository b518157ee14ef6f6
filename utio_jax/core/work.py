# SPDX-License-Identifier: Apache-2.0
"""Executed work of passes and decode steps: slots, keys, heads, decisions, padding included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Num

from utio_jax.core.pytrees import pytree

Count = Num[Array | np.ndarray, "*segment"]
"""An integer, but for `key_slots`, `kv_reads` and sums that charge rows for others."""


@pytree
class Work:
    """Executed work, padding included: one entry per segment or row, or scalars for one segment.

    Attributes:
      queries: slots that went through queries, output projection and MLP, times layers.
      keys_values: tokens whose K/V were projected, times layers.
      key_slots: query slots times the key slots that each attended over, times layers. A float: it
        outgrows int32.
      kv_reads: key slots read in decode steps, times the layers whose K/V each layer reads; times
        `bytes_per_slot`: bytes.
      decisions: slots that a decision at the segment's end evaluates.
      choices: slots that a choice of attention at the segment's start evaluates.
      heads: slots that went through the vocabulary head, for decisions, choices or the result.
      exit_maps: slots whose states were mapped for the head, see
        `utio_jax.core.decoder.HasExitLens`.
      kv_maps: slots whose keys and values were mapped, times the layers that they are for, see
        `utio_jax.core.decoder.HasKVMaps`.
      overflows: whether live tokens outgrew a static prefix: whole rows ran, or the last tokens
        did not, see `CapacityPrefix`.
      steps: decode steps that a row ran. The first new token belongs to prefill.
      drafts: verified drafts.
      accepted: accepted drafts.
    """

    queries: Count
    keys_values: Count
    key_slots: Count
    kv_reads: Count
    decisions: Count
    choices: Count
    heads: Count
    exit_maps: Count
    kv_maps: Count
    overflows: Count
    steps: Count
    drafts: Count
    accepted: Count

    @classmethod
    def of(cls, **entries: Any) -> Work:
        """Returns the work of one segment; omitted fields are 0."""
        nothing = dict.fromkeys((x.name for x in dataclasses.fields(cls)), np.zeros((), np.int32))
        floats = dict.fromkeys(("key_slots", "kv_reads"), np.zeros((), np.float32))
        return cls(**(nothing | floats | entries))

    @classmethod
    def of_rows(cls, batch: int) -> Work:
        """Returns the work of rows that have run nothing."""
        return jax.tree.map(lambda leaf: jnp.zeros((batch,), leaf.dtype), cls.of())

    def add(self, active: Bool[Array, " batch"], **amounts: Any) -> Work:
        """Adds amounts, scalar or per row, to the work of the active rows."""
        for name, amount in amounts.items():
            old = getattr(self, name)
            amounts[name] = old + jnp.where(active, amount, 0).astype(old.dtype)
        return dataclasses.replace(self, **amounts)

    def __add__(self, other: Work) -> Work:
        return jax.tree.map(jnp.add, self, other)


def stack_work(segments: Sequence[Work]) -> Work:
    """Returns the segments' scalar entries as one `Work` of vectors."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *segments)
