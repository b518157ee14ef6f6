# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n's text model: several streams per token (AltUp), per-layer inputs, shared K/V.

What a layer does to a token's state, which is `[streams * hidden | layers * inputs]` wide:

    streams h_0 .. h_3  --predict-->  p_0 .. p_3          each a mix of all, by a router on h_0
    p_0 --attention, Laurel, MLP-->  a                    the only stream that attends
    c_i = p_i + (a - p_0) * w_i(a)                        all are corrected by what it learnt
    c_1 .. c_3 += gate(c_0) * input of this layer         the token's own, made as it is embedded

Inputs are an embedding per token and layer, and a projection of the first embedding. They enter the
state once, so that they go where the token goes, and layers leave them as they are. The upper
layers read the K/V of the last own layer of their kind, with a window or without (`kv_source`).

Alternating updates: arXiv 2301.13310. The rest is known from the model's open implementations.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, Places
from utio_jax.models.rope import RopeScaling, frequencies, rotate, rotations

_LEAST_SQUARE = 1e-5
"""Of a stream that is scaled to the magnitude of another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(DecoderConfig):
    """Sizes and options of `Gemma3n`.

    `embed_dim` is the width of a whole state, `num_streams * hidden_dim + num_layers * input_dim`.

    Attributes:
      hidden_dim: width of one stream.
      num_streams: of a token; the first attends and is read, the others follow.
      input_dim: width of what each layer reads of the token itself.
      input_vocab_size: tokens with such inputs of their own; others have those of token 0.
      mlp_dim: width of the MLP's hidden layer.
      sparsity: for each layer the share of the MLP's gates that is cut off, were they normally
        distributed; 0: none. Empty: none in any layer.
      laurel_rank: of the low-rank map beside attention (Laurel).
      norm_eps: added to mean squares.
      rope_theta: base of the rotary frequencies in layers without a window.
      rope_scaling: how these are stretched.
      local_rope_theta: the base in layers with one.
      logit_softcap: logits become `cap * tanh(logit / cap)`; None leaves them alone.
    """

    hidden_dim: int
    num_streams: int
    input_dim: int
    input_vocab_size: int
    mlp_dim: int
    laurel_rank: int
    sparsity: tuple[float, ...] = ()
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 10_000.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        width = state_width(self.hidden_dim, self.num_streams, self.num_layers, self.input_dim)
        if self.embed_dim != width:
            raise ValueError(
                "Gemma3nConfig needs an embed_dim of num_streams * hidden_dim + num_layers * "
                f"input_dim = {width}. Got embed_dim={self.embed_dim}."
            )
        if self.sparsity and (
            len(self.sparsity) != self.num_layers
            or not all(isinstance(part, (int, float)) and 0 <= part < 1 for part in self.sparsity)
        ):
            raise ValueError(
                f"Gemma3nConfig needs a sparsity from 0 to below 1 for each of its "
                f"{self.num_layers} layers, or none. Got sparsity={self.sparsity!r:.200}."
            )
        if self.head_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so Gemma3nConfig needs an even head_dim. "
                f"Got head_dim={self.head_dim}."
            )


def state_width(hidden: int, streams: int, layers: int, inputs: int) -> int:
    """Returns the width of a token's state: its streams, and its inputs to each layer."""
    return streams * hidden + layers * inputs


_OF_KV = ("k_proj", "v_proj", "k_norm")
"""What a layer has for its keys and values alone."""


@dataclasses.dataclass(frozen=True)
class Gemma3n:
    """`Gemma3nConfig` made into a `Decoder`. Hashes by its configuration.

    Parameters are a nested dict: `embedding` `[vocab, hidden]`, which is the head, too; of inputs
    `input_embedding` `[input_vocab, layer * input]`, `input_proj` and `input_norm`; `stream_in` and
    `stream_out` `[stream - 1, hidden, hidden]`; `norm`; and `layers`, stacked along a leading layer
    axis. Those of keys and values have only the layers that make any.
    """

    config: Gemma3nConfig

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters: normal, by the square root of the inputs; norms of one."""
        config = self.config
        dim, streams, inputs = config.hidden_dim, config.num_streams, config.input_dim
        heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        kernels = {
            "q_proj": (dim, heads),
            "k_proj": (dim, kv_heads),
            "v_proj": (dim, kv_heads),
            "o_proj": (heads, dim),
            "gate_proj": (dim, config.mlp_dim),
            "up_proj": (dim, config.mlp_dim),
            "down_proj": (config.mlp_dim, dim),
            "laurel_left": (dim, config.laurel_rank),
            "laurel_right": (config.laurel_rank, dim),
            "router": (dim, streams),
            "predict": (streams, streams**2),
            "correct": (streams, streams),
            "input_gate": (dim, inputs),
            "input_out": (inputs, dim),
        }
        scales = {
            **dict.fromkeys(("q_norm", "k_norm"), config.head_dim),
            **dict.fromkeys(
                (
                    *("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
                    *("laurel_norm", "router_norm", "input_out_norm", "corrected"),
                ),
                dim,
            ),
        }
        layers = lambda name: config.kv_layers if name in _OF_KV else config.num_layers  # noqa: E731
        keys = iter(jax.random.split(key, len(kernels) + 5))

        def normal(*shape: int, by: int) -> jax.Array:
            return (jax.random.normal(next(keys), shape) / math.sqrt(by)).astype(dtype)

        def ones(*shape: int) -> jax.Array:
            return jnp.ones(shape, dtype)

        flat_inputs = config.num_layers * inputs
        return {
            "embedding": {"embedding": normal(config.vocab_size, dim, by=dim)},
            "input_embedding": {
                "embedding": normal(config.input_vocab_size, flat_inputs, by=inputs)
            },
            "input_proj": {"kernel": normal(dim, flat_inputs, by=1)},
            "input_norm": {"scale": ones(inputs)},
            "stream_in": {"kernel": normal(streams - 1, dim, dim, by=dim)},
            "stream_out": {"kernel": normal(streams - 1, dim, dim, by=dim)},
            "norm": {"scale": ones(dim)},
            "layers": {
                name: {"kernel": normal(layers(name), *shape, by=shape[0])}
                for name, shape in kernels.items()
            }
            | {name: {"scale": ones(layers(name), width)} for name, width in scales.items()},
        }

    def layers(self, params: Params) -> LayerParams:
        # Which layer it is, its rotation and its cut-off are no parameters: they come with the
        # config.
        config = self.config
        sparsity = config.sparsity or (0.0,) * config.num_layers
        cutoffs = [NormalDist().inv_cdf(part) if part else 0.0 for part in sparsity]
        return {
            **params["layers"],
            "index": jnp.arange(config.num_layers),
            "is_local": jnp.asarray([w > 0 for w in config.windows or (0,) * config.num_layers]),
            "is_sparse": jnp.asarray([part > 0 for part in sparsity]),
            "cutoff": jnp.asarray(cutoffs, jnp.float32),
        }

    def encode_positions(self, positions: Int[Array, "*lead"]) -> Places:
        config = self.config
        full = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        local = frequencies(config.head_dim, config.local_rope_theta)
        return rotations(positions, full), rotations(positions, local)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        config, lead = self.config, token_ids.shape
        x = params["embedding"]["embedding"][token_ids]
        x *= jnp.asarray(math.sqrt(config.hidden_dim), x.dtype)
        others = jnp.einsum("...d,sde->...se", x, params["stream_in"]["kernel"])
        streams = jnp.concatenate([x[..., None, :], _scaled_as(x, others)], axis=-2)

        inputs = token_inputs(config, params, x, token_ids)
        return jnp.concatenate([streams.reshape(*lead, -1), inputs], axis=-1)

    def queries(self, layer: LayerParams, x: jax.Array, places: Places) -> jax.Array:
        normed = self._norm(self._predicted(layer, x)[..., 0, :], layer["attention_norm"])
        queries = self._norm(self._heads(normed, layer["q_proj"]), layer["q_norm"])
        return rotate(queries, _places(layer, places))  # Of unit scale already.

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array]:
        normed = self._norm(self._predicted(layer, x)[..., 0, :], layer["attention_norm"])
        keys = self._norm(self._heads(normed, layer["k_proj"]), layer["k_norm"])
        values = self._norm(self._heads(normed, layer["v_proj"]))
        return rotate(keys, _places(layer, places)), values

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        norm, lead = self._norm, x.shape[:-1]
        predicted = self._predicted(layer, x)
        active = predicted[..., 0, :]
        normed = norm(active, layer["attention_norm"])
        laurel = linear(linear(normed, layer["laurel_left"]), layer["laurel_right"])
        laurel = normed + norm(laurel, layer["laurel_norm"])
        out = linear(attended.reshape(*lead, -1), layer["o_proj"])
        out = active + norm(out, layer["post_attention_norm"])
        out = (out + laurel) * math.sqrt(0.5)
        out += norm(self._mlp(layer, norm(out, layer["mlp_norm"])), layer["post_mlp_norm"])

        weights = 1 + linear(self._routed(layer, out), layer["correct"])
        streams = predicted + weights[..., None] * (out - active)[..., None, :]
        first = scaled(streams[..., 0, :], layer["corrected"])
        added = from_input(self.config, layer, first, x)
        streams = streams.at[..., 1:, :].add(added[..., None, :])
        flat = streams.reshape(*lead, -1)
        return x.at[..., : flat.shape[-1]].set(flat.astype(x.dtype))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        streams = self._streams(x)
        first, others = streams[..., 0, :], streams[..., 1:, :]
        others = jnp.einsum("...sd,sde->...se", others, params["stream_out"]["kernel"])
        total = first + jnp.sum(_scaled_as(first, others), axis=-2)
        normed = self._norm(total / self.config.num_streams, params["norm"])
        logits = normed @ params["embedding"]["embedding"].T
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def reduce_head(self, params: Params, token_ids: Int[Array, " kept"]) -> Params:
        table = params["embedding"]["embedding"][token_ids]
        return {
            "norm": params["norm"],
            "stream_out": params["stream_out"],
            "embedding": {"embedding": table},
        }

    def _streams(self, x: jax.Array) -> Float[Array, "*lead stream hidden"]:
        config = self.config
        flat = x[..., : config.num_streams * config.hidden_dim]
        return flat.reshape(*x.shape[:-1], config.num_streams, config.hidden_dim)

    def _routed(self, layer: LayerParams, x: jax.Array) -> Float[Array, "*lead stream"]:
        normed = self._norm(x, layer["router_norm"]) / self.config.hidden_dim
        return jnp.tanh(linear(normed, layer["router"]))

    def _predicted(self, layer: LayerParams, x: jax.Array) -> Float[Array, "*lead stream hidden"]:
        """Returns the streams as the layer expects them, each itself and a mix of all."""
        streams, count = self._streams(x), self.config.num_streams
        weights = linear(self._routed(layer, streams[..., 0, :]), layer["predict"])
        weights = weights.reshape(*x.shape[:-1], count, count)
        return streams + jnp.einsum("...ij,...jd->...id", weights, streams)

    def _mlp(self, layer: LayerParams, x: jax.Array) -> jax.Array:
        gate = linear(x, layer["gate_proj"])
        if any(self.config.sparsity):
            mean, deviation = (f(gate, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
            least = mean + deviation * layer["cutoff"].astype(gate.dtype)
            gate = jnp.where(layer["is_sparse"], jax.nn.relu(gate - least), gate)
        gate = jax.nn.gelu(gate, approximate=True)
        return linear(gate * linear(x, layer["up_proj"]), layer["down_proj"])

    def _heads(self, x: jax.Array, params: Params) -> Float[Array, "*lead head head_dim"]:
        return linear(x, params).reshape(*x.shape[:-1], -1, self.config.head_dim)

    def _norm(self, x: jax.Array, params: Params | None = None) -> jax.Array:
        return rms_norm(x, params, eps=self.config.norm_eps)


def linear(x: jax.Array, params: Params) -> jax.Array:
    """Returns a linear map of the last axis."""
    return x @ params["kernel"]


def rms_norm(x: jax.Array, params: Params | None, *, eps: float) -> jax.Array:
    """Returns `x` over its root mean square, computed in float32; scaled where there is one."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide if params is None else scaled(wide, params)).astype(x.dtype)


def scaled(x: jax.Array, params: Params) -> jax.Array:
    """Returns `x` times a scale for each entry of its last axis, or one for all."""
    return x * jnp.broadcast_to(params["scale"], x.shape)


def token_inputs(
    config: Any, params: Params, x: Float[Array, "*lead hidden"], token_ids: Int[Array, "*lead"]
) -> Float[Array, "*lead inputs"]:
    """Returns what all layers read of tokens themselves, of their embedding `x` and their ids."""
    known = jnp.where(token_ids < config.input_vocab_size, token_ids, 0)
    own = params["input_embedding"]["embedding"][known]
    own *= jnp.asarray(math.sqrt(config.input_dim), x.dtype)
    made = linear(x, params["input_proj"]) * config.hidden_dim**-0.5
    made = made.reshape(*token_ids.shape, config.num_layers, config.input_dim)
    made = rms_norm(made, params["input_norm"], eps=config.norm_eps).reshape(own.shape)
    return ((made + own) * math.sqrt(0.5)).astype(x.dtype)


def from_input(
    config: Any, layer: LayerParams, x: Float[Array, "*lead hidden"], state: jax.Array
) -> Float[Array, "*lead hidden"]:
    """Returns what a layer makes of its input, gated by `x`; inputs are the end of the state."""
    start = state.shape[-1] + (layer["index"] - config.num_layers) * config.input_dim
    gate = jax.nn.gelu(linear(x, layer["input_gate"]), approximate=True)
    gate *= jax.lax.dynamic_slice_in_dim(state, start, config.input_dim, axis=-1)
    return rms_norm(linear(gate, layer["input_out"]), layer["input_out_norm"], eps=config.norm_eps)


def _places(layer: LayerParams, places: Places) -> Any:
    """Returns the rotations that a layer takes."""
    return jax.tree.map(partial(jnp.where, layer["is_local"]), places[1], places[0])


def _scaled_as(
    first: Float[Array, "*lead hidden"], others: Float[Array, "*lead stream hidden"]
) -> jax.Array:
    """Returns the other streams with the magnitude of the first."""
    square = lambda x: jnp.mean(x * x, axis=-1, keepdims=True)  # noqa: E731
    wanted = jnp.sqrt(square(first))[..., None, :]
    return others * wanted / jnp.sqrt(jnp.maximum(square(others), _LEAST_SQUARE))
