# SPDX-License-Identifier: Apache-2.0
"""Drafters for speculative decoding: an early exit of the model, or n-grams of the text.

Both `propose` drafts for each row, which `utio_jax.decoding.lossless` verifies. `depth` is the
number of layers that pending tokens have run by then. `varies` is True if rows may have no drafts.
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
from utio_jax.core.decoder import DecoderConfig, apply_exit_lens, is_integer
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import DecodeContext, process, sampling_of
from utio_jax.decoding.cached import block_at, run_segment
from utio_jax.decoding.sampling import DRAW, token_keys
from utio_jax.decoding.state import DecodeState

Pending = tuple[KVCache, Float[Array, "batch pending dim"]]
"""K/V cache and states of each row's last token and its drafts, after a drafter's layers."""


@pytree
class Proposal:
    """Drafts of one step.

    Attributes:
      pending: pending tokens after the layers that the drafter ran; None: it ran none.
      token_ids: draft tokens.
      log_q: log-probabilities that drafts were drawn from; None: drafts were not drawn.
      counts: number of drafts per row to verify.
      rounds: number of sequential draft steps of the longest row.
      matched: rows that have a draft, including drafts that are not verified.
    """

    pending: Pending | None
    token_ids: Int[Array, "batch draft"]
    log_q: Float[Array, "batch draft vocab"] | None
    counts: Int[Array, " batch"]
    rounds: Int[Array, ""]
    matched: Bool[Array, " batch"]


def round_keys(state: DecodeState, positions: Int[Array, "batch token"], stream: int) -> jax.Array:
    """Returns PRNG keys that no other step uses, so that draws of steps are independent."""
    return token_keys(state.seeds, positions, stream, rounds=state.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitDrafter:
    """Drafter at an early exit: one token after the other, with K/V of the full model.

    A branch (`DecoderConfig.branches`) drafts from the hidden states of the lower layers. These are
    stored, so verification runs only the upper layers of the full model.

    Attributes:
      exit: number of layers that a draft runs.
      upper: layers [start, stop) of the stack that only drafts run, not pending tokens.
    """

    exit: int
    upper: tuple[int, int]
    varies: ClassVar[bool] = False

    @classmethod
    def of(cls, config: DecoderConfig, depth: int) -> ExitDrafter:
        """Returns the drafter at an exit or a branch."""
        in_branch = depth in config.branch_depths
        return cls(exit=depth, upper=config.upper_layers(depth) if in_branch else (depth, depth))

    @property
    def depth(self) -> int:
        """Number of layers of the full model that pending tokens have run."""
        return self.exit - (self.upper[1] - self.upper[0])

    def propose(self, context: DecodeContext, state: DecodeState, *, most: int) -> Proposal:
        """Returns `most` drafts for every active row."""
        decoder, params = context.decoder, context.params
        batch, vocab = state.lengths.shape[0], decoder.config.vocab_size
        rows, active = jnp.arange(batch, dtype=jnp.int32), state.active
        one = jax.eval_shape(decoder.embed, params, state.last_ids, state.positions)
        sampling = sampling_of(context, state)
        greedy = sampling is None
        blank = jnp.zeros((batch, most + 1, one.shape[-1]), one.dtype)
        run = partial(run_segment, decoder, params, width=context.width, layers=context.layers)
        none = Proposal(
            pending=None,
            token_ids=jnp.zeros((batch, most), jnp.int32),
            log_q=None if greedy else jnp.zeros((batch, most, vocab), jnp.float32),
            counts=jnp.where(active, jnp.int32(most), 0),
            rounds=jnp.int32(most + 1),
            matched=active,
        )

        def step(
            at: jax.Array, carry: tuple[Pending, Proposal, jax.Array]
        ) -> tuple[Pending, Proposal, jax.Array]:
            (cache, states), now, last = carry
            positions = (state.positions + at)[:, None]
            block = block_at(decoder, positions, active[:, None])
            x = decoder.embed(params, last[:, None], positions)
            x, cache = run(cache, x, block, start=0, stop=self.depth)
            stored = jnp.where(active[:, None, None], x, states[:, at][:, None])
            (start, stop), guessing = self.upper, at < most
            if start < stop:
                end = jnp.where(guessing, stop, start)
                x, cache = run(cache, x, block, start=start, stop=end, bounds=(start, stop))

            def skip() -> tuple[jax.Array, jax.Array | None]:
                return last, None if greedy else jnp.zeros((batch, vocab), jnp.float32)

            def guess() -> tuple[jax.Array, jax.Array | None]:
                seen = apply_exit_lens(decoder, params, x[:, 0], self.exit)
                logits = decoder.unembed(params, seen).astype(jnp.float32)
                drafts = now.token_ids
                logits = process(context, state, logits[:, None], positions + 1, drafts)[:, 0]
                if sampling is None:
                    return most_probable(logits), None
                log_q = jax.nn.log_softmax(sampling(logits), axis=-1)
                keys = round_keys(state, positions + 1, DRAW)[:, 0]
                return jax.vmap(jax.random.categorical)(keys, log_q).astype(jnp.int32), log_q

            # The last draft needs no successor. (The cache does not pass through the conditional.)
            new, log_q = jax.lax.cond(guessing, guess, skip)
            slot = jnp.where(active, at, most)
            drawn = None if now.log_q is None else now.log_q.at[rows, slot].set(log_q, mode="drop")
            states = jax.lax.dynamic_update_slice_in_dim(states, stored, at, axis=1)
            now = dataclasses.replace(
                now, token_ids=now.token_ids.at[rows, slot].set(new, mode="drop"), log_q=drawn
            )
            return (cache, states), now, jnp.where(active, new, last)

        begun = (state.cache, blank), none, state.last_ids
        pending, drafted, _ = jax.lax.fori_loop(jnp.int32(0), none.rounds, step, begun)
        return dataclasses.replace(drafted, pending=pending)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
    """Prompt-lookup drafter: copies the tokens that followed an earlier match of the last tokens.

    Prompt lookup (Saxena 2023). The longest match wins; of several, the latest. vLLM's `ngram`
    method and transformers' `prompt_lookup_num_tokens` take the first of them. If the text after a
    match is shorter than the draft, it is repeated, as in an LZ77 copy.

    A row drafts while its first draft is accepted in at least `LEAST_HITS` of its recent steps
    (exponential mean with weight `RECENT`). None does where a pass over all rows' drafts would take
    longer than the accepted ones save (`least_accepted`): many rows, or long drafts on a CPU. Rows
    that do not draft decode one token a step, at the cost of plain decoding. Unverified drafts are
    still compared with their tokens, so rows draft again as soon as their text repeats.

    Attributes:
      longest: maximum length of a match in tokens: `prompt_lookup_max`.
      shortest: minimum length of a match in tokens: `prompt_lookup_min`.
    """

    longest: int = 3
    shortest: int = 1
    depth: ClassVar[int] = 0
    varies: ClassVar[bool] = True
    LEAST_HITS: ClassVar[float] = 0.25
    RECENT: ClassVar[float] = 0.25

    def __post_init__(self) -> None:
        if not (is_integer(self.shortest, 1) and is_integer(self.longest, self.shortest)):
            raise ValueError(
                "Wanted matches of at least 1 token, integers, shortest <= longest. Got shortest="
                f"{self.shortest!r}, longest={self.longest!r}. For example: NGram(longest=3)."
            )

    def propose(self, context: DecodeContext, state: DecodeState, *, most: int) -> Proposal:
        """Returns drafts copied from the rows' own text; runs no layer."""
        drafts, counts = self(state.token_ids, state.lengths, drafts=most)
        matched = state.active & (counts > 0)
        hits = jnp.where(matched & (state.memory >= self.LEAST_HITS), state.memory, 0.0)
        accepted = jnp.sum(sum(hits**draft for draft in range(1, most + 1)))
        least = self.least_accepted(counts.shape[0], most=most)
        pays = accepted >= least * jnp.sum(state.active)
        return Proposal(
            pending=None,
            token_ids=drafts,
            log_q=None,
            counts=jnp.where(pays & (hits > 0), counts, 0),
            rounds=jnp.int32(0),
            matched=matched,
        )

    def least_accepted(self, rows: int, *, most: int) -> float:
        """Returns the accepted drafts of each row, on average, from which a pass over drafts pays.

        That is the time that it takes longer than a plain step, in plain steps, if time is the
        number of tokens plus `Platform.fixed_tokens`.
        """
        return rows * most / (here().fixed_tokens + rows)

    def start(self, rows: int) -> Float[Array, " batch"]:
        """Returns the initial acceptance rate of first drafts: one miss is enough to stop."""
        return jnp.full((rows,), self.LEAST_HITS, jnp.float32)

    def follow(
        self,
        hits: Float[Array, " batch"],
        *,
        matched: Bool[Array, " batch"],
        right: Bool[Array, " batch"],
    ) -> Float[Array, " batch"]:
        """Returns the acceptance rate of each row's first drafts, updated after a step."""
        return jnp.where(matched, hits + self.RECENT * (right.astype(hits.dtype) - hits), hits)

    def __call__(
        self, token_ids: Int[Array, "batch slot"], lengths: Int[Array, " batch"], *, drafts: int
    ) -> tuple[Int[Array, "batch draft"], Int[Array, " batch"]]:
        """Returns the drafts of each row and their number: all, or 0 without a match."""
        ends = jnp.arange(token_ids.shape[1], dtype=jnp.int32)  # A match ends before this position.

        def row(known: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
            matched, goes_on = jnp.zeros_like(ends), (ends > 0) & (ends < length)
            for back in range(1, self.longest + 1):
                goes_on &= (ends >= back) & (jnp.roll(known, back) == known[length - back])
                matched += goes_on
            # The longest match, and the latest of these: `argmax` takes the first maximum.
            best = ends.size - 1 - jnp.argmax(matched[::-1]).astype(jnp.int32)
            has_match = matched[best] >= self.shortest
            period = jnp.maximum(length - best, 1)
            copied = known[best + jnp.arange(drafts, dtype=jnp.int32) % period]
            return jnp.where(has_match, copied, 0), jnp.where(has_match, jnp.int32(drafts), 0)

        return jax.vmap(row)(token_ids, lengths)
