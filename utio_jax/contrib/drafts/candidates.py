# SPDX-License-Identifier: Apache-2.0
"""Gates on an exit's logits for a few likely next tokens, after SpecEE.

SpecEE (Xu et al. 2025, arXiv 2504.08850) has a draft model for the candidates. Here a table of the
most frequent next tokens names them, so they are known before the first layer.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.calibration.gates import SignalFitter, fit_gates
from utio_jax.calibration.studies import predicted_tokens
from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import Decoder, Inputs, Params, apply_exit_lens
from utio_jax.core.documents import Batch
from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.lens import Wrapped
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.quantised import is_quantised
from utio_jax.policies import StateGate
from utio_jax.policies.base import Boundary
from utio_jax.policies.signals import SignalBase, exit_index


@pytree
class CandidateGates(SignalBase):
    """A gate on the state and on its logits for a few likely next tokens.

    Attributes:
      gates: one per exit, on `gate_inputs`; fitted to sqrt(KL to full depth).
      likely: candidates of each token of the vocabulary.
      exits: depths of the gates. Static.
    """

    gates: StateGate
    likely: Int[Array, "vocab candidate"]
    exits: tuple[int, ...] = static()
    name: str = static(default="candidates")

    def start(
        self, token_ids: Inputs, positions: Int[Array, "batch token"]
    ) -> Int[Array, "batch token"]:
        """Returns the token ids, which select candidates. Raises ValueError for other inputs."""
        ids = jnp.asarray(token_ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                "Wanted token ids, which the candidates of these gates follow from. Got inputs of "
                f"type {ids.dtype}. Use gates on states alone."
            )
        return ids

    def __call__(
        self, index: int, boundary: Boundary, memory: Int[Array, "batch token"]
    ) -> tuple[jax.Array, Int[Array, "batch token"]]:
        decoder = boundary.decoder
        if len(self.likely) != decoder.config.vocab_size:
            raise ValueError(
                f"Wanted candidates of {decoder.config.vocab_size} tokens, the model's vocabulary. "
                f"These gates have them of {len(self.likely)}. Fit gates to this model."
            )
        place = exit_index(self.exits, boundary.depth, self.name)
        value = partial(self._value(decoder, place), boundary.params)
        return boundary.map_live(value, boundary.x, memory, boundary.positions), memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        x = jax.ShapeDtypeStruct((1, decoder.config.embed_dim), jnp.float32)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        return count_matmul_flops(self._value(decoder, 0), params, x, one, one)  # All cost that.

    def _value(self, decoder: Decoder, index: int) -> Callable[..., jax.Array]:
        inputs = partial(gate_inputs, decoder, likely=self.likely, depth=self.exits[index])
        return lambda *arrays: self.gates.at(index)(inputs(*arrays))


def gate_inputs(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "slot dim"],
    token_ids: Int[Array, " slot"],
    positions: Int[Array, " slot"],
    *,
    likely: Int[Array, "vocab candidate"],
    depth: int,
) -> Float[Array, "slot input"]:
    """Returns the normalised states at `depth`, with six features of the candidates' logits.

    Of the candidates' logits, read through the exit's lens where there is one: entropy (nats), the
    largest, its distance to the second, logarithm of the sum of exponentials. Then the logarithms
    of the state's scale, and of 1 + the position. (Whole, they would drown the state, with which
    a `StateGate` normalises them.) Raises ValueError where the head's columns cannot be found.
    """
    seen = apply_exit_lens(decoder, params, x, depth)
    logits = jax.vmap(partial(_some_logits, decoder, params))(seen, likely[token_ids])
    logits = logits.astype(jnp.float32)
    ordered = jnp.sort(logits, axis=-1)
    most, second = ordered[:, -1], ordered[:, -min(2, ordered.shape[-1])]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    shares = jnp.exp(logits - log_total[:, None])
    entropy = log_total - jnp.sum(shares * logits, axis=-1)
    size = jnp.log(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1) + 1e-6) / 2
    place = jnp.log1p(positions.astype(jnp.float32))
    beside = jnp.stack([entropy, most, most - second, log_total, size, place], axis=-1)
    return jnp.concatenate([normalise(x), beside / 8], axis=-1)


def _some_logits(
    decoder: Decoder, params: Params, x: Float[Array, " dim"], kept: Int[Array, " kept"]
) -> Float[Array, " kept"]:
    """Returns the logits of some tokens alone, by these columns of the head."""
    while isinstance(decoder, Wrapped):
        decoder, params = decoder.decoder, params["model"]
    names = sorted(params) if isinstance(params, Mapping) else type(params).__name__
    for name, leaf, axis in (("head", "kernel", 1), ("embedding", "embedding", 0)):
        if name in names and leaf in params[name]:
            table = params[name][leaf]
            axis = 0 if is_quantised(table) else axis  # Output first, as its scales.
            part = jax.tree.map(partial(jnp.take, indices=kept, axis=axis), table)
            columns = {name: {leaf: part}}
            logits = decoder.unembed({**params, **columns}, x)
            if logits.shape == kept.shape:
                return logits
    raise ValueError(
        "Wanted a decoder whose unembed reads params['head']['kernel'], [dim, vocab], or "
        "params['embedding']['embedding'], [vocab, dim], as Transformer's. Got "
        f"{type(decoder).__name__} with parameters {names}. Use gates on states alone: 'learned'."
    )


def fit_candidates(fit: SignalFitter, count: int = 16) -> CandidateGates:
    """Returns gates fitted to sqrt(KL to full depth), on `count` likely tokens.

    An entry for `utio_jax.calibration.SIGNALS`. 64 are better, and take a layer's time. Raises
    ValueError, see `gate_inputs`.
    """
    decoder, batches = fit.decoder, [study.batch for study in fit.studies]
    likely = jnp.asarray(likely_followers(batches, decoder.config.vocab_size, count=count))

    @jax.jit
    def read(params: Params, states: jax.Array, ids: jax.Array) -> jax.Array:
        places = jnp.arange(ids.shape[1])
        of_row = partial(gate_inputs, decoder, params, positions=places, likely=likely)
        at = [partial(of_row, depth=depth) for depth in fit.exits]
        rows = zip(at, states.astype(jnp.float32), strict=True)
        return jnp.stack([jax.lax.map(lambda row, one=one: one(*row), (x, ids)) for one, x in rows])

    seen = [read(fit.params, study.states, study.batch.token_ids) for study in fit.studies]
    inputs = predicted_tokens(fit.studies, [np.asarray(values) for values in seen])
    kl = predicted_tokens(fit.studies, [study.kl for study in fit.studies])[:-1]
    gates = fit_gates(inputs, np.sqrt(kl), seed=fit.seed)
    return CandidateGates(gates=gates, likely=likely, exits=fit.exits)


def likely_followers(batches: Sequence[Batch], vocab_size: int, *, count: int) -> np.ndarray:
    """Returns `[vocab, count]`, the tokens that follow each token most often in a text.

    Most frequent first; where a token has fewer followers, the text's commonest tokens that are not
    among them fill up. At most as many as the vocabulary has.
    """
    follow, times = defaultdict[int, Counter](Counter), Counter(range(vocab_size))
    for batch in batches:
        for row, length in zip(batch.token_ids.tolist(), batch.lengths, strict=True):
            times.update(row[:length])
            for first, second in itertools.pairwise(row[:length]):
                follow[first][second] += 1
    common = times.most_common(2 * count)
    rows = [[*dict([*follow[t].most_common(count), *common])] for t in range(vocab_size)]
    return np.asarray([row[:count] for row in rows], np.int32)
