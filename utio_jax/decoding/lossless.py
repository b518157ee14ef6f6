# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding: the first layers draft, the full model verifies.

Self-speculative decoding as in LayerSkip (Elhoushi et al. 2024), for any batch size:

    [e, L)             # # # #        one deep pass over all pending tokens, from stored states
    [0, e)    #  #  #  #              drafts, one after the other; their K/V are the full model's
    token     c  d0 d1 d2

`c` is the last emitted token; the exit's head proposes the drafts `d0 d1 d2`. The deep pass yields
the full model's distribution after each of them. Accepted drafts are emitted, plus one token of the
full model. Drafts of prompt lookup (`drafter="ngram"`) are copied from the row's own text: they run
no layer before the deep pass, and are not drawn. All tokens are then those of plain decoding with
the same seed, sampled ones included.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, has_exit_lens, is_integer, name_exits
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.base import DecodeContext, Mode, Plain, process, sampling_of
from utio_jax.decoding.cached import block_at, run_segment
from utio_jax.decoding.drafting import ExitDrafter, NGram, Proposal, round_keys
from utio_jax.decoding.sampling import (
    ACCEPT,
    DRAW,
    REPLACE,
    draw,
    token_keys,
    verify_sampling,
    verify_tokens,
)
from utio_jax.decoding.state import DecodeState, emit

DrafterName = Literal["exit", "ngram"]
"""Drafter: an exit of the model, or n-grams of the row's own text."""


def lossless_for(
    decoder: Decoder, drafter: DrafterName | None = None, *, max_draft: int = 4
) -> Lossless:
    """Returns the default `Lossless` of a model, with the drafter that was fastest in measurements.

    A model trained at its exits drafts at the exit closest to 3/8 of its layers. All other models
    draft by n-grams: exits with a lens that was fitted afterwards slow decoding down
    (results/scoring.md, results/stock_models.md).

    Raises:
      ValueError: unknown drafter, or `"exit"` for a model without early exits.
    """
    early = decoder.config.exits[:-1]
    if drafter is None:
        nested = not decoder.config.branches  # Branches draft more slowly than n-grams.
        trained = bool(early) and nested and not has_exit_lens(decoder, early[0])
        drafter = "exit" if trained else "ngram"
    # The mode's own check rejects an unknown drafter or a model without exits.
    exit_ = None
    if drafter == "exit":
        target = 3 * decoder.config.num_layers / 8
        exit_ = min(early, key=lambda depth: abs(depth - target), default=1)
    mode = Lossless(exit=exit_, drafter=drafter, max_draft=max_draft)
    mode.check(decoder)
    return mode


@pytree
class Lossless(Mode):
    """Speculative decoding: drafts of an early exit or of n-grams, verified by the full model.

    Rows accept different numbers of drafts. Greedy tokens are the argmax of the full model on the
    tokens before them. Sampled tokens follow the full model's distribution; with `"ngram"` they are
    the tokens of plain decoding. All hold up to rounding, which depends on the shapes of a pass.

    Attributes:
      exit: draft depth, one of the model's early exits; None with `drafter="ngram"`. Static.
      max_draft: maximum number of drafts of a row per deep pass. Static.
      drafter: `"exit"`, or `"ngram"`: prompt lookup in the row's own text, without an exit. Static.
      ngram: n-gram drafter with its match lengths. Static.
    """

    name: ClassVar[str] = "lossless"

    exit: int | None = static(default=None)
    max_draft: int = static(default=4)
    drafter: DrafterName = static(default="exit")
    ngram: NGram = static(default=NGram())

    def __post_init__(self) -> None:
        if self.drafter not in get_args(DrafterName):
            raise ValueError(
                f"Wanted a drafter of {', '.join(get_args(DrafterName))}. Got {self.drafter!r}."
            )
        if not is_integer(self.max_draft, 1):
            raise ValueError(
                "Wanted a max_draft of at least 1 token, an integer. Got "
                f"max_draft={self.max_draft!r}."
            )
        if not isinstance(self.ngram, NGram):
            raise ValueError(f"Wanted ngram=NGram(longest=...). Got ngram={self.ngram!r}.")
        if (self.drafter == "exit") != (self.exit is not None):
            raise ValueError(
                "Wanted an exit that drafts, or drafter='ngram' alone, which copies from the text. "
                f"Got drafter={self.drafter!r} and exit={self.exit}. For example: "
                "Lossless(exit=4), or Lossless(drafter='ngram')."
            )

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

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        if self.exit is not None:
            return state
        return dataclasses.replace(state, memory=self.ngram.start(state.lengths.shape[0]))

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Proposes drafts, verifies them by all layers, and emits accepted drafts and one token.

        A step in which no row has drafts is a step of plain decoding.
        """
        drafter = self._drafter(context.decoder)
        with jax.named_scope("draft"):
            drafted = drafter.propose(context, state, most=self.max_draft)
        if not drafter.varies:
            return self._verify(context, state, drafted)
        drafts, lengths = jnp.any(drafted.counts > 0).astype(jnp.int32), state.lengths
        # Loops of no or one turn: the cache does not pass through a conditional.
        verify = partial(self._verify, context, drafted=drafted)
        plain = partial(Plain().step, context)
        state = jax.lax.fori_loop(0, drafts, lambda _, carry: verify(carry), state)
        state = jax.lax.fori_loop(0, 1 - drafts, lambda _, carry: plain(carry), state)
        emitted = jax.vmap(lambda row, length: row[length])(state.token_ids, lengths)
        right = drafted.token_ids[:, 0] == emitted
        hits = self.ngram.follow(state.memory, matched=drafted.matched, right=right)
        return dataclasses.replace(state, memory=hits)

    def _verify(self, context: DecodeContext, state: DecodeState, drafted: Proposal) -> DecodeState:
        """Returns the state after one deep pass over every row's last token and its drafts."""
        decoder, params, sampling = context.decoder, context.params, sampling_of(context, state)
        config, active, width = decoder.config, state.active, context.width
        num_layers = config.num_layers
        depth, pending = self._drafter(decoder).depth, drafted.pending
        offsets = jnp.arange(self.block, dtype=jnp.int32)[None, :]
        positions = state.positions[:, None] + offsets
        if pending is None:  # No layer has run.
            ids = jnp.concatenate([state.last_ids[:, None], drafted.token_ids], axis=1)
            pending = state.cache, decoder.embed(params, ids, positions)
        with jax.named_scope("verify"):
            valid = (offsets <= drafted.counts[:, None]) & active[:, None]
            x, cache = run_segment(
                decoder,
                params,
                *pending,
                block_at(decoder, positions, valid),
                start=depth,
                stop=num_layers,
                width=width,
                layers=context.layers,
            )
            logits = decoder.unembed(params, flat(x)).astype(jnp.float32)
            logits = logits.reshape(*positions.shape, -1)
            allowed = process(context, state, logits, positions + 1, drafted.token_ids)
            if sampling is None or drafted.log_q is None:
                # For drafts that were not drawn, tokens are those of plain decoding.
                own = draw(sampling, allowed, token_keys(state.seeds, positions + 1, DRAW))
                verified = verify_tokens(own, drafted.token_ids, drafted.counts)
            else:
                verified = verify_sampling(
                    jax.nn.log_softmax(sampling(allowed), axis=-1),
                    drafted.log_q,
                    drafted.token_ids,
                    drafted.counts,
                    accept_keys=round_keys(state, positions[:, 1:], ACCEPT),
                    replace_keys=round_keys(state, positions + 1, REPLACE),
                )
        # The last pending token of a row drafts nothing, so it runs no exit head.
        runs, guesses = drafted.rounds, jnp.minimum(drafted.rounds, self.max_draft)
        exit_depth = depth if self.exit is None else self.exit
        drafting = runs * depth + guesses * (exit_depth - depth)
        reads = runs * config.kv_reads(0, depth) + guesses * config.kv_reads(depth, exit_depth)
        layers = drafting + self.block * (num_layers - depth)
        lower, upper = len(config.kv_made(0, depth)), len(config.kv_made(depth, num_layers))
        work = state.work.add(
            active,
            steps=1,
            drafts=drafted.counts,
            accepted=verified.accepted,
            queries=layers,
            keys_values=runs * lower + self.block * upper,
            key_slots=layers * float(width),
            kv_reads=(reads + config.kv_reads(depth, num_layers)) * float(width),
            heads=guesses + self.block,
            exit_maps=guesses * has_exit_lens(decoder, self.exit or 0),
        )
        # Rejected drafts stay in the cache: their slots follow the row's last token and are
        # overwritten before any later query reads them.
        return emit(
            dataclasses.replace(state, cache=cache, work=work),
            context.eos_ids,
            verified.token_ids,
            verified.accepted + 1,
            logits=logits,
            decided=jnp.where(offsets < verified.accepted[:, None], self.exit or 0, num_layers),
            executed=jnp.full(positions.shape, num_layers, jnp.int32),
        )

    def _drafter(self, decoder: Decoder) -> ExitDrafter | NGram:
        return self.ngram if self.exit is None else ExitDrafter.of(decoder.config, self.exit)
