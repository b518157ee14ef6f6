# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2-style decoder: state-space layers whose tokens may exit early.

Each layer is the SSD mixer of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) between a norm and a
residual, without MLPs in between. Per head, over the tokens `t` that the layer sees,

    h_t = exp(-dt_t A) h_{t-1} + dt_t B_t x_t^T        state [state_dim, head_dim]
    y_t = C_t h_t + D x_t

written as the masked product that the paper shows it to be (its section 4): a sum over earlier
tokens, each faded by the decays of the tokens *between* it and the query. That fits the contract of
decoders: `C` is a query, `(B, dt, -dt A)` a key, `x` a value. docs/contrib/recurrent.md says what a
frozen token does to the state.

Not here: Mamba-2's short convolution over `x`, `B` and `C`. It reads neighbours' inputs, but
caches, packing and frozen tokens need K/V that follow from a token's own state alone. Nor
groups: all heads share one `B` and one `C`, the paper's default.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, PositionEncoding
from utio_jax.models.transformer import RMSNorm

__all__ = [
    "Mamba2",
    "Mamba2Config",
]

_STEPS = (1e-3, 1e-1)  # Between which dt starts; A starts between 1 and 16: both the paper's.
_RATES = (1.0, 16.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """Sizes of `Mamba2`. Tokens see all before them; there is one key head per head.

    Attributes:
      num_kv_heads: as many as `num_heads`; not an option.
      norm_eps: added to the mean square.
    """

    num_kv_heads: int = dataclasses.field(init=False, default=0)
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", max(1, self.num_heads))
        super().__post_init__()
        if self.head_dim < 3:
            raise ValueError(
                "Mamba2Config needs a head_dim of at least 3: two numbers of a key are its step "
                f"and its decay. Got head_dim={self.head_dim}."
            )
        if self.windows or self.attention_softcap is not None or not self.causal:
            raise ValueError(
                "A recurrent state has no windows, no scores to cap, and no later tokens. Got "
                f"windows={self.windows}, attention_softcap={self.attention_softcap}, "
                f"causal={self.causal}. Leave them out."
            )

    @property
    def state_dim(self) -> int:
        """Width of `B` and `C`: a key without its step and its decay."""
        return self.head_dim - 2

    @property
    def inner_dim(self) -> int:
        """Width of the mixer: all heads side by side."""
        return self.num_heads * self.head_dim


def _step_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns biases at which softplus gives steps that are log-uniform between `_STEPS`."""
    low, high = map(math.log, _STEPS)
    steps = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return steps + jnp.log(-jnp.expm1(-steps))


def _log_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, minval=_RATES[0], maxval=_RATES[1]))


class Mamba2Layer(nn.Module):
    """One pre-norm SSD layer, in the pieces of the `Decoder` protocol."""

    config: Mamba2Config

    def setup(self) -> None:
        config = self.config

        def dense(features: int, init: Any = nn.initializers.lecun_normal()) -> nn.Dense:
            return nn.Dense(features, use_bias=False, kernel_init=init)

        heads = (config.num_heads,)
        self.norm = RMSNorm(config.norm_eps)
        self.x_proj, self.z_proj = dense(config.inner_dim), dense(config.inner_dim)
        self.b_proj, self.c_proj = dense(config.state_dim), dense(config.state_dim)
        self.dt_proj = dense(config.num_heads)
        self.dt_bias = self.param("dt_bias", _step_bias, heads)
        self.log_rate = self.param("log_rate", _log_rate, heads)
        self.skip = self.param("skip", nn.initializers.ones, heads)
        self.gated_norm = RMSNorm(config.norm_eps)
        # Every layer starts as the identity, and so every exit starts as the same model.
        self.out_proj = dense(config.embed_dim, nn.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Uses every parameter once, for `init`."""
        _, values = self.keys_values(x)
        return self.finish(x, values + 0 * self.queries(x))

    def queries(self, x: jax.Array) -> jax.Array:
        """Returns `[C, D, 0]` for each head."""
        shape = (*x.shape[:-1], self.config.num_heads)
        c = nn.silu(self.c_proj(self.norm(x)))
        skip = jnp.broadcast_to(self.skip.astype(x.dtype), shape)
        return _columns(c, skip, jnp.zeros_like(skip))

    def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `[B, dt, -dt A]` and `x` for each head."""
        config, normed = self.config, self.norm(x)
        raw = self.dt_proj(normed).astype(jnp.float32)
        step = nn.softplus(raw + jnp.broadcast_to(self.dt_bias.astype(jnp.float32), raw.shape))
        rate = jnp.broadcast_to(jnp.exp(self.log_rate.astype(jnp.float32)), step.shape)
        keys = _columns(
            nn.silu(self.b_proj(normed)), step.astype(x.dtype), (-step * rate).astype(x.dtype)
        )
        values = nn.silu(self.x_proj(normed))
        return keys, values.reshape(*x.shape[:-1], config.num_heads, config.head_dim)

    def finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        gate = nn.silu(self.z_proj(self.norm(x)))
        return x + self.out_proj(self.gated_norm(mixed.reshape(gate.shape) * gate))


def _columns(shared: jax.Array, *of_heads: jax.Array) -> jax.Array:
    """Returns `[..., head, column]`: shared columns, then one column per head."""
    heads = of_heads[0].shape[-1]
    shared = jnp.broadcast_to(shared[..., None, :], (*shared.shape[:-1], heads, shared.shape[-1]))
    return jnp.concatenate([shared, *(column[..., None] for column in of_heads)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """`Mamba2Config` made into a decoder that `Mixes`. Hashes by its configuration.

    Parameters are a nested dict: `embedding/embedding` `[vocab, dim]`, which is the head, too,
    `layers/...` stacked along a leading layer axis, and `norm/scale` `[dim]`.
    """

    config: Mamba2Config

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        config = self.config
        embedding_key, layer_key = jax.random.split(key)
        x, layer = jnp.zeros((1, config.embed_dim)), Mamba2Layer(config)
        table = jax.random.normal(embedding_key, (config.vocab_size, config.embed_dim))
        stack = jax.vmap(lambda one: layer.init(one, x)["params"])
        params = {
            "embedding": {"embedding": 0.02 * table},
            "layers": stack(jax.random.split(layer_key, config.num_layers)),
            "norm": RMSNorm(config.norm_eps).init(key, x)["params"],
        }
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def layers(self, params: Params) -> LayerParams:
        return params["layers"]

    def encode_positions(self, positions: Int[Array, "*lead"]) -> PositionEncoding:
        return positions  # Not read: the decays say how far away a token is.

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        return params["embedding"]["embedding"][token_ids]

    def _apply(self, layer: LayerParams, *args: Any, method: str) -> Any:
        return Mamba2Layer(self.config).apply({"params": layer}, *args, method=method)

    def queries(self, layer: LayerParams, x: jax.Array, places: PositionEncoding) -> jax.Array:
        return self._apply(layer, x, method="queries")

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: PositionEncoding
    ) -> tuple[jax.Array, jax.Array]:
        return self._apply(layer, x, method="keys_values")

    def mix(
        self,
        queries: Float[Array, "*lead query head head_dim"],
        keys: Float[Array, "*lead key head head_dim"],
        values: Float[Array, "*lead key head head_dim"],
        visible: Bool[Array, "*#lead query key"],
    ) -> jax.Array:
        """Returns the state's output for each query: the recurrence over the visible keys.

        There is one state for all: a query sees every key up to its own that any query sees. Decays
        are differences of float32 sums over the row, exact to about 1e-7 of the row's whole sum.
        """
        # Heads share B and C, so one product of scores serves them all. Keys lead, so that what
        # differs by query and head lies side by side.
        c, skip = queries[..., 0, :-2], jnp.moveaxis(queries[..., -2], -1, -2)
        b, step, log_decay = keys[..., 0, :-2], keys[..., -2], keys[..., -1]
        seen = jnp.broadcast_to(visible, (*b.shape[:-2], *visible.shape[-2:]))
        seen = jnp.moveaxis(seen, -1, -2)
        scores = jnp.einsum("...qn,...kn->...kq", c, b, preferred_element_type=jnp.float32)
        # Chosen, not added to: what is hidden may be NaN, see `keys_values_of`.
        shown = jnp.any(seen, axis=-1, keepdims=True)
        faded = jnp.cumsum(jnp.where(shown, log_decay.astype(jnp.float32), 0.0), axis=-2)
        number = jax.lax.broadcasted_iota(jnp.int32, seen.shape, seen.ndim - 2)
        last = jnp.max(jnp.where(seen, number, -1), axis=-2, keepdims=True)
        until = jnp.take_along_axis(faded, jnp.maximum(jnp.moveaxis(last, -1, -2), 0), axis=-2)
        seen_by_heads = seen[..., :, None, :]
        behind = jnp.moveaxis(until, -1, -2)[..., None, :, :] - faded[..., None]
        fade = jnp.exp(jnp.where(seen_by_heads, behind, 0.0))
        weights = scores[..., :, None, :] * step[..., None].astype(jnp.float32) * fade
        own = (number == last)[..., :, None, :]
        weights += jnp.where(own, skip[..., None, :, :].astype(jnp.float32), 0.0)
        weights = jnp.where(seen_by_heads, weights, 0.0).astype(values.dtype)
        mixed = jnp.einsum(
            "...khq,...khp->...qhp", weights, values, preferred_element_type=jnp.float32
        )
        return mixed.astype(values.dtype)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        return self._apply(layer, x, attended, method="finish")

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        normed = RMSNorm(self.config.norm_eps).apply({"params": params["norm"]}, x)
        return normed @ params["embedding"]["embedding"].T
