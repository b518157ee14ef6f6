# SPDX-License-Identifier: Apache-2.0
"""What drafts for speculative decoding: an exit of the model, or n-grams of the text.

Both `propose` drafts of each row for `utio_jax.decoding.lossless` to verify. `depth` is the layers
that pending tokens have run then; `varies`: a row may have fewer drafts than were asked for.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.arrays import most_probable
from utio_jax.core.decoder import DecoderConfig, apply_exit_lens
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import DecodeContext, process
from utio_jax.decoding.sampling import DRAW, token_keys
from utio_jax.decoding.segments import block_at, run_segment
from utio_jax.decoding.state import DecodeState


@pytree
class Proposal:
    """Drafts of a round. Pending tokens are each row's last one, and its drafts.

    Attributes:
      cache: with the shallow K/V of all pending tokens.
      x: their states, behind the layers that the drafter ran.
      token_ids: the drafts.
      log_q: the distributions that they were drawn from; None where no draft was drawn.
      counts: drafts per row.
      rounds: tokens that the longest row ran one by one.
      matched: rows that have a draft, those included that do not have it verified.
    """

    cache: KVCache
    x: Float[Array, "batch pending dim"]
    token_ids: Int[Array, "batch draft"]
    log_q: Float[Array, "batch draft vocab"] | None
    counts: Int[Array, " batch"]
    rounds: Int[Array, ""]
    matched: Bool[Array, " batch"]


def round_keys(state: DecodeState, positions: Int[Array, "batch token"], stream: int) -> jax.Array:
    """Returns keys that no other round uses: bits seen in one must not decide the next."""
    return token_keys(state.seeds, positions, stream, rounds=state.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitDrafter:
    """Drafts of an exit's own head, one token after the other; the K/V are the full model's.

    A branch (`DecoderConfig.branches`) drafts from the lower layers' states, which are kept: the
    verification runs the full model's upper layers alone.

    Attributes:
      exit: layers that a draft takes.
      upper: layers [start, stop) of the stack that drafts run beyond those of pending tokens.
    """

    exit: int
    upper: tuple[int, int]
    varies: ClassVar[bool] = False

    @classmethod
    def of(cls, config: DecoderConfig, depth: int) -> ExitDrafter:
        """Returns what drafts at an exit or at a branch."""
        in_branch = depth in config.branch_depths
        return cls(exit=depth, upper=config.upper_layers(depth) if in_branch else (depth, depth))

    @property
    def depth(self) -> int:
        """Layers of the full model that pending tokens have run."""
        return self.exit - (self.upper[1] - self.upper[0])

    def propose(self, context: DecodeContext, state: DecodeState, *, most: int) -> Proposal:
        """Returns so many drafts of every active row."""
        decoder, params = context.decoder, context.params
        batch, vocab = state.lengths.shape[0], decoder.config.vocab_size
        rows, active = jnp.arange(batch, dtype=jnp.int32), state.active
        states = jax.eval_shape(decoder.embed, params, state.last_ids, state.positions)
        greedy = context.sampling is None
        none = Proposal(
            cache=state.cache,
            x=jnp.zeros((batch, most + 1, states.shape[-1]), states.dtype),
            token_ids=jnp.zeros((batch, most), jnp.int32),
            log_q=None if greedy else jnp.zeros((batch, most, vocab), jnp.float32),
            counts=jnp.where(active, jnp.int32(most), 0),
            rounds=jnp.int32(most + 1),
            matched=active,
        )

        def step(at: jax.Array, carry: tuple[Proposal, jax.Array]) -> tuple[Proposal, jax.Array]:
            now, last = carry
            positions = (state.positions + at)[:, None]
            x, cache = run_segment(
                decoder,
                params,
                now.cache,
                decoder.embed(params, last[:, None], positions),
                block_at(decoder, positions, active[:, None]),
                start=0,
                stop=self.depth,
                width=context.width,
                layers=context.layers,
            )
            stored = jnp.where(active[:, None, None], x, now.x[:, at][:, None])
            (start, stop), guessing = self.upper, at < most
            if start < stop:
                x, cache = run_segment(
                    decoder,
                    params,
                    cache,
                    x,
                    block_at(decoder, positions, active[:, None]),
                    start=start,
                    stop=jnp.where(guessing, stop, start),
                    width=context.width,
                    layers=context.layers,
                    bounds=(start, stop),
                )

            def rest() -> tuple[jax.Array, jax.Array | None]:
                return last, None if greedy else jnp.zeros((batch, vocab), jnp.float32)

            # The last draft needs no successor. (No cache goes through the conditional.)
            guess = partial(self._guess, context, state, x[:, 0], positions, now.token_ids)
            new, log_q = jax.lax.cond(guessing, guess, rest)
            slot = jnp.where(active, at, most)
            drawn = None if now.log_q is None else now.log_q.at[rows, slot].set(log_q, mode="drop")
            now = dataclasses.replace(
                now,
                cache=cache,
                x=jax.lax.dynamic_update_slice_in_dim(now.x, stored, at, axis=1),
                token_ids=now.token_ids.at[rows, slot].set(new, mode="drop"),
                log_q=drawn,
            )
            return now, jnp.where(active, new, last)

        return jax.lax.fori_loop(jnp.int32(0), none.rounds, step, (none, state.last_ids))[0]

    def _guess(
        self,
        context: DecodeContext,
        state: DecodeState,
        x: Float[Array, "batch dim"],
        positions: Int[Array, "batch 1"],
        drafts: Int[Array, "batch draft"],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the exit's next tokens, and the log-probabilities if they are drawn."""
        decoder, params, sampling = context.decoder, context.params, context.sampling
        seen = apply_exit_lens(decoder, params, x, self.exit)
        logits = decoder.unembed(params, seen).astype(jnp.float32)
        logits = process(context, state, logits[:, None], positions + 1, drafts)[:, 0]
        if sampling is None:
            return most_probable(logits), None
        log_q = jax.nn.log_softmax(sampling(logits), axis=-1)
        keys = round_keys(state, positions + 1, DRAW)[:, 0]
        return jax.vmap(jax.random.categorical)(keys, log_q).astype(jnp.int32), log_q


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
    """Drafts without a model: what followed the last few tokens when the text had them before.

    Prompt lookup (Saxena 2023), as vLLM's `ngram` method and transformers'
    `prompt_lookup_num_tokens`. The longest match wins, among these the latest. A match so close to
    the end that the text behind it is shorter than the draft repeats it, as a copy in LZ77 does.

    A row drafts while its first drafts are right in at least `LEAST_HITS` of its recent rounds
    (exponential mean, `RECENT`). Below that it rests: it is decoded one token a round, at plain
    decoding's cost, while its drafts are still compared with its tokens. So it drafts again as soon
    as the text repeats.

    Attributes:
      longest: tokens of the longest match that is looked for: `prompt_lookup_max`.
      shortest: of the shortest that counts: `prompt_lookup_min`.
    """

    longest: int = 3
    shortest: int = 1
    depth: ClassVar[int] = 0
    varies: ClassVar[bool] = True
    LEAST_HITS: ClassVar[float] = 0.25
    RECENT: ClassVar[float] = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                "Wanted matches of at least 1 token, shortest <= longest. Got "
                f"shortest={self.shortest}, longest={self.longest}. For example: NGram(longest=3)."
            )

    def propose(self, context: DecodeContext, state: DecodeState, *, most: int) -> Proposal:
        """Returns drafts that follow the rows' own last tokens; no layer has run."""
        decoder = context.decoder
        drafts, counts = self(state.token_ids, state.lengths, drafts=most)
        offsets = jnp.arange(most + 1, dtype=jnp.int32)[None, :]
        ids = jnp.concatenate([state.last_ids[:, None], drafts], axis=1)
        matched = state.active & (counts > 0)
        return Proposal(
            cache=state.cache,
            x=decoder.embed(context.params, ids, state.positions[:, None] + offsets),
            token_ids=drafts,
            log_q=None,
            counts=jnp.where(matched & (state.memory >= self.LEAST_HITS), counts, 0),
            rounds=jnp.int32(0),
            matched=matched,
        )

    def start(self, rows: int) -> Float[Array, " batch"]:
        """Returns the share of right first drafts that rows begin with: some are verified."""
        return jnp.full((rows,), 2 * self.LEAST_HITS, jnp.float32)

    def follow(
        self,
        hits: Float[Array, " batch"],
        *,
        matched: Bool[Array, " batch"],
        right: Bool[Array, " batch"],
    ) -> Float[Array, " batch"]:
        """Returns each row's share of right first drafts, after a round in which some matched."""
        return jnp.where(matched, hits + self.RECENT * (right.astype(hits.dtype) - hits), hits)

    def __call__(
        self, token_ids: Int[Array, "batch slot"], lengths: Int[Array, " batch"], *, drafts: int
    ) -> tuple[Int[Array, "batch draft"], Int[Array, " batch"]]:
        """Returns what follows each row's tokens, and how many are real: all, or none."""
        ends = jnp.arange(token_ids.shape[1], dtype=jnp.int32)  # A match ends before this position.

        def row(known: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
            matched, goes_on = jnp.zeros_like(ends), (ends > 0) & (ends < length)
            for back in range(1, self.longest + 1):
                goes_on &= (ends >= back) & (jnp.roll(known, back) == known[length - back])
                matched += goes_on
            # The longest, and of these the latest: of two equal ones `argmax` takes the first.
            best = ends.size - 1 - jnp.argmax(matched[::-1]).astype(jnp.int32)
            found = matched[best] >= self.shortest
            period = jnp.maximum(length - best, 1)
            copied = known[best + jnp.arange(drafts, dtype=jnp.int32) % period]
            return jnp.where(found, copied, 0), jnp.where(found, jnp.int32(drafts), 0)

        return jax.vmap(row)(token_ids, lengths)
