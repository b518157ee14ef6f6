# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters: the keys that earlier queries attended to most, chunk by chunk of positions.

    chunk        0        1        2        3
    position 0 ......  ......** ......** ......**     # "*" the chunk's last queries are sampled
    a set        {}       {*0}    {*0,*1}  {*0,*1,*2} # whose queries a chunk's set counts

Nothing is kept of the executor's own scores: these are products of blocks that have no common
shape. A sample of queries of one layer is asked again, which costs a few per cent of one layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.attention.history import History
from utio_jax.attention.products import attention_received, visible_keys
from utio_jax.core.arrays import flat, layer_at
from utio_jax.core.decoder import Decoder, Params, Places


def heavy_hitters(
    decoder: Decoder,
    params: Params,
    layer: int,
    x: Float[Array, "batch token dim"],
    places: Places,
    shown: Bool[Array, "batch token"],
    *,
    history: History,
    chunk: int,
    sample: int,
) -> Int[Array, "batch chunk heavy"]:
    """Returns each chunk's heavy hitters: H2O's (arXiv 2306.14048), by a sample of queries.

    A key's heat is the attention that it received from the sampled queries of earlier chunks, all
    heads of one layer together, so a set depends on earlier tokens alone. Among the keys behind the
    band of the chunk's first query, and behind the sinks, the hottest are taken.

    Args:
      decoder: the model.
      params: its parameters.
      layer: whose queries and keys.
      x: the states before it.
      places: of all tokens.
      shown: keys that anybody may see.
      history: how many heavy hitters, and what is seen anyway. Static.
      chunk: positions that share a set. Static.
      sample: queries per chunk, its last ones. Static.
    """
    batch, width = shown.shape
    chunks, config = -(-width // chunk), decoder.config
    weights, window = layer_at(decoder, params, layer), config.window_at(layer)
    keys, _ = decoder.keys_values(weights, flat(x), flat(places))
    keys = keys.reshape(batch, width, *keys.shape[1:])
    # The last chunk's queries come before no other chunk.
    asks = jnp.arange((chunks - 1) * chunk).reshape(chunks - 1, chunk)[:, -sample:]
    chosen = jax.tree.map(lambda leaf: leaf[:, asks.reshape(-1)], (x, places))
    queries = decoder.queries(weights, *flat(chosen))
    queries = queries.reshape(batch, *asks.shape, *queries.shape[1:])
    every = jnp.arange(width, dtype=jnp.int32)

    def step(heat: jax.Array, of_chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, positions = of_chunk
        visible = visible_keys(positions, every, window)[None] & shown[:, None, :]
        received = attention_received(queries, keys, visible, softcap=config.attention_softcap)
        heat += received
        return heat, hottest(heat, shown, first=positions[-1] + 1, history=history)

    cold = jnp.zeros((batch, width), jnp.float32)
    _, later = jax.lax.scan(step, cold, (jnp.moveaxis(queries, 1, 0), asks))
    none = hottest(cold, shown, first=jnp.int32(0), history=history)
    return jnp.moveaxis(jnp.concatenate([none[None], later]), 0, 1)


def blind_hitters(
    key: PRNGKeyArray, shown: Bool[Array, "batch token"], *, history: History, chunk: int
) -> Int[Array, "batch chunk heavy"]:
    """Returns as many verticals, drawn blindly: the control. All rows have the same draw."""
    chunks = -(-shown.shape[1] // chunk)

    def one(index: jax.Array) -> jax.Array:
        position = jnp.arange(shown.shape[1])
        draw = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(chunk_key(index), p)))
        heat = jnp.broadcast_to(draw(position)[None, :], shown.shape)
        return hottest(heat, shown, first=index * chunk, history=history)

    def chunk_key(index: jax.Array) -> PRNGKeyArray:
        return jax.random.fold_in(key, index)

    return jnp.moveaxis(jax.lax.map(one, jnp.arange(chunks, dtype=jnp.int32)), 0, 1)


def hottest(
    heat: Float[Array, "batch token"],
    shown: Bool[Array, "batch token"],
    *,
    first: Int[Array, ""],
    history: History,
) -> Int[Array, "batch heavy"]:
    """Returns the hottest keys behind the sinks and the band of a query at `first`.

    Where there are too few, the row's width stands for none.
    """
    width = heat.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)
    behind = (position >= history.sinks) & (position <= first - history.recent)
    heat, chosen = jax.lax.top_k(
        jnp.where(behind[None, :] & shown, heat, -1.0), min(history.heavy, width)
    )
    return jnp.where(heat >= 0, chosen, width)
