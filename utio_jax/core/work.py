# SPDX-License-Identifier: Apache-2.0
"""What a pass executed: slots, keys, heads and decisions, padding included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseWork:
    """What it took to choose who attends sparsely and to what, one entry per segment.

    Attributes:
      decisions: slots that a decision at the segment's start evaluates; their heads are in `Work`.
      heats: times that heavy hitters were looked for, in all rows.
    """

    decisions: Int[Array | np.ndarray, "*segment"]
    heats: Int[Array | np.ndarray, "*segment"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What was executed, padding included, one entry per segment.

    Attributes:
      queries: slots that went through queries, output projection and MLP, times layers.
      keys_values: tokens whose K/V were projected, times layers.
      key_slots: query slots times the key slots that each attended over, times layers. A float: it
        outgrows int32.
      decisions: slots that a decision at the segment's end evaluates.
      heads: slots that went through the vocabulary head at the segment's end, for the decision or
        for the pass' result.
      exit_maps: slots whose states were mapped for the head, see
        `utio_jax.core.decoder.ReadsExits`.
      sparse: what choosing attention took; None where there was nothing to choose.
    """

    queries: Int[Array | np.ndarray, "*segment"]
    keys_values: Int[Array | np.ndarray, "*segment"]
    key_slots: Float[Array | np.ndarray, "*segment"]
    decisions: Int[Array | np.ndarray, "*segment"]
    heads: Int[Array | np.ndarray, "*segment"]
    exit_maps: Int[Array | np.ndarray, "*segment"]
    sparse: SparseWork | None = None


def stack_work(segments: Sequence[Work]) -> Work:
    """Returns the segments' scalar entries as one `Work` of vectors."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *segments)
