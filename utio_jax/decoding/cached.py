# SPDX-License-Identifier: Apache-2.0
"""Layers over tokens with K/V in a cache: `run_segment`, and the executor of a decode step.

`CachedRows` runs segments for `utio_jax.staircase.loop.run_pass`, one token per row. A segment that
writes K/V runs for all rows if any row needs it. A segment that only reads K/V runs for the rows
that need it. The executed work is counted per row, in the cache that segments pass on (`RowCache`).

    rows       0  1  2  3  4  5  6  7      eight rows, packed by quarters
    [12, 16)   .  .  #  .  .  .  .  .      one row continues: a block of 2 rows
    [8, 12)    .  #  #  .  .  #  .  .      three rows continue: a block of 4 rows
    [0, 8)     #  #  #  #  #  #  #  #      writes K/V: the whole batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read
from utio_jax.attention.mixing import mix_apart, mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import (
    Decoder,
    DecoderConfig,
    LayerParams,
    Params,
    PositionEncoding,
    logits_of,
)
from utio_jax.core.layer import Depth
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work
from utio_jax.staircase.base import Sources, Tokens
from utio_jax.staircase.forward import InPlace, forward, shows_from, write_at

Layers = tuple[LayerParams, ...] | None
"""Parameters of each layer, see `utio_jax.core.layer.split_layers`; None: those of the stack."""

Attend = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps a layer's index and its queries, by row, to their attention output."""

AttendOver = Callable[[KVCache, Sources], Attend]
"""Maps the cache, and the layers whose K/V are read, to an `Attend`."""


class Span(TypedDict):
    """Layers `[start, stop)` of a pass, as `utio_jax.staircase.forward.over_layers` takes them.

    A traced `stop` equal to `start` runs nothing, and copies nothing. `bounds` are static limits of
    traced depths, needed with `layers`.
    """

    start: Depth
    stop: Depth
    layers: NotRequired[Layers]
    bounds: NotRequired[tuple[int, int] | None]


@pytree
class Block:
    """Positions of the tokens of a pass, computed once for all its layers.

    Attributes:
      positions: token positions within each row, which are also slots in the cache.
      valid: mask of real tokens. All others are padding: computed, never written or attended to.
      places: the decoder's encoding of the positions.
      rows: rows of the cache that the block's rows map to; None: the first ones, in order. No two
        valid tokens share a slot. A padding row, without valid tokens, may map to any row. The
        cache is passed whole.
    """

    positions: Int[Array, "batch token"]
    valid: Bool[Array, "batch token"]
    places: PositionEncoding
    rows: Int[Array, " batch"] | None = None

    @property
    def at(self) -> dict[str, Any]:
        """Target of the block's K/V, as arguments of `utio_jax.attention.cache.write`."""
        return {"positions": self.positions, "valid": self.valid, "rows": self.rows}


def block_at(
    decoder: Decoder,
    positions: Int[Array, "batch token"],
    valid: Bool[Array, "batch token"],
    *,
    rows: Int[Array, " batch"] | None = None,
) -> Block:
    """Returns the block of tokens at `positions`, in some `rows` of the cache or its first ones."""
    places = decoder.encode_positions(positions)
    return Block(positions=positions, valid=valid, places=places, rows=rows)


def run_segment(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    block: Block,
    *,
    width: int,
    runs: Bool[Array, "batch token"] | None = None,
    shown: Int[Array, "row slot"] | None = None,
    **span: Unpack[Span],
) -> tuple[Float[Array, "batch token dim"], KVCache]:
    """Runs some layers; returns hidden states, and the cache with the K/V of these layers.

    K/V of all earlier positions must be valid in these layers. A traced `stop` equal to `start`
    skips a segment on the device. (`lax.cond` would copy the whole cache.)

    Args:
      decoder: the model.
      params: model parameters.
      cache: K/V cache, passed whole; donate it.
      x: hidden states at depth `start`, of the block's rows.
      block: positions of the tokens.
      width: slots to attend over; more than every valid position. Static.
      runs: valid tokens that run the layers; K/V of all others are projected from their hidden
        states. None: all.
      shown: number of layers in which each slot of the cache is visible, for `kv="drop"`, tokens
        of `x` included. None: all.
      **span: the layers.
    """
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (x.shape[0], width))
    if shown is not None and block.rows is not None:
        shown = shown.at[block.rows].get(mode="clip")

    def attention(cache: KVCache, sources: Sources) -> Attend:
        which: dict[str, Any] = {"rows": block.rows, "count": x.shape[0]}
        seen = [read(cache, (source,), width=width, **which) for source in sources]

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix = mixer_at(decoder, index)
            visible = mix.visible(block.positions, slots)
            if shown is not None:
                visible &= (shown[:, :width] > shows_from(decoder.config, index))[:, None, :]
            return mix_apart(mix, queries, seen, visible)

        return attend

    return run_layers(decoder, params, cache, x, block, attention, runs=runs, **span)


def run_layers(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    x: Float[Array, "batch token dim"],
    block: Block,
    attention: AttendOver,
    *,
    runs: Bool[Array, "batch token"] | None = None,
    **span: Unpack[Span],
) -> tuple[Float[Array, "batch token dim"], KVCache]:
    """Runs some layers with given attention; returns hidden states and the cache."""
    runs = block.valid if runs is None else runs & block.valid
    return forward(
        decoder,
        params,
        x,
        block.places,
        cache,
        slots=InPlace(flat(runs)),
        attention=_Cached(block, attention),
        **span,
    )


@dataclasses.dataclass(frozen=True)
class _Cached:
    """K/V source for `forward`: new K/V are written to the cache before attention reads it."""

    block: Block
    attention: AttendOver

    def write(
        self, cache: KVCache, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[KVCache, None]:
        return write_at(self.block.at)(cache, index, keys, values)

    def read(self, cache: KVCache, sources: Sources) -> Attend:
        return self.attention(cache, sources)

    def attend(self, index: Any, queries: jax.Array, seen: Attend) -> jax.Array:
        rows = queries.reshape(*self.block.positions.shape, *queries.shape[1:])
        return flat(seen(index, rows))


def decode_step(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, " batch"],
    cache: KVCache,
    positions: Int[Array, " batch"],
    *,
    active: Bool[Array, " batch"] | None = None,
    width: int | None = None,
    layers: Layers = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Runs one token per active row at full depth; returns logits and the cache.

    A step attends over `width` slots, static; None: all.
    """
    active = jnp.ones(token_ids.shape, jnp.bool_) if active is None else active
    block = block_at(decoder, positions[:, None], active[:, None])
    x = decoder.embed(params, token_ids[:, None], positions[:, None])
    x, cache = run_segment(
        decoder,
        params,
        cache,
        x,
        block,
        start=0,
        stop=decoder.config.num_layers,
        width=width or cache.num_slots,
        layers=layers,
    )
    return logits_of(decoder, params, x[:, 0]), cache


@pytree
class RowSlots:
    """Rows that run a segment: those whose token is `live`."""

    live: Bool[Array, "batch 1"]


@pytree
class RowCache:
    """K/V cache that a step's segments pass on, with the work executed so far, by row."""

    kv: KVCache
    work: Work

    def after(
        self, kv: KVCache, config: DecoderConfig, layers: tuple[int, int], *, runs: Array, read: Any
    ) -> RowCache:
        """Returns the cache after a segment, with its work added.

        `runs` are the rows that ran it, or whether all did; `read` is the number of key slots of a
        layer that each of them reads.
        """
        rows, runs = jnp.ones(self.work.queries.shape, jnp.bool_), runs.astype(jnp.int32)
        queries = runs * (layers[1] - layers[0])
        work = self.work.add(
            rows,
            queries=queries,
            keys_values=runs * len(config.kv_made(*layers)),
            key_slots=queries * read,
            kv_reads=runs * config.kv_reads(*layers) * read,
        )
        return RowCache(kv=kv, work=work)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Executor of all rows together: a segment or LM head runs if any row needs it.

    Rows that have exited run along and keep their hidden states.

    Attributes:
      width: slots to attend over; more than every valid position. Static.
      layers: parameters of each layer; None: those of the stack.
      shown: number of layers in which each slot is visible, for `kv="drop"`; None: all.
    """

    width: int
    layers: Layers = None
    shown: Int[Array, "batch slot"] | None = None
    keeps_logits: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        """Granularity of rows: 1, since rows are not padded."""
        return 1

    def key_widths(self, width: int) -> list[int]:
        """Returns the number of slots that a step attends over, as the only width."""
        del width
        return [self.width]

    def pack(self, segment: int, live: Bool[Array, "batch 1"], *, causal: bool = True) -> RowSlots:
        del segment, causal
        return RowSlots(live=live)

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
        del only_live_keys  # K/V of rows that run along are not worth a separate program.
        if not decoder.config.kv_made(*layers):
            return self._read_alone(decoder, params, tokens, slots.live, layers, cache)
        span, block = self.span(slots, layers), block_of(tokens)
        where: dict[str, Any] = {"width": self.width, "runs": slots.live, "shown": self.shown}
        x, kv = run_segment(decoder, params, cache.kv, tokens.x, block, **span, **where)
        runs, read = jnp.any(slots.live), float(self.width)
        return x, cache.after(kv, decoder.config, layers, runs=runs, read=read)

    def span(self, slots: RowSlots, layers: tuple[int, int]) -> Span:
        """Returns a segment's layers; an empty span if no row needs it."""
        return Span(
            start=layers[0],
            stop=jnp.where(jnp.any(slots.live), layers[1], layers[0]),
            layers=self.layers,
            bounds=layers,
        )

    def _read_alone(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        live: Bool[Array, "batch 1"],
        layers: tuple[int, int],
        cache: RowCache,
    ) -> tuple[Float[Array, "batch 1 dim"], RowCache]:
        """Runs a segment that writes no K/V for the rows that need it; returns hidden states.

        Later tokens read nothing of such a segment, so rows need not run along. The live rows are
        packed into the smallest number of quarters of the batch. Their K/V are copied once for all
        layers of the segment. Each width is a branch of a conditional. The conditional returns
        hidden states and no cache, since its operands and results are copied.
        """
        start, end = layers
        span = Span(start=start, stop=end, layers=self.layers, bounds=layers)

        def run(x: jax.Array, *, rows: jax.Array | None = None) -> jax.Array:
            leaves = (x, tokens.positions, tokens.places, live)
            if rows is not None:
                leaves = jax.tree.map(lambda leaf: leaf[rows], leaves)
            states, positions, places, valid = leaves
            block = Block(positions=positions, valid=valid, places=places, rows=rows)
            where: dict[str, Any] = {"width": self.width, "shown": self.shown}
            new, _ = run_segment(decoder, params, cache.kv, states, block, **span, **where)
            return new if rows is None else x.at[rows].set(new)

        x, ran = on_packed_rows(live[:, 0], run, lambda x: x, tokens.x)
        read = float(self.width)
        return x, cache.after(cache.kv, decoder.config, layers, runs=ran, read=read)

    def map_slots(self, slots: RowSlots, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        live = slots.live

        def run() -> Any:
            def put(y: jax.Array) -> jax.Array:
                is_live = live.reshape(live.shape + (1,) * (y.ndim - 1))
                return jnp.where(is_live, y[:, None], jnp.zeros((), y.dtype))

            return jax.tree.map(put, function(*(array[:, 0] for array in arrays)))

        def skip(shapes: Any = jax.eval_shape(run)) -> Any:
            return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

        return jax.lax.cond(jnp.any(live), run, skip)  # The conditional copies small arrays only.

    def attended(self, spent: RowCache) -> Float[Array, " batch"]:
        """Returns the number of key slots that each row attended over, summed over layers."""
        return jnp.asarray(spent.work.key_slots)

    def only_if(self, slots: RowSlots, asked: bool | Bool[Array, ""]) -> RowSlots:
        return dataclasses.replace(slots, live=slots.live & asked)

    def slots_run(self, slots: RowSlots) -> Int[Array, ""]:
        return jnp.any(slots.live).astype(jnp.int32) * slots.live.size

    def heads_run(self, slots: RowSlots) -> Int[Array, ""]:
        return self.slots_run(slots)

    def work(
        self, slots: RowSlots, layers: int, *, kv_layers: int, live_kv_layers: int = 0
    ) -> Work:
        """Returns zero work: layers are counted per row, in the `RowCache`."""
        del slots, layers, kv_layers, live_kv_layers
        return Work.of()


def on_packed_rows(
    chosen: Bool[Array, " batch"], run: Callable[..., Any], skip: Callable[..., Any], x: jax.Array
) -> tuple[Any, Bool[Array, " batch"]]:
    """Returns `run(x, rows=...)` of the chosen rows, and the rows that ran, padding included.

    Rows are packed into the smallest number of quarters of the batch; `run(x)` runs all, `skip(x)`
    none. Each size is a branch of a conditional, which copies its operands and results.
    """
    batch = chosen.shape[0]
    sizes, (order, count) = (*quarters(batch), batch), chosen_first(chosen)
    branches = [skip, *(partial(run, rows=order[:size]) for size in sizes[:-1]), run]
    which = jnp.sum(count > jnp.asarray((0, *sizes[:-1]), jnp.int32))
    result = jax.lax.switch(which, branches, x)
    size = jnp.asarray((0, *sizes), jnp.int32)[which]
    return result, jnp.zeros_like(chosen).at[order].set(jnp.arange(batch) < size)


def chosen_first(chosen: Bool[Array, " batch"]) -> tuple[Int[Array, " batch"], Int[Array, ""]]:
    """Returns row indices sorted with chosen rows first, and the number of chosen rows."""
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    return order, jnp.sum(chosen, dtype=jnp.int32)


def quarters(batch: int) -> tuple[int, ...]:
    """Returns the sizes of packed blocks of rows below the whole batch.

    >>> quarters(8), quarters(1)
    ((2, 4, 6), ())
    """
    return tuple(sorted({batch * part // 4 for part in (1, 2, 3)} - {0}))


def block_of(tokens: Tokens) -> Block:
    """Returns the positions of a step's tokens as a `Block`."""
    return Block(positions=tokens.positions, valid=tokens.shown, places=tokens.places)
