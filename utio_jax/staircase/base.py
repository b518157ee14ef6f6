# SPDX-License-Identifier: Apache-2.0
"""Protocols of a pass: `Executor`, and the `TokenLayout` and `KVAccess` that it gives to `forward`.

An executor changes cost, never results. `utio_jax.staircase.microbatches` runs blocks in loops
with traced trip counts. `utio_jax.staircase.capacity` runs a static prefix, which is
differentiable. `utio_jax.decoding.cached` runs one token per row, with K/V in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, read
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import (
    Decoder,
    HasKVMaps,
    Inputs,
    LayerParams,
    Params,
    PositionEncoding,
    is_integer,
)
from utio_jax.core.layer import contain_overflow
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.reference import positions_of


@pytree
class Tokens:
    """Hidden states and status of all tokens of a pass, in text order.

    Attributes:
      x: hidden states; frozen or padding where a token is not live.
      positions: token positions within each row.
      places: position encoding, e.g. RoPE cos and sin.
      live: tokens that have not exited yet; all real tokens at depth 0.
      shown: tokens whose K/V are visible in deeper layers.
      depth: layers that each frozen token has run; 0 for padding and live tokens.
      mapped: under `kv="mapped"`, keys (before rotation) and values of frozen tokens in layers
        from `mapped_from` on. None before the first exit, and under other strategies.
      mapped_from: first layer of `mapped`. Static.
    """

    x: Float[Array, "batch token dim"]
    positions: Int[Array, "batch token"]
    places: PositionEncoding
    live: Bool[Array, "batch token"]
    shown: Bool[Array, "batch token"]
    depth: Int[Array, "batch token"]
    mapped: Float[Array, "batch token layer 2 kv_head head_dim"] | None = None
    mapped_from: int = static(default=0)

    @classmethod
    def embed(
        cls, decoder: Decoder, params: Params, token_ids: Inputs, lengths: Int[Array, " batch"]
    ) -> Tokens:
        """Returns right-padded rows of tokens at depth 0."""
        return cls.at(decoder, params, token_ids, *positions_of(token_ids, lengths))

    @classmethod
    def at(
        cls,
        decoder: Decoder,
        params: Params,
        token_ids: Inputs,
        positions: Int[Array, "batch token"],
        real: Bool[Array, "batch token"],
    ) -> Tokens:
        """Returns tokens at given positions, at depth 0; tokens that are not `real` are padding."""
        return cls(
            x=jnp.asarray(
                decoder.embed(params, token_ids, positions)
            ),  # Of NumPy's parameters, too.
            positions=positions,
            places=decoder.encode_positions(positions),
            live=real,
            shown=real,
            depth=jnp.zeros_like(positions),
        )

    def shown_at(
        self,
        decoder: Decoder,
        layer: LayerParams,
        index: int | Int[Array, ""],
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "token kv_head head_dim"], Float[Array, "token kv_head head_dim"]]:
        """Returns the K/V of frozen tokens in a layer that they do not run, flattened.

        Those of maps; of a looped model, what the cache holds of the turn before; else zeros.
        """
        config, (batch, width) = decoder.config, self.live.shape
        if self.mapped is None and config.turns > 1 and cache is not None:
            before = jnp.maximum(index - config.turn_layers, 0)
            keys, values = read(cache, (before,), width=width)
            return flat(keys), flat(values)
        if self.mapped is None:
            shape = (batch * width, config.num_kv_heads, config.head_dim)
            return jnp.zeros(shape, self.x.dtype), jnp.zeros(shape, self.x.dtype)
        assert isinstance(decoder, HasKVMaps)
        mapped = jax.lax.dynamic_index_in_dim(self.mapped, index - self.mapped_from, 2, False)
        mapped = flat(mapped)
        keys = decoder.rotate_keys(layer, mapped[:, 0], flat(self.places))
        return contain_overflow(keys, mapped[:, 1])


Sources = tuple[int | Int[Array, ""], ...]
"""Layers whose K/V are read, concatenated along the head axis."""


@runtime_checkable
class TokenLayout(Protocol):
    """Memory layout of the tokens that run: maps `[token, ...]` in row order to `[slot, ...]`.

    Attributes:
      blocked: True if packed states are carried from layer to layer and processed block by block.
    """

    blocked: ClassVar[bool]

    def pack(self, leaf: jax.Array) -> jax.Array:
        """Gathers an array `[token, ...]` into slots `[slot, ...]`."""
        ...

    def put(self, leaf: jax.Array, new: jax.Array, start: Any, size: Any) -> jax.Array:
        """Scatters slots `[start, start + size)` into the array `[token, ...]`."""
        ...

    def by_blocks(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Loops `carry = step(start, size, carry)` over all slots in use."""
        ...

    def empty(self, *shape: int, dtype: Any) -> jax.Array | None:
        """Returns an array of slots for results of blocks; None if one block holds all slots."""
        ...


@runtime_checkable
class KVAccess(Protocol):
    """Storage of the K/V of a pass, and attention over them."""

    def write(
        self, cache: Any, index: Any, keys: jax.Array, values: jax.Array
    ) -> tuple[Any, tuple[jax.Array, jax.Array] | None]:
        """Writes a layer's K/V `[token, ...]`; returns cache, and K/V that need no read."""
        ...

    def read(self, cache: Any, sources: Sources) -> Any:
        """Reads the K/V of some layers from the cache."""
        ...

    def attend(self, index: Any, queries: jax.Array, seen: Any) -> jax.Array:
        """Returns the attention output of queries `[slot, head, head_dim]`, in that shape."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Runs the live tokens of a segment; `slots` is the value that `pack` returned.

    Attributes:
      keeps_logits: True if the logits of all tokens are few enough to keep. Then one LM head per
        exit serves the policy and the readout.
    """

    keeps_logits: ClassVar[bool]

    @property
    def unit(self) -> int:
        """Least padding unit of projections and MLP, in slots."""
        ...

    def key_widths(self, width: int) -> list[int]:
        """Returns the static key counts of attention in rows of `width` tokens."""
        ...

    def pack(self, segment: int, live: Bool[Array, "batch token"], *, causal: bool = True) -> Any:
        """Packs a segment's live tokens into slots."""
        ...

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        slots: Any,
        layers: tuple[int, int],
        cache: Any = None,
        *,
        only_live_keys: bool = False,
    ) -> tuple[Float[Array, "batch token dim"], Any]:
        """Returns the states after layers `[start, stop)`, and the cache.

        Keys are visible where `tokens.shown`. With `only_live_keys`, K/V are projected for the
        slots' tokens only. A `KVCache` receives all projected K/V; an executor may define its own
        cache type. Models that share K/V between layers (`DecoderConfig.kv_source`) need a cache.
        """
        ...

    def map_slots(self, slots: Any, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Applies `function` to the live tokens' `[slot, ...]` blocks; 0 for all other tokens.

        The function returns an array `[slot, ...]`, or a pytree of them. Results are in token
        order.
        """
        ...

    def only_if(self, slots: Any, asked: bool | Bool[Array, ""]) -> Any:
        """Returns the slots if `asked` is True, otherwise no slots."""
        ...

    def slots_run(self, slots: Any) -> Int[Array, ""]:
        """Returns the number of slots that one `map_slots` computes, padding included."""
        ...

    def heads_run(self, slots: Any) -> Int[Array, ""]:
        """Returns the number of slots through the LM head when `map_slots` calls `map_head`."""
        ...

    def work(self, slots: Any, layers: int, *, kv_layers: int, live_kv_layers: int = 0) -> Work:
        """Returns the work of `layers` layers on the slots.

        `kv_layers` of them project K/V, of every token; `live_kv_layers` of these project K/V of
        the slots alone.
        """
        ...


def over_blocks(
    total: jax.Array, sizes: tuple[int, int], step: Callable[[jax.Array, int, Any], Any], carry: Any
) -> Any:
    """Loops `carry = step(first, size, carry)` over blocks of `total` slots.

    `sizes` are the size of whole blocks, and a divisor of it. Whole blocks come first; smaller
    blocks cover the remaining slots. The last block may extend past `total`.
    """
    block, least = sizes
    if block == least:  # One loop, one body to compile.
        count = -(-total // least)
        with jax.named_scope(f"by_{least}"):
            return jax.lax.fori_loop(0, count, lambda i, c: step(i * least, least, c), carry)
    whole = total // block
    with jax.named_scope(f"whole_{block}"):
        carry = jax.lax.fori_loop(0, whole, lambda i, c: step(i * block, block, c), carry)
    done = whole * block
    remaining = -(-(total - done) // least)
    with jax.named_scope(f"rest_{block}_{least}"):
        return jax.lax.fori_loop(0, remaining, lambda i, c: step(done + i * least, least, c), carry)


def check_min_bucket(min_bucket: int) -> int:
    """Returns `min_bucket`; raises ValueError unless it is a positive integer."""
    if not is_integer(min_bucket, 1):
        raise ValueError(
            f"Wanted a min_bucket of at least 1, in items. Got min_bucket={min_bucket!r}. "
            "Good sizes: 64 on a CPU, a few hundred on accelerators."
        )
    return min_bucket
