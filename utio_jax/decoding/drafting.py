# SPDX-License-Identifier: Apache-2.0
"""How much is drafted: rules for hard tokens, and the online choice of exit and length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import TokenCost, token_cost
from utio_jax.policies.importance import predictive_entropy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyAbove:
    """Hard are tokens whose exit distribution has more entropy than a threshold.

    Attributes:
      threshold_nats: a leaf: another one compiles nothing.
    """

    threshold_nats: float | Float[Array, ""]

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Bool[Array, "*lead"]:
        return ~(predictive_entropy(logits) <= self.threshold_nats)  # NaN is hard.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GapBelow:
    """Hard are tokens whose two most probable successors differ too little: CALM's gap.

    Attributes:
      threshold: difference of probabilities, in [0, 1]. A leaf.
    """

    threshold: float | Float[Array, ""]

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Bool[Array, "*lead"]:
        best = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), 2)[0]
        return ~(best[..., 0] - best[..., 1] >= self.threshold)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What was accepted so far at each exit, older rounds counting less.

    Attributes:
      accepted: verified drafts that were right.
      rejected: rounds that ended at a wrong one; drafts behind it are not verified and count
        nowhere.
    """

    accepted: Float[Array, " exit"]
    rejected: Float[Array, " exit"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
    """Picks the exit and draft length with the most expected tokens per layer, round after round.

    The objective is DEL's (Entezari Zarch et al. 2025): with acceptance `a`, a draft of `n` tokens
    lets out `(1 - a^(n+1)) / (1 - a)` tokens, and costs `n + 1` runs of the exit's layers, `n`
    heads and one deep pass. `n` may be 0: where drafting does not pay, the round is a plain step.
    DEL reads every exit's acceptance off the verified tokens, which takes
    a vocabulary head per exit; here an exit is judged by its own drafts alone, and exits not tried
    for long are trusted again: estimates start high and fall back to their start.

    One choice serves the whole batch, so under a controller a row's *cost* depends on the others;
    with sampling, so do its draws, though not their distribution.

    Attributes:
      marginal: cost of one more token per row in a pass relative to the first; 0 where reading
        weights is everything, 1 where arithmetic is. `measure_marginal` in
        `utio_jax.benchmark.decoding` measures it.
      memory_rounds: how many rounds an observation lasts.
      prior: acceptance to expect of an exit that was not tried, one number or one per exit; the
        exits' top-1 agreement with full depth on text is a good guess.
      prior_weight: drafts that this is worth.
    """

    marginal: float | Float[Array, ""] = 0.2
    memory_rounds: float | Float[Array, ""] = 50.0
    prior: float | Float[Array, ""] | Float[Array, " exit"] = 0.95
    prior_weight: float | Float[Array, ""] = 4.0

    def start(self, exits: int) -> Observed:
        """Returns the memory of no rounds."""
        return Observed(accepted=jnp.zeros((exits,)), rejected=jnp.zeros((exits,)))

    def observe(
        self,
        memory: Observed,
        chosen: Int[Array, ""],
        *,
        accepted: Int[Array, ""],
        rejected: Int[Array, ""],
    ) -> Observed:
        """Returns the memory after a round at exit number `chosen`, summed over rows."""
        keep = 1.0 - 1.0 / jnp.asarray(self.memory_rounds, jnp.float32)
        return Observed(
            accepted=(memory.accepted * keep).at[chosen].add(accepted.astype(jnp.float32)),
            rejected=(memory.rejected * keep).at[chosen].add(rejected.astype(jnp.float32)),
        )

    def acceptance(self, memory: Observed) -> Float[Array, " exit"]:
        """Returns the acceptance to expect of each exit, below 1."""
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
