# SPDX-License-Identifier: Apache-2.0
"""Some layers of a model on the next tokens of one row with its K/V cache, in padded blocks."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache, init_cache, key_widths
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens, check_own_kv
from utio_jax.core.files import hash_params
from utio_jax.decoding.sampling import DRAW, SamplingParams, draw, rows_of, token_keys
from utio_jax.decoding.segments import block_at, run_segment
from utio_jax.policies.base import Boundary, Policy

CHUNKS = (1, 4, 16, 64)
"""Tokens that run at once: whole ones of the widest, then the narrowest that holds the rest."""


def first_layers(decoder: Decoder, params: Params, stop: int) -> Params:
    """Returns a model's parameters without the layers from `stop` on."""
    stacked = {id(leaf) for leaf in jax.tree.leaves(decoder.layers(params))}
    return jax.tree.map(lambda leaf: leaf[:stop] if id(leaf) in stacked else leaf, params)


def identify(decoder: Decoder, params: Params) -> bytes:
    """Returns 16 letters: a digest of a model, its config, and its weights and their types."""
    said = f"{decoder!r} {hash_params(params)}"
    return hashlib.sha256(said.encode()).hexdigest()[:16].encode()


def pieces(count: int) -> list[tuple[int, int]]:
    """Returns blocks for so many tokens: how many of each are real, and how many run.

    >>> pieces(70)
    [(64, 64), (6, 16)]
    """
    whole, rest = divmod(count, CHUNKS[-1])
    last = [(rest, min(w for w in CHUNKS if w >= rest))] if rest else []
    return [(CHUNKS[-1], CHUNKS[-1])] * whole + last


class Row:
    """One row in layers [start, stop): a cache of the model's context, and how far it is filled.

    Attributes:
      ran: tokens that have run.
      last: state of the last of them.
      slots: that ran, padding included.
    """

    def __init__(self, decoder: Decoder, params: Params, *, start: int, stop: int) -> None:
        check_own_kv(decoder, what="layers in two processes")
        config = decoder.config
        self.widths = key_widths(config.context_length, key_step=32)
        self._model, self._layers = (decoder, params), {"start": start, "stop": stop}
        nothing = jnp.zeros((1,), jnp.int32)
        dtype = jax.eval_shape(decoder.embed, params, nothing, nothing).dtype
        layers = dataclasses.replace(config, num_layers=stop, exits=(), windows=())
        self.cache = init_cache(layers, batch=1, slots=config.context_length, dtype=dtype)
        self.last, self.ran, self.slots = jnp.zeros(config.embed_dim, dtype), 0, 0

    def compile(self, policy: Policy | None = None) -> None:
        """Compiles every program that tokens of a row may need."""
        dim, start = self.last.size, self._layers["start"]
        for chunk, width in itertools.product(CHUNKS, self.widths):
            real = min(chunk, width)
            self.ran = width - real
            self.run(np.zeros((real, dim), np.float32) if start else np.zeros(real, np.int32))
        self.read(policy, rows_of([SamplingParams()]), 0, 0)
        self.ran = self.slots = 0

    def run(self, inputs: np.ndarray) -> list[tuple[Array, int]]:
        """Runs the next tokens: ids, or states at `start`; returns blocks of states, sizes."""
        found, done = [], 0
        for real, wide in pieces(len(inputs)):
            block = np.zeros((wide, *inputs.shape[1:]), inputs.dtype)
            block[:real] = inputs[done : done + real]
            width = min(each for each in self.widths if each >= self.ran + real)
            where = np.int32(self.ran), np.int32(real)
            x, self.last, self.cache = run_block(
                *self._model, self.cache, block, *where, width=width, **self._layers
            )
            found.append((x, real))
            done, self.ran, self.slots = done + real, self.ran + real, self.slots + wide
        return found

    def read(
        self, policy: Policy | None, sampling: SamplingParams, token_id: int, seed: int
    ) -> Any:
        """Returns what `read_last` does, of the last token."""
        where = np.int32(token_id), np.int32(self.ran - 1), np.uint32(seed)
        depth = self._layers["stop"]
        return read_last(*self._model, policy, sampling, self.last, *where, depth=depth)


@partial(jax.jit, static_argnames=("decoder", "start", "stop", "width"), donate_argnames=("cache",))
def run_block(  # noqa: PLR0913 (arrays of one block)
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    inputs: Int[Array, " chunk"] | Float[Array, "chunk dim"],
    first: Int[Array, ""],
    count: Int[Array, ""],
    *,
    start: int,
    stop: int,
    width: int,
) -> tuple[Float[Array, "chunk dim"], Float[Array, " dim"], KVCache]:
    """Returns states behind layers [start, stop) of the next tokens, the last one's, the cache.

    `count` inputs are real, from position `first` on; `width` slots are read. Donates the cache.
    """
    ahead = jnp.arange(inputs.shape[0], dtype=jnp.int32)[None, :]
    valid = ahead < count
    positions = jnp.where(valid, first + ahead, 0)  # Some decoders have none behind the last.
    block = block_at(decoder, positions, valid)
    x = inputs[None].astype(cache.keys.dtype)
    if not start:
        x = decoder.embed(params, inputs[None], positions)
    layers: Any = {"start": start, "stop": stop, "width": width}
    x, cache = run_segment(decoder, params, cache, x, block, **layers)
    return x[0], x[0, count - 1], cache


@partial(jax.jit, static_argnames=("decoder", "depth"))
def read_last(  # noqa: PLR0913 (arrays of one token)
    decoder: Decoder,
    params: Params,
    policy: Policy | None,
    sampling: SamplingParams,
    x: Float[Array, " dim"],
    token_id: Int[Array, ""],
    position: Int[Array, ""],
    seed: UInt32[Array, ""],
    *,
    depth: int,
) -> tuple[Int[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Returns the token behind a row's last one, its log-probability, whether to go deeper first.

    `x` is the last token's state at `depth`. Without a policy none goes deeper.
    """
    with jax.named_scope("head"):
        seen = apply_exit_lens(decoder, params, x[None], depth)
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
            depth=depth,
            decoder=decoder,
            map_live=per_token,
            map_logits=lambda function, *arrays: per_token(partial(function, logits), *arrays),
        )
        with jax.named_scope("decide"):
            goes = policy.go_deeper(0, boundary, policy.start(ids, places))[0][0, 0]
    # Draws are keyed by the length of the row, as everywhere.
    new = draw(sampling, logits[:, None], token_keys(seed[None], position[None, None] + 1, DRAW))
    total = jax.nn.logsumexp(logits[0])
    return new[0, 0], logits[0, new[0, 0]] - total, goes
