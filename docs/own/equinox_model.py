# SPDX-License-Identifier: Apache-2.0
"""An Equinox model with early exits: docs/bring_your_own.md.

python docs/own/equinox_model.py
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from utio_jax import DecoderConfig, score, uniform
from utio_jax.attention import attend, visible_keys

HEADS, DIM, VOCAB, LAYERS = 4, 32, 50, 6
SIZES = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM // HEADS, "context_length": 64}
CONFIG = DecoderConfig(vocab_size=VOCAB, num_layers=LAYERS, embed_dim=DIM, exits=(2, 4, 6), **SIZES)


def linear(layer, x):  # Equinox' layers take one vector; states have leading axes.
    return x @ layer.weight.T + layer.bias


class Block(eqx.Module):
    q: eqx.nn.Linear
    kv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        shapes = (DIM, DIM), (DIM, 2 * DIM), (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)
        pairs = zip(shapes, jax.random.split(key, 5), strict=True)
        layers = (eqx.nn.Linear(*shape, key=key) for shape, key in pairs)
        self.q, self.kv, self.out, self.up, self.down = layers

    def queries(self, x):
        return linear(self.q, x).reshape(*x.shape[:-1], HEADS, -1) * (DIM // HEADS) ** -0.5

    def keys_values(self, x):
        return jnp.split(linear(self.kv, x).reshape(*x.shape[:-1], HEADS, -1), 2, -1)

    def finish(self, x, attended):
        x = x + linear(self.out, attended.reshape(x.shape))
        return x + linear(self.down, jax.nn.gelu(linear(self.up, x)))

    def __call__(self, x):  # Your own forward pass of a row.
        seen = visible_keys(jnp.arange(len(x)), jnp.arange(len(x)))
        return self.finish(x, attend(self.queries(x), *self.keys_values(x), seen))


@dataclasses.dataclass(frozen=True)
class EquinoxDecoder:
    static: Any  # Of one block; hashable.
    config: DecoderConfig = CONFIG
    layers = staticmethod(lambda params: params["blocks"])
    encode_positions = staticmethod(lambda positions: positions)
    unembed = staticmethod(lambda params, x: x @ params["embed"].T)

    def embed(self, params, ids, positions):
        return params["embed"][ids] + params["place"][positions]

    def queries(self, layer, x, places):
        return eqx.combine(layer, self.static).queries(x)

    def keys_values(self, layer, x, places):
        return eqx.combine(layer, self.static).keys_values(x)

    def finish_layer(self, layer, x, attended):
        return eqx.combine(layer, self.static).finish(x, attended)


keys = jax.random.split(jax.random.key(0), 3)
blocks = eqx.filter_vmap(Block)(jax.random.split(keys[0], LAYERS))  # Your stacked layers.
arrays, static = eqx.partition(blocks, eqx.is_array)
embed, place = jax.random.normal(keys[1], (VOCAB, DIM)), jax.random.normal(keys[2], (64, DIM))
decoder, params = EquinoxDecoder(static), {"embed": embed, "place": place, "blocks": arrays}
ids = jax.random.randint(jax.random.key(3), (1, 20), 0, VOCAB)

x = embed[ids[0]] + place[:20]
for index in range(LAYERS):
    x = eqx.combine(jax.tree.map(lambda leaf: leaf[index], arrays), static)(x)
own = jax.nn.log_softmax(x @ embed.T)[jnp.arange(19), ids[0, 1:]]
result = score(decoder, params, ids, jnp.asarray([20]), uniform(LAYERS))
assert abs(result.log_likelihood[0, :19] - own).max() < 1e-3
