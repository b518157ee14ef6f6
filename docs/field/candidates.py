# SPDX-License-Identifier: Apache-2.0
"""SpecEE (Xu et al. 2025, arXiv 2504.08850): gates that see logits of a few likely tokens.

    python docs/field/candidates.py

A table of the tokens that most often follow each token stands for SpecEE's draft model. Their
columns of the head give an exit's certainty. Prints it beside `learned` and the controls.
"""

import jax
import jax.numpy as jnp
import numpy as np
from orthorank import compared

from utio_jax.core import apply_exit_lens, pytree, static
from utio_jax.policies import SignalBase, StateGate


def inputs_of(decoder, params, x, ids, likely, depth):
    """Returns states with four numbers of the candidates' logits, `[token, dim + 4]`."""
    own = params.get("model", params)  # Without the lens.
    head, table = getattr(decoder, "decoder", decoder), own["embedding"]["embedding"]
    some = lambda x, kept: head.unembed({**own, "embedding": {"embedding": table[kept]}}, x)
    logits = jnp.sort(jax.vmap(some)(apply_exit_lens(decoder, params, x, depth), likely[ids]))
    total, best = jax.nn.logsumexp(logits, axis=-1), logits[:, -1]
    entropy = total - (jax.nn.softmax(logits) * logits).sum(axis=-1)
    features = jnp.stack([entropy, best, best - logits[:, -2], total], axis=-1)
    return jnp.concatenate([x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True)), features], axis=-1)


@pytree
class Candidates(SignalBase):
    """A `StateGate` of each exit on `inputs_of`."""

    gates: StateGate
    likely: jax.Array
    exits: tuple[int, ...] = static()
    name: str = static(default="candidates")

    def start(self, token_ids, positions):
        return token_ids

    def __call__(self, index, boundary, memory):
        seen, gate = boundary, self.gates.at(self.exits.index(boundary.depth))
        of = lambda x, ids: inputs_of(seen.decoder, seen.params, x, ids, self.likely, seen.depth)
        return seen.map_live(lambda *slots: gate(of(*slots)), seen.x, memory), memory

    def flops(self, index, decoder, params):
        return 2.0 * decoder.config.embed_dim * (self.gates.hidden.shape[-1] + self.likely.shape[1])


def fit(fitter, count=16):
    """Returns gates fitted to sqrt(KL to full depth), on `count` likely tokens."""
    follow = np.zeros((fitter.decoder.config.vocab_size,) * 2)
    for study in fitter.studies:
        ids, real = study.batch.token_ids, study.predicted[:, :-1]
        np.add.at(follow, (ids[:, :-1][real], ids[:, 1:][real]), 1.0)
    likely = jnp.asarray(np.argsort(-follow - 1e-9 * follow.sum(axis=0), axis=1)[:, :count])

    @jax.jit
    def read(params, states, ids):
        at = lambda depth: lambda row: inputs_of(fitter.decoder, params, *row, likely, depth)
        return jnp.stack([jax.lax.map(at(d), (x, ids)) for x, d in zip(states, fitter.exits)])

    rows = [(np.float32(study.states), study.batch.token_ids) for study in fitter.studies]
    gates = fitter.regressor([np.asarray(read(fitter.params, *row)) for row in rows])
    return Candidates(gates=gates, likely=likely, exits=fitter.exits)


if __name__ == "__main__":
    print(compared({"candidates": fit}).summary())
