# SPDX-License-Identifier: Apache-2.0
"""Decoding segments on the rows that need them alone, packed by depth into few static widths.

    rows       0  1  2  3  4  5  6  7      eight rows, packed into 2 or 4
    [8, 16)    .  .  #  .  .  .  .  .      one goes on: a block of 2 rows
    [4, 8)     .  #  #  .  .  #  .  .      three do: a block of 4 rows
    [0, 4)     #  #  #  #  #  #  #  #      all: the whole batch

States are gathered, keys and values are not: a loop attends a row at a time, and reads no row of
the cache that is not in the block. There is a body for each width; those that are not chosen take
no turn of their loops, so that no cache passes through a conditional.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.rows import attend_rows, chosen_first
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import Depth
from utio_jax.decoding.base import Setting
from utio_jax.decoding.segments import (
    Attend,
    Block,
    Bounds,
    Layers,
    Sources,
    depth_of_kv,
    project_frozen,
    run_layers,
    run_segment,
)
from utio_jax.decoding.step import DecodeStep


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
                width=width,
                shown=shown,
                cache_rows=block.rows,
            )

        return attend

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


def run_packed(
    setting: Setting,
    now: DecodeStep,
    *,
    start: int,
    stop: Int[Array, ""],
    bounds: tuple[int, int],
    shown: Int[Array, "batch slot"] | None,
    widths: tuple[int, ...],
    project: bool,
) -> DecodeStep:
    """Is a `utio_jax.decoding.frozen.RunSegment` that runs live rows alone where they are few.

    Args:
      setting: of the round.
      now: before the segment.
      start: first layer.
      stop: layer to stop before; `start` where no row is live.
      bounds: of the segment.
      shown: layers at which slots may be seen, under `kv="drop"`.
      widths: rows of a packed block, ascending. Static.
      project: whether stopped rows show K/V of their last state in these layers. Static.
    """
    batch, fixed = now.live.shape[0], (setting.decoder, setting.params)
    sizes = [width for width in widths if width < batch]
    order, count = chosen_first(now.live[:, 0])
    chosen = sum(((count > size).astype(jnp.int32) for size in sizes), start=jnp.int32(0))
    x, cache, ran = now.x, now.cache, jnp.ones((batch,), jnp.bool_)
    layers, where = setting.layers, now.block

    for number, size in enumerate(sizes):
        mine, rows = chosen == number, order[:size]
        valid, leaves = now.live[rows], (x, where.positions, where.places)
        old, positions, places = jax.tree.map(lambda leaf, rows=rows: leaf[rows], leaves)
        new, cache = run_rows(
            *fixed,
            cache,
            old,
            Block(positions=positions, valid=valid, places=places, rows=rows),
            start=start,
            stop=jnp.where(mine, stop, start),
            width=setting.width,
            count=jnp.where(mine, count, 0),
            shown=shown,
            layers=layers,
            bounds=bounds,
        )
        x = x.at[rows].set(jnp.where(valid[:, :, None], new, old))
        ran = jnp.where(mine, jnp.zeros_like(ran).at[rows].set(True), ran)

    together = chosen == len(sizes)
    x, cache = run_segment(
        *fixed,
        cache,
        x,
        where,
        start=start,
        stop=jnp.where(together, stop, start),
        width=setting.width,
        runs=now.live,
        shown=shown,
        layers=layers,
        bounds=bounds,
    )
    if project and sizes:
        alone = jnp.where(together, start, stop)
        stopped = dataclasses.replace(where, valid=where.valid & ~now.live)
        kept = {"start": start, "stop": alone, "layers": layers, "bounds": bounds}
        cache = project_frozen(*fixed, cache, now.x, stopped, **kept)
        now = dataclasses.replace(now, projected=now.projected + alone - start)
    read = jnp.where(together | now.live[:, 0], float(setting.width), 0.0)
    return now.after(
        x,
        cache,
        depth=stop,
        layers=stop - start,
        tokens=ran.astype(jnp.int32),
        slots=read.astype(jnp.float32),
    )
