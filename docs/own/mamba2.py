# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2-style decoder: state-space layers by the method `mix`, docs/bring_your_own.md.

    python docs/own/mamba2.py

After Dao and Gu 2024, arXiv 2405.21060. Per head, over the tokens `t` that the layer sees,

    h_t = exp(-dt_t A) h_{t-1} + dt_t B_t x_t^T        state [n, head_dim]
    y_t = C_t h_t + D x_t

written as the masked product of the paper's section 4: `C` is a query, `(B, dt, -dt A)` a key, `x`
a value, and each earlier token fades by the decays of the visible tokens between it and the query.
Not here: the short convolution (K/V follow from a token's own state alone), groups, a scan.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from utio_jax import DecoderConfig, Thresholded, generate, reference_states, score
from utio_jax.decoding import Adaptive
from utio_jax.policies import StateSimilarity


def normed(norm, x, eps=1e-6):
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return jnp.broadcast_to(norm["scale"], x.shape) * unit


def columns(shared, *of_heads):
    """Returns `[..., head, column]`: shared columns, then one column for each head."""
    heads = of_heads[0].shape[-1]
    shared = jnp.broadcast_to(shared[..., None, :], (*shared.shape[:-1], heads, shared.shape[-1]))
    return jnp.concatenate([shared, *(column[..., None] for column in of_heads)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """Heads share `B` and `C` of `head_dim - 2` numbers; `num_kv_heads` equals `num_heads`."""

    config: DecoderConfig
    layers = staticmethod(lambda params: params["layers"])
    encode_positions = staticmethod(lambda positions: positions)  # Not read: decays say it.

    def init(self, key, dtype=jnp.float32):
        config, keys = self.config, iter(jax.random.split(key, 9))
        layers, dim, heads = config.num_layers, config.embed_dim, config.num_heads
        inner, n, wide = heads * config.head_dim, config.head_dim - 2, (config.num_layers, heads)
        outs = {"x_proj": inner, "z_proj": inner, "b_proj": n, "c_proj": n, "dt_proj": heads}
        drawn = {
            name: {"kernel": dim**-0.5 * jax.random.normal(next(keys), (layers, dim, out))}
            for name, out in outs.items()
        }
        # Steps from 1e-3 to 1e-1, rates from 1 to 16, as theirs; a fresh layer is the identity.
        low, high = math.log(1e-3), math.log(1e-1)
        steps = jnp.exp(jax.random.uniform(next(keys), wide, minval=low, maxval=high))
        rates = jax.random.uniform(next(keys), wide, minval=1.0, maxval=16.0)
        table = 0.02 * jax.random.normal(next(keys), (config.vocab_size, dim))
        own = {
            "norm": {"scale": jnp.ones((layers, dim))},
            "gated_norm": {"scale": jnp.ones((layers, inner))},
            "out_proj": {"kernel": jnp.zeros((layers, inner, dim))},
            "dt_bias": steps + jnp.log(-jnp.expm1(-steps)),  # Softplus gives the steps.
            "log_rate": jnp.log(rates),
            "skip": jnp.ones(wide),
        }
        whole = {"embedding": {"embedding": table}, "norm": {"scale": jnp.ones(dim)}}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), {**whole, "layers": drawn | own})

    def embed(self, params, token_ids, positions):
        return params["embedding"]["embedding"][token_ids]

    def unembed(self, params, x):
        return normed(params["norm"], x) @ params["embedding"]["embedding"].T

    def queries(self, layer, x, places):
        """Returns `[C, D, 0]` for each head."""
        skip = jnp.broadcast_to(layer["skip"].astype(x.dtype), (*x.shape[:-1], len(layer["skip"])))
        c = jax.nn.silu(normed(layer["norm"], x) @ layer["c_proj"]["kernel"])
        return columns(c, skip, jnp.zeros_like(skip))

    def keys_values(self, layer, x, places):
        """Returns `[B, dt, -dt A]` and `x` for each head."""
        heads = normed(layer["norm"], x)
        raw = (heads @ layer["dt_proj"]["kernel"]).astype(jnp.float32)
        step = jax.nn.softplus(raw + jnp.broadcast_to(layer["dt_bias"], raw.shape))
        decay = -step * jnp.broadcast_to(jnp.exp(layer["log_rate"]), raw.shape)
        b = jax.nn.silu(heads @ layer["b_proj"]["kernel"])
        values = jax.nn.silu(heads @ layer["x_proj"]["kernel"])
        values = values.reshape(*raw.shape, self.config.head_dim)
        return columns(b, step.astype(x.dtype), decay.astype(x.dtype)), values

    def mix(self, queries, keys, values, visible):
        """Returns the recurrence over the visible keys; heads share one product of scores.

        A query sees every key up to its own that any query sees: there is one state for all. Decays
        are differences of float32 sums over the row, exact to about 1e-7 of the row's whole sum.
        """
        c, skip = queries[..., 0, :-2], jnp.moveaxis(queries[..., -2], -1, -2)
        b, step, log_decay = keys[..., 0, :-2], keys[..., -2], keys[..., -1]
        seen = jnp.broadcast_to(visible, (*b.shape[:-2], *visible.shape[-2:]))
        seen = jnp.moveaxis(seen, -1, -2)  # [..., key, query]
        scores = jnp.einsum("...qn,...kn->...kq", c, b, preferred_element_type=jnp.float32)
        # Chosen, not added to: what is hidden may be NaN.
        shown = jnp.any(seen, axis=-1, keepdims=True)
        faded = jnp.cumsum(jnp.where(shown, log_decay.astype(jnp.float32), 0.0), axis=-2)
        number = jax.lax.broadcasted_iota(jnp.int32, seen.shape, seen.ndim - 2)
        last = jnp.max(jnp.where(seen, number, -1), axis=-2, keepdims=True)
        until = jnp.take_along_axis(faded, jnp.maximum(jnp.moveaxis(last, -1, -2), 0), axis=-2)
        by_heads = seen[..., :, None, :]
        behind = jnp.moveaxis(until, -1, -2)[..., None, :, :] - faded[..., None]
        fade = jnp.exp(jnp.where(by_heads, behind, 0.0))
        weights = scores[..., :, None, :] * step[..., None].astype(jnp.float32) * fade
        own = (number == last)[..., :, None, :]
        weights += jnp.where(own, skip[..., None, :, :].astype(jnp.float32), 0.0)
        weights = jnp.where(by_heads, weights, 0.0).astype(values.dtype)
        exact = {"preferred_element_type": jnp.float32}
        return jnp.einsum("...khq,...khp->...qhp", weights, values, **exact).astype(values.dtype)

    def finish_layer(self, layer, x, attended):
        gate = jax.nn.silu(normed(layer["norm"], x) @ layer["z_proj"]["kernel"])
        gated = normed(layer["gated_norm"], attended.reshape(gate.shape) * gate)
        return x + gated @ layer["out_proj"]["kernel"]


if __name__ == "__main__":
    exits, sizes = (2, 4, 6), {"vocab_size": 256, "embed_dim": 32, "context_length": 128}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
    model = Mamba2(DecoderConfig(num_layers=6, exits=exits, **sizes, **heads))
    params = model.init(jax.random.key(0))  # Train it: docs/bring_your_own.md
    kernel = params["layers"]["out_proj"]["kernel"]
    params["layers"]["out_proj"]["kernel"] = 0.1 * jax.random.normal(
        jax.random.key(2), kernel.shape
    )
    ids, lengths = jax.random.randint(jax.random.key(1), (2, 24), 0, 256), jnp.asarray([24, 9])
    # One minus the cosine between the states at this exit and the one before.
    cuts = jnp.asarray([1.0, 0.3])
    settled = Thresholded(signal=StateSimilarity(), thresholds=cuts, depths=exits)
    result = score(model, params, ids, lengths, settled)
    print(result.depths)  # Layers that each token ran; 0: padding.
    states = reference_states(model, params, ids, lengths, result.depths)
    logs = jax.nn.log_softmax(model.unembed(params, states))[0, jnp.arange(23), ids[0, 1:]]
    assert abs(result.log_likelihood[0, :23] - logs).max() < 1e-3
    print(
        generate(
            model, params, [[1, 2, 3]], mode=Adaptive(policy=settled), max_new_tokens=4
        ).decided
    )
