# SPDX-License-Identifier: Apache-2.0
"""Static-shape executor: a prefix of slots, sized on the host; differentiable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.mixing import causal_blocks, mix_whole_rows, mixer_at
from utio_jax.core.arrays import executed_heads, flat, stable_partition
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.base import Executor, Tokens, check_min_bucket
from utio_jax.staircase.forward import WholeRows, forward
from utio_jax.staircase.microbatches import MicroBatches


@pytree
class PrefixSlots:
    """The first `capacity` slots of every row, live tokens first and in token order.

    Attributes:
      token_of_slot: token in each slot of a row.
      live: tokens that have not exited yet.
      capacity: slots per row. Static.
      whole_keys: query-key pairs per row if the prefix is the whole row. Static.
    """

    token_of_slot: Int[Array, "batch slot"]
    live: Bool[Array, "batch token"]
    capacity: int = static()
    whole_keys: int = static()

    def take(self, leaf: Array, size: int) -> Array:
        """Gathers the first `size` slots `[batch, size, ...]`; a whole row stays in token order."""
        if size == self.live.shape[1]:
            return leaf
        return jax.vmap(lambda row, order: row[order])(leaf, self.token_of_slot[:, :size])

    def put(self, leaf: Array, new: Array) -> Array:
        """Scatters the first slots' entries `new` into `leaf` `[batch, token, ...]`."""
        size = new.shape[1]
        if size == leaf.shape[1]:
            return new
        order = self.token_of_slot[:, :size]
        return jax.vmap(lambda row, order, new: row.at[order].set(new))(leaf, order, new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPrefix:
    """Executor with static shapes: the first `capacities[segment]` slots of all rows at once.

    Differentiable. A segment whose live tokens do not fit runs at full width instead: more cost,
    same result.

    Attributes:
      capacities: slots per row and segment, multiples of `min_bucket`.
      min_bucket: padding unit, in slots.
      certain: True if the capacities are known to hold all live tokens, e.g. for a policy with a
        fixed share of deep tokens. Then the full-width fallback is not compiled, and a cache can be
        filled. If live tokens exceed the capacity, a row's last live tokens do not run, and
        `Work.overflows` counts the segment.
    """

    capacities: tuple[int, ...]
    min_bucket: int = 64
    certain: bool = False
    keeps_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_min_bucket(self.min_bucket)
        if not isinstance(self.capacities, tuple):
            raise ValueError(
                "Wanted capacities as a tuple, one for each segment. Got "
                f"{self.capacities!r:.60}. For example: (512, 256)."
            )
        if any(capacity < 0 or capacity % self.min_bucket for capacity in self.capacities):
            raise ValueError(
                f"Wanted capacities that are multiples of min_bucket={self.min_bucket}, in slots. "
                f"Got capacities={self.capacities}. Round them up."
            )

    @property
    def unit(self) -> int:
        return self.min_bucket

    def pack(
        self, segment: int, live: Bool[Array, "batch token"], *, causal: bool = True
    ) -> PrefixSlots:
        if segment >= len(self.capacities):
            raise ValueError(
                "Wanted a capacity for each segment: each of the policy's depths, or for a model "
                "with branches each part of the layers below them and each branch. Got "
                f"{len(self.capacities)} capacities, and segment {segment + 1}. Add one."
            )
        width = live.shape[1]
        token_of_slot, _ = stable_partition((~live).astype(jnp.int32), 2)
        blocks = causal_blocks(width) if causal else [(0, width)]
        return PrefixSlots(
            token_of_slot=token_of_slot,
            live=live,
            capacity=min(self.capacities[segment], width),
            whole_keys=sum((stop - start) * stop for start, stop in blocks),
        )

    def key_widths(self, width: int) -> list[int]:
        """Returns the key counts of the blocks in which whole rows attend."""
        return [stop for _, stop in causal_blocks(width)]

    def _choose(
        self, slots: PrefixSlots, run: Callable[[int], Callable[[], Any]], nothing: Any
    ) -> Any:
        """Returns `run(capacity)()`, or `run(width)()` if a row's live tokens do not fit.

        `nothing` is the result for an empty prefix.
        """
        width = slots.live.shape[1]
        if self.certain or slots.capacity == width:
            return run(slots.capacity)()
        fits = run(slots.capacity) if slots.capacity else lambda: nothing
        return jax.lax.cond(self._overflows(slots), run(width), fits)

    def _overflows(self, slots: PrefixSlots) -> Bool[Array, ""]:
        return jnp.max(jnp.sum(slots.live, axis=1)) > slots.capacity

    def _runs_whole(self, slots: PrefixSlots) -> bool | Bool[Array, ""]:
        return not self.certain and self._overflows(slots)

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: PrefixSlots,
        layers: tuple[int, int],
        cache: KVCache | None = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch token dim"], KVCache | None]:
        config = decoder.config
        within = config.shares_kv or config.turns > 1
        if cache is not None and not self.certain and not within:
            raise ValueError(
                "Wanted an executor that keeps keys and values, to fill a cache. Got a "
                "CapacityPrefix, through whose choices a cache would be copied whole. Use "
                "executor=MicroBatches(), or capacities that are certain to hold all tokens."
            )
        start, stop = layers
        others = partial(tokens.shown_at, decoder) if only_live_keys else None

        def run(size: int) -> Callable[[], tuple[jax.Array, KVCache | None]]:
            return lambda: forward(
                decoder,
                params,
                tokens.x,
                tokens.places,
                cache,
                slots=_Prefix(slots, size),
                attention=_PrefixAttention.of(decoder, tokens.shown, slots, size),
                start=start,
                stop=stop,
                others=others,
                unroll=config.embed_dim < here().narrow,
            )

        return self._choose(slots, run, (tokens.x, cache))

    def map_slots(
        self, slots: PrefixSlots, function: Callable[..., Any], *arrays: jax.Array
    ) -> Any:
        batch, width = slots.live.shape
        block = [jax.ShapeDtypeStruct((1, *a.shape[2:]), a.dtype) for a in arrays]
        empty = jax.tree.map(
            lambda one: jnp.zeros((batch, width, *one.shape[1:]), one.dtype),
            jax.eval_shape(function, *block),
        )

        def run(size: int) -> Callable[[], Any]:
            def on_prefix() -> Any:
                live = slots.take(slots.live, size)

                def scatter(empty: jax.Array, new: jax.Array) -> jax.Array:
                    new = new.reshape(batch, size, *new.shape[1:])
                    keep = live.reshape(batch, size, *(1,) * (new.ndim - 2))
                    return slots.put(empty, jnp.where(keep, new, jnp.zeros((), new.dtype)))

                result = function(*(flat(slots.take(a, size)) for a in arrays))
                return jax.tree.map(scatter, empty, result)

            return on_prefix

        return self._choose(slots, run, empty)

    def only_if(self, slots: PrefixSlots, asked: bool | Bool[Array, ""]) -> PrefixSlots:
        return dataclasses.replace(slots, live=slots.live & asked)

    def slots_run(self, slots: PrefixSlots) -> Int[Array, ""]:
        batch, width = slots.live.shape
        used = jnp.where(self._runs_whole(slots), width, slots.capacity)
        return used.astype(jnp.int32) * batch

    def heads_run(self, slots: PrefixSlots) -> Int[Array, ""]:
        batch, width = slots.live.shape
        whole, prefix = (executed_heads(batch * size) for size in (width, slots.capacity))
        return jnp.where(self._runs_whole(slots), whole, prefix).astype(jnp.int32)

    def work(
        self, slots: PrefixSlots, layers: int, *, kv_layers: int, live_kv_layers: int = 0
    ) -> Work:
        batch, width = slots.live.shape
        used, whole = self.slots_run(slots), float(batch * slots.whole_keys)
        # Without slots nothing runs, K/V of frozen tokens included, unless the prefix is certain.
        every = jnp.where(self.certain or used > 0, batch * width, 0).astype(jnp.int32)
        return Work.of(
            queries=used * layers,
            keys_values=used * live_kv_layers + every * (kv_layers - live_kv_layers),
            key_slots=jnp.where(
                used < batch * width,
                used.astype(jnp.float32) * width,
                whole,
            )
            * float(layers),
            overflows=self._overflows(slots).astype(jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """`TokenLayout` of `forward`: the first `size` slots of all rows at once."""

    slots: PrefixSlots
    size: int
    blocked: ClassVar[bool] = False

    def _rows(self, leaf: jax.Array, size: int) -> jax.Array:
        return leaf.reshape(-1, size, *leaf.shape[1:])

    def pack(self, leaf: jax.Array) -> jax.Array:
        return flat(self.slots.take(self._rows(leaf, self.slots.live.shape[1]), self.size))

    def put(self, leaf: jax.Array, new: jax.Array, start: Any, size: Any) -> jax.Array:
        rows = self._rows(leaf, self.slots.live.shape[1])
        keep = self.slots.take(self.slots.live, self.size)
        keep = keep.reshape(*keep.shape, *(1,) * (leaf.ndim - 1))
        new = jnp.where(keep, self._rows(new, self.size), self.slots.take(rows, self.size))
        return flat(self.slots.put(rows, new))

    def by_blocks(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        return step(None, None, carry)

    def empty(self, *shape: int, dtype: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class _PrefixAttention(WholeRows):
    """Attention of the first slots of all rows.

    Attributes:
      size: slots per row.
      visible_at: maps a layer's index to its attention mask `[batch, query, key]`.
    """

    size: int
    visible_at: Callable[[Any], jax.Array]

    @classmethod
    def of(
        cls, decoder: Decoder, shown: Bool[Array, "batch token"], slots: PrefixSlots, size: int
    ) -> _PrefixAttention:
        """Returns the attention of the first `size` slots.

        A mask that is the same in all layers is computed once here: XLA does not hoist large arrays
        out of a loop.
        """
        keys = jnp.broadcast_to(jnp.arange(shown.shape[1]), shown.shape)
        queries = slots.take(keys, size)

        def visible_at(index: Any) -> jax.Array:
            return mixer_at(decoder, index).visible(queries, keys) & shown[:, None, :]

        if any(decoder.config.windows):
            return cls(decoder, shown, size, visible_at)
        same = visible_at(0)
        return cls(decoder, shown, size, lambda index: same)

    def attend(self, index: Any, queries: jax.Array, seen: Any) -> jax.Array:
        mix = mixer_at(self.decoder, index)
        whole = partial(mix_whole_rows, mix) if self.size == self.shown.shape[1] else mix
        queries = queries.reshape(-1, self.size, *queries.shape[1:])
        keys, values = seen
        return flat(whole(queries, keys, values, self.visible_at(index)))


def fit_row_shares(
    depth_of_token: np.ndarray, *, depths: Sequence[int], rows: int = 16
) -> tuple[float, ...]:
    """Returns the capacity of each segment with the least expected cost, as a share of a row.

    Runs on the host. A batch in which one row exceeds the capacity costs the full width. The
    expectation is over batches of `rows` rows drawn at random. Decided depths are `[row, token]`
    in layers, 0 for padding.

    >>> fit_row_shares(np.array([[2, 2, 4, 4], [2, 2, 2, 4]]), depths=(2, 4), rows=1)
    (1.0, 0.5)
    """
    decided, shares = np.asarray(depth_of_token), [1.0]
    decided = decided[(decided > 0).any(axis=1)]
    for start in depths[:-1]:
        live = np.sort((decided > start).mean(axis=1))
        fits = (np.arange(1, live.size + 1) / live.size) ** rows
        cost = fits * live + (1 - fits)
        best = int(np.argmin(cost))
        worth = cost[best] < 0.95  # A smaller saving does not pay for two programs.
        shares.append(min(shares[-1], float(live[best])) if worth else shares[-1])
    return tuple(shares)


def choose_executor(executor: Executor | Literal["auto"], policy: Any, width: int) -> Executor:
    """Resolves `executor="auto"` for rows of `width` tokens; returns other executors unchanged.

    The result is a static prefix if loops of unknown length are slow (`Platform.static_shapes`) and
    the policy's `row_shares` are known; otherwise micro-batches.
    """
    if executor != "auto":
        if isinstance(executor, (str, type)) or not hasattr(executor, "pack"):
            raise TypeError(
                "Wanted an executor: 'auto', or an object such as MicroBatches() or "
                f"CapacityPrefix(capacities=...). Got {executor!r:.60}."
            )
        return executor
    shares = getattr(policy, "row_shares", None)
    alone = len(policy.depths) == 1  # No token exits early; a branch is a second segment.
    shares = (1.0, 1.0) if alone else shares
    if shares is None or not here().static_shapes:
        return MicroBatches()
    unit = CapacityPrefix.min_bucket
    slots = tuple(math.ceil(share * width / unit) * unit for share in shares)
    return CapacityPrefix(capacities=slots, certain=alone)
