# SPDX-License-Identifier: Apache-2.0
"""The Flax transformer: RMSNorm, RoPE, grouped-query attention, squared ReLU or SwiGLU.

Linen defines the parameters and the arithmetic of *one* layer; the loop over layers is plain
`jax.lax` in the core, over parameters stacked along a leading layer axis. Names and shapes follow
Llama, so that its checkpoints map onto these one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.decoder import DecoderConfig, LayerParams, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(DecoderConfig):
    """Sizes and options of `Transformer`.

    Attributes:
      mlp_dim: width of the MLP's hidden layer.
      activation: `"squared_relu"` (two matrices) or `"swiglu"` (three, gated).
      tie_embeddings: whether the head is the transposed embedding.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
    """

    mlp_dim: int
    activation: Literal["squared_relu", "swiglu"] = "squared_relu"
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ("squared_relu", "swiglu"):
            raise ValueError(
                'TransformerConfig needs activation "squared_relu" or "swiglu". '
                f"Got activation={self.activation!r}."
            )
        if self.head_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so TransformerConfig needs an even head_dim. "
                f"Got head_dim={self.head_dim}."
            )


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich 2019), computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def rotate(
    x: Float[Array, "*lead head head_dim"], places: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Returns `x` with the two halves of each head rotated by position (RoPE, Su et al. 2021)."""
    cosine, sine = (part[..., None, :].astype(x.dtype) for part in places)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


class Layer(nn.Module):
    """One pre-norm layer, in the pieces of the `Decoder` protocol."""

    config: TransformerConfig

    def setup(self) -> None:
        config = self.config
        # Output projections start at zero: every layer starts as the identity, and so every exit
        # starts as the same model.
        into_residual = nn.initializers.zeros
        dense = lambda features, name, init=nn.initializers.lecun_normal(): nn.Dense(  # noqa: E731
            features, use_bias=False, kernel_init=init, name=name
        )
        self.attention_norm = RMSNorm(config.norm_eps)
        self.q_proj = dense(config.num_heads * config.head_dim, "q_proj")
        self.k_proj = dense(config.num_kv_heads * config.head_dim, "k_proj")
        self.v_proj = dense(config.num_kv_heads * config.head_dim, "v_proj")
        self.o_proj = dense(config.embed_dim, "o_proj", into_residual)
        self.mlp_norm = RMSNorm(config.norm_eps)
        if config.activation == "swiglu":
            self.gate_proj = dense(config.mlp_dim, "gate_proj")
        self.up_proj = dense(config.mlp_dim, "up_proj")
        self.down_proj = dense(config.embed_dim, "down_proj", into_residual)

    def __call__(self, x: jax.Array, places: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Touches every parameter, for `init`; the attention here is of each token to itself."""
        _, values = self.keys_values(x, places)
        group = self.config.num_heads // self.config.num_kv_heads
        return self.finish(x, self.queries(x, places) * 0 + jnp.repeat(values, group, axis=-2))

    def queries(self, x: jax.Array, places: tuple[jax.Array, jax.Array]) -> jax.Array:
        config = self.config
        projected = self.q_proj(self.attention_norm(x))
        heads = projected.reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        return rotate(heads, places) * config.head_dim**-0.5

    def keys_values(
        self, x: jax.Array, places: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        normed = self.attention_norm(x)
        shape = (*x.shape[:-1], config.num_kv_heads, config.head_dim)
        return rotate(self.k_proj(normed).reshape(shape), places), self.v_proj(normed).reshape(
            shape
        )

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.o_proj(attended.reshape(*x.shape[:-1], -1))
        normed = self.mlp_norm(x)
        if self.config.activation == "swiglu":
            hidden = nn.silu(self.gate_proj(normed)) * self.up_proj(normed)
        else:
            hidden = jnp.square(nn.relu(self.up_proj(normed)))
        return x + self.down_proj(hidden)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """`TransformerConfig` made into a `Decoder`. Hashes by its configuration.

    Parameters are a nested dict: `embedding/embedding` `[vocab, dim]`, `layers/...` stacked along a
    leading layer axis, `norm/scale` `[dim]`, and `head/kernel` `[dim, vocab]` where it is untied.
    """

    config: TransformerConfig

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        config = self.config
        embedding_key, layer_key, head_key = jax.random.split(key, 3)
        x = jnp.zeros((1, config.embed_dim))
        places = self.encode_positions(jnp.zeros((1,), jnp.int32))
        layer = Layer(config)
        stack = jax.vmap(lambda one: layer.init(one, x, places)["params"])
        params = {
            "embedding": {
                "embedding": 0.02
                * jax.random.normal(embedding_key, (config.vocab_size, config.embed_dim))
            },
            "layers": stack(jax.random.split(layer_key, config.num_layers)),
            "norm": {"scale": jnp.ones((config.embed_dim,))},
        }
        if not config.tie_embeddings:
            params["head"] = {
                "kernel": nn.initializers.lecun_normal()(
                    head_key, (config.embed_dim, config.vocab_size)
                )
            }
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def layers(self, params: Params) -> LayerParams:
        return params["layers"]

    def encode_positions(self, positions: Int[Array, "*lead"]) -> tuple[jax.Array, jax.Array]:
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(
            (1,) * positions.ndim + (-1,)
        )
        return jnp.cos(angles), jnp.sin(angles)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        del positions  # Rotary positions enter at the queries and keys.
        return params["embedding"]["embedding"][token_ids]

    def queries(
        self, layer: LayerParams, x: jax.Array, places: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        return Layer(self.config).apply({"params": layer}, x, places, method="queries")  # type: ignore[return-value]

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return Layer(self.config).apply({"params": layer}, x, places, method="keys_values")  # type: ignore[return-value]

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        return Layer(self.config).apply({"params": layer}, x, attended, method="finish")  # type: ignore[return-value]

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        normed = RMSNorm(self.config.norm_eps).apply({"params": params["norm"]}, x)
        if self.config.tie_embeddings:
            return normed @ params["embedding"]["embedding"].T
        return normed @ params["head"]["kernel"]
