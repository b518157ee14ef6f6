# SPDX-License-Identifier: Apache-2.0
"""Some layers of a model on the next tokens of one row with its K/V cache, in padded blocks."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.attention.cache import KVCache, init_cache, key_widths
from utio_jax.core.decoder import Decoder, Params, check_not_looped, check_own_kv
from utio_jax.decoding.cached import CachedRows, RowSlots, block_at, run_segment
from utio_jax.decoding.sampling import DRAW, SamplingParams, draw, rows_of, token_keys
from utio_jax.policies.base import Policy
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Head, Model, Reading, Readout

CHUNKS = (1, 4, 16, 64)
"""Tokens that run at once: whole ones of the widest, then the narrowest that holds the rest."""


class Row:
    """One row in layers [start, stop): a cache of the model's context, and how far it is filled.

    Attributes:
      ran: tokens that have run, and `slots` with padding.
      last: state of the last of them.
    """

    def __init__(self, decoder: Decoder, params: Params, *, start: int, stop: int) -> None:
        check_own_kv(decoder, what="layers in two processes")
        check_not_looped(decoder, what="layers in two processes")
        config = decoder.config
        self._widths = key_widths(config.context_length, key_step=32)
        self._model, self._layers = (decoder, params), {"start": start, "stop": stop}
        nothing = jnp.zeros((1,), jnp.int32)
        dtype = jax.eval_shape(decoder.embed, params, nothing, nothing).dtype
        layers = dataclasses.replace(config, num_layers=stop, exits=(), windows=())
        self.cache = init_cache(layers, batch=1, slots=config.context_length, dtype=dtype)
        self.last, self.ran, self.slots = np.zeros(config.embed_dim, dtype), 0, 0

    def compile(self, policy: Policy | None = None) -> None:
        """Compiles every program that tokens of a row may need, by running them."""
        for chunk, width in itertools.product(CHUNKS, self._widths):
            ids = np.zeros(min(chunk, width), np.int32)
            states = np.zeros((ids.size, self.last.size), self.last.dtype)
            self.ran = width - ids.size
            self.run(states if self._layers["start"] else ids)
        self.read(policy, rows_of([SamplingParams()]), 0, 0)

    def run(self, inputs: np.ndarray) -> Float[np.ndarray, "token dim"]:
        """Returns states of the next tokens at `stop`. Inputs are ids, or states at `start`."""
        states = []
        for done in range(0, len(inputs), CHUNKS[-1]):
            part = inputs[done : done + CHUNKS[-1]]
            real = len(part)
            wide = min(chunk for chunk in CHUNKS if chunk >= real)
            width = min(size for size in self._widths if size >= self.ran + real)
            block = np.resize(part, (wide, *part.shape[1:]))  # Repeated, where it is too short.
            where = np.int32(self.ran), np.int32(real)
            x, self.cache = run_block(
                *self._model, self.cache, block, *where, width=width, **self._layers
            )
            states.append(np.asarray(x)[:real])
            self.ran, self.slots = self.ran + real, self.slots + wide
        self.last = states[-1][-1]
        return np.concatenate(states)

    def read(
        self, policy: Policy | None, sampling: SamplingParams, token_id: int, seed: int
    ) -> Any:
        """Returns the result of `read_last` for the last token."""
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
) -> tuple[Float[Array, "chunk dim"], KVCache]:
    """Returns states after layers [start, stop) of the next tokens, and the cache.

    `count` inputs are real, from position `first` on; `width` slots are read. Donates the cache.
    """
    ahead = jnp.arange(inputs.shape[0], dtype=jnp.int32)[None, :]
    valid = ahead < count
    positions = jnp.where(valid, first + ahead, 0)  # Some decoders have none after the last.
    block = block_at(decoder, positions, valid)
    x = inputs[None].astype(cache.keys.dtype)
    if not start:
        x = decoder.embed(params, inputs[None], positions)
    layers: Any = {"start": start, "stop": stop, "width": width}
    x, cache = run_segment(decoder, params, cache, x, block, **layers)
    return x[0], cache


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
    """Returns a row's next token, its log-probability, and whether it should run deeper.

    `x` is the last token's state at `depth`. Without a policy none goes deeper.
    """
    ids, positions, live = token_id[None, None], position[None, None], jnp.ones((1, 1), jnp.bool_)
    tokens = Tokens.at(decoder, params, ids, positions, live)
    tokens = dataclasses.replace(tokens, x=x[None, None])
    model = Model(decoder, params, CachedRows(width=1))
    readout, goes = Readout(function=lambda logits: logits), ~live
    head = Head(model, tokens, RowSlots(live=live), depth=depth, readout=readout)
    if policy is not None:
        with jax.named_scope("decide"):
            goes, _ = policy.go_deeper(0, head.boundary(), policy.start(ids, positions))
    reading = Reading.of(model, tokens, (depth,)).add(head, live)
    _, logits, _ = reading.finish(model, tokens, readout)
    # Draws are keyed by the length of the row, as everywhere.
    new = draw(sampling, logits, token_keys(seed[None], positions + 1, DRAW))[0, 0]
    return new, logits[0, 0, new] - jax.nn.logsumexp(logits[0, 0]), goes[0, 0]
