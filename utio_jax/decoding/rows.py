# SPDX-License-Identifier: Apache-2.0
"""Executors of a decoding step: one token of each row, whose keys and values lie in a cache.

    CachedRows      all rows together; a segment that no row needs is skipped
    PackedRows      the rows that need a segment alone, packed into few static widths
    ThrottledRows   all rows together, some of which read a compact view of their history

They run segments for `utio_jax.staircase.loop.run_pass`. What they execute is counted by row, in
the cache that they hand on (`RowCache`), since rows share some of it and not the rest.

    rows       0  1  2  3  4  5  6  7      eight rows, packed into 2 or 4
    [8, 16)    .  .  #  .  .  .  .  .      one goes on: a block of 2 rows
    [4, 8)     .  #  #  .  .  #  .  .      three do: a block of 4 rows
    [0, 4)     #  #  #  #  #  #  #  #      all: the whole batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, write
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.rows import attend_rows, chosen_first
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import Depth
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.decoding.segments import Block, Bounds, Layers, run_layers, run_segment
from utio_jax.decoding.throttle_attention import run_throttled
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.frozen import Propagate


@pytree
class RowSlots:
    """The rows that run a segment.

    Attributes:
      live: these rows' tokens.
      throttled: tokens that see their row's view alone; None: none do.
    """

    live: Bool[Array, "batch 1"]
    throttled: Bool[Array, "batch 1"] | None = None


@pytree
class RowCache:
    """The K/V cache as a step's segments hand it on, and what they have executed so far.

    Attributes:
      kv: keys and values.
      layers: that ran in each row's slot.
      key_slots: that each row has read, summed over layers.
      projected: layers whose K/V were projected apart, of every row.
      view_layers: that each row's token ran throttled.
      view_slots: those of `key_slots` that were read from views.
    """

    kv: KVCache
    layers: Int[Array, " batch"]
    key_slots: Float[Array, " batch"]
    projected: Int[Array, ""]
    view_layers: Int[Array, " batch"]
    view_slots: Float[Array, " batch"]

    @classmethod
    def of(cls, kv: KVCache) -> RowCache:
        """Returns a cache of which nothing has been read yet."""
        none = jnp.zeros_like(kv.lengths)
        return cls(
            kv=kv,
            layers=none,
            key_slots=none.astype(jnp.float32),
            projected=jnp.int32(0),
            view_layers=none,
            view_slots=none.astype(jnp.float32),
        )

    def after(self, kv: KVCache, **spent: Any) -> RowCache:
        """Returns the cache after a segment, and what that took."""
        grown = {name: getattr(self, name) + amount for name, amount in spent.items()}
        return dataclasses.replace(self, kv=kv, **grown)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """All rows together: a segment runs if any row needs it, and so does a head.

    Rows that had stopped go along and keep their states.

    Attributes:
      width: slots to attend over; more than every valid position. Static.
      layers: each layer's parameters apart, where they are.
      shown: layers at which each slot of each row may be seen, under `kv="drop"`; None: all.
    """

    width: int
    layers: Layers = None
    shown: Int[Array, "batch slot"] | None = None
    keeps_logits: ClassVar[bool] = True

    @property
    def min_bucket(self) -> int:
        """One: rows are not padded."""
        return 1

    def key_widths(self, width: int) -> list[int]:
        """Returns the one number of slots that a step attends over."""
        del width
        return [self.width]

    def pack(
        self,
        segment: int,
        live: Bool[Array, "batch 1"],
        sparse: SparseQueries | None = None,
        *,
        causal: bool = True,
    ) -> RowSlots:
        del segment, causal
        return RowSlots(live=live, throttled=None if sparse is None else sparse.sparse)

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        layers: tuple[int, int],
        cache: Any = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        del only_live_keys  # Of the rows that go along, K/V are not worth a program of their own.
        stop = _stop(slots, layers)
        span = {"start": layers[0], "stop": stop, "layers": self.layers, "bounds": layers}
        where = {"width": self.width, "runs": slots.live, "shown": self.shown}
        x, kv = run_segment(decoder, params, cache.kv, tokens.x, _block(tokens), **span, **where)
        ran = stop - layers[0]
        return x, cache.after(kv, layers=ran, key_slots=ran * float(self.width))

    def map_slots(self, slots: RowSlots, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        live = slots.live

        def run() -> Any:
            def put(y: jax.Array) -> jax.Array:
                mine = live.reshape(live.shape + (1,) * (y.ndim - 1))
                return jnp.where(mine, y[:, None], jnp.zeros((), y.dtype))

            return jax.tree.map(put, function(*(array[:, 0] for array in arrays)))

        def skip(shapes: Any = jax.eval_shape(run)) -> Any:
            return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

        return jax.lax.cond(jnp.any(live), run, skip)  # Small arrays may go through one.

    def only_if(self, slots: RowSlots, asked: bool | Bool[Array, ""]) -> RowSlots:
        return dataclasses.replace(slots, live=slots.live & asked)

    def slots_run(self, slots: RowSlots) -> Int[Array, ""]:
        return jnp.any(slots.live).astype(jnp.int32) * slots.live.size

    def heads_run(self, slots: RowSlots) -> Int[Array, ""]:
        return self.slots_run(slots)

    def work(self, slots: RowSlots, layers: int, *, only_live_keys: bool = False) -> Work:
        """Returns nothing: layers are counted by row, in the `RowCache`."""
        del slots, layers, only_live_keys
        return Work.of()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows(CachedRows):
    """The rows that need a segment alone, in the narrowest of some static widths that holds them.

    States are gathered, keys and values are not: a loop attends a row at a time, and reads no row
    of the cache that is not in the block. There is a body for each width, and one for all rows;
    those that are not chosen take no turn of their loops, so that no cache passes through a
    conditional.

    Attributes:
      widths: rows of a packed block, ascending. Static.
      project: whether stopped rows show K/V of their last state in layers that others run. Static.
    """

    widths: tuple[int, ...]
    project: bool

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        layers: tuple[int, int],
        cache: Any = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        live, start, stop = slots.live, layers[0], _stop(slots, layers)
        sizes = [size for size in self.widths if size < live.shape[0]]
        order, count = chosen_first(live[:, 0])
        chosen = sum(((count > size).astype(jnp.int32) for size in sizes), start=jnp.int32(0))
        x, kv, ran = tokens.x, cache.kv, jnp.ones((live.shape[0],), jnp.bool_)
        span: dict[str, Any] = {"start": start, "layers": self.layers, "bounds": layers}
        where = {"width": self.width, "shown": self.shown}

        for number, size in enumerate(sizes):
            mine, rows = chosen == number, order[:size]
            valid, leaves = live[rows], (x, tokens.positions, tokens.places)
            old, positions, places = jax.tree.map(lambda leaf, rows=rows: leaf[rows], leaves)
            new, kv = run_rows(
                decoder,
                params,
                kv,
                old,
                Block(positions=positions, valid=valid, places=places, rows=rows),
                stop=jnp.where(mine, stop, start),
                count=jnp.where(mine, count, 0),
                **span,
                **where,
            )
            x = x.at[rows].set(jnp.where(valid[:, :, None], new, old))
            ran = jnp.where(mine, jnp.zeros_like(ran).at[rows].set(True), ran)

        together = chosen == len(sizes)
        whole = {"stop": jnp.where(together, stop, start), "runs": live, **span, **where}
        x, kv = run_segment(decoder, params, kv, x, _block(tokens), **whole)
        projected: int | jax.Array = 0
        if self.project and sizes:
            span["start"] = jnp.where(together | ~jnp.any(live), layers[1], start)
            stopped = dataclasses.replace(tokens, shown=tokens.shown & ~live)
            kv, projected = Propagate().end(decoder, params, stopped, kv, **span)
        read = jnp.where(together | live[:, 0], float(self.width), 0.0)
        return x, cache.after(
            kv,
            layers=(stop - start) * ran,
            key_slots=(stop - start) * read.astype(jnp.float32),
            projected=projected,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThrottledRows(CachedRows):
    """All rows together, of which the throttled ones read a compact view of their history.

    Where any row needs its view, one call reads those of all rows; unthrottled rows read all their
    slots besides.
    """

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        layers: tuple[int, int],
        cache: Any = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        del only_live_keys
        assert slots.throttled is not None
        live, stop = slots.live, _stop(slots, layers)
        span = {"start": layers[0], "stop": stop, "layers": self.layers, "bounds": layers}
        where = {"width": self.width, "runs": live, "shown": self.shown}
        where["dense"] = ~slots.throttled
        x, kv = run_throttled(decoder, params, cache.kv, tokens.x, _block(tokens), **span, **where)
        low, ran = live & slots.throttled, stop - layers[0]
        size = cache.kv.view.history.size
        views = jnp.any(low) * jnp.full(live.shape[:1], float(size))
        return x, cache.after(
            kv,
            layers=ran,
            key_slots=ran * (views + (live & ~slots.throttled)[:, 0] * float(self.width)),
            view_layers=ran * low[:, 0],
            view_slots=ran * views,
        )


def run_rows(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch 1 dim"],
    block: Block,
    *,
    start: Depth,
    stop: Depth,
    width: int,
    count: Int[Array, ""],
    shown: Int[Array, "row slot"] | None = None,
    layers: Layers = None,
    bounds: Bounds = None,
) -> tuple[Float[Array, "batch 1 dim"], KVCache]:
    """Returns what `run_segment` does for a block of packed rows, and copies no keys and values.

    Args:
      decoder: the model.
      params: its parameters.
      cache: of all rows; donate it.
      x: states at depth `start`, of the block's rows.
      block: the tokens' places, and their rows of the cache.
      start: first layer.
      stop: layer to stop before.
      width: slots to attend over; more than every valid position. Static.
      count: rows of the block that are real: its first ones.
      shown: as in `run_segment`.
      layers: likewise.
      bounds: likewise.
    """
    assert block.rows is not None
    order = jnp.arange(x.shape[0], dtype=jnp.int32)

    def attention(
        cache: KVCache, index: jax.Array, keys: jax.Array, values: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        places = {"positions": block.positions, "valid": block.valid, "rows": block.rows}
        cache = write(cache, index, keys, values, **places)
        attended = attend_rows(
            mixer_at(decoder, index),
            cache,
            jnp.zeros(queries.shape, cache.values.dtype),
            queries,
            block.positions,
            layer=index,
            rows=(order, count),
            width=width,
            shown=shown,
            cache_rows=block.rows,
        )
        return attended, cache

    return run_layers(
        decoder,
        params,
        cache,
        x,
        block,
        attention,
        start=start,
        stop=stop,
        layers=layers,
        bounds=bounds,
    )


def _block(tokens: Tokens) -> Block:
    return Block(positions=tokens.positions, valid=tokens.shown, places=tokens.places)


def _stop(slots: RowSlots, layers: tuple[int, int]) -> jax.Array:
    """Returns where a segment ends: where it starts, if no row is live."""
    return jnp.where(jnp.any(slots.live), layers[1], layers[0])
