# SPDX-License-Identifier: Apache-2.0
"""What runs the live tokens of a segment: the executors' contract, and what they share.

An executor changes cost, never results. `utio_jax.staircase.microbatches` runs blocks in traced
loops; `utio_jax.staircase.capacity` a static prefix, through which gradients flow;
`utio_jax.decoding.rows` one token of each row, whose keys and values lie in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, HasKVMaps, Inputs, LayerParams, Params, Places
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.staircase.reference import positions_of


@pytree
class Tokens:
    """All tokens of a pass, in text order; their states never move.

    Attributes:
      x: states; those of tokens that are not live are frozen, or padding.
      positions: in their rows.
      places: what the decoder made of the positions.
      live: tokens that run on. At first all that are real.
      shown: tokens whose keys and values others may see in the layers to come.
      depth: layers that each token has run, once it is frozen; 0 for padding and live tokens.
      mapped: under `kv="mapped"`, keys (before rotation) and values that frozen tokens show in all
        layers from `mapped_from` on (static); None before the first stop, and otherwise.
    """

    x: Float[Array, "batch token dim"]
    positions: Int[Array, "batch token"]
    places: Places
    live: Bool[Array, "batch token"]
    shown: Bool[Array, "batch token"]
    depth: Int[Array, "batch token"]
    mapped: Float[Array, "batch token layer 2 kv_head head_dim"] | None = None
    mapped_from: int = static(default=0)

    @classmethod
    def embed(
        cls, decoder: Decoder, params: Params, token_ids: Inputs, lengths: Int[Array, " batch"]
    ) -> Tokens:
        """Returns the tokens at depth 0."""
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
        """Returns tokens at given positions, at depth 0; those that are not real are padding."""
        return cls(
            x=decoder.embed(params, token_ids, positions),
            positions=positions,
            places=decoder.encode_positions(positions),
            live=real,
            shown=real,
            depth=jnp.zeros_like(positions),
        )

    def shown_at(
        self, decoder: Decoder, layer: LayerParams, index: int | Int[Array, ""]
    ) -> tuple[Float[Array, "token kv_head head_dim"], Float[Array, "token kv_head head_dim"]]:
        """Returns keys and values that frozen tokens show in a layer, flattened: maps', or zeros.

        Zeros where nothing of theirs is seen.
        """
        if self.mapped is None:
            config, (batch, width) = decoder.config, self.live.shape
            shape = (batch * width, config.num_kv_heads, config.head_dim)
            return jnp.zeros(shape, self.x.dtype), jnp.zeros(shape, self.x.dtype)
        assert isinstance(decoder, HasKVMaps)
        mapped = jax.lax.dynamic_index_in_dim(self.mapped, index - self.mapped_from, 2, False)
        mapped = flat(mapped)
        return decoder.rotate_keys(layer, mapped[:, 0], flat(self.places)), mapped[:, 1]


@runtime_checkable
class Executor(Protocol):
    """What the staircase asks of an executor. `slots` is whatever `pack` returned.

    Attributes:
      keeps_logits: whether logits of all tokens are few enough to keep: one head at an exit then
        serves all that look at them.
    """

    keeps_logits: ClassVar[bool]

    @property
    def unit(self) -> int:
        """The unit of padding of projections and MLP, in slots."""
        ...

    def key_widths(self, width: int) -> list[int]:
        """Returns the numbers of keys that attention may run over in rows of `width` tokens."""
        ...

    def pack(
        self,
        segment: int,
        live: Bool[Array, "batch token"],
        sparse: SparseQueries | None = None,
        *,
        causal: bool = True,
    ) -> Any:
        """Returns a segment's slots, of its `live` tokens; `sparse` ones see a history alone."""
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

        Keys are seen where `tokens.shown`; with `only_live_keys` only the slots' own are projected.
        A `KVCache` receives all K/V that are projected; an executor may have a cache of its own
        kind. There has to be one where layers read others' K/V (`DecoderConfig.kv_source`).
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

    def slots_run(self, slots: Any) -> Int[Array, ""]:
        """Returns the slots that one `map_slots` computes, padding included."""
        ...

    def heads_run(self, slots: Any) -> Int[Array, ""]:
        """Returns the slots that go through the head where `map_slots` calls `map_head`."""
        ...

    def work(
        self, slots: Any, layers: int, *, kv_layers: int, only_live_keys: bool = False
    ) -> Work:
        """Returns what `layers` layers on the slots execute, `kv_layers` of which make K/V."""
        ...


def over_blocks(
    total: jax.Array, sizes: tuple[int, int], step: Callable[[jax.Array, int, Any], Any], carry: Any
) -> Any:
    """Returns what `step(first, size, carry)` makes of a carry: whole blocks, then the rest.

    `sizes` are that of whole blocks, and one that divides it, of blocks for what remains of the
    `total`; the last of these may reach beyond it.
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
    rest = -(-(total - done) // least)
    with jax.named_scope(f"rest_{block}_{least}"):
        return jax.lax.fori_loop(0, rest, lambda i, c: step(done + i * least, least, c), carry)


def check_min_bucket(min_bucket: int) -> int:
    """Returns `min_bucket`; raises ValueError where it is no positive integer."""
    if isinstance(min_bucket, bool) or not isinstance(min_bucket, int) or min_bucket < 1:
        raise ValueError(
            f"Wanted a min_bucket of at least 1, in items. Got min_bucket={min_bucket!r}. "
            "Good sizes: 64 on a CPU, a few hundred on accelerators."
        )
    return min_bucket
