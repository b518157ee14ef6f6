# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding whose exit and draft length follow the text, after DEL.

DEL (Entezari Zarch et al. 2025, arXiv 2504.05598) reads off every verified token what each exit
would have said there, and drafts next where most tokens are expected per layer that runs. It also
ends a draft at a token of low confidence; that is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.arrays import most_probable
from utio_jax.core.decoder import (
    Decoder,
    apply_exit_lens,
    check_no_branches,
    has_exit_lens,
    name_exits,
)
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding import DecodeContext, Mode
from utio_jax.decoding.base import process
from utio_jax.decoding.cached import Block, block_at, run_segment
from utio_jax.decoding.drafting import round_keys
from utio_jax.decoding.sampling import ACCEPT, DRAW, REPLACE, verify_sampling, verify_tokens
from utio_jax.decoding.state import DecodeState, emit


@pytree
class Agreement:
    """Acceptance rate of each exit in a row, an exponential mean over rounds.

    Attributes:
      right: tokens whose draft there would have been accepted: expected ones, where they are drawn.
        At full depth, all that were verified.
    """

    right: Float[Array, "row exit"]


@pytree
class _Drafted:
    """Pending tokens so far: each row's last one and its drafts, and their states at each exit."""

    cache: KVCache
    states: Float[Array, "batch pending exit dim"]
    token_ids: Int[Array, "batch token"]
    log_q: Float[Array, "batch pending vocab"] | None


@pytree
class DynamicExits(Mode):
    """Lossless decoding whose exit and draft length minimise the cost of each row.

    Greedy tokens are the full model's, drawn ones distributed as its. What a row draws depends on
    its seed and prompt alone, up to rounding: its exit and length follow from its own tokens. What
    it costs depends on the batch, whose rows all run to the deepest exit and the longest draft.

    Attributes:
      max_draft: most drafts of a row between two deep passes; none may be chosen. Static.
      decay: weight of all that was seen before a round. Static.
    """

    name: ClassVar[str] = "dynamic_exits"
    max_draft: int = static(default=4)
    decay: float = static(default=0.95)

    @property
    def block(self) -> int:
        return self.max_draft + 1

    @property
    def prompt_kv(self) -> str:
        return "full"

    def check(self, decoder: Decoder) -> None:
        check_no_branches(decoder, what="drafts at a choice of exits")
        exits = decoder.config.exits
        if not 0 <= self.decay <= 1:
            raise ValueError(f"Wanted a decay from 0 to 1. Got decay={self.decay}.")
        if len(exits) < 2 or self.max_draft < 1:
            raise ValueError(
                "Wanted a model with an exit before its last layer, and a max_draft of at least 1 "
                f"token. Got exits={exits}, max_draft={self.max_draft}. {name_exits(decoder)} Or "
                "decode with Plain()."
            )

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        shape = len(state.lengths), len(context.decoder.config.exits)
        right = jnp.full(shape, 0.5).at[:, -1].set(1.0)
        return dataclasses.replace(state, memory=Agreement(right=right))

    def choose(self, decoder: Decoder, state: DecodeState) -> tuple[Array, Array]:
        """Returns each row's exit and draft length with most expected tokens per layer.

        With agreement `a`, `n` drafts let out `1 + a + ... + a^n` tokens, and run `n` times the
        exit's layers, plus all layers once.
        """
        right, exits = state.memory.right, decoder.config.exits
        drafts = jnp.arange(self.block, dtype=jnp.float32)
        agreement = (right[:, :-1] / right[:, -1:])[:, :, None]
        tokens = jnp.cumsum(agreement ** drafts[None, None, :], axis=2)
        early = jnp.asarray(exits[:-1], jnp.float32)
        rate = tokens / (early[:, None] * drafts[None, :] + exits[-1])[None]
        best = jnp.argmax(rate.reshape(len(rate), -1), axis=1).astype(jnp.int32)
        return best // self.block, best % self.block

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Drafts, verifies, emits accepted drafts and one token, and updates the rates."""
        decoder, sampling, active = context.decoder, context.sampling, state.active
        *early, num_layers = decoder.config.exits
        exits = jnp.asarray(early, jnp.int32)
        chosen, counts = self.choose(decoder, state)
        counts, depths = jnp.where(active, counts, 0), exits[chosen]
        deepest, rounds = jnp.max(jnp.where(active, depths, exits[0])), jnp.max(counts) + 1
        with jax.named_scope("draft"):
            drafted = self._draft(context, state, chosen, counts, deepest)
            drafts, log_q = drafted.token_ids[:, 1:-1], drafted.log_q
        with jax.named_scope("verify"):
            offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
            positions = state.positions[:, None] + offsets
            pending = (offsets <= counts[:, None]) & active[:, None]
            block, shallow = block_at(decoder, positions, pending), drafted.states
            x, cache = shallow[:, :, -1], drafted.cache
            deep, cache = _run(context, cache, x, block, deepest, deep=True)
            known = (exits <= deepest)[None, None, :, None]
            shallow = jnp.where(known, shallow, jnp.roll(deep, 1, axis=2))
            logits = _read(context, jnp.concatenate([shallow, deep[:, :, -1:]], axis=2))
            change = partial(process, context, state, lengths=positions + 1, drafts=drafts)
            allowed = jax.vmap(change, in_axes=2, out_axes=2)(logits)
            if sampling is None or log_q is None:  # Both only if greedy.
                best = most_probable(allowed)
                verified = verify_tokens(best[:, :, -1], drafts, counts)
                right = (best == best[:, :, -1:]).astype(jnp.float32)
            else:
                log_p = jax.nn.log_softmax(sampling(allowed), axis=-1)
                verified = verify_sampling(
                    log_p[:, :, -1],
                    log_q[:, :-1],
                    drafts,
                    counts,
                    accept_keys=round_keys(state, positions[:, 1:], ACCEPT),
                    replace_keys=round_keys(state, positions + 1, REPLACE),
                )
                # A draft of q is accepted under p in this share of the cases.
                right = jnp.sum(jnp.exp(jnp.minimum(log_p, log_p[:, :, -1:])), axis=-1)
        # After a wrong draft the text is another one.
        judged = active[:, None] & (offsets <= verified.accepted[:, None])
        right = jnp.sum(jnp.where(judged[:, :, None], right, 0.0), axis=1)
        right += state.memory.right * jnp.where(active, self.decay, 1.0)[:, None]
        layers = rounds * deepest + self.block * (num_layers - deepest)
        tally = state.tally.add(
            active,
            steps=1,
            drafts=counts,
            accepted=verified.accepted,
            token_layers=layers,
            key_slots=(rounds * deepest + num_layers - deepest) * float(context.width),
            attended=layers * float(context.width),
            heads=rounds + self.block * (len(early) + 1),
            exit_maps=(rounds + self.block) * sum(has_exit_lens(decoder, e) for e in early),
        )
        return emit(
            dataclasses.replace(state, cache=cache, tally=tally, memory=Agreement(right=right)),
            context.stops,
            verified.token_ids,
            verified.accepted + 1,
            logits=logits[:, :, -1],
            decided=jnp.where(offsets < verified.accepted[:, None], depths[:, None], num_layers),
            executed=jnp.full(positions.shape, num_layers, jnp.int32),
        )

    def _draft(
        self,
        context: DecodeContext,
        state: DecodeState,
        chosen: Array,
        counts: Array,
        deepest: Array,
    ) -> _Drafted:
        """Returns drafts of each row's exit; all rows run to the deepest exit in use."""
        decoder, params, sampling = context.decoder, context.params, context.sampling
        exits, (rows, block) = decoder.config.exits[:-1], (len(chosen), self.block)
        like = jax.eval_shape(decoder.embed, params, chosen, chosen)

        def step(at: jax.Array, now: _Drafted) -> _Drafted:
            positions = (state.positions + at)[:, None]
            places = block_at(decoder, positions, (state.active & (at <= counts))[:, None])
            x = decoder.embed(params, now.token_ids[:, at][:, None], positions)
            states, cache = _run(context, now.cache, x, places, deepest, deep=False)
            logits = _read(context, states, chosen)[:, 0]
            new, log_q = most_probable(logits), now.log_q
            if sampling is not None and log_q is not None:
                drawn = jax.nn.log_softmax(sampling(logits), axis=-1)
                keys = round_keys(state, positions + 1, DRAW)[:, 0]
                new = jax.vmap(jax.random.categorical)(keys, drawn).astype(jnp.int32)
                log_q = log_q.at[:, at].set(drawn)
            return _Drafted(
                cache=cache,
                states=now.states.at[:, at].set(states[:, 0]),
                token_ids=now.token_ids.at[:, at + 1].set(new),
                log_q=log_q,
            )

        none = _Drafted(
            cache=state.cache,
            states=jnp.zeros((rows, block, len(exits), like.shape[-1]), like.dtype),
            token_ids=jnp.pad(state.last_ids[:, None], ((0, 0), (0, block))),
            log_q=None if sampling is None else jnp.zeros((rows, block, decoder.config.vocab_size)),
        )
        return jax.lax.fori_loop(jnp.int32(0), jnp.max(counts) + 1, step, none)


def _run(
    context: DecodeContext, cache: KVCache, x: Array, block: Block, deepest: Array, *, deep: bool
) -> tuple[Array, KVCache]:
    """Returns the states at each exit in `[batch, token, exit, dim]`, and the cache.

    Layers run up to the deepest exit that drafts; or deep, from there, at all exits but the first.
    """
    states, exits = [], context.decoder.config.exits
    for below, depth in itertools.pairwise(exits if deep else (0, *exits[:-1])):
        runs = below >= deepest if deep else depth <= deepest
        x, cache = run_segment(
            *(context.decoder, context.params, cache, x, block),
            start=below,
            stop=jnp.where(runs, depth, below),
            bounds=(below, depth),
            width=context.width,
            layers=context.layers,
        )
        states.append(x)
    return jnp.stack(states, axis=2), cache


def _read(context: DecodeContext, states: Array, chosen: Array | None = None) -> Array:
    """Returns the logits `[batch, token, depth, vocab]` of the first exits; or of a chosen one."""
    decoder, depths = context.decoder, context.decoder.config.exits
    seen = [*jnp.moveaxis(states, 2, 0)]
    for index, depth in enumerate(depths[:-1]):
        seen[index] = apply_exit_lens(decoder, context.params, seen[index], depth)
    read = jnp.stack(seen, axis=2)
    if chosen is not None:
        read = jnp.take_along_axis(read, chosen[:, None, None, None], axis=2)[:, :, 0]
    logits = decoder.unembed(context.params, read.reshape(-1, read.shape[-1]))
    return logits.astype(jnp.float32).reshape(*read.shape[:-1], -1)
