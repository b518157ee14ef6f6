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
and one pass of all layers verifies them. `drafter="both"` copies where the text repeats itself or
the exit agrees with it, and drafts at the exit elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

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
from utio_jax.decoding.base import ModeBase, Setting
from utio_jax.decoding.drafting import (
    Controller,
    Copied,
    EntropyAbove,
    GapBelow,
    NGram,
    Observed,
)
from utio_jax.decoding.sampling import (
    ACCEPT,
    DRAW,
    REPLACE,
    Greedy,
    Verified,
    token_keys,
    verify_greedy,
    verify_sampling,
)
from utio_jax.decoding.segments import Block, block_at, run_segment
from utio_jax.decoding.state import RELEASED, DecodeState, emit
from utio_jax.devices.rows import put_rows

Drafter = Literal["exit", "ngram", "both"]
"""What drafts: an exit of the model, the row's own text, or whichever has the longer draft."""


def check_drafter(drafter: Any) -> Drafter:
    """Returns `drafter`, once it is known to be one.

    Raises:
      ValueError: it is not.
    """
    if drafter not in get_args(Drafter):
        raise ValueError(f"Wanted a drafter of {', '.join(get_args(Drafter))}. Got {drafter!r}.")
    return drafter


@pytree
class Lossless(ModeBase):
    """Drafts at an exit or by n-gram, verified by all layers; rows accept different lengths.

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
      drafter: `"exit"`; `"ngram"`, which needs no exit: what followed the row's last tokens when
        they stood in its text before; or `"both"`: a match of `ngram.longest` tokens is copied, a
        shorter one if the exit guesses its first token, too, and otherwise the exit drafts. Static.
      ngram: which matches count. Static.
      vocabulary: tokens among which exits draft, see `draft_vocabulary`: their head then reads
        these columns alone. None: all. What comes out is the same.
    """

    exit: int | None = static(default=None)
    max_draft: int = static(default=4)
    stop: EntropyAbove | GapBelow | None = None
    controller: Controller | None = None
    drafter: Drafter = static(default="exit")
    ngram: NGram = static(default=NGram())
    vocabulary: Int[Array | np.ndarray, " kept"] | None = None

    def __post_init__(self) -> None:
        check_drafter(self.drafter)
        if self.max_draft < 1:
            raise ValueError(
                f"Wanted a max_draft of at least 1 token. Got max_draft={self.max_draft}."
            )
        if self.drafter == "ngram":
            of_exits = ("exit", "controller", "stop", "vocabulary")
            given = [name for name in of_exits if getattr(self, name) is not None]
            if given:
                raise ValueError(
                    "Wanted drafter='ngram' alone: it copies from the text, and asks no exit. Got "
                    f"{', '.join(given)} as well. Leave them out, or use drafter='both'."
                )
        elif (self.exit is None) == (self.controller is None):
            raise ValueError(
                "Wanted either an exit or a controller that chooses it. Got "
                f"exit={self.exit} and controller={self.controller}. For example: "
                "Lossless(exit=4), Lossless(controller=Controller()), or without an exit "
                "Lossless(drafter='ngram')."
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
        """Returns the exits to choose from; none where no exit drafts."""
        if self.drafter == "ngram":
            return ()
        early = decoder.config.exits[:-1]
        return early if self.exit is None else (self.exit,)

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
        if self.exit is not None and self.exit not in early:
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
        decoder, observed, head = setting.decoder, None, None
        if self.controller is not None:
            batch = state.lengths.shape[0]
            observed = self.controller.start(len(self.exits(decoder)), batch=batch)
        if self.vocabulary is not None:
            # Once, before the loop: the columns are copied out of the whole head.
            head = reduced_head(decoder, setting.params, jnp.asarray(self.vocabulary))
        return dataclasses.replace(state, memory=_Memory(observed=observed, head=head))

    def admit(self, memory: _Memory, fresh: _Memory, rows: Int[Array, " row"]) -> _Memory:
        return put_rows(memory, fresh, rows)

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        decoder, params, sampling = setting.decoder, setting.params, setting.sampling
        active, num_layers, width = state.active, decoder.config.num_layers, setting.width
        exits, memory = self.exits(decoder), state.memory
        chosen, length = jnp.int32(0), jnp.int32(self.max_draft)
        if self.controller is not None:
            chosen, length = self.controller.choose(
                # Rows that have ended still know this batch's text; released ones do not.
                memory.observed.total(state.reason != RELEASED),
                decoder,
                params,
                exits=exits,
                max_draft=self.max_draft,
            )
        depth = jnp.asarray(exits, jnp.int32)[chosen] if exits else jnp.int32(0)
        with jax.named_scope("draft"):
            copied = None
            if self.drafter != "exit":
                copied = self.ngram(state.token_ids, state.lengths, drafts=self.max_draft)
            drafted = self._start(setting, state, copied)
            if exits:
                drafted = self._draft(setting, state, drafted, copied, depth, length)
            if copied is not None:
                drafted = self._copy(setting, state, drafted, copied, depth)
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
        runs, guesses = drafted.rounds, jnp.minimum(drafted.rounds, length)
        layers = (runs + drafted.together) * depth + tokens * (num_layers - depth)
        passes = runs + (drafted.together > 0)
        tally = state.tally.add(
            active,
            steps=1,
            drafts=drafted.counts,
            accepted=verified.accepted,
            token_layers=layers,
            key_slots=(passes * depth + num_layers - depth) * float(width),
            attended=layers * float(width),
            heads=guesses * (memory.head is None) + tokens,
            draft_heads=guesses * (memory.head is not None),
            exit_maps=guesses * any(has_exit_lens(decoder, e) for e in exits),
        )
        guessed = jnp.where(drafted.copied, 0, depth)
        if self.controller is not None:
            observed = self._observe(memory.observed, drafted, verified, chosen, active)
            memory = dataclasses.replace(memory, observed=observed)
        state = emit(
            dataclasses.replace(state, memory=memory, tally=tally),
            setting.stops,
            verified.token_ids,
            verified.accepted + 1,
            logits=logits,
            decided=jnp.where(
                offsets < verified.accepted[:, None],
                jnp.pad(guessed, ((0, 0), (0, 1))),
                num_layers,
            ),
            executed=jnp.full(positions.shape, num_layers, jnp.int32),
        )
        # Rejected drafts are rolled back: their slots lie beyond the watermarks and are written
        # again before any later query sees them.
        lengths = jnp.where(active, state.positions, cache.lengths)
        return dataclasses.replace(state, cache=fill(cache, lengths))

    def _observe(
        self,
        observed: Observed,
        drafted: _Drafted,
        verified: Verified,
        chosen: Int[Array, ""],
        active: Bool[Array, " batch"],
    ) -> Observed:
        """Returns the controller's memory after a round: of the exit's own drafts alone."""
        assert self.controller is not None
        places = jnp.arange(self.max_draft, dtype=jnp.int32)[None, :]
        own, accepted = active[:, None] & ~drafted.copied, verified.accepted[:, None]
        wrong = (places == accepted) & (places < drafted.counts[:, None])
        return self.controller.observe(
            observed,
            chosen,
            accepted=jnp.sum(own & (places < accepted), axis=1, dtype=jnp.int32),
            rejected=jnp.sum(own & wrong, axis=1, dtype=jnp.int32),
        )

    def _run_deep(
        self, setting: Setting, drafted: _Drafted, block: Block, depth: Int[Array, ""]
    ) -> tuple[Float[Array, "batch pending vocab"], KVCache, Int[Array, ""]]:
        """Returns logits of the pending tokens, the cache, and the tokens per row of the pass.

        Where drafts may be shorter than `max_draft`, the pass comes in three sizes: the smallest
        that holds every row's pending tokens runs, the others skip all their layers.
        """
        decoder, params = setting.decoder, setting.params
        varies = self.drafter != "exit" or self.stop is not None or self.controller is not None
        sizes = sorted({1, (self.block + 1) // 2, self.block}) if varies else [self.block]
        needed = jnp.max(jnp.sum(block.valid, axis=1, dtype=jnp.int32))
        passed = [(needed > size).astype(jnp.int32) for size in sizes[:-1]]
        chosen = sum(passed, start=jnp.int32(0))
        x, cache = drafted.x, drafted.cache
        exits = self.exits(decoder)
        # A program for each size and layer: too long a program where many exits may draft.
        layers = setting.layers if len(exits) <= 1 else None
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
                layers=layers,
                bounds=(min(exits, default=0), decoder.config.num_layers),
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

    def _start(self, setting: Setting, state: DecodeState, copied: Copied | None) -> _Drafted:
        """Returns the round before its first draft."""
        batch, vocab = state.lengths.shape[0], setting.decoder.config.vocab_size
        greedy = isinstance(setting.sampling, Greedy)
        x = jax.eval_shape(setting.decoder.embed, setting.params, state.last_ids, state.positions)
        follows = jnp.zeros((batch,), jnp.bool_)
        if copied is not None:
            # With no exit to ask, every match is copied.
            trusted = self.ngram.longest if self.drafter == "both" else 1
            follows = state.active & (copied.matched >= trusted)
        return _Drafted(
            cache=state.cache,
            x=jnp.zeros((batch, self.block, x.shape[-1]), x.dtype),
            token_ids=jnp.zeros((batch, self.max_draft), jnp.int32),
            log_q=None if greedy else jnp.zeros((batch, self.max_draft, vocab), jnp.float32),
            copied=jnp.zeros((batch, self.max_draft), jnp.bool_),
            counts=jnp.zeros((batch,), jnp.int32),
            last=state.last_ids,
            drafting=state.active,
            follows=follows,
            rounds=jnp.int32(0),
            together=jnp.int32(0),
        )

    def _draft(
        self,
        setting: Setting,
        state: DecodeState,
        start: _Drafted,
        copied: Copied | None,
        depth: Int[Array, ""],
        length: Int[Array, ""],
    ) -> _Drafted:
        """Drafts until every row is at a hard token, has `length` drafts, or copies the rest."""
        decoder, params = setting.decoder, setting.params
        batch, vocab = state.lengths.shape[0], decoder.config.vocab_size

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
                bounds=(0, max(self.exits(decoder))),
            )
            stored = jnp.where(now.drafting[:, None, None], x, now.x[:, at][:, None])
            stored = jax.lax.dynamic_update_slice_in_dim(now.x, stored, at, axis=1)

            def rest() -> tuple[jax.Array, jax.Array, jax.Array | None]:
                q = None if now.log_q is None else jnp.zeros((batch, vocab), jnp.float32)
                return now.last, jnp.ones((batch,), jnp.bool_), q

            # The last of `length` drafts needs no successor. (No cache goes through the
            # conditional.)
            guess = partial(self._guess, setting, state, x[:, 0], positions, depth)
            new, hard, log_q = jax.lax.cond(at < length, guess, rest)
            goes, follows, agrees = now.drafting & ~hard, now.follows, now.follows
            if copied is not None:
                theirs = copied.token_ids[:, at]
                agrees |= (at == 0) & goes & (copied.counts > 0) & (new == theirs)
                goes = now.drafting & jnp.where(follows, at < copied.counts, goes)
                new = jnp.where(follows, theirs, new)
                if log_q is not None:
                    log_q = jnp.where(follows[:, None], _certain(theirs, vocab), log_q)
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
                copied=now.copied.at[rows, slot].set(follows, mode="drop"),
                counts=now.counts + goes,
                last=jnp.where(goes, new, now.last),
                drafting=goes,
                # A guess that the text agrees with was the exit's own; what comes after is copied.
                follows=agrees,
                rounds=at + 1,
            )

        return jax.lax.while_loop(lambda now: jnp.any(now.drafting & ~now.follows), step, start)

    def _guess(
        self,
        setting: Setting,
        state: DecodeState,
        x: Float[Array, "batch dim"],
        positions: Int[Array, "batch 1"],
        depth: Int[Array, ""],
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the exit's next tokens, whether they are hard, and the log-probabilities."""
        decoder, params, sampling = setting.decoder, setting.params, setting.sampling
        kept, head = self.vocabulary, state.memory.head
        seen = apply_exit_lens(decoder, params, x, depth)
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

    def _copy(
        self,
        setting: Setting,
        state: DecodeState,
        now: _Drafted,
        copied: Copied,
        depth: Int[Array, ""],
    ) -> _Drafted:
        """Returns the round once the rest of the copied drafts has run the exit's layers.

        All at once: nothing has to be guessed between them.
        """
        decoder, params = setting.decoder, setting.params
        follows = now.drafting & now.follows
        offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
        counts = jnp.where(follows, copied.counts, now.counts)
        later = follows[:, None] & (offsets[:, :-1] >= now.rounds)
        token_ids = jnp.where(later, copied.token_ids, now.token_ids)
        log_q = now.log_q
        if log_q is not None:
            certain = _certain(copied.token_ids, log_q.shape[-1])
            log_q = jnp.where(later[:, :, None], certain, log_q)
        # A token that has not run yet: the last one that is out, or a draft. Where no exit drafts,
        # none has, and the deep pass begins with the first layer.
        runs = now.drafting if self.drafter == "ngram" else follows
        positions = state.positions[:, None] + offsets
        pending = runs[:, None] & (offsets >= now.rounds) & (offsets <= counts[:, None])
        block = block_at(decoder, positions, pending)
        ids = jnp.concatenate([state.last_ids[:, None], token_ids], axis=1)
        x, cache = run_segment(
            decoder,
            params,
            now.cache,
            decoder.embed(params, ids, positions),
            block,
            start=0,
            stop=jnp.where(jnp.any(follows), depth, 0),
            width=setting.width,
            layers=setting.layers,
            bounds=(0, max(self.exits(decoder), default=0)),
        )
        return dataclasses.replace(
            now,
            cache=cache,
            x=jnp.where(pending[:, :, None], x, now.x),
            token_ids=token_ids,
            log_q=log_q,
            copied=now.copied | later,
            counts=counts,
            together=jnp.any(follows) * jnp.int32(self.block),
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
      observed: what the controller has seen of each row.
      head: parameters of the head that drafts, the same for all rows; None: the model's own.
    """

    observed: Observed | None = dataclasses.field(metadata={"row_axis": 0})
    head: Params | None


@pytree
class _Drafted:
    """Drafts of a round, and what verification needs of them.

    Attributes:
      cache: with the shallow K/V of all pending tokens.
      x: their states at the exit.
      token_ids: the drafts.
      log_q: the distributions that they were drawn from; None where nothing is drawn.
      copied: drafts from the row's own text.
      counts: drafts per row.
      last: each row's last token, draft or not.
      drafting: rows that go on.
      follows: rows whose further drafts are copied.
      rounds: tokens that the longest row ran one by one.
      together: token slots per row that ran the exit's layers in one pass.
    """

    cache: KVCache
    x: Float[Array, "batch pending dim"]
    token_ids: Int[Array, "batch draft"]
    log_q: Float[Array, "batch draft vocab"] | None
    copied: Bool[Array, "batch draft"]
    counts: Int[Array, " batch"]
    last: Int[Array, " batch"]
    drafting: Bool[Array, " batch"]
    follows: Bool[Array, " batch"]
    rounds: Int[Array, ""]
    together: Int[Array, ""]
