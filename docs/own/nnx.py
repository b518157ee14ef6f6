# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX model with early exits: docs/bring_your_own.md.

python docs/own/nnx.py
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from utio_jax import DecoderConfig, score, uniform
from utio_jax.attention import attend, visible_keys
from utio_jax.models import frequencies, rotate, rotations

HEADS, DIM, VOCAB, LAYERS = 4, 32, 50, 6
SIZES = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM // HEADS, "context_length": 64}
CONFIG = DecoderConfig(vocab_size=VOCAB, num_layers=LAYERS, embed_dim=DIM, exits=(2, 4, 6), **SIZES)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1, self.norm_2 = nnx.RMSNorm(DIM, rngs=rngs), nnx.RMSNorm(DIM, rngs=rngs)
        self.q, self.kv = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.out, self.up = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def queries(self, x, places):
        heads = self.q(self.norm_1(x)).reshape(*x.shape[:-1], HEADS, -1)
        return rotate(heads, places) * (DIM // HEADS) ** -0.5

    def keys_values(self, x, places):
        keys, values = jnp.split(self.kv(self.norm_1(x)).reshape(*x.shape[:-1], HEADS, -1), 2, -1)
        return rotate(keys, places), values

    def finish_layer(self, x, attended):
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))

    def __call__(self, x, places):  # Your own forward pass of a row.
        seen = visible_keys(jnp.arange(len(x)), jnp.arange(len(x)))
        attended = attend(self.queries(x, places), *self.keys_values(x, places), seen)
        return self.finish_layer(x, attended)


@dataclasses.dataclass(frozen=True)
class NnxDecoder:  # Frozen: jit knows it by its fields.
    graph: nnx.GraphDef  # Of one block; hashable.
    config: DecoderConfig = CONFIG
    layers = staticmethod(lambda params: params["blocks"])
    embed = staticmethod(lambda params, ids, positions: params["embed"][ids])
    unembed = staticmethod(lambda params, x: x @ params["embed"].T)

    def encode_positions(self, positions):
        return rotations(positions, frequencies(DIM // HEADS, 1e4))

    def queries(self, layer, x, places):
        return nnx.merge(self.graph, layer).queries(x, places)

    def keys_values(self, layer, x, places):
        return nnx.merge(self.graph, layer).keys_values(x, places)

    def finish_layer(self, layer, x, attended):
        return nnx.merge(self.graph, layer).finish_layer(x, attended)


blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(nnx.Rngs(0).split(LAYERS))  # Your stacked layers.
graph, state = nnx.split(blocks)
embed = jax.random.normal(jax.random.key(1), (VOCAB, DIM))
decoder, params = NnxDecoder(graph), {"embed": embed, "blocks": state}
ids = jax.random.randint(jax.random.key(2), (1, 20), 0, VOCAB)

x, places = embed[ids[0]], decoder.encode_positions(jnp.arange(20))
for index in range(LAYERS):
    x = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], state))(x, places)
own = jax.nn.log_softmax(x @ embed.T)[jnp.arange(19), ids[0, 1:]]
result = score(decoder, params, ids, jnp.asarray([20]), uniform(LAYERS))
assert abs(result.log_likelihood[0, :19] - own).max() < 1e-3
