# SPDX-License-Identifier: Apache-2.0
"""Signals with weights that calibration fits: small MLPs on states.

`utio_jax.calibration.gates` fits them. What a gate's number means is what it was fitted to:
sqrt(KL to full depth) for `learned`, the logit of "the prediction here differs from full depth's"
for `classifier` and `hazard`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import Decoder, Inputs, Params, some_exits
from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import SignalBase, exit_index


@pytree
class StateGate:
    """A small MLP on the normalised state; gates of several exits lead with an exit axis.

    The exit classifier of CALM (Schuster et al. 2022) and arXiv 2407.20272, with a hidden layer.
    """

    hidden: Float[Array, "*exit dim hidden"]
    hidden_bias: Float[Array, "*exit hidden"]
    output: Float[Array, "*exit hidden"]
    output_bias: Float[Array, "*exit"]
    as_is: bool = static(default=False)
    """True if states are read as they are, not normalised first. Static."""

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead"]:
        """Returns one gate's value for each state."""
        return self.read(x if self.as_is else normalise(x))

    def read(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead"]:
        """Returns the same of inputs that are not normalised first."""
        hidden = x @ self.hidden
        hidden = jax.nn.relu(hidden + jnp.broadcast_to(self.hidden_bias, hidden.shape))
        return hidden @ self.output + self.output_bias

    def at(self, index: int) -> StateGate:
        """Returns the gate of one exit."""
        return jax.tree.map(lambda leaf: leaf[index], self)


@pytree
class _Gated(SignalBase):
    """Base of signals with a gate per exit.

    Attributes:
      gates: one per exit.
      exits: their depths. Static.
    """

    gates: StateGate
    exits: tuple[int, ...] = static()

    def gate_at(self, boundary: Boundary) -> StateGate:
        """Returns the gate of a boundary; raises ValueError where there is none."""
        return self.gates.at(exit_index(self.exits, boundary.depth, self.name))

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        x, gates = jax.ShapeDtypeStruct((1, decoder.config.embed_dim), jnp.float32), self.gates
        return count_matmul_flops(lambda x: gates.at(0)(x), x)


@pytree
class Learned(_Gated):
    """A gate's value at every boundary.

    Named `learned`, gates regress sqrt(KL to full depth), in nats ** 0.5: a dense target without
    labels. Named `classifier`, they hold the logit of "this exit's most probable token is not full
    depth's": the classifier of CALM and arXiv 2407.20272, and TIDE's router, whose label compares
    the last state with itself.
    """

    name: str = static(default="learned")

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        return boundary.map_live(self.gate_at(boundary), boundary.x), None


@pytree
class Hazard(_Gated):
    """The probability of having passed all boundaries so far, this one included.

    PALBERT's Q-exit (Balagansky and Gavrilov 2022): with h_i the probability of halting at exit i,
    a token stops once 1 - prod(1 - h_i) reaches q: a threshold of `1 - q` on this score. The gates
    are those of `classifier`, whose value is the logit of 1 - h. `own_gate` has a model's own.
    """

    name: str = static(default="hazard")

    @property
    def remembers(self) -> bool:
        return True

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return jnp.ones(positions.shape, jnp.float32)

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        survival = memory * jax.nn.sigmoid(boundary.map_live(self.gate_at(boundary), boundary.x))
        return survival, survival


def own_gate(decoder: Any, params: Params, *, threshold: float) -> Thresholded:
    """Returns the exit policy of a looped model's own gate, as Ouro's (arXiv 2510.25741).

    A token stops after the first turn by which it has stopped with a probability of at least
    `threshold`: 1 - prod(1 - hazard) of the turns so far. At 1 none stops early.

    Raises:
      ValueError: the model has no gate, or the threshold is not above 0 and at most 1.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"Wanted a threshold above 0, at most 1. Got threshold={threshold}.")
    if not getattr(decoder.config, "exit_gate", False):
        raise ValueError(
            "Wanted a model with an exit gate of its own, as Ouro. Got one without. Fit a policy: "
            "model.calibrate(texts), or utio-jax calibrate."
        )
    kernel, bias = decoder.exit_gate(params)
    depths = some_exits(decoder.config.num_layers, decoder.config.turns)
    count = len(depths) - 1

    def repeat(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (count, *leaf.shape))

    # A linear map as the difference of its two halves; its value is the logit of going on.
    hidden, ends = jnp.concatenate([kernel, -kernel], axis=1), jnp.asarray([-1.0, 1.0])
    gates = StateGate(
        hidden=repeat(hidden),
        hidden_bias=repeat(jnp.zeros((2,), hidden.dtype)),
        output=repeat(ends.astype(hidden.dtype)),
        output_bias=repeat(-bias[0]),
        as_is=True,
    )
    limit = 1 - threshold if threshold < 1 else -jnp.inf
    signal = Hazard(gates=gates, exits=depths[:-1], name="own_gate")
    return Thresholded(signal=signal, thresholds=jnp.full((count,), limit), depths=depths)


@pytree
class PromptRouter(_Gated):
    """Scores a row by the mean state of its first tokens, which run in full themselves.

    FiRST (Jain et al. 2024, arXiv 2410.12513) routes a whole sequence by its prompt, per layer;
    this is its form as a depth. The first `prompt` tokens must be in the block: while decoding,
    when they are not, all tokens go deeper.

    Attributes:
      prompt: tokens. Static.
    """

    prompt: int = static(default=32)
    name: str = static(default="prompt_router")

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        gate = self.gate_at(boundary)
        first = boundary.positions < self.prompt
        seen = first & boundary.live
        count = jnp.sum(seen, axis=1)
        total = jnp.sum(jnp.where(seen[:, :, None], boundary.x, 0).astype(jnp.float32), axis=1)
        mean = total / jnp.maximum(count, 1)[:, None]
        score = jnp.where(count > 0, gate(mean), jnp.inf)
        return jnp.where(first, jnp.inf, score[:, None]), None

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        # Asked once per row, in which at least `prompt` tokens are live wherever it matters.
        return super().flops(index, decoder, params) / self.prompt
