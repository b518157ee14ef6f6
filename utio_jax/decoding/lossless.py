# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding: the first layers draft, the full model verifies. Output as at full depth.

Self-speculative decoding as in LayerSkip (Elhoushi et al. 2024), for any batch size:

    [e, L)             # # # #        one deep pass over all pending tokens, from stored states
    [0, e)    #  #  #  #              drafts, one after the other; their K/V are the full model's
    token     c  d0 d1 d2

`c` is the last token that is out; drafts `d0 d1 d2` come from the exit's own head. The deep pass
yields the full model's distribution after each of them; what agrees is let out, plus one token of
its own. Nothing is let out before that. The shallow layers never run twice for the same token.

Drafts may also be copied from the row's own text (`drafter="ngram"`): then no layer runs for them,
and one pass of all layers verifies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, fill
from utio_jax.core.arrays import flat, most_probable
from utio_jax.core.decoder import (
    Decoder,
    Params,
    apply_exit_lens,
    has_exit_lens,
    name_exits,
    reduced_head,
)
from utio_jax.core.documents import check_ids
from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.rows import put_rows
from utio_jax.decoding.base import ModeBase, Setting
from utio_jax.decoding.drafting import EntropyAbove, GapBelow, NGram
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

Drafter = Literal["exit", "ngram"]
"""What drafts: an exit of the model, or the row's own text."""


def lossless_for(
    decoder: Decoder, drafter: Drafter | None = None, *, max_draft: int = 4
) -> Lossless:
    """Returns the default `Lossless` of a model: the drafts that were fastest in measurements.

    A model trained at its exits drafts at the one next to 3/8 of its layers, which was faster than
    copies at batch 1 and 8; all others copy from the text: exits read through a lens that was
    fitted afterwards slowed decoding down (results/decoding.md, results/stock_model.md).

    Args:
      decoder: the model.
      drafter: `"exit"` or `"ngram"`; None: the faster one.
      max_draft: most drafts of a row between two deep passes.

    Raises:
      ValueError: another drafter, or `"exit"` for a model without early exits.
    """
    early = decoder.config.exits[:-1]
    if drafter is None:
        trained = bool(early) and not has_exit_lens(decoder, early[0])
        drafter = "exit" if trained else "ngram"
    # Its own check names what is wrong with another drafter, or with no exit at all.
    exit_ = None
    if drafter == "exit":
        wanted = 3 * decoder.config.num_layers / 8
        exit_ = min(early, key=lambda depth: abs(depth - wanted), default=1)
    mode = Lossless(exit=exit_, drafter=drafter, max_draft=max_draft)
    mode.check(decoder)
    return mode


@pytree
class Lossless(ModeBase):
    """Drafts at an exit or by n-gram, verified by all layers; rows accept different lengths.

    Greedy: every token is the argmax of the full model on the tokens before it. Drawing: every
    token is distributed as the full model's. Both up to rounding, which depends on the shapes of a
    pass.

    Attributes:
      exit: layers that draft: one of the model's exits; None with `drafter="ngram"`. Static.
      max_draft: most drafts of a row between two deep passes. Static.
      stop: which tokens are hard: the row stops drafting there and waits for the deep pass. Reads
        the prefix and the exit's distribution only, never the drawn token, which would bias what is
        accepted. None: never.
      drafter: `"exit"`; or `"ngram"`, which needs no exit: what followed the row's last tokens when
        they stood in its text before. Static.
      ngram: which matches count. Static.
      vocabulary: tokens among which exits draft, see `draft_vocabulary`: their head then reads
        these columns alone. None: all. What comes out is the same.
    """

    exit: int | None = static(default=None)
    max_draft: int = static(default=4)
    stop: EntropyAbove | GapBelow | None = None
    drafter: Drafter = static(default="exit")
    ngram: NGram = static(default=NGram())
    vocabulary: Int[Array | np.ndarray, " kept"] | None = None

    def __post_init__(self) -> None:
        if self.drafter not in get_args(Drafter):
            raise ValueError(
                f"Wanted a drafter of {', '.join(get_args(Drafter))}. Got {self.drafter!r}."
            )
        if self.max_draft < 1:
            raise ValueError(
                f"Wanted a max_draft of at least 1 token. Got max_draft={self.max_draft}."
            )
        if self.drafter == "ngram":
            of_exits = ("exit", "stop", "vocabulary")
            given = [name for name in of_exits if getattr(self, name) is not None]
            if given:
                raise ValueError(
                    "Wanted drafter='ngram' alone: it copies from the text, and asks no exit. Got "
                    f"{', '.join(given)} as well. Leave them out."
                )
        elif self.exit is None:
            raise ValueError(
                "Wanted an exit that drafts. Got none. For example: Lossless(exit=4), or without "
                "an exit Lossless(drafter='ngram')."
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

    def check(self, decoder: Decoder) -> None:
        if self.drafter == "ngram":
            return
        early = decoder.config.exits[:-1]
        if not early:
            raise ValueError(
                "Wanted a model that can draft: one with an exit before its last layer. Got exits="
                f"{decoder.config.exits}. {name_exits(decoder)} Or draft with drafter='ngram', or "
                "decode with Plain()."
            )
        if self.exit not in early:
            raise ValueError(
                f"Wanted an exit among the model's early exits {early}. Got exit={self.exit}."
            )
        if self.vocabulary is not None:
            check_ids(
                np.asarray(self.vocabulary),
                vocab_size=decoder.config.vocab_size,
                what="the draft vocabulary",
            )

    def segments(self, decoder: Decoder) -> int:
        return 2

    def draft_head_flops(self, decoder: Decoder, params: Params) -> float:
        if self.vocabulary is None:
            return 0.0
        head = jax.eval_shape(partial(reduced_head, decoder), params, self.vocabulary)
        position = jax.ShapeDtypeStruct((1,), jnp.int32)
        x = jax.eval_shape(decoder.embed, params, position, position)
        return count_matmul_flops(decoder.unembed, head, x)

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        head = None
        if self.vocabulary is not None:
            # Once, before the loop: the columns are copied out of the whole head.
            head = reduced_head(setting.decoder, setting.params, jnp.asarray(self.vocabulary))
        return dataclasses.replace(state, memory=_Memory(head=head))

    def admit(self, memory: _Memory, fresh: _Memory, rows: Int[Array, " row"]) -> _Memory:
        return put_rows(memory, fresh, rows)

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        decoder, sampling = setting.decoder, setting.sampling
        active, num_layers, width = state.active, decoder.config.num_layers, setting.width
        depth = self._depth
        with jax.named_scope("draft"):
            by_exit = self.drafter == "exit"
            drafted = self._draft(setting, state) if by_exit else self._copy(setting, state)
        with jax.named_scope("verify"):
            offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
            positions = state.positions[:, None] + offsets
            pending = (offsets <= drafted.counts[:, None]) & active[:, None]
            block = block_at(decoder, positions, pending)
            logits, cache, tokens = self._run_deep(setting, drafted, block)
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
        runs, guesses = drafted.rounds, jnp.minimum(drafted.rounds, self.max_draft)
        layers = runs * depth + tokens * (num_layers - depth)
        tally = state.tally.add(
            active,
            steps=1,
            drafts=drafted.counts,
            accepted=verified.accepted,
            token_layers=layers,
            key_slots=(runs * depth + num_layers - depth) * float(width),
            attended=layers * float(width),
            heads=guesses * (state.memory.head is None) + tokens,
            draft_heads=guesses * (state.memory.head is not None),
            exit_maps=guesses * has_exit_lens(decoder, depth),
        )
        state = emit(
            dataclasses.replace(state, tally=tally),
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

    @property
    def _depth(self) -> int:
        """Layers that drafts have run before they are verified."""
        return 0 if self.exit is None else self.exit

    def _run_deep(
        self, setting: Setting, drafted: _Drafted, block: Block
    ) -> tuple[Float[Array, "batch pending vocab"], KVCache, Int[Array, ""]]:
        """Returns logits of the pending tokens, the cache, and the tokens per row of the pass.

        Where drafts may be shorter than `max_draft`, the pass comes in three sizes: the smallest
        that holds every row's pending tokens runs, the others skip all their layers.
        """
        decoder, params, depth = setting.decoder, setting.params, self._depth
        varies = self.drafter != "exit" or self.stop is not None
        sizes = sorted({1, (self.block + 1) // 2, self.block}) if varies else [self.block]
        needed = jnp.max(jnp.sum(block.valid, axis=1, dtype=jnp.int32))
        passed = [(needed > size).astype(jnp.int32) for size in sizes[:-1]]
        chosen = sum(passed, start=jnp.int32(0))
        x, cache = drafted.x, drafted.cache
        layers = decoder.config.num_layers
        for number, size in enumerate(sizes):
            deep, cache = run_segment(
                decoder,
                params,
                cache,
                x[:, :size],
                jax.tree.map(lambda leaf: leaf[:, :size], block),  # noqa: B023
                start=depth,
                stop=jnp.where(chosen == number, layers, depth) if varies else layers,
                width=setting.width,
                layers=setting.layers,
                bounds=(depth, layers),
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

    def _draft(self, setting: Setting, state: DecodeState) -> _Drafted:
        """Drafts at the exit until every row is at a hard token or has `max_draft` drafts."""
        decoder, params, depth = setting.decoder, setting.params, self._depth
        batch, vocab = state.lengths.shape[0], decoder.config.vocab_size
        greedy = isinstance(setting.sampling, Greedy)
        states = jax.eval_shape(decoder.embed, params, state.last_ids, state.positions)
        start = _Drafted(
            cache=state.cache,
            x=jnp.zeros((batch, self.block, states.shape[-1]), states.dtype),
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
                decoder,
                params,
                now.cache,
                x,
                block,
                start=0,
                stop=depth,
                width=setting.width,
                layers=setting.layers,
            )
            stored = jnp.where(now.drafting[:, None, None], x, now.x[:, at][:, None])
            stored = jax.lax.dynamic_update_slice_in_dim(now.x, stored, at, axis=1)

            def rest() -> tuple[jax.Array, jax.Array, jax.Array | None]:
                q = None if now.log_q is None else jnp.zeros((batch, vocab), jnp.float32)
                return now.last, jnp.ones((batch,), jnp.bool_), q

            # The last draft needs no successor. (No cache goes through the conditional.)
            guess = partial(self._guess, setting, state, x[:, 0], positions)
            new, hard, log_q = jax.lax.cond(at < self.max_draft, guess, rest)
            goes = now.drafting & ~hard
            slot = jnp.where(goes, at, self.max_draft)
            rows = jnp.arange(batch, dtype=jnp.int32)
            return dataclasses.replace(
                now,
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

    def _guess(
        self,
        setting: Setting,
        state: DecodeState,
        x: Float[Array, "batch dim"],
        positions: Int[Array, "batch 1"],
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the exit's next tokens, whether they are hard, and the log-probabilities."""
        decoder, params, sampling = setting.decoder, setting.params, setting.sampling
        kept, head = self.vocabulary, state.memory.head
        seen = apply_exit_lens(decoder, params, x, self._depth)
        logits = decoder.unembed(params if head is None else head, seen).astype(jnp.float32)
        hard = jnp.zeros(x.shape[:1], jnp.bool_) if self.stop is None else self.stop(logits)

        def of_all(ids: jax.Array) -> jax.Array:
            return (ids if kept is None else jnp.asarray(kept)[ids]).astype(jnp.int32)

        if isinstance(sampling, Greedy):
            return of_all(most_probable(logits)), hard, None
        log_q = jax.nn.log_softmax(sampling(logits), axis=-1)
        keys = self._keys(state, positions + 1, DRAW)
        drawn = of_all(jax.vmap(jax.random.categorical)(keys[:, 0], log_q))
        if kept is not None:
            none = jnp.full((x.shape[0], decoder.config.vocab_size), -jnp.inf, jnp.float32)
            log_q = none.at[:, jnp.asarray(kept)].set(log_q)
        return drawn, hard, log_q

    def _copy(self, setting: Setting, state: DecodeState) -> _Drafted:
        """Returns drafts that follow the rows' own last tokens; no layer has run."""
        decoder = setting.decoder
        copied = self.ngram(state.token_ids, state.lengths, drafts=self.max_draft)
        offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
        ids = jnp.concatenate([state.last_ids[:, None], copied.token_ids], axis=1)
        greedy = isinstance(setting.sampling, Greedy)
        return _Drafted(
            cache=state.cache,
            x=decoder.embed(setting.params, ids, state.positions[:, None] + offsets),
            token_ids=copied.token_ids,
            log_q=None if greedy else _certain(copied.token_ids, decoder.config.vocab_size),
            counts=jnp.where(state.active, copied.counts, 0),
            last=state.last_ids,
            drafting=state.active,
            rounds=jnp.int32(0),
        )

    def _keys(self, state: DecodeState, positions: jax.Array, stream: int) -> jax.Array:
        """Returns keys that no other round uses: bits seen in one must not decide the next."""
        return token_keys(state.seeds, positions, stream, rounds=state.positions)


def _certain(token_ids: Int[Array, "*lead"], vocab: int) -> Float[Array, "*lead vocab"]:
    """Returns log-probabilities of the distributions that yield these tokens always."""
    return jnp.where(jax.nn.one_hot(token_ids, vocab, dtype=jnp.bool_), 0.0, -jnp.inf)


@pytree
class _Memory:
    """What stays from round to round.

    Attributes:
      head: parameters of the head that drafts, the same for all rows; None: the model's own.
    """

    head: Params | None


@pytree
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
      rounds: tokens that the longest row ran one by one.
    """

    cache: KVCache
    x: Float[Array, "batch pending dim"]
    token_ids: Int[Array, "batch draft"]
    log_q: Float[Array, "batch draft vocab"] | None
    counts: Int[Array, " batch"]
    last: Int[Array, " batch"]
    drafting: Bool[Array, " batch"]
    rounds: Int[Array, ""]
