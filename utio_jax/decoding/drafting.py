# SPDX-License-Identifier: Apache-2.0
"""What is drafted and how much: n-grams, a draft vocabulary, hard tokens, exit and length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import TokenCost, token_cost
from utio_jax.core.pytrees import pytree
from utio_jax.policies.importance import predictive_entropy


@pytree
class Copied:
    """Drafts that rows copied from their own text.

    Attributes:
      token_ids: the drafts.
      counts: how many of them are real: all, or none where nothing matches.
      matched: tokens of the match; 0 where there is none.
    """

    token_ids: Int[Array, "batch draft"]
    counts: Int[Array, " batch"]
    matched: Int[Array, " batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
    """Drafts without a model: what followed the last few tokens when the text had them before.

    Prompt lookup (Saxena 2023), as vLLM's `ngram` method and transformers'
    `prompt_lookup_num_tokens`. The longest match wins; among these the latest, where transformers
    takes the first: what a text did last it does again. A match so close to the end that the text
    behind it is shorter than the draft repeats it, as a copy in LZ77 does.

    Attributes:
      longest: tokens of the longest match that is looked for: `prompt_lookup_max`,
        `max_matching_ngram_size`.
      shortest: of the shortest that counts: `prompt_lookup_min`.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                "Wanted matches of at least 1 token, shortest <= longest. Got "
                f"shortest={self.shortest}, longest={self.longest}. For example: NGram(longest=3)."
            )

    def __call__(
        self, token_ids: Int[Array, "batch slot"], lengths: Int[Array, " batch"], *, drafts: int
    ) -> Copied:
        """Returns the drafts that follow each row's tokens.

        Args:
          token_ids: the rows' tokens; what lies beyond `lengths` means nothing.
          lengths: tokens of each row.
          drafts: tokens to copy.
        """
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
            return jnp.where(found, copied, 0), jnp.where(found, matched[best], 0)

        copied, matched = jax.vmap(row)(token_ids, lengths)
        counts = jnp.where(matched > 0, drafts, 0).astype(jnp.int32)
        return Copied(token_ids=copied, counts=counts, matched=matched)


def draft_vocabulary(
    text: Sequence[Sequence[int] | np.ndarray] | Mapping[int, int], *, size: int
) -> Int[np.ndarray, " kept"]:
    """Returns the most frequent tokens of a text, ascending: `Lossless(vocabulary=...)`.

    FR-Spec (Zhao et al. 2025, arXiv 2502.14856): drafts that are chosen among these alone need but
    their columns of the vocabulary head. Of equally frequent tokens the lower id is kept, which in
    a byte-pair vocabulary is the more frequent one.

    Args:
      text: token ids of documents; or how often each token occurs, as a `Counter`.
      size: tokens to keep; fewer where the text has no more.

    Raises:
      ValueError: nothing to count, or a size below 1.
    """
    if size < 1:
        raise ValueError(f"Wanted a draft vocabulary of at least 1 token. Got size={size}.")
    if isinstance(text, Mapping):
        ids, counts = np.asarray([*text.keys()]), np.asarray([*text.values()])
        ids, counts = ids[counts > 0], counts[counts > 0]
    else:
        every = [np.zeros(0, np.int64), *(np.asarray(ids).ravel() for ids in text)]
        ids, counts = np.unique(np.concatenate(every), return_counts=True)
    if not ids.size:
        raise ValueError("Wanted a text to count tokens of. Got no tokens.")
    ranked = ids[np.lexsort((ids, -counts))]
    return np.sort(ranked[:size]).astype(np.int32)


@pytree
class EntropyAbove:
    """Hard are tokens whose exit distribution has more entropy than a threshold.

    Attributes:
      threshold_nats: a leaf: another one compiles nothing.
    """

    threshold_nats: float | Float[Array, ""]

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Bool[Array, "*lead"]:
        return ~(predictive_entropy(logits) <= self.threshold_nats)  # NaN is hard.


@pytree
class GapBelow:
    """Hard are tokens whose two most probable successors differ too little: CALM's gap.

    Attributes:
      threshold: difference of probabilities, in [0, 1]. A leaf.
    """

    threshold: float | Float[Array, ""]

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Bool[Array, "*lead"]:
        best = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), 2)[0]
        return ~(best[..., 0] - best[..., 1] >= self.threshold)


@pytree
class Observed:
    """What was accepted so far at each exit, older rounds counting less.

    Attributes:
      accepted: verified drafts that were right.
      rejected: rounds that ended at a wrong one; drafts behind it are not verified and count
        nowhere.
    """

    accepted: Float[Array, "*row exit"]
    rejected: Float[Array, "*row exit"]

    def total(self, counted: Bool[Array, " row"]) -> Observed:
        """Returns what some rows have seen, summed."""
        return jax.tree.map(
            lambda leaf: jnp.sum(jnp.where(counted[:, None], leaf, 0.0), axis=0), self
        )


@pytree
class Controller:
    """Picks the exit and draft length with the most expected tokens per layer, round after round.

    The objective is DEL's (Entezari Zarch et al. 2025): with acceptance `a`, a draft of `n` tokens
    lets out `(1 - a^(n+1)) / (1 - a)` tokens, and costs `n + 1` runs of the exit's layers, `n`
    heads and one deep pass. `n` may be 0: where drafting does not pay, the round is a plain step.
    DEL reads every exit's acceptance off the verified tokens, which takes
    a vocabulary head per exit; here an exit is judged by its own drafts alone, and exits not tried
    for long are trusted again: estimates start high and fall back to their start.

    Each row remembers its own rounds; one choice, from what all rows have seen, serves the whole
    batch, whose rows draft together. So under a controller a row's *cost* depends on the others;
    with sampling, so do its draws, though not their distribution.

    Attributes:
      marginal: cost of one more token per row in a pass relative to the first; 0 where reading
        weights is everything, 1 where arithmetic is.
      memory_rounds: how many rounds an observation lasts.
      prior: acceptance to expect of an exit that was not tried, one number or one per exit; the
        exits' top-1 agreement with full depth on text is a good guess.
      prior_weight: drafts that this is worth.
    """

    marginal: float | Float[Array, ""] = 0.2
    memory_rounds: float | Float[Array, ""] = 50.0
    prior: float | Float[Array, ""] | Float[Array, " exit"] = 0.95
    prior_weight: float | Float[Array, ""] = 4.0

    def start(self, exits: int, *, batch: int | None = None) -> Observed:
        """Returns the memory of no rounds; of `batch` rows each, if it is given."""
        shape = (exits,) if batch is None else (batch, exits)
        return Observed(accepted=jnp.zeros(shape), rejected=jnp.zeros(shape))

    def observe(
        self,
        memory: Observed,
        chosen: Int[Array, ""],
        *,
        accepted: Int[Array, "*row"],
        rejected: Int[Array, "*row"],
    ) -> Observed:
        """Returns the memory after a round at exit number `chosen`."""
        keep = 1.0 - 1.0 / jnp.asarray(self.memory_rounds, jnp.float32)
        return Observed(
            accepted=(memory.accepted * keep).at[..., chosen].add(accepted.astype(jnp.float32)),
            rejected=(memory.rejected * keep).at[..., chosen].add(rejected.astype(jnp.float32)),
        )

    def acceptance(self, memory: Observed) -> Float[Array, " exit"]:
        """Returns the acceptance to expect of each exit, below 1: of one memory."""
        right = memory.accepted + self.prior * self.prior_weight
        total = memory.accepted + memory.rejected + self.prior_weight
        return jnp.minimum(right / total, 0.999)

    def choose(
        self,
        memory: Observed,
        decoder: Decoder,
        params: Params,
        *,
        exits: tuple[int, ...],
        max_draft: int,
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the number of the exit, and the drafts to make there, from 0 to `max_draft`."""
        accept = self.acceptance(memory)[:, None]
        drafts = jnp.arange(max_draft + 1, dtype=jnp.float32)[None, :]
        rate = tokens_per_layer(
            token_cost(decoder, params),
            accept,
            jnp.asarray(exits, jnp.float32)[:, None],
            drafts,
            num_layers=decoder.config.num_layers,
            marginal=self.marginal,
        )
        best = jnp.argmax(rate).astype(jnp.int32)
        return best // (max_draft + 1), best % (max_draft + 1)


def tokens_per_layer(
    cost: TokenCost, accept: Any, exits: Any, drafts: Any, *, num_layers: int, marginal: Any
) -> Any:
    """Returns the tokens that a round of drafting lets out per layer's cost: DEL's objective.

    Args:
      cost: of one token.
      accept: probability that a draft is right, below 1; all of these broadcast.
      exits: layers that draft.
      drafts: per round, from 0.
      num_layers: of the model.
      marginal: see `Controller`.
    """
    layer = cost.query + cost.keys_values
    head, guess = (float(cost.read(depth)) / layer for depth in (num_layers, 0))
    tokens = (1.0 - accept ** (drafts + 1.0)) / (1.0 - accept)
    deep = (num_layers - exits + head) * (1.0 + marginal * drafts)
    return tokens / ((drafts + 1.0) * exits + drafts * guess + deep)
