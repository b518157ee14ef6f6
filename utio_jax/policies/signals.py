# SPDX-License-Identifier: Apache-2.0
"""Signals without learned weights, as `utio_jax.policies.base.Signal` defines them.

Each returns one score per token and boundary, the higher the harder. Known before the pass:
`Position`, `TokenSurrogate`. From an exit's own prediction, at the price of a vocabulary head for
tokens that go on: `SoftmaxGap`, `MaxProbability`, `Entropy`, `Patience`, `UtioSurrogate`. From
states alone: `StateSimilarity`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from utio_jax.core.arrays import most_probable
from utio_jax.core.decoder import Decoder, Inputs, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.importance import embedding_outlier, predictive_entropy


@pytree
class SignalBase:
    """Base of most signals: causal, no memory, no cost, no logits."""

    name: str = static()
    causal: bool = static(default=True)

    @property
    def remembers(self) -> bool:
        return False

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        return None

    def __call__(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Float[Array, "batch token"], Any]:
        raise NotImplementedError

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@pytree
class KnownBefore(SignalBase):
    """Base of scores that `start` knows before the pass: one per token, for all boundaries."""

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory, memory


@pytree
class Position(KnownBefore):
    """Minus the position: later tokens exit earlier, whatever they are.

    SkipDecode (Del Corro et al. 2023), whose exit points fall linearly with the position; here each
    exit begins where its threshold says.
    """

    name: str = static(default="position")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return -positions.astype(jnp.float32)


@pytree
class TokenSurrogate(KnownBefore):
    """UTIO's surrogate before the pass, from the token alone.

    It combines the entropy of the head applied to the bare embedding and the embedding's outlier.
    Both depend on the token id only, so they are a table (`surrogate_table`), read at no cost.

    Attributes:
      table: each token's surrogate, mostly in nats.
    """

    table: Float[Array, " vocab"]
    name: str = static(default="utio_before")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return self.table[token_ids]


@pytree
class UtioSurrogate(SignalBase):
    """UTIO's surrogate, computed once at the first exit from the signals available there.

    Entropy (nats) of the exit's own prediction and the state's outlier against a calibrated mean;
    heat has no causal estimate for a token that none has attended to, so its weight goes to the
    other two. The number of thresholds that the score exceeds is the bucket.

    Attributes:
      mean_states: `[exit, dim]`, the mean state at each exit over the calibration text.
      exits: their depths; the floor is one of them. Static.
      weights: of entropy and outlier. Static.
    """

    mean_states: Float[Array, "exit dim"]
    exits: tuple[int, ...] = static()
    weights: tuple[float, float] = static(default=(2 / 3, 1 / 3))
    name: str = static(default="utio_surrogate")

    @property
    def remembers(self) -> bool:
        return True

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if memory is None:  # The floor.
            mean = self.mean_states[exit_index(self.exits, boundary.depth, self.name)]

            def surrogate(logits: jax.Array, x: jax.Array) -> jax.Array:
                entropy, outlier = predictive_entropy(logits), embedding_outlier(x, batch_mean=mean)
                return self.weights[0] * entropy + self.weights[1] * outlier

            memory = boundary.map_logits(surrogate, boundary.x)
        return memory, memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0 if index else 4.0 * decoder.config.embed_dim

    def reads_logits(self, index: int) -> bool:
        return index == 0


@pytree
class _Confidence(SignalBase):
    """A function of the exit's own prediction, computed at every boundary."""

    def score(self, logits: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        raise NotImplementedError

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        return boundary.map_logits(self.score), None

    def reads_logits(self, index: int) -> bool:
        return True


@pytree
class SoftmaxGap(_Confidence):
    """One minus the gap between the two largest probabilities.

    CALM's softmax response (Schuster et al. 2022).
    """

    name: str = static(default="softmax_gap")

    def score(self, logits: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        # Two maxima: on CPU `top_k` sorts, on one core.
        probability = jax.nn.softmax(logits)
        best = most_probable(logits)[:, None]
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        others = jnp.where(index == best, 0.0, probability)
        return 1.0 - (jnp.max(probability, axis=-1) - jnp.max(others, axis=-1))


@pytree
class MaxProbability(_Confidence):
    """One minus the largest probability, the confidence of EE-LLM (Chen et al. 2023)."""

    name: str = static(default="max_probability")

    def score(self, logits: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        return 1.0 - jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))


@pytree
class Entropy(_Confidence):
    """The prediction's entropy in nats, DeeBERT's criterion (Xin et al. 2020)."""

    name: str = static(default="entropy")

    def score(self, logits: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        return predictive_entropy(logits)


@pytree
class StateSimilarity(SignalBase):
    """One minus the cosine between the state here and at the boundary before.

    CALM's hidden-state saturation (Schuster et al. 2022); before the first boundary the state is
    the embedding.
    """

    name: str = static(default="state_similarity")

    @property
    def remembers(self) -> bool:
        return True

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Inputs:
        return token_ids

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        before = memory
        if index == 0:
            before = boundary.decoder.embed(boundary.params, memory, boundary.positions)

        def distance(x: jax.Array, before: jax.Array) -> jax.Array:
            x, before = x.astype(jnp.float32), before.astype(jnp.float32)
            norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(before, axis=-1)
            return 1.0 - jnp.sum(x * before, axis=-1) / norms

        return boundary.map_live(distance, boundary.x, before), boundary.x

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 6.0 * decoder.config.embed_dim


@pytree
class Patience(SignalBase):
    """Minus the number of consecutive boundaries so far that agree with this one's prediction.

    PABEE (Zhou et al. 2020), which stops at a count of `patience`: a threshold of
    `-patience` at every boundary.
    """

    name: str = static(default="patience")

    @property
    def remembers(self) -> bool:
        return True

    def __call__(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        best = boundary.map_logits(_best_token)
        before, count = memory if index else (best, jnp.full(best.shape, -1, jnp.int32))
        count = jnp.where(best == before, count + 1, 0)
        return jnp.where(best >= 0, -count.astype(jnp.float32), jnp.nan), (best, count)

    def reads_logits(self, index: int) -> bool:
        return True


def _best_token(logits: Float[Array, "slot vocab"]) -> Int[Array, " slot"]:
    """Returns the most probable token; -1 where logits are not numbers, which agrees with none."""
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, most_probable(logits))


def surrogate_table(
    decoder: Decoder,
    params: Params,
    mean_embedding: Float[Array, " dim"],
    *,
    weights: tuple[float, float] = (2 / 3, 1 / 3),
) -> Float[Array, " vocab"]:
    """Returns each token's surrogate before the pass, for `TokenSurrogate`.

    Args:
      decoder: the model; one that adds positions to its embeddings is asked at position 0.
      params: its parameters.
      mean_embedding: the mean over the calibration text.
      weights: of entropy and outlier.
    """

    def one(token_id: jax.Array) -> jax.Array:  # A token at a time: [vocab, vocab] can be large.
        x = decoder.embed(params, token_id[None], jnp.zeros(1, jnp.int32))
        entropy = predictive_entropy(decoder.unembed(params, x).astype(jnp.float32))
        outlier = embedding_outlier(x, batch_mean=mean_embedding)
        return (weights[0] * entropy + weights[1] * outlier)[0]

    return jax.lax.map(one, jnp.arange(decoder.config.vocab_size), batch_size=128)


def exit_index(exits: tuple[int, ...], depth: int, name: str) -> int:
    """Returns the place of a boundary's depth among those that a signal has weights for.

    Raises:
      ValueError: it has none for this depth.
    """
    if depth not in exits:
        raise ValueError(
            f"Wanted boundaries at depths {exits}, for which the signal {name!r} has weights. "
            f"Got depth={depth}."
        )
    return exits.index(depth)


@pytree
class ScoreTable(KnownBefore):
    """Scores that the caller has computed beforehand.

    Attributes:
      scores: of each token; depths in layers, for `utio_jax.policies.depth.given_depths`.
    """

    scores: Float[Array, "batch token"] = dataclasses.field(metadata={"row_axis": 0})
    name: str = static(default="scores")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        if token_ids.shape[:2] != self.scores.shape:
            raise ValueError(
                f"Wanted one score or one depth per token of {token_ids.shape[:2]}. Got "
                f"{self.scores.shape}."
            )
        return self.scores


@pytree
class Chance(KnownBefore):
    """The control: a draw from [0, 1) per token, the same at every boundary.

    Attributes:
      key: a PRNG key.
    """

    key: PRNGKeyArray
    name: str = static(default="chance")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return draw_per_token(self.key, token_ids, positions)


def draw_per_token(
    key: PRNGKeyArray, token_ids: Inputs, positions: Int[Array, "batch token"]
) -> Float[Array, "batch token"]:
    """Returns a draw from [0, 1) per token, by the key, its position and its id alone."""

    def draw(token_id: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, token_id), position))

    return jax.vmap(jax.vmap(draw))(_ids_of(token_ids), positions)


def _ids_of(inputs: Inputs) -> Int[Array, "batch token"]:
    """Returns a number for each token: its id, or a hash of its input."""
    if inputs.ndim == 2:
        return inputs
    wide = jax.lax.bitcast_convert_type(inputs.astype(jnp.float32), jnp.int32)
    wide = wide.reshape(*inputs.shape[:2], -1)
    odd = 2 * jnp.arange(wide.shape[-1], dtype=jnp.int32) + 1
    mixed = (wide ^ (wide >> 15)) * jnp.broadcast_to(odd * 0x2C1B3C6D, wide.shape)
    return jnp.sum(mixed, axis=-1, dtype=jnp.int32) & 0x7FFFFFFF
