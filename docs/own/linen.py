# SPDX-License-Identifier: Apache-2.0
"""A Flax Linen model, trained at its exits, and UTIO's pass over it: docs/bring_your_own.md.

python docs/own/linen.py
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from utio_jax import DecoderConfig, reference_states, score, uniform
from utio_jax.attention import attend, visible_keys
from utio_jax.staircase import exit_nll
from utio_jax.utio import UtioPlan, utio_forward


class Block(nn.Module):
    def setup(self):
        self.norm, self.out = nn.LayerNorm(), nn.Dense(32)
        self.q, self.k, self.v = (nn.DenseGeneral((4, 8)) for _ in range(3))
        self.mlp = nn.Sequential([nn.LayerNorm(), nn.Dense(128), nn.gelu, nn.Dense(32)])

    def queries(self, x):
        return self.q(self.norm(x)) * 8**-0.5

    def keys_values(self, x):
        return self.k(self.norm(x)), self.v(self.norm(x))

    def finish(self, x, attended):
        x = x + self.out(attended.reshape(x.shape))
        return x + self.mlp(x)

    def __call__(self, x):  # Your own forward pass of a row `[token, dim]`.
        visible = visible_keys(jnp.arange(len(x)), jnp.arange(len(x)))
        return self.finish(x, attend(self.queries(x), *self.keys_values(x), visible))


@dataclasses.dataclass(frozen=True)
class LinenDecoder:
    config: DecoderConfig
    layers = staticmethod(lambda params: params["blocks"])
    encode_positions = staticmethod(lambda positions: positions)
    queries = staticmethod(lambda layer, x, _: Block().apply(layer, x, method="queries"))
    keys_values = staticmethod(lambda layer, x, _: Block().apply(layer, x, method="keys_values"))
    finish_layer = staticmethod(lambda layer, x, y: Block().apply(layer, x, y, method="finish"))
    unembed = staticmethod(lambda params, x: x @ params["embed"].T)

    def embed(self, params, ids, positions):
        return params["embed"][ids] + params["place"][positions]


sizes = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "context_length": 32}
decoder = LinenDecoder(DecoderConfig(vocab_size=50, num_layers=4, exits=(2, 4), **sizes))
keys = jax.random.split(jax.random.key(0), 4)
blocks = jax.vmap(lambda key: Block().init(key, jnp.zeros((1, 32))))(keys)
params = {"blocks": blocks, "embed": jax.random.normal(keys[0], (50, 32)), "place": jnp.eye(32)}
ids = (jnp.arange(16)[:, None] + jnp.arange(32)) % 50  # Counting, which is soon learned.
x = params["embed"][ids[0]] + params["place"]
for index in range(4):
    x = Block().apply(jax.tree.map(lambda leaf: leaf[index], blocks), x)
own = jax.nn.log_softmax(x @ params["embed"].T)[jnp.arange(31), ids[0, 1:]]
result = score(decoder, params, ids, jnp.full(16, 32), uniform(4))
assert abs(result.log_likelihood[0, :31] - own).max() < 1e-3


loss = lambda params: exit_nll(decoder, params, ids, jnp.full(16, 32)).mean(axis=(1, 2)).sum()
optimizer, slope = optax.adam(3e-3), jax.jit(jax.value_and_grad(loss))
state, losses = optimizer.init(params), []
for _ in range(30):
    value, gradient = slope(params)
    updates, state = optimizer.update(gradient, state)
    params = optax.apply_updates(params, updates)
    losses.append(float(value))
assert losses[-1] < losses[0] / 2


# The decoder, parameters and rows from above, by UTIO's pass.
args, run = (decoder, params, ids, jnp.full(16, 32)), jax.jit(utio_forward, static_argnums=0)
score_of = run(*args, UtioPlan(depths=(2, 4), min_bucket=8)).score  # Half of each row, by rank.
plan = UtioPlan(depths=(2, 4), thresholds=jnp.quantile(score_of, jnp.array([0.6])), min_bucket=8)
result = run(*args, plan)
print(-result.log_likelihood.sum() / (16 * 31), result.depths.mean(), result.slots)
assert abs(result.x - reference_states(*args, result.depths)).max() < 1e-3
