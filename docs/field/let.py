# SPDX-License-Identifier: Apache-2.0
"""LET (Zhao et al. 2026, arXiv 2602.05393): early layers learn the late states of a finished model.

    python docs/field/let.py [STEPS]

A small model learns Python from scratch. For the first half of its steps, its states after `early`
layers are drawn to the shipped model's last ones, by their cosine, with a falling weight. Prints
test nats per token at each exit, with and without that, and where exits are added late: a loss of
all exits alike for the second half of the steps.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jei import whole_windows

import utio_jax
from utio_jax.models import STDLIB_16, Transformer
from utio_jax.staircase import dense_states, exit_nll


def run(teacher, student, batches, held, steps, early, weight=0.1):
    """Returns nats per token on held rows at each exit, by way."""
    lengths, losses = jnp.full(len(held), held.shape[1]), {}
    last, width = teacher.decoder.config.num_layers, jnp.full(len(batches[0]), held.shape[1])
    unit = lambda x: x * jax.lax.rsqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)

    def loss(params, ids, pull, exits):
        nats = exit_nll(student, params, ids, width).sum(axis=(1, 2)) / ids[:, 1:].size
        (late,) = dense_states(teacher.decoder, teacher.params, ids, width, depths=(last,))
        (here,) = dense_states(student, params, ids, width, depths=(early,))
        apart = 1 - (unit(here) * unit(late)).sum(axis=-1).mean()
        return nats @ exits + pull * apart

    for name in ("LET", "plain", "exits added late"):
        params = student.init(jax.random.key(0))
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, steps))
        state, step_of = optimizer.init(params), jax.jit(jax.grad(loss))
        final = jnp.eye(len(student.config.exits))[-1]
        for step in range(steps):
            begun = max(0.0, 1 - 2 * step / steps)
            late = name == "exits added late" and not begun
            exits = jnp.ones_like(final) / len(final) if late else final
            ids, pull = batches[step % len(batches)], weight * begun * (name == "LET")
            slopes = step_of(params, ids, pull, exits)
            updates, state = optimizer.update(slopes, state)
            params = optax.apply_updates(params, updates)
        nats = jax.jit(lambda p: exit_nll(student, p, held, lengths).sum(axis=(1, 2)))(params)
        losses[name] = np.round(np.asarray(nats) / held[:, 1:].size, 3).tolist()
    return losses


if __name__ == "__main__":
    steps, teacher = int([*sys.argv, "300"][1]), utio_jax.load(branches=False)
    train, test = (whole_windows(teacher, split) for split in ("train", "test"))
    config = dataclasses.replace(STDLIB_16, num_layers=8, exits=(2, 4, 8))
    print(run(teacher, Transformer(config), train, jnp.concatenate(test[:8]), steps, early=3))
