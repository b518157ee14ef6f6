# SPDX-License-Identifier: Apache-2.0
"""A model cut in two at an exit: each part runs its own layers, and keeps K/V of these alone.

    shallow = part_of(decoder, params, stop=8)           # embedding, layers 0 to 7, the exit's head
    deep = part_of(decoder, params, start=8)             # layers 8 to 15, the last head

Blocks of tokens are padded to a few widths (`Widths`), so that few programs ever compile.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache, init_cache, key_widths, read, write
from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, LayerParams, Params, apply_exit_lens, check_own_kv
from utio_jax.core.files import hash_params
from utio_jax.core.layer import keys_values_of, run_layer
from utio_jax.core.lens import Lensed
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.sampling import DRAW, SamplingParams, draw, token_keys
from utio_jax.policies.base import Boundary, Policy
from utio_jax.prompts.maps import KVMapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """The shapes that compile: one program for each chunk and each number of key slots.

    Attributes:
      chunks: tokens that run at once, ascending. More of them take several of the widest, the rest
        the narrowest that holds it.
      key_step: rows hold a multiple of this, in tokens, and attention reads at most four different
        multiples.
    """

    chunks: tuple[int, ...] = (1, 4, 16, 64)
    key_step: int = 128

    def __post_init__(self) -> None:
        ascending = [*self.chunks] == sorted({*self.chunks})
        if not self.chunks or not ascending or self.chunks[0] < 1 or self.key_step < 1:
            raise ValueError(
                "Wanted chunks of at least 1 token, ascending, and a key_step of at least 1. Got "
                f"chunks={self.chunks}, key_step={self.key_step}. For example: chunks=(1, 16)."
            )

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """Returns blocks for so many tokens: how many of each are real, and how many run.

        >>> Widths().pieces(70)
        [(64, 64), (6, 16)]
        """
        widest = self.chunks[-1]
        whole, rest = divmod(count, widest)
        found = [(widest, widest)] * whole
        return [*found, (rest, min(w for w in self.chunks if w >= rest))] if rest else found

    def keys(self, slots: int, end: int) -> int:
        """Returns how many of a row's slots a block reads that ends before position `end`."""
        return min(w for w in key_widths(slots, key_step=self.key_step) if w >= end)


@pytree
class Part:
    """Layers [start, stop) of a model, and what is no layer: embedding, last norm, head.

    Attributes:
      params: of the model, without its layers.
      layers: each one's parameters; None where they are the other part's.
      decoder: the model. Static.
      start: first layer. Static.
      stop: layer to stop before. Static.
    """

    params: Params
    layers: tuple[LayerParams | None, ...]
    decoder: Decoder = static()
    start: int = static()
    stop: int = static()

    @property
    def dtype(self) -> Any:
        """Of states."""
        nothing = jnp.zeros((1,), jnp.int32)
        return jax.eval_shape(self.decoder.embed, self.params, nothing, nothing).dtype

    def empty_cache(self, slots: int) -> KVCache:
        """Returns a cache of one row, of this part's layers alone."""
        layers = self.stop - self.start
        own = dataclasses.replace(self.decoder.config, num_layers=layers, exits=(), windows=())
        return init_cache(own, batch=1, slots=slots, dtype=self.dtype)


def part_of(decoder: Decoder, params: Params, *, start: int = 0, stop: int | None = None) -> Part:
    """Returns layers [start, stop) of a model as arrays of their own: the rest may be freed.

    Raises:
      ValueError: no such layers.
    """
    check_own_kv(decoder, what="a part of it in another process")
    layers = decoder.config.num_layers
    stop = layers if stop is None else stop
    if not 0 <= start < stop <= layers:
        raise ValueError(
            f"Wanted some of the model's {layers} layers, 0 <= start < stop. Got start={start}, "
            f"stop={stop}. For example: stop={max(1, layers // 2)}."
        )
    stack = decoder.layers(params)
    stacked = {id(leaf) for leaf in jax.tree.leaves(stack)}
    return Part(
        params=jax.tree.map(lambda leaf: leaf[:0] if id(leaf) in stacked else leaf, params),
        layers=tuple(
            jax.tree.map(lambda leaf, i=index: leaf[i], stack) if index >= start else None
            for index in range(stop)
        ),
        decoder=decoder,
        start=start,
        stop=stop,
    )


def identify(decoder: Decoder, params: Params) -> str:
    """Returns a digest of a whole model: weights, their types, and the config of its layers.

    Edge and cloud have to agree on it. What changes no layer may differ between them: a lens, KV
    maps, where exits are, the context, and which tokens begin and end a text.
    """
    while isinstance(decoder, Lensed | KVMapped):
        decoder, params = decoder.decoder, params["model"]
    open_ = {"exits": (), "context_length": 1, "bos_id": None, "eos_ids": ()}
    config = dataclasses.replace(decoder.config, **open_)
    said = f"{type(decoder).__name__} {config!r} {hash_params(params)}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


class Ran(NamedTuple):
    """States behind a part's last layer (padding means nothing), the last real one, the cache."""

    states: Float[Array, "chunk dim"]
    last: Float[Array, " dim"]
    cache: KVCache


@partial(jax.jit, static_argnames=("width",), donate_argnames=("cache",))
def run_part(
    part: Part,
    cache: KVCache,
    inputs: Int[Array, " chunk"] | Float[Array, "chunk dim"],
    first: Int[Array, ""],
    count: Int[Array, ""],
    *,
    width: int,
) -> Ran:
    """Runs a part's layers on the next tokens of a row.

    Inputs are token ids where the part begins at layer 0, else states at its `start`; `count` of
    them are real, from position `first` on. The row's cache is donated; `width` slots are read.
    """
    decoder = part.decoder
    ahead = jnp.arange(inputs.shape[0], dtype=jnp.int32)[None, :]
    valid = ahead < count
    positions = jnp.where(valid, first + ahead, 0)  # Some decoders have none behind the last.
    x = inputs.astype(part.dtype) if part.start else inputs
    if not part.start:
        x = decoder.embed(part.params, inputs[None], positions)[0]
    places = flat(decoder.encode_positions(positions))
    slots = jnp.arange(width, dtype=jnp.int32)[None, :]
    with jax.named_scope(f"layers_{part.start}_{part.stop}"):
        for index in range(part.start, part.stop):
            layer, own = part.layers[index], jnp.int32(index - part.start)
            keys, values = (y[None] for y in keys_values_of(decoder, layer, x, places))
            cache = write(cache, own, keys, values, positions=positions, valid=valid)
            mix = mixer_at(decoder, jnp.int32(index))
            seen = (*read(cache, (own,), width=width), mix.visible(positions, slots))

            def attend(queries: jax.Array, mix: Any = mix, seen: Any = seen) -> jax.Array:
                return mix(queries[None], *seen)[0]

            x = run_layer(decoder, layer, x, places, attend)
    return Ran(states=x, last=x[count - 1], cache=cache)


class Next(NamedTuple):
    """The token that comes next, its log-probability in nats, whether to ask deeper layers."""

    token_id: Int[Array, ""]
    log_probability: Float[Array, ""]
    goes: Bool[Array, ""]


@jax.jit
def read_last(
    part: Part,
    policy: Policy | None,
    sampling: SamplingParams,
    x: Float[Array, " dim"],
    token_id: Int[Array, ""],
    position: Int[Array, ""],
    seed: UInt32[Array, ""],
) -> Next:
    """Returns the token behind a row's last one, and whether a policy asks for more layers first.

    `x` is the last token's state behind the part's last layer. Without a policy none is asked for.
    """
    decoder, params = part.decoder, part.params
    with jax.named_scope("head"):
        seen = apply_exit_lens(decoder, params, x[None], part.stop)
        logits = decoder.unembed(params, seen).astype(jnp.float32)
    ids, places, goes = token_id[None, None], position[None, None], jnp.bool_(False)

    def per_token(function: Any, *arrays: jax.Array) -> jax.Array:
        return function(*(array[:, 0] for array in arrays))[:, None]

    if policy is not None:
        boundary = Boundary(
            x=x[None, None],
            positions=places,
            live=jnp.ones_like(places, jnp.bool_),
            params=params,
            depth=part.stop,
            decoder=decoder,
            map_live=per_token,
            map_logits=lambda function, *arrays: per_token(
                lambda *blocks: function(logits, *blocks), *arrays
            ),
        )
        with jax.named_scope("decide"):
            goes = policy.go_deeper(0, boundary, policy.start(ids, places))[0][0, 0]
    # Draws are keyed by the length of the row, as everywhere.
    new = draw(sampling, logits[:, None], token_keys(seed[None], position[None, None] + 1, DRAW))
    token = new[0, 0]
    total = jax.nn.logsumexp(logits[0])
    return Next(token_id=token, log_probability=logits[0, token] - total, goes=goes)


def all_shapes(part: Part, widths: Widths, slots: int) -> None:
    """Compiles every program that rows of so many slots may need of a part's layers."""
    wide = part.decoder.config.embed_dim
    for chunk in widths.chunks:
        for width in key_widths(slots, key_step=widths.key_step):
            shape = (chunk, wide) if part.start else (chunk,)
            inputs = np.zeros(shape, np.float32 if part.start else np.int32)
            cache, where = part.empty_cache(slots), (np.int32(0), np.int32(1))
            jax.block_until_ready(run_part(part, cache, inputs, *where, width=width))
