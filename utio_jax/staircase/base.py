# SPDX-License-Identifier: Apache-2.0
"""What runs the live tokens of a segment: the executors' contract, and what they share.

An executor changes cost, never results. It packs the live tokens into slots, applies layers to
them, and leaves all other tokens' states alone. `utio_jax.staircase.microbatches` runs blocks in
traced loops; `utio_jax.staircase.capacity` a static prefix, through which gradients flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.vertical_slash import SparseQueries
from utio_jax.core.decoder import Decoder, LayerParams, Params, Places


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


def layer_at(decoder: Decoder, params: Params, index: int | jax.Array) -> LayerParams:
    """Returns one layer's parameters.

    Loops index the stack rather than scan over `layers[:depth]`: the slice copies the weights on
    every call (28 ms against 4 for 6 of 12 layers), indexing reads one layer where it is.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
        decoder.layers(params),
    )


@runtime_checkable
class Executor(Protocol):
    """What the staircase asks of an executor. `slots` is whatever `pack` returned."""

    @property
    def min_bucket(self) -> int:
        """The unit of padding, in slots."""
        ...

    def key_widths(self, width: int) -> list[int]:
        """Returns the numbers of keys that attention may run over in rows of `width` tokens."""
        ...

    def pack(
        self, segment: int, live: Bool[Array, "batch token"], sparse: SparseQueries | None = None
    ) -> Any:
        """Returns the slots of a segment, for the tokens that run in it; who attends sparsely."""
        ...

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: Any,
        layers: tuple[int, int],
        only_live_keys: bool,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "batch token dim"], KVCache | None]:
        """Returns the states after layers `[start, stop)`; tokens without a slot are unchanged.

        Keys are seen where `keys_shown`; with `only_live_keys` only the slots' own are projected.
        A cache receives all K/V that are projected, token by token from slot 0 on.
        """
        ...

    def map_slots(self, slots: Any, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Returns `function` of the live tokens' `[slot, ...]` blocks, in token order; else 0.

        The function returns an array `[slot, ...]`, or a pytree of them.
        """
        ...

    def only_if(self, slots: Any, asked: bool | Bool[Array, ""]) -> Any:
        """Returns the slots if `asked`, and none of them if not."""
        ...

    def work(
        self,
        slots: Any,
        layers: int,
        only_live_keys: bool,
        *,
        deciding: Any = None,
        heads: int = 0,
        mapped: Sequence[Any] = (),
    ) -> Work:
        """Returns what running `layers` layers on the slots executes.

        With the decision of the slots `deciding`, `heads` heads on each of these, and the exit's
        map of the slots of each of `mapped`.
        """
        ...


# Tokens whose logits are alive at once: [128, vocab] stays in cache, [batch * token, vocab] not.
_HEAD_BLOCK = 128


def map_head(
    decoder: Decoder,
    params: Params,
    function: Callable[..., Any],
    x: Float[Array, "slot dim"],
    *arrays: Array,
) -> Any:
    """Returns `function(logits, *arrays)` of states, `[slot, ...]` each, a few logits at a time."""

    def block(x: jax.Array, *arrays: jax.Array) -> Any:
        return function(decoder.unembed(params, x).astype(jnp.float32), *arrays)

    total = x.shape[0]
    if total <= _HEAD_BLOCK:
        return block(x, *arrays)
    missing = -total % _HEAD_BLOCK
    blocks = [
        jnp.pad(a, ((0, missing),) + ((0, 0),) * (a.ndim - 1)).reshape(
            -1, _HEAD_BLOCK, *a.shape[1:]
        )
        for a in (x, *arrays)
    ]
    mapped = jax.lax.map(lambda xs: block(*xs), tuple(blocks))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:total], mapped)


def flat(tree: Any) -> Any:
    """Returns a pytree with its two leading axes merged: one 2D GEMM beats a batched 3D one."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
