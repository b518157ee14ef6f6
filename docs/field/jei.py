# SPDX-License-Identifier: Apache-2.0
"""JEI-DNN (Regol et al. 2023, arXiv 2310.09163): exits and gates learn by one loss.

    python docs/field/jei.py [STEPS]

The loss is the mean over exits of nats plus the price of their layers, weighted by the gates'
probability of leaving there. The control trains all exits alike for as long, then fits `learned`.
Both are compared at one budget, from the shipped model's weights.
"""

import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orthorank import compared

import utio_jax
from utio_jax.core import windows_of
from utio_jax.models.training import standard_library
from utio_jax.policies import Learned, StateGate
from utio_jax.staircase import dense_states, exit_nll


def whole_windows(model, split, rows=16, width=256):
    """Returns batches `[row, token]` of windows in a random order; shorter ones are left out."""
    texts = model.encode([each.text for each in standard_library(split)])
    whole = [ids for ids in windows_of(texts, width=width) if len(ids) == width]
    random.Random(0).shuffle(whole)
    return [np.stack(whole[at : at + rows]) for at in range(0, len(whole) - rows + 1, rows)]


def losses(decoder, params, gates, ids, price):
    """Returns the joint loss, and that of exits alike, of rows of whole windows."""
    exits = decoder.config.exits
    shares = np.asarray(exits) / decoder.config.num_layers
    lengths = jnp.full(len(ids), ids.shape[1])
    states = dense_states(decoder, params, ids, lengths, depths=exits)
    nats = exit_nll(decoder, params, ids, lengths)[:, :, :-1]
    halts = jnp.stack([jax.nn.sigmoid(-gates.at(i)(x[:, :-1])) for i, x in enumerate(states[:-1])])
    passes = jnp.cumprod(jnp.concatenate([jnp.ones_like(halts[:1]), 1 - halts]), axis=0)
    leaves = passes * jnp.concatenate([halts, jnp.ones_like(halts[:1])])
    return (leaves * (nats + price * shares[:, None, None])).sum(axis=0).mean(), nats.mean()


def run(model, texts, train, steps, budget=0.75, price=1.0, joint=True, **options):
    """Returns the rows of `compare` after training; jointly, gates of the training are judged."""
    count, dim = len(model.decoder.config.exits) - 1, model.decoder.config.embed_dim
    shapes = {"hidden": (dim, 64), "hidden_bias": (64,), "output": (64,), "output_bias": ()}
    draw = lambda key, shape: 0.1 * jax.random.normal(key, (count, *shape))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    gates = StateGate(**dict(zip(shapes, map(draw, keys, shapes.values()), strict=True)))
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-4, steps))

    @jax.jit
    def update(trained, state, ids):
        loss = lambda both: losses(model.decoder, *both, ids, price)[0 if joint else 1]
        updates, state = optimizer.update(jax.grad(loss)(trained), state, trained)
        return optax.apply_updates(trained, updates), state

    trained, state = (model.params, gates), optimizer.init((model.params, gates))
    for step in range(steps):
        trained, state = update(trained, state, train[step % len(train)])
    model.params, exits = trained[0], model.decoder.config.exits[:-1]
    own = lambda fitter: Learned(gates=trained[1], exits=exits, name="jei")
    return compared({"jei": own} if joint else {}, model, texts, budget, **options)


if __name__ == "__main__":
    steps = int([*sys.argv, "200"][1])
    for joint in (True, False):
        model = utio_jax.load(branches=False)
        print(run(model, None, whole_windows(model, "train"), steps, joint=joint).summary())
