# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding: the first layers draft, the full model verifies. Output as at full depth.

Self-speculative decoding as in LayerSkip (Elhoushi et al. 2024), for any batch size:

    [e, L)             # # # #        one deep pass over all pending tokens, from stored states
    [0, e)    #  #  #  #              drafts, one after the other; their K/V are the full model's
    token     c  d0 d1 d2

`c` is the last token that is out; drafts `d0 d1 d2` come from the exit's own head. The deep pass
yields the full model's distribution after each of them; what agrees is let out, plus one token of
its own. Nothing is let out before that. The shallow layers never run twice for the same token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, fill
from utio_jax.core.arrays import flat, most_probable
from utio_jax.core.decoder import Decoder, apply_exit_lens, has_exit_lens, name_exits
from utio_jax.decoding.base import ModeBase, Setting
from utio_jax.decoding.drafting import Controller, EntropyAbove, GapBelow
from utio_jax.decoding.sampling import (
    ACCEPT,
    DRAW,
    REPLACE,
    Greedy,
    token_keys,
    verify_greedy,
    verify_sampling,
)
from utio_jax.decoding.segments import Block, block_at, run_segment
from utio_jax.decoding.state import DecodeState, emit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossless(ModeBase):
    """Drafts at an exit, verified by all layers; any batch size, rows accept different lengths.

    Greedy: every token is the argmax of the full model on the tokens before it. Drawing: every
    token is distributed as the full model's. Both up to rounding, which depends on the shapes of a
    pass.

    Attributes:
      exit: layers that draft: one of the model's exits. None lets `controller` choose. Static.
      max_draft: most drafts of a row between two deep passes. Static.
      stop: which tokens are hard: the row stops drafting there and waits for the deep pass. Reads
        the prefix and the exit's distribution only, never the drawn token, which would bias what is
        accepted. None: never.
      controller: chooses exit and draft length from what was accepted so far.
    """

    exit: int | None = dataclasses.field(default=None, metadata={"static": True})
    max_draft: int = dataclasses.field(default=4, metadata={"static": True})
    stop: EntropyAbove | GapBelow | None = None
    controller: Controller | None = None

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise ValueError(
                f"Wanted a max_draft of at least 1 token. Got max_draft={self.max_draft}."
            )
        if (self.exit is None) == (self.controller is None):
            raise ValueError(
                "Wanted either an exit or a controller that chooses it. Got "
                f"exit={self.exit} and controller={self.controller}. For example: "
                "Lossless(exit=4), or Lossless(controller=Controller())."
            )

    @property
    def name(self) -> str:
        return "lossless"

    @property
    def block(self) -> int:
        return self.max_draft + 1

    @property
    def prompt_kv(self) -> str:
        return "full"

    def exits(self, decoder: Decoder) -> tuple[int, ...]:
        """Returns the exits to choose from."""
        early = decoder.config.exits[:-1]
        return early if self.exit is None else (self.exit,)

    def check(self, decoder: Decoder) -> None:
        early = decoder.config.exits[:-1]
        if not early:
            raise ValueError(
                "Wanted a model that can draft: one with an exit before its last layer. Got exits="
                f"{decoder.config.exits}. {name_exits(decoder)} Or decode with Plain()."
            )
        if self.exit is not None and self.exit not in early:
            raise ValueError(
                f"Wanted an exit among the model's early exits {early}. Got exit={self.exit}."
            )

    def segments(self, decoder: Decoder) -> int:
        return 2

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        if self.controller is None:
            return state
        memory = self.controller.start(len(self.exits(setting.decoder)))
        return dataclasses.replace(state, memory=memory)

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        decoder, params, sampling = setting.decoder, setting.params, setting.sampling
        active, num_layers, width = state.active, decoder.config.num_layers, setting.width
        exits = self.exits(decoder)
        chosen, length = jnp.int32(0), jnp.int32(self.max_draft)
        if self.controller is not None:
            chosen, length = self.controller.choose(
                state.memory, decoder, params, exits=exits, max_draft=self.max_draft
            )
        depth = jnp.asarray(exits, jnp.int32)[chosen]
        with jax.named_scope("draft"):
            drafted = self._draft(setting, state, depth, length)
        with jax.named_scope("verify"):
            offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
            positions = state.positions[:, None] + offsets
            pending = (offsets <= drafted.counts[:, None]) & active[:, None]
            block = block_at(decoder, positions, pending)
            logits, cache, tokens = self._run_deep(setting, drafted, block, depth)
            if isinstance(sampling, Greedy) or drafted.log_q is None:  # None only if greedy.
                verified = verify_greedy(logits, drafted.token_ids, drafted.counts)
            else:
                verified = verify_sampling(
                    jax.nn.log_softmax(sampling(logits), axis=-1),
                    drafted.log_q,
                    drafted.token_ids,
                    drafted.counts,
                    accept_keys=self._keys(state, positions[:, 1:], ACCEPT),
                    replace_keys=self._keys(state, positions + 1, REPLACE),
                )
        # The row's last draft runs no head; its distribution was not needed.
        runs = drafted.rounds
        layers = runs * depth + tokens * (num_layers - depth)
        tally = state.tally.add(
            active,
            steps=1,
            drafts=drafted.counts,
            accepted=verified.accepted,
            token_layers=layers,
            key_slots=(runs * depth + num_layers - depth) * float(width),
            attended=layers * float(width),
            heads=jnp.minimum(runs, length) + tokens,
            exit_maps=jnp.minimum(runs, length) * any(has_exit_lens(decoder, e) for e in exits),
        )
        memory = state.memory
        if self.controller is not None:
            memory = self.controller.observe(
                memory,
                chosen,
                accepted=jnp.sum(jnp.where(active, verified.accepted, 0)),
                rejected=jnp.sum(active & (verified.accepted < drafted.counts)),
            )
        state = emit(
            dataclasses.replace(state, memory=memory, tally=tally),
            setting.stops,
            verified.token_ids,
            verified.accepted + 1,
            logits=logits,
            decided=jnp.where(offsets < verified.accepted[:, None], depth, num_layers),
            executed=jnp.full(positions.shape, num_layers, jnp.int32),
        )
        # Rejected drafts are rolled back: their slots lie beyond the watermarks and are written
        # again before any later query sees them.
        lengths = jnp.where(active, state.positions, cache.lengths)
        return dataclasses.replace(state, cache=fill(cache, lengths))

    def _run_deep(
        self, setting: Setting, drafted: _Drafted, block: Block, depth: Int[Array, ""]
    ) -> tuple[Float[Array, "batch pending vocab"], KVCache, Int[Array, ""]]:
        """Returns logits of the pending tokens, the cache, and the tokens per row of the pass.

        Where drafts may be shorter than `max_draft`, the pass comes in three sizes: the smallest
        that holds every row's pending tokens runs, the others skip all their layers.
        """
        decoder, params = setting.decoder, setting.params
        varies = self.stop is not None or self.controller is not None
        sizes = sorted({1, (self.block + 1) // 2, self.block}) if varies else [self.block]
        needed = jnp.max(jnp.sum(block.valid, axis=1, dtype=jnp.int32))
        passed = [(needed > size).astype(jnp.int32) for size in sizes[:-1]]
        chosen = sum(passed, start=jnp.int32(0))
        x, cache = drafted.x, drafted.cache
        for number, size in enumerate(sizes):
            deep, cache = run_segment(
                decoder,
                params,
                cache,
                x[:, :size],
                jax.tree.map(lambda leaf: leaf[:, :size], block),  # noqa: B023
                start=depth,
                stop=jnp.where(chosen == number, decoder.config.num_layers, depth),
                width=setting.width,
            )
            x = jnp.concatenate([deep, x[:, size:]], axis=1)

        def head(size: int) -> Callable[[], jax.Array]:
            def run() -> jax.Array:
                logits = decoder.unembed(params, flat(x[:, :size])).astype(jnp.float32)
                logits = logits.reshape(x.shape[0], size, -1)
                return jnp.pad(logits, ((0, 0), (0, self.block - size), (0, 0)))

            return run

        logits = jax.lax.switch(chosen, [head(size) for size in sizes])
        return logits, cache, jnp.asarray(sizes, jnp.int32)[chosen]

    def _draft(
        self,
        setting: Setting,
        state: DecodeState,
        depth: Int[Array, ""],
        length: Int[Array, ""],
    ) -> _Drafted:
        """Drafts until every row is at a hard token or has `length` drafts."""
        decoder, params, sampling = setting.decoder, setting.params, setting.sampling
        batch = state.lengths.shape[0]
        greedy = isinstance(sampling, Greedy)
        vocab = decoder.config.vocab_size
        x = jax.eval_shape(decoder.embed, params, state.last_ids, state.positions)
        start = _Drafted(
            cache=state.cache,
            x=jnp.zeros((batch, self.block, x.shape[-1]), x.dtype),
            token_ids=jnp.zeros((batch, self.max_draft), jnp.int32),
            log_q=None if greedy else jnp.zeros((batch, self.max_draft, vocab), jnp.float32),
            counts=jnp.zeros((batch,), jnp.int32),
            last=state.last_ids,
            drafting=state.active,
            rounds=jnp.int32(0),
        )

        def step(now: _Drafted) -> _Drafted:
            at = now.rounds
            positions = (state.positions + at)[:, None]
            block = block_at(decoder, positions, now.drafting[:, None])
            x = decoder.embed(params, now.last[:, None], positions)
            x, cache = run_segment(
                decoder, params, now.cache, x, block, start=0, stop=depth, width=setting.width
            )
            stored = jnp.where(now.drafting[:, None, None], x, now.x[:, at][:, None])
            stored = jax.lax.dynamic_update_slice(now.x, stored, (0, at, 0))

            def guess() -> tuple[jax.Array, jax.Array, jax.Array | None]:
                seen = apply_exit_lens(decoder, params, x[:, 0], depth)
                logits = decoder.unembed(params, seen).astype(jnp.float32)
                hard = jnp.zeros((batch,), jnp.bool_) if self.stop is None else self.stop(logits)
                if greedy:
                    return most_probable(logits), hard, None
                log_q = jax.nn.log_softmax(sampling(logits), axis=-1)
                keys = self._keys(state, positions + 1, DRAW)
                drawn = jax.vmap(jax.random.categorical)(keys[:, 0], log_q)
                return drawn.astype(jnp.int32), hard, log_q

            def rest() -> tuple[jax.Array, jax.Array, jax.Array | None]:
                q = None if greedy else jnp.zeros((batch, vocab), jnp.float32)
                return now.last, jnp.ones((batch,), jnp.bool_), q

            # The last of `length` drafts needs no successor. (No cache goes through the
            # conditional.)
            new, hard, log_q = jax.lax.cond(at < length, guess, rest)
            goes = now.drafting & ~hard
            slot = jnp.where(goes, at, self.max_draft)
            rows = jnp.arange(batch, dtype=jnp.int32)
            return _Drafted(
                cache=cache,
                x=stored,
                token_ids=now.token_ids.at[rows, slot].set(new, mode="drop"),
                log_q=(
                    None if now.log_q is None else now.log_q.at[rows, slot].set(log_q, mode="drop")
                ),
                counts=now.counts + goes,
                last=jnp.where(goes, new, now.last),
                drafting=goes,
                rounds=at + 1,
            )

        return jax.lax.while_loop(lambda now: jnp.any(now.drafting), step, start)

    def _keys(self, state: DecodeState, positions: jax.Array, stream: int) -> jax.Array:
        """Returns keys that no other round uses: bits seen in one must not decide the next."""
        return token_keys(state.seeds, positions, stream, rounds=state.tally.steps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drafted:
    """Drafts of a round, and what verification needs of them.

    Attributes:
      cache: with the shallow K/V of all pending tokens.
      x: their states at the exit.
      token_ids: the drafts.
      log_q: the distributions that they were drawn from; None where nothing is drawn.
      counts: drafts per row.
      last: each row's last token, draft or not.
      drafting: rows that go on.
      rounds: tokens that the longest row ran.
    """

    cache: KVCache
    x: Float[Array, "batch pending dim"]
    token_ids: Int[Array, "batch draft"]
    log_q: Float[Array, "batch draft vocab"] | None
    counts: Int[Array, " batch"]
    last: Int[Array, " batch"]
    drafting: Bool[Array, " batch"]
    rounds: Int[Array, ""]
