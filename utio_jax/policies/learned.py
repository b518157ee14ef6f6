# SPDX-License-Identifier: Apache-2.0
"""Signals with weights that calibration fits: small MLPs on states.

`utio_jax.calibration.gates` fits them. What a gate's number means is what it was fitted to:
sqrt(KL to full depth) for `learned`, the logit of "the prediction here differs from full depth's"
for `classifier` and `hazard`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
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

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead"]:
        """Returns one gate's value for each state."""
        return self.read(normalise(x))

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
    are those of `classifier`, whose value is the logit of 1 - h.
    """

    name: str = static(default="hazard")

    @property
    def remembers(self) -> bool:
        return True

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        passes = jax.nn.sigmoid(boundary.map_live(self.gate_at(boundary), boundary.x))
        survival = passes if memory is None else memory * passes
        return survival, survival


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
