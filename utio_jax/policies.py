# SPDX-License-Identifier: Apache-2.0
"""Depth policies: frozen dataclasses that decide who runs deeper, after `utio_jax.plan.Policy`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.cost import count_matmul_flops
from utio_jax.decoder import Decoder, Params, check_depths
from utio_jax.importance import embedding_outlier, predictive_entropy
from utio_jax.plan import Boundary


def _static(**kwargs: Any) -> Any:
    return dataclasses.field(metadata={"static": True}, **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every token runs `depth` layers: the model truncated at one exit, or the full model.

    Attributes:
      depth: layers for everyone. Static.
    """

    depth: int = _static()
    causal: bool = _static(default=True)
    name: str = _static(default="uniform")

    def __post_init__(self) -> None:
        check_depths((self.depth,))

    @property
    def depths(self) -> tuple[int, ...]:
        return (self.depth,)

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> None:
        return None

    def go_deeper(
        self, index: int, boundary: Boundary, memory: None
    ) -> tuple[Bool[Array, "batch token"], None]:
        raise AssertionError("a uniform policy has no boundary")

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenDepths:
    """Depths decided beforehand, by the caller: `depth_of_token` holds layers per token.

    A depth that is not in `depths` runs to the next deeper one that is.
    """

    depth_of_token: Int[Array, "batch token"]
    depths: tuple[int, ...] = _static()
    causal: bool = _static(default=False)
    name: str = _static(default="given")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Int[Array, "batch token"]:
        if token_ids.shape != self.depth_of_token.shape:
            raise ValueError(
                f"Wanted one depth per token of {token_ids.shape}. Got {self.depth_of_token.shape}."
            )
        return self.depth_of_token

    def go_deeper(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory > self.depths[index], memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random:
    """The control: depths drawn from a histogram, independent of the token.

    Every token's draw depends on the key, its position and its id alone: causal, and the same
    whoever shares the batch.

    Attributes:
      fractions: probability of each depth, shallowest first.
      key: a PRNG key.
      depths: where tokens may stop. Static.
    """

    fractions: Float[Array, " depth"]
    key: PRNGKeyArray
    depths: tuple[int, ...] = _static()
    causal: bool = _static(default=True)
    name: str = _static(default="random")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Float[Array, "batch token"]:
        def draw(token_id: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.uniform(
                jax.random.fold_in(jax.random.fold_in(self.key, token_id), position)
            )

        return jax.vmap(jax.vmap(draw))(token_ids, positions)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return memory >= jnp.cumsum(self.fractions)[index], memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UtioSurrogate:
    """UTIO's surrogate, computed once at the depth floor from signals that really exist there.

    Entropy (nats) of the exit's own prediction and the state's outlier against a calibrated mean;
    heat has no causal estimate in scoring, so its weight goes to the other two. The number of
    thresholds that the score exceeds is the bucket.

    Attributes:
      thresholds: ascending, one fewer than depths, in the score's unit (mostly nats).
      mean_state: `[dim]`, the mean state at the floor over the calibration text.
      depths: the floor first. Static.
      weights: of entropy and outlier. Static.
    """

    thresholds: Float[Array, " edge"]
    mean_state: Float[Array, " dim"]
    depths: tuple[int, ...] = _static()
    weights: tuple[float, float] = _static(default=(2 / 3, 1 / 3))
    causal: bool = _static(default=True)
    name: str = _static(default="utio_surrogate")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> Float[Array, "batch token"]:
        return jnp.zeros(token_ids.shape, jnp.float32)

    def score(
        self, logits: Float[Array, "slot vocab"], x: Float[Array, "slot dim"]
    ) -> Float[Array, " slot"]:
        """Returns the surrogate of states at the floor, and of what is predicted from them."""
        entropy, outlier = self.weights
        return entropy * predictive_entropy(logits) + outlier * embedding_outlier(
            x, batch_mean=self.mean_state
        )

    def go_deeper(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if index == 0:
            memory = boundary.map_logits(self.score, boundary.x)
        return ~(memory <= self.thresholds[index]), memory  # NaN goes deeper.

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0 if index else 4.0 * decoder.config.embed_dim

    def reads_logits(self, index: int) -> bool:
        return index == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateGate:
    """A small MLP on the normalised state that predicts sqrt(KL to full depth), in nats ** 0.5.

    The exit classifier of CALM (Schuster et al. 2022) and arXiv 2407.20272, with the dense,
    label-free target of this project: how far the exit's prediction is from the full model's.

    Attributes:
      hidden: `[dim, hidden]`; while gates are fitted together, all leaves lead with a gate axis.
      hidden_bias: `[hidden]`.
      output: `[hidden]`.
      output_bias: `[]`.
    """

    hidden: Float[Array, "*gate dim hidden"]
    hidden_bias: Float[Array, "*gate hidden"]
    output: Float[Array, "*gate hidden"]
    output_bias: Float[Array, "*gate"]

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead"]:
        """Returns the predicted sqrt(KL) of each state."""
        x = x.astype(jnp.float32)
        # A root-mean-square norm without scale: the gate's own first matrix can learn that.
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        hidden = x @ self.hidden
        hidden = jax.nn.relu(hidden + jnp.broadcast_to(self.hidden_bias, hidden.shape))
        return hidden @ self.output + self.output_bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """A state gate at every boundary: tokens go deeper while its value exceeds a threshold.

    Attributes:
      gates: one `StateGate` per boundary.
      thresholds: one per boundary, in nats ** 0.5; +inf lets nobody pass, -inf everybody.
      depths: where tokens may stop. Static.
    """

    gates: tuple[StateGate, ...]
    thresholds: Float[Array, " boundary"]
    depths: tuple[int, ...] = _static()
    causal: bool = _static(default=True)
    name: str = _static(default="learned")

    def start(
        self, token_ids: Int[Array, "batch token"], positions: Int[Array, "batch token"]
    ) -> None:
        return None

    def go_deeper(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        predicted = boundary.map_live(self.gates[index], boundary.x)
        return ~(predicted <= self.thresholds[index]), None  # NaN goes deeper.

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return count_matmul_flops(self.gates[index], jnp.zeros((1, decoder.config.embed_dim)))

    def reads_logits(self, index: int) -> bool:
        return False
