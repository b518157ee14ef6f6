# SPDX-License-Identifier: Apache-2.0
"""The static-shape executor: a prefix of slots, sized on the host; differentiable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, write_prompt
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import executed_heads, flat
from utio_jax.core.decoder import Decoder, LayerParams, Params
from utio_jax.core.layer import keys_values_of, layer_at, run_layer
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.base import Tokens, check_min_bucket, rotated
from utio_jax.staircase.keys_values import make_shared, shared_at, spans


@pytree
class PrefixSlots:
    """The first `capacity` slots of every row, live tokens first and in token order."""

    token_of_slot: Int[Array, "batch slot"]
    live: Bool[Array, "batch token"]
    capacity: int = static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPrefix:
    """The first `capacities[segment]` slots of all rows at once: static shapes, differentiable.

    A segment whose live tokens do not fit runs at full width instead: more cost, same result.

    Attributes:
      capacities: slots per row and segment, multiples of `min_bucket`; `fit_capacities` finds them.
      min_bucket: the unit of padding.
      certain: the capacities are known to hold all live tokens, as where a policy sends a fixed
        share deep: no other program is compiled, and a cache can be filled. Where they do not after
        all, the tokens that come last in a row stay where they are.
    """

    capacities: tuple[int, ...]
    min_bucket: int = 64
    certain: bool = False
    keeps_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_min_bucket(self.min_bucket)
        if any(capacity < 0 or capacity % self.min_bucket for capacity in self.capacities):
            raise ValueError(
                f"Wanted capacities that are multiples of min_bucket={self.min_bucket}, in slots. "
                f"Got capacities={self.capacities}. `fit_capacities` rounds them up."
            )

    def pack(
        self,
        segment: int,
        live: Bool[Array, "batch token"],
        sparse: SparseQueries | None = None,
        *,
        causal: bool = True,
    ) -> PrefixSlots:
        del causal  # Whole rows of keys, whichever of them are visible.
        if sparse is not None:
            raise ValueError(
                "Wanted dense attention, the only one that a static prefix has. Got a choice of "
                "sparse attention. Use executor=MicroBatches()."
            )
        if segment >= len(self.capacities):
            raise ValueError(
                "Wanted a capacity for each of the policy's depths. "
                f"Got {len(self.capacities)} capacities."
            )
        batch, width = live.shape
        ahead = jnp.cumsum(live, axis=1, dtype=jnp.int32)
        behind = ahead[:, -1:] + jnp.cumsum(~live, axis=1, dtype=jnp.int32)
        slot_of_token = jnp.where(live, ahead, behind) - 1
        rows = jnp.arange(batch)[:, None]
        tokens = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), live.shape)
        token_of_slot = (
            jnp.zeros_like(tokens).at[rows, slot_of_token].set(tokens, unique_indices=True)
        )
        return PrefixSlots(
            token_of_slot=token_of_slot, live=live, capacity=min(self.capacities[segment], width)
        )

    def key_widths(self, width: int) -> list[int]:
        """Returns `[width]`: a static prefix attends over whole rows."""
        return [width]

    def _choose(
        self, slots: PrefixSlots, run: Callable[[int], Callable[[], Any]], nothing: Any
    ) -> Any:
        """Returns `run(capacity)()`, or `run(width)()` where a row's live tokens do not fit.

        `nothing` is the result of an empty prefix.
        """
        width = slots.live.shape[1]
        if self.certain or slots.capacity == width:
            return run(slots.capacity)()
        fits = run(slots.capacity) if slots.capacity else lambda: nothing
        return jax.lax.cond(self._overflows(slots), run(width), fits)

    def _overflows(self, slots: PrefixSlots) -> Bool[Array, ""]:
        return jnp.max(jnp.sum(slots.live, axis=1)) > slots.capacity

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
        if cache is not None and not self.certain and not config.kv_source:
            raise ValueError(
                "Wanted an executor that keeps keys and values, to fill a cache. Got a "
                "CapacityPrefix, through whose choices a cache would be copied whole. Use "
                "executor=MicroBatches(), or capacities that are certain to hold all tokens."
            )
        batch, width, _ = tokens.x.shape
        alone = only_live_keys or tokens.mapped is not None  # Others show nothing, or their maps'.
        rows = lambda y, n: y.reshape(batch, n, *y.shape[1:])  # noqa: E731
        gather = jax.vmap(lambda leaf, order: leaf[order])

        def others_at(layer: LayerParams, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            if tokens.mapped is None:  # Hidden.
                shape = (batch, width, config.num_kv_heads, config.head_dim)
                return jnp.zeros(shape, tokens.x.dtype), jnp.zeros(shape, tokens.x.dtype)
            keys, values = tokens.mapped_at(index)
            keys = rotated(decoder, layer, keys, flat(tokens.places))
            return rows(keys, width), rows(values, width)

        def run(size: int) -> Callable[[], tuple[jax.Array, KVCache | None]]:
            chosen = slots.token_of_slot[:, :size]
            keep = gather(slots.live, chosen)[..., None]
            places = jax.tree.map(lambda leaf: gather(leaf, chosen), tokens.places)
            every = jnp.broadcast_to(jnp.arange(width), (batch, width))

            def put(others: jax.Array, own: jax.Array) -> jax.Array:
                """Returns what all tokens show, where those that run show their own."""
                mine = jnp.where(keep[..., None], rows(own, size), gather(others, chosen))
                return jax.vmap(lambda all_, order, new: all_.at[order].set(new))(
                    others, chosen, mine
                )

            def run_one(
                index: jax.Array,
                carry: tuple[jax.Array, KVCache | None],
                shared: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
            ) -> tuple[jax.Array, KVCache | None]:
                x, cache = carry
                layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
                block = gather(x, chosen)
                if shared is not None:
                    keys, values = shared(index)
                elif alone:
                    keys, values = others_at(layer, index)
                    own = keys_values_of(decoder, layer, flat(block), flat(places))
                    keys, values = map(put, (keys, values), own)
                else:
                    keys, values = (
                        rows(y, width)
                        for y in keys_values_of(decoder, layer, flat(x), flat(tokens.places))
                    )
                if cache is not None and shared is None:
                    cache = write_prompt(cache, index, keys, values)
                visible = mix.visible(chosen, every) & tokens.shown[:, None, :]

                def attend(queries: jax.Array) -> jax.Array:
                    return flat(mix(rows(queries, size), keys, values, visible))

                new = rows(run_layer(decoder, layer, flat(block), flat(places), attend), size)
                new = jnp.where(keep, new, block)
                x = jax.vmap(lambda row, order, new: row.at[order].set(new))(x, chosen, new)
                return x, cache

            def run_all() -> tuple[jax.Array, KVCache | None]:
                x, kept = tokens.x, cache
                for start, stop, reads_others in spans(config, *layers):
                    one = run_one
                    if reads_others:
                        assert kept is not None
                        if start == config.kv_own:
                            kept = make_shared(decoder, params, kept, x, tokens.places)
                        one = partial(run_one, shared=shared_at(config, kept, width))
                    x, kept = jax.lax.fori_loop(start, stop, one, (x, kept))
                return x, kept

            return run_all

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
                tokens = slots.token_of_slot[:, :size]
                gather = jax.vmap(lambda row, order: row[order])
                live = gather(slots.live, tokens)

                def scatter(empty: jax.Array, new: jax.Array) -> jax.Array:
                    new = new.reshape(batch, size, *new.shape[1:])
                    keep = live.reshape(batch, size, *(1,) * (new.ndim - 2))
                    new = jnp.where(keep, new, jnp.zeros((), new.dtype))
                    return jax.vmap(lambda row, order, new: row.at[order].set(new))(
                        empty, tokens, new
                    )

                found = function(*(flat(gather(a, tokens)) for a in arrays))
                return jax.tree.map(scatter, empty, found)

            return on_prefix

        return self._choose(slots, run, empty)

    def only_if(self, slots: PrefixSlots, asked: bool | Bool[Array, ""]) -> PrefixSlots:
        return dataclasses.replace(slots, live=slots.live & asked)

    def slots_run(self, slots: PrefixSlots) -> Int[Array, ""]:
        batch, width = slots.live.shape
        overflows = False if self.certain else self._overflows(slots)
        used = jnp.where(overflows, width, slots.capacity)
        return used.astype(jnp.int32) * batch

    def heads_run(self, slots: PrefixSlots) -> Int[Array, ""]:
        batch, width = slots.live.shape
        whole, prefix = (executed_heads(batch * size) for size in (width, slots.capacity))
        overflows = False if self.certain else self._overflows(slots)
        return jnp.where(overflows, whole, prefix).astype(jnp.int32)

    def work(
        self, slots: PrefixSlots, layers: int, *, kv_layers: int, only_live_keys: bool = False
    ) -> Work:
        batch, width = slots.live.shape
        used = self.slots_run(slots)
        return Work.of(
            queries=used * layers,
            keys_values=(used if only_live_keys else jnp.int32(batch * width)) * kv_layers,
            key_slots=used.astype(jnp.float32) * width * layers,
        )


def fit_capacities(
    depth_of_token: np.ndarray, *, depths: Sequence[int], min_bucket: int = 64
) -> tuple[int, ...]:
    """Returns the smallest capacities, in slots per row, that hold these tokens. On the host.

    Args:
      depth_of_token: decided depths `[batch, token]` in layers; 0 for padding.
      depths: the policy's depths.
      min_bucket: the unit that capacities are multiples of.

    >>> fit_capacities(np.array([[2, 2, 4], [2, 4, 4]]), depths=(2, 4), min_bucket=2)
    (4, 2)
    """
    decided = np.asarray(depth_of_token)
    live = [int((decided > start).sum(axis=1).max(initial=0)) for start in (0, *depths[:-1])]
    return tuple(-(-count // min_bucket) * min_bucket for count in live)
