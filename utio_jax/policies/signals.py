# SPDX-License-Identifier: Apache-2.0
"""Signals without learned weights, as `utio_jax.policies.base.Signal` defines them.

Each returns one score per token and boundary, the higher the harder. Known before the pass:
`Position`. From an exit's own prediction, at the price of a vocabulary head for tokens that go on:
`SoftmaxGap`, `MaxProbability`, `Entropy`, `Patience`. From states alone: `StateSimilarity`. UTIO's
own are in `utio_jax.utio.signals`.
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
class _Confidence(SignalBase):
    """A function of the exit's own prediction, computed at every boundary."""

    def score(self, logits: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        raise NotImplementedError

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        def score(logits: jax.Array) -> jax.Array:
            check_alternatives(logits, self.name)
            return self.score(logits)

        return boundary.map_logits(score), None

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
        def predict(logits: jax.Array) -> jax.Array:
            check_alternatives(logits, self.name)
            # Logits that are not numbers agree with none.
            return jnp.where(jnp.isnan(logits).any(axis=-1), -1, most_probable(logits))

        best = boundary.map_logits(predict)
        before, count = memory if index else (best, jnp.full(best.shape, -1, jnp.int32))
        count = jnp.where(best == before, count + 1, 0)
        return jnp.where(best >= 0, -count.astype(jnp.float32), jnp.nan), (best, count)

    def reads_logits(self, index: int) -> bool:
        return True


def check_alternatives(logits: Float[Array, "slot vocab"], name: str) -> None:
    """Raises ValueError for predictions of one number: a softmax over one class is always 1."""
    if logits.shape[-1] < 2:
        raise ValueError(
            f"Wanted predictions among at least 2 tokens or classes for signal {name!r}. Got a "
            "single number, a regression: its softmax is always 1. Take StateSimilarity, or a "
            "signal of your own on the change of the number."
        )


def predictive_entropy(logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead"]:
    """Returns the entropy of softmax(logits) in nats, between 0 and log(vocab).

    Exact where logits are -inf (probability zero) and for one-hot distributions (entropy zero).
    NaN where no entry is finite: bucketing sends NaN deepest.

    >>> predictive_entropy(jnp.array([0.0, 0.0, -jnp.inf])).round(4)
    Array(0.6931, dtype=float32)
    """
    check_floats(logits, "logits", "[..., vocab]", 1)
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    # entropy = log(total) - E[shifted]; a weight of zero contributes nothing, not 0 * -inf.
    expected = jnp.sum(jnp.where(weights > 0, shifted, 0.0) * weights, axis=-1) / total
    return jnp.log(total) - expected


def check_floats(array: jax.Array, name: str, shape: str, rank: int) -> None:
    """Raises ValueError unless an array holds floats and has at least `rank` axes."""
    if not hasattr(array, "dtype"):
        raise ValueError(
            f"Wanted an array of floating-point {name}, {shape}. Got {type(array).__name__}. Make "
            f"one: jnp.asarray({name})."
        )
    if jnp.ndim(array) < rank or not jnp.issubdtype(jnp.result_type(array), jnp.floating):
        raise ValueError(
            f"Wanted floating-point {name} of shape {shape}. "
            f"Got shape {jnp.shape(array)} and dtype {jnp.result_type(array)}."
        )


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
    """The control: a draw from [0, 1) per token, by the key, its position and its id alone.

    It is the same at every boundary.

    Attributes:
      key: a PRNG key.
    """

    key: PRNGKeyArray
    name: str = static(default="chance")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        def draw(token_id: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(self.key, token_id)
            return jax.random.uniform(jax.random.fold_in(key, position))

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
