# SPDX-License-Identifier: Apache-2.0
"""Picks 1 of many candidates after a shared context; those that cannot win exit early.

At each depth of `Select.depths` the head scores all remaining candidates. Those more than a margin
worse than the best leave; the others are packed into a smaller static batch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, init_cache, read
from utio_jax.attention.mixing import NOWHERE, mixer_at
from utio_jax.core.arrays import check_computed, executed_heads, flat, map_head, next_token_nll
from utio_jax.core.decoder import (
    Decoder,
    Params,
    apply_exit_lens,
    check_depths,
    check_no_branches,
    has_exit_lens,
)
from utio_jax.core.documents import check_tokens
from utio_jax.core.flops import token_cost
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work, stack_work
from utio_jax.decoding.base import Plain, check_mode
from utio_jax.decoding.cached import Attend, Block, run_layers
from utio_jax.decoding.loop import read_prompts, round_up
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.requests import check_prompts
from utio_jax.engine import Engine
from utio_jax.staircase.base import Sources

_STEP = 64  # Static widths of contexts, and of what a prefix cache lacks, are multiples of it.
_MOST_SCORES = 2**24
"""Pairs of queries and keys in one pass after a prefix, as of a prompt of 4,096 tokens.

Scores of all of them are in memory: 0.6 GB of nine heads."""


@pytree
class Context:
    """The shared context of candidates, read once at full depth for any number of `select`s.

    Attributes:
      cache: keys and values of all layers that make some, one row.
      length: tokens.
      log_probs: of the token after it, in nats.
    """

    cache: KVCache
    length: Int[Array, ""]
    log_probs: Float[Array, " vocab"]


@pytree
class Select:
    """Rule for the candidates that run deeper: at most a margin worse than the best.

    A candidate's score is the mean log-likelihood of its tokens after the context, in nats. Its
    first token is predicted by the context alone, so that term is full depth's at every depth. At
    depth 0 it is all that is known: there it is compared as it is.

    Attributes:
      margins: of scores, one for each depth. A candidate leaves when the best score exceeds its own
        by more. Infinity: none leaves.
      depths: in layers, strictly increasing, below the model's; 0: before the first layer.
    """

    margins: Float[Array | np.ndarray, " boundary"]
    depths: tuple[int, ...] = static()

    def check(self, decoder: Decoder) -> None:
        """Raises ValueError: depths not the model's, margins of another number or below 0."""
        layers = decoder.config.num_layers
        margins = np.asarray(self.margins)
        inner = self.depths[1:] if tuple(self.depths[:1]) == (0,) else self.depths
        check_depths((*inner, layers), num_layers=layers)
        check_no_branches(decoder, what="candidates that leave at exits")
        if margins.shape != (len(self.depths),) or not (margins >= 0).all():
            raise ValueError(
                f"Wanted a margin of at least 0 for each of depths={self.depths}, in nats. Got "
                f"{margins.tolist()}. Use infinity where none shall leave."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """Result of `select`, on the host.

    Attributes:
      winner: the best candidate; of equals the earlier.
      scores: the last that was seen of each; full depth's of those whose depth is the model's. NaN
        for candidates of length 0.
      depths: layers that each has run.
      seen: scores at each of `Select.depths`, and at full depth; NaN of those that had left.
      work: executed work after the context, padding included, by segment.
    """

    winner: int
    scores: Float[np.ndarray, " row"]
    depths: Int[np.ndarray, " row"]
    seen: Float[np.ndarray, "boundary row"]
    work: Work

    def flops(self, decoder: Decoder, params: Params) -> float:
        """Returns the FLOPs of all matrix products after the context, padding included."""
        return token_cost(decoder, params).flops(self.work)


def read_context(
    decoder: Decoder,
    params: Params,
    token_ids: Any,
    *,
    slots: int = _STEP,
    engine: Engine | None = None,
    cache_salt: str = "",
) -> Context:
    """Returns a context at full depth, for any number of candidates after it.

    Args:
      decoder: a causal model.
      params: model parameters.
      token_ids: tokens of the context.
      slots: static width that it is padded to, or to a multiple: one program for many lengths, or
        two on a CPU, where `utio_jax.generate` reads rows with much padding by another one.
      engine: an engine of the same model, between calls of its `advance`. The context uses its
        prefix cache: tokens of a known prefix are copied, the others are read and stored.
      cache_salt: as of `Engine.submit`: contexts and requests with other salts share nothing.

    Raises:
      ValueError: no token, ids outside the vocabulary, or more than the model's context holds. A
        model that is not causal. An engine of another model, or without a prefix cache.
    """
    config = decoder.config
    check_mode(Plain(), decoder)
    (ids,) = check_prompts([token_ids], config=config, max_new_tokens=1)
    slots = min(round_up(ids.size, slots), config.context_length)
    dtype = jax.eval_shape(decoder.embed, params, ids[None], ids[None]).dtype
    cache = init_cache(config, batch=1, slots=slots, dtype=dtype)
    if engine is None:
        how = fastest_prefill(decoder, 1, slots, kv="propagate", filled=ids.size / slots)
        return _read_context(decoder, params, _padded(ids, slots), ids.size, cache, None, how)
    prefix = engine.prefix_cache_of(decoder, params)
    keys = prefix.keys_of(ids, cache_salt)
    places = prefix.find(keys[: (ids.size - 1) // prefix.block])  # The last token is always read.
    start = len(places) * prefix.block
    if places:
        cache = prefix.load(cache, 0, places)
    most = max(_STEP, _MOST_SCORES // slots // _STEP * _STEP)
    while True:
        end = min(start + most, ids.size)
        unread = _padded(ids[start:end], min(slots, round_up(end - start, _STEP)))
        context = _read_context(decoder, params, unread, end, cache, start, None)
        if end == ids.size:
            break
        start, cache = end, context.cache
    prefix.store(context.cache, 0, keys)
    return context


def _padded(ids: Int[np.ndarray, " token"], width: int) -> Int[np.ndarray, "1 slot"]:
    return np.pad(ids, (0, width - ids.size))[None]


@partial(jax.jit, static_argnames=("decoder",), donate_argnames=("cache",))
def _read_context(
    decoder: Decoder,
    params: Params,
    ids: Int[Array, "1 token"],
    length: Int[Any, ""],
    cache: KVCache,
    start: Int[Any, ""] | None,
    how: Prefill | None,
) -> Context:
    """Returns the context after reading `ids` by a prefill; None: densely, from `start` on."""
    length = jnp.asarray(length, jnp.int32)
    if how is None:
        logits, cache = read_prompts(decoder, params, ids, length[None], cache, start=start)
    else:
        logits, cache, _ = how.read(decoder, params, ids, length[None], cache, kv="propagate")
    return Context(cache=cache, length=length, log_probs=jax.nn.log_softmax(logits[0]))


def select(
    decoder: Decoder,
    params: Params,
    context: Context,
    candidates: Int[Array | np.ndarray, "row token"],
    lengths: Int[Array | np.ndarray, " row"],
    how: Select,
) -> Selected:
    """Returns the best candidate after a context; most candidates run few layers.

    Waits for the device at each depth, to learn how many are left. Compiles a program for each
    segment and width at most, per shape of the candidates. One of length 0 is none.

    Raises:
      ValueError: see `Select.check`; ids outside the vocabulary, no candidates, or ones that do not
        fit after the context.
    """
    config = decoder.config
    ids, ends = check_tokens(candidates, lengths, vocab_size=config.vocab_size)
    rows, width = ids.shape
    how.check(decoder)
    if not ends.any():
        raise ValueError("Wanted a candidate whose length is above 0. Got none.")
    known = int(context.length)
    if known + int(ends.max()) > config.context_length:
        raise ValueError(
            f"Wanted candidates of at most {config.context_length - known} tokens after a context "
            f"of {known}. Got one of {int(ends.max())}. Cut the context at its beginning."
        )
    # Every program knows the static width of the last token, which itself is never run.
    ids = np.pad(ids, ((0, 0), (0, max(0, 2 - width))))
    tokens, alive = ids.shape[1] - 1, ends > 0
    first = np.asarray(context.log_probs)[np.where(alive, ids[:, 0], 0)]
    depths = np.zeros(rows, np.int32)
    scores = np.full(rows, np.nan, np.float32)
    x = cache = None
    seen, work, start = [], [], 0
    boundaries = (*how.depths, config.num_layers)
    margins = (*np.asarray(how.margins).tolist(), np.inf)
    for stop, margin in zip(boundaries, margins, strict=True):
        chosen = np.flatnonzero(alive)
        scores[chosen], depths[chosen] = first[chosen], stop
        if stop > 0:
            size = _narrowest(rows, chosen.size)
            packed = np.pad(chosen, (0, size - chosen.size), constant_values=rows).astype(np.int32)
            x, cache, nll = _run(
                decoder, params, context, x, cache, ids, ends, packed, start=start, stop=stop
            )
            scores[chosen] += np.asarray(nll)[: chosen.size]
            scores[chosen] /= ends[chosen]
            runs, keys = size * tokens, context.cache.num_slots + tokens
            entries = Work.of(
                queries=jnp.int32(runs * (stop - start)),
                keys_values=jnp.int32(runs * len(config.kv_made(start, stop))),
                key_slots=jnp.float32(runs * (stop - start) * keys),
                heads=jnp.int32(executed_heads(runs)),
                exit_maps=jnp.int32(runs * has_exit_lens(decoder, stop)),
            )
            work.append(entries)
        seen.append(np.where(alive, scores, np.nan))
        alive = survivors(scores, alive, margin)
        start = stop
    check_computed(scores[alive], what="scores of candidates at full depth")
    return Selected(
        winner=int(np.where(np.isnan(seen[-1]), -np.inf, seen[-1]).argmax()),
        scores=scores,
        depths=depths,
        seen=np.stack(seen),
        work=jax.tree.map(np.asarray, stack_work(work)),
    )


def _narrowest(rows: int, least: int) -> int:
    """Returns the smallest of a number of rows, its half, its quarter, ... that is enough."""
    while (half := -(-rows // 2)) < rows and half >= least:
        rows = half
    return rows


def survivors(
    scores: Float[np.ndarray, "*lead row"], alive: Bool[np.ndarray, "*lead row"], margin: float
) -> Bool[np.ndarray, "*lead row"]:
    """Returns which of the candidates `alive` run deeper: at most `margin` worse than the best.

    A score of NaN decides nothing: that one goes on.
    """
    bar = np.where(alive & ~np.isnan(scores), scores, -np.inf).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return alive & ~(bar - scores > margin)


@partial(jax.jit, static_argnames=("decoder", "start", "stop"), donate_argnames=("x", "cache"))
def _run(  # noqa: PLR0913 (arrays of one segment)
    decoder: Decoder,
    params: Params,
    context: Context,
    x: Float[Array, "row input dim"] | None,
    cache: KVCache | None,
    ids: Int[Array, "row token"],
    lengths: Int[Array, " row"],
    rows: Int[Array, " packed"],
    *,
    start: int,
    stop: int,
) -> tuple[Float[Array, "row input dim"], KVCache, Float[Array, " packed"]]:
    """Returns states after layers [start, stop) of some rows, the cache, and their scores.

    That is the log-likelihood of all tokens but the first, summed. A row past the end fills up.
    Candidates' own K/V lie in a cache of theirs, a slot for each token. The first run makes it.
    """
    labels, ends = (a.at[rows].get(mode="fill", fill_value=0) for a in (ids, lengths))
    slots, tokens = context.cache.num_slots, ids.shape[1] - 1
    own = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows.size, tokens))
    real = own < ends[:, None] - 1
    positions = jnp.where(real, context.length + own, 0)
    if x is None or cache is None:
        states_in = decoder.embed(params, labels[:, :-1], positions)
        x = jnp.zeros((len(ids), *states_in.shape[1:]), states_in.dtype)
        cache = init_cache(decoder.config, batch=len(ids), slots=tokens, dtype=states_in.dtype)
    else:
        states_in = x.at[rows].get(mode="fill", fill_value=0)
    before = jnp.arange(slots, dtype=jnp.int32)
    before = jnp.where(before < context.length, before, NOWHERE)
    before = jnp.broadcast_to(before, (rows.size, slots))
    key_positions = jnp.concatenate([before, jnp.where(real, positions, NOWHERE)], axis=1)

    def attention(cache: KVCache, sources: Sources) -> Attend:
        shared = read(context.cache, sources, width=slots)
        keys, values = (
            jnp.concatenate([jnp.broadcast_to(old, (rows.size, *old.shape[1:])), new], axis=1)
            for old, new in zip(shared, read(cache, sources, width=tokens, rows=rows), strict=True)
        )

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix = mixer_at(decoder, index)
            return mix(queries, keys, values, mix.visible(positions, key_positions))

        return attend

    block = Block(positions=own, valid=real, places=decoder.encode_positions(positions), rows=rows)
    with jax.named_scope("select"):
        states_in, cache = run_layers(
            decoder, params, cache, states_in, block, attention, start=start, stop=stop
        )
    with jax.named_scope("head"):
        states = apply_exit_lens(decoder, params, flat(states_in), stop)
        nll = map_head(decoder, params, next_token_nll, states, flat(labels[:, 1:]))
    nll = jnp.where(real, nll.reshape(real.shape), 0.0)
    return x.at[rows].set(states_in, mode="drop"), cache, -jnp.sum(nll, axis=1)
