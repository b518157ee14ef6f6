# SPDX-License-Identifier: Apache-2.0
"""Signals with weights that `utio_jax.calibration.gates` fits: small MLPs on states."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import Decoder, Inputs, Params, apply_exit_lens, reduced_head
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
    """What signals of a gate per exit share.

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
        return gate_flops(self.gates, decoder)


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
class CandidateGates(_Gated):
    """A gate's value from the state, and from what it predicts of a few likely next tokens.

    SpecEE (Xu et al. 2025, arXiv 2504.08850): how sure an exit is shows in the logits of a few
    candidates, so many columns of the head instead of the whole vocabulary. There a draft model
    names them; here a table does, by what follows a token most often in a text.

    Attributes:
      gates: one per exit, on states and `candidate_inputs`; fitted to sqrt(KL to full depth).
      likely: candidates of each token of the vocabulary.
    """

    likely: Int[Array, "vocab candidate"]
    name: str = static(default="candidates")

    def start(
        self, token_ids: Inputs, positions: Int[Array, "batch token"]
    ) -> Int[Array, "batch token"]:
        """Returns the token ids, which say the candidates; raises ValueError for other inputs."""
        if not jnp.issubdtype(jnp.asarray(token_ids).dtype, jnp.integer):
            raise ValueError(
                "Wanted token ids, which the candidates of these gates follow from. Got inputs of "
                f"type {jnp.asarray(token_ids).dtype}. Use gates on states alone."
            )
        return jnp.asarray(token_ids)

    def __call__(
        self, index: int, boundary: Boundary, memory: Int[Array, "batch token"]
    ) -> tuple[jax.Array, Int[Array, "batch token"]]:
        decoder = boundary.decoder
        index = exit_index(self.exits, boundary.depth, self.name)
        if len(self.likely) != decoder.config.vocab_size:
            raise ValueError(
                f"Wanted candidates of {decoder.config.vocab_size} tokens, the model's vocabulary. "
                f"These gates have them of {len(self.likely)}. Fit gates to this model."
            )

        value = partial(self._value, decoder, boundary.params, index=index)
        return boundary.map_live(value, boundary.x, memory, boundary.positions), memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        x = jax.ShapeDtypeStruct((1, decoder.config.embed_dim), jnp.float32)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        value = partial(self._value, decoder, index=0)  # All cost the same.
        return count_matmul_flops(value, params, x, one, one)

    def _value(
        self,
        decoder: Decoder,
        params: Params,
        x: Float[Array, "slot dim"],
        token_ids: Int[Array, " slot"],
        positions: Int[Array, " slot"],
        *,
        index: int,
    ) -> Float[Array, " slot"]:
        candidates, depth = self.likely[token_ids], self.exits[index]
        more = candidate_inputs(decoder, params, x, candidates, positions, depth=depth)
        return self.gates.at(index).read(jnp.concatenate([normalise(x), more], axis=-1))


def candidate_inputs(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "slot dim"],
    candidates: Int[Array, "slot candidate"],
    positions: Int[Array, " slot"],
    *,
    depth: int,
) -> Float[Array, "slot 6"]:
    """Returns what gates see beside a normalised state, see `CandidateGates`.

    Entropy (nats), largest logit, its distance to the second and the logarithm of the sum of
    exponentials, all over the candidates; logarithms of the state's scale and of the position.

    Args:
      decoder: the model; where it reads an exit through a lens, so do the candidates' columns.
      params: its parameters.
      x: states at `depth`.
      candidates: ids of each token's own.
      positions: of the tokens in their sequences.
      depth: layers that the states have run.

    Raises:
      ValueError: the decoder has no head of a few tokens alone, see `HasReducedHead`.
    """

    def one(seen: jax.Array, kept: jax.Array) -> jax.Array:
        return decoder.unembed(reduced_head(decoder, params, kept), seen)

    logits = jax.vmap(one)(apply_exit_lens(decoder, params, x, depth), candidates)
    logits = logits.astype(jnp.float32)
    most = jnp.max(logits, axis=-1)
    largest = logits == most[:, None]
    second = jnp.max(jnp.where(largest, -jnp.inf, logits), axis=-1)
    one_of_several = jnp.sum(largest, axis=-1) > 1  # As happens in bfloat16.
    second = jnp.where(one_of_several | (logits.shape[-1] == 1), most, second)
    weights = jnp.exp(logits - most[:, None])
    total = jnp.sum(weights, axis=-1)
    log_total = most + jnp.log(total)
    entropy = log_total - jnp.sum(weights * logits, axis=-1) / total
    size = jnp.log(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1) + 1e-6) / 2
    place = jnp.log1p(positions.astype(jnp.float32))
    return jnp.stack([entropy, most, most - second, log_total, size, place], axis=-1)


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
    """The mean state of a row's first tokens decides for all later ones; the first run to the end.

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
        mean, known = mean_of_first(boundary.x, first & boundary.live)
        score = jnp.where(known, gate(mean), jnp.inf)
        return jnp.where(first, jnp.inf, score[:, None]), None

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        # Asked once per row, in which at least `prompt` tokens are live wherever it matters.
        return gate_flops(self.gates, decoder) / self.prompt


def mean_of_first(
    x: Float[Array, "batch token dim"], first: jax.Array
) -> tuple[Float[Array, "batch dim"], jax.Array]:
    """Returns each row's mean state over `first`, and whether the row has such tokens."""
    count = jnp.sum(first, axis=1)
    total = jnp.sum(jnp.where(first[:, :, None], x, 0).astype(jnp.float32), axis=1)
    return total / jnp.maximum(count, 1)[:, None], count > 0


def gate_flops(gates: StateGate, decoder: Decoder) -> float:
    """Returns what one gate costs for one state."""
    x = jax.ShapeDtypeStruct((1, decoder.config.embed_dim), jnp.float32)
    return count_matmul_flops(lambda x: gates.at(0)(x), x)
