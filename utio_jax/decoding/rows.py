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
from functools import partial
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.rows import attend_rows, chosen_first
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.decoding.segments import (
    Attend,
    Attention,
    Block,
    Layers,
    Sources,
    depth_of_kv,
    run_layers,
    run_segment,
)
from utio_jax.decoding.throttle import view_attention
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
    """

    kv: KVCache
    layers: Int[Array, " batch"]
    key_slots: Float[Array, " batch"]
    projected: Int[Array, ""]

    @classmethod
    def of(cls, kv: KVCache) -> RowCache:
        """Returns a cache of which nothing has been read yet."""
        none = jnp.zeros_like(kv.lengths)
        read = none.astype(jnp.float32)
        return cls(kv=kv, layers=none, key_slots=read, projected=jnp.int32(0))

    def after(self, kv: KVCache, **spent: Any) -> RowCache:
        """Returns the cache after a segment, and what that took."""
        grown = {name: getattr(self, name) + amount for name, amount in spent.items()}
        return dataclasses.replace(self, kv=kv, **grown)


class Segment(TypedDict):
    """The layers of a segment, see `utio_jax.decoding.segments.Span`."""

    start: int | jax.Array
    stop: int | jax.Array
    layers: Layers
    bounds: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """All rows together: a segment runs if any row needs it, and so does a head.

    Rows that had stopped go along and keep their states.

    Attributes:
      width: slots to attend over; more than every valid position. Static.
      layers: each layer's parameters apart, where they are.
      shown: layers at which each slot of each row may be seen, under `kv="drop"`; None: all.
      widths: rows of a packed block, ascending, in segments that write no K/V; all rows run
        together in the others, and everywhere if it is empty. Static.
    """

    width: int
    layers: Layers = None
    shown: Int[Array, "batch slot"] | None = None
    widths: tuple[int, ...] = ()
    keeps_logits: ClassVar[bool] = True

    @property
    def unit(self) -> int:
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
        # A segment that no row needs takes no turn of a loop.
        span = Segment(
            start=layers[0],
            stop=jnp.where(jnp.any(slots.live), layers[1], layers[0]),
            layers=self.layers,
            bounds=layers,
        )
        return self.run_span(decoder, params, tokens, slots, span, cache)

    def run_span(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        span: Segment,
        cache: RowCache,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        """Returns the states after a segment, and the cache: what these executors differ in."""
        if not decoder.config.kv_made(*span["bounds"]):
            return self._read_alone(decoder, params, tokens, slots.live, span, cache)
        where: dict[str, Any] = {"width": self.width, "runs": slots.live, "shown": self.shown}
        x, kv = run_segment(decoder, params, cache.kv, tokens.x, _block(tokens), **span, **where)
        ran = span["stop"] - span["start"]
        return x, cache.after(kv, layers=ran, key_slots=ran * float(self.width))

    def _read_alone(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        live: Bool[Array, "batch 1"],
        span: Segment,
        cache: RowCache,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        """Returns the states after a segment that writes no K/V, run by the rows that need it.

        Later tokens read nothing of it, so no row has to go along for others. The live rows are
        packed into the smallest of `widths`, and their K/V copied side by side, once for all layers
        of the segment. Each width is a branch of a conditional, which passes on states and no
        cache: what goes through one is copied.
        """
        start, end = span["bounds"]
        batch = live.shape[0]
        sizes = (*(size for size in self.widths if size < batch), batch)
        order, count = chosen_first(live[:, 0])

        def run(x: jax.Array, *, rows: jax.Array | None = None) -> jax.Array:
            leaves = (x, tokens.positions, tokens.places, live)
            if rows is not None:
                leaves = jax.tree.map(lambda leaf: leaf[rows], leaves)
            mine, positions, places, valid = leaves
            block = Block(positions=positions, valid=valid, places=places, rows=rows)
            fixed: Segment = {**span, "start": start, "stop": end}
            where: dict[str, Any] = {"width": self.width, "shown": self.shown}
            new, _ = run_segment(decoder, params, cache.kv, mine, block, **fixed, **where)
            return new if rows is None else x.at[rows].set(new)

        branches = [lambda x: x, *(partial(run, rows=order[:size]) for size in sizes[:-1]), run]
        chosen = jnp.sum(count > jnp.asarray((0, *sizes[:-1]), jnp.int32))
        x = jax.lax.switch(chosen, branches, tokens.x)
        size = jnp.asarray((0, *sizes), jnp.int32)[chosen]
        ran = jnp.zeros_like(live[:, 0]).at[order].set(jnp.arange(batch) < size)
        layers = (end - start) * ran.astype(jnp.int32)
        return x, cache.after(cache.kv, layers=layers, key_slots=layers * float(self.width))

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

    def work(
        self, slots: RowSlots, layers: int, *, kv_layers: int, only_live_keys: bool = False
    ) -> Work:
        """Returns nothing: layers are counted by row, in the `RowCache`."""
        del slots, layers, kv_layers, only_live_keys
        return Work.of()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows(CachedRows):
    """The rows that need a segment alone, in the narrowest of some static widths that holds them.

    States are gathered, keys and values are not: a loop attends a row at a time, and reads no row
    of the cache that is not in the block. There is a body for each width, and one for all rows;
    those that are not chosen take no turn of their loops, so that no cache passes through a
    conditional. In segments that make no K/V, one does: see `CachedRows`.

    Attributes:
      project: whether stopped rows show K/V of their last state in layers that others run. Static.
    """

    project: bool

    def run_span(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        span: Segment,
        cache: RowCache,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        live, (start, end), stop = slots.live, span["bounds"], span["stop"]
        if not decoder.config.kv_made(start, end):
            return self._read_alone(decoder, params, tokens, live, span, cache)
        sizes = [size for size in self.widths if size < live.shape[0]]
        order, count = chosen_first(live[:, 0])
        chosen = sum(((count > size).astype(jnp.int32) for size in sizes), start=jnp.int32(0))
        x, kv, ran = tokens.x, cache.kv, jnp.ones(live.shape[:1], jnp.bool_)

        for number, size in enumerate(sizes):
            mine, rows = chosen == number, order[:size]
            leaves = (x, tokens.positions, tokens.places)
            old, positions, places = jax.tree.map(lambda leaf, rows=rows: leaf[rows], leaves)
            block = Block(positions=positions, valid=live[rows], places=places, rows=rows)
            attend = self._attend(decoder, block, jnp.where(mine, count, 0))
            here: Segment = {**span, "stop": jnp.where(mine, stop, start)}
            new, kv = run_layers(decoder, params, kv, old, block, attend, **here)
            x = x.at[rows].set(jnp.where(block.valid[:, :, None], new, old))
            ran = jnp.where(mine, jnp.zeros_like(ran).at[rows].set(True), ran)

        together = chosen == len(sizes)
        here = {**span, "stop": jnp.where(together, stop, start)}
        where: dict[str, Any] = {"width": self.width, "runs": live, "shown": self.shown}
        x, kv = run_segment(decoder, params, kv, x, _block(tokens), **here, **where)
        projected: int | jax.Array = 0
        if self.project and sizes:
            alone = jnp.where(together | ~jnp.any(live), end, start)
            stopped = dataclasses.replace(tokens, shown=tokens.shown & ~live)
            kv, projected = Propagate().end(
                decoder, params, stopped, kv, start=alone, bounds=(start, end), layers=self.layers
            )
        read = jnp.where(together | live[:, 0], float(self.width), 0.0).astype(jnp.float32)
        layers = stop - start
        return x, cache.after(kv, layers=layers * ran, key_slots=layers * read, projected=projected)

    def _attend(self, decoder: Decoder, block: Block, count: Int[Array, ""]) -> Attention:
        """Returns attention of a packed block whose first `count` rows are real."""
        order = jnp.arange(block.valid.shape[0], dtype=jnp.int32)

        def attention(cache: KVCache, sources: Sources) -> Attend:
            def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
                return attend_rows(
                    mixer_at(decoder, index),
                    cache,
                    jnp.zeros(queries.shape, cache.values.dtype),
                    queries,
                    block.positions,
                    layers=sources,
                    seen_from=depth_of_kv(decoder, index),
                    rows=(order, count),
                    width=self.width,
                    shown=self.shown,
                    cache_rows=block.rows,
                )

            return attend

        return attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThrottledRows(CachedRows):
    """All rows together, of which the throttled ones read a compact view of their history.

    Where any row needs its view, one call reads those of all rows; unthrottled rows read all their
    slots besides.
    """

    def run_span(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: RowSlots,
        span: Segment,
        cache: RowCache,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        live, low, view = slots.live, slots.throttled, cache.kv.view
        assert low is not None
        assert view is not None
        block, where = _block(tokens), {"width": self.width, "shown": self.shown}
        attend = view_attention(decoder, block, runs=live, dense=~low, **where)
        x, kv = run_layers(decoder, params, cache.kv, tokens.x, block, attend, runs=live, **span)
        ran, size = span["stop"] - span["start"], float(view.history.size)
        views = jnp.any(live & low) * jnp.full(live.shape[:1], size)
        read = ran * (views + (live & ~low)[:, 0] * float(self.width))
        return x, cache.after(kv, layers=ran, key_slots=read)


def _block(tokens: Tokens) -> Block:
    return Block(positions=tokens.positions, valid=tokens.shown, places=tokens.places)
