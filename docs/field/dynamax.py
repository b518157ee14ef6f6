# SPDX-License-Identifier: Apache-2.0
"""DYNAMAX (Nogales et al. 2025, arXiv 2504.20922): a selective recurrence decides who exits.

    python docs/field/dynamax.py

Mamba scans over tokens there. Here the scan goes over a token's exits: a gate of `learned`'s size
that remembers earlier exits. Prints it beside `learned`, truncation and random depths.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orthorank import compared

from utio_jax.calibration import predicted_tokens
from utio_jax.core import pytree, static
from utio_jax.policies import SignalBase


@pytree
class Recurrent(SignalBase):
    """The score `v h` after `h = a h + (1 - a) relu(W x)`; `a = sigmoid(u x)`, x of unit scale."""

    weights: dict
    name: str = static(default="recurrent")
    remembers = True

    def start(self, token_ids, positions):
        return jnp.zeros((*positions.shape, len(self.weights["v"])))

    def step(self, x, h):
        seen = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True)) @ self.weights["Wu"]
        keep = jax.nn.sigmoid(seen[..., -1:])
        return keep * h + (1 - keep) * jax.nn.relu(seen[..., :-1])

    def __call__(self, index, boundary, memory):
        h = boundary.map_live(self.step, boundary.x, memory)
        return h @ self.weights["v"], h

    def flops(self, index, decoder, params):
        return 2.0 * self.weights["Wu"].size


def fit(fitter, steps=2500, hidden=64):
    """Returns the gate that predicts sqrt(KL to full depth) at all exits, one after the other."""
    x = predicted_tokens(fitter.studies, [each.states for each in fitter.studies])
    target = np.sqrt(predicted_tokens(fitter.studies, [each.kl for each in fitter.studies])[:-1])
    keys, dim = jax.random.split(jax.random.key(fitter.seed)), x.shape[-1]
    weights = {"Wu": jax.random.normal(keys[0], (dim, hidden + 1)) * dim**-0.5}
    weights["v"] = jax.random.normal(keys[1], (hidden,)) * hidden**-0.5
    optimizer = optax.adam(optax.linear_schedule(3e-3, 0.0, steps))

    def loss(weights, x, target):
        gate, h, errors = Recurrent(weights=weights), jnp.zeros((x.shape[1], hidden)), 0.0
        for state, root in zip(x.astype(jnp.float32), target):
            h = gate.step(state, h)
            errors += ((h @ weights["v"] - root) ** 2).mean()
        return errors

    @jax.jit
    def update(weights, state, x, target):
        updates, state = optimizer.update(jax.grad(loss)(weights, x, target), state)
        return optax.apply_updates(weights, updates), state

    state, rng = optimizer.init(weights), np.random.default_rng(fitter.seed)
    for _ in range(steps):
        some = rng.integers(x.shape[1], size=2048)
        weights, state = update(weights, state, x[:, some], target[:, some])
    return Recurrent(weights=weights)


if __name__ == "__main__":
    print(compared({"recurrent": fit}).summary())
