# SPDX-License-Identifier: Apache-2.0
"""Text models of Gemma 3n and 4 (E2B, E4B): per-layer inputs and K/V that upper layers share.

A token's state is `[streams * hidden | layers * inputs]` wide. Inputs are an embedding per token
and layer, and a projection of the first embedding; layers leave them as they are. The upper layers
read the K/V of the last own layer of their kind, with a window or without (`kv_source`).

Gemma 4 has one stream. A layer adds attention, MLP and its input, each normalised before and after,
and scales the sum. Heads with a window are narrower, and the MLP may be wider in layers that read
others' K/V. All are stacked, and cost, as the widest: narrower ones are filled up with zeros.

Gemma 3n has several streams (AltUp, arXiv 2301.13310). What a layer does to them:

    h_0 .. h_3  (predict)          p_0 .. p_3             each a mix of all, by a router on h_0
    p_0 (attention, Laurel, MLP)   a                      the only stream that attends
    c_i = p_i + (a - p_0) * w_i(a)                        all are corrected by what it learnt
    c_1 .. c_3 += gate(c_0) * input of this layer         the token's own, made as it is embedded
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from statistics import NormalDist
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, PositionEncoding
from utio_jax.core.layer import head_product, project
from utio_jax.core.quantised import rows_of
from utio_jax.models.rope import RopeScaling, frequencies, rotate, rotations
from utio_jax.models.transformer import OF_KV

_LEAST_SQUARE = 1e-5
"""Of a stream that is scaled to the magnitude of another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Sizes that Gemma 3n and 4 share.

    `embed_dim` is the width of a whole state, `num_streams * hidden_dim + num_layers * input_dim`.

    Attributes:
      hidden_dim: width of one stream.
      num_streams: of a token; the first attends and is read, the others follow.
      input_dim: width of what each layer reads of the token itself.
      input_vocab_size: tokens with such inputs of their own; others have those of token 0.
      mlp_dim: width of the MLP's hidden layer, where layers differ of the widest.
      norm_eps: added to mean squares.
      rope_theta: base of the rotary frequencies in layers without a window.
      local_rope_theta: the base in layers with one.
      logit_softcap: logits become `cap * tanh(logit / cap)`; None leaves them alone.
    """

    hidden_dim: int
    num_streams: int = 1
    input_dim: int
    input_vocab_size: int
    mlp_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.num_streams * self.hidden_dim + self.num_layers * self.input_dim
        if self.embed_dim != width:
            raise ValueError(
                f"{type(self).__name__} needs an embed_dim of num_streams * hidden_dim + "
                f"num_layers * input_dim = {width}. Got embed_dim={self.embed_dim}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"RoPE rotates pairs, so {type(self).__name__} needs an even head_dim. "
                f"Got head_dim={self.head_dim}."
            )

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer has a window."""
        return bool(self.windows) and self.windows[layer] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(GemmaConfig):
    """Sizes and options of `Gemma3n`.

    Attributes:
      sparsity: for each layer the share of the MLP's gates that is cut off, were they normally
        distributed; 0: none. Empty: none in any layer.
      laurel_rank: of the low-rank map next to attention (Laurel).
      rope_scaling: of rotations in layers without a window.
    """

    laurel_rank: int
    sparsity: tuple[float, ...] = ()
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity and (
            len(self.sparsity) != self.num_layers
            or not all(isinstance(part, (int, float)) and 0 <= part < 1 for part in self.sparsity)
        ):
            raise ValueError(
                f"Gemma3nConfig needs a sparsity from 0 to below 1 for each of its "
                f"{self.num_layers} layers, or none. Got sparsity={self.sparsity!r:.200}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """Sizes and options of `Gemma4`, whose `head_dim` is that of heads without a window.

    Attributes:
      own_mlp_dim: width of the MLP of layers that read their own K/V.
      local_head_dim: width of heads with a window.
      rotated: share of a head that rotates without one, the fastest pairs; the rest stands still.
    """

    own_mlp_dim: int
    local_head_dim: int
    rotated: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        narrow = self.local_head_dim <= self.head_dim and self.own_mlp_dim <= self.mlp_dim
        if not narrow or self.local_head_dim % 2 or self.rotated > 1:
            raise ValueError(
                f"Gemma4Config needs a local_head_dim of at most head_dim={self.head_dim}, even "
                f"since RoPE rotates pairs, an own_mlp_dim of at most mlp_dim={self.mlp_dim}, and "
                f"at most all of a head rotated. Got local_head_dim={self.local_head_dim}, "
                f"own_mlp_dim={self.own_mlp_dim}, rotated={self.rotated}."
            )


@dataclasses.dataclass(frozen=True)
class _Gemma:
    """Base of the decoders of Gemma 3n and 4.

    Parameters are a nested dict: `embedding` `[vocab, hidden]`, which is the head, too; of inputs
    `input_embedding` `[input_vocab, layer * input]`, `input_proj` and `input_norm`; `norm`; and
    `layers`, stacked along a leading layer axis; those of K/V for the layers that make some.
    """

    config: Any

    def _fresh(
        self,
        key: jax.Array,
        dtype: jax.typing.DTypeLike,
        kernels: dict[str, tuple[int, int]],
        scales: dict[str, int],
    ) -> Params:
        """Returns fresh parameters; layers have `kernels` and `scales` besides the shared ones."""
        config = self.config
        dim, inputs, every = config.hidden_dim, config.input_dim, config.num_layers
        kernels = {**self._kernels(config.head_dim, config.mlp_dim), **kernels}
        norms = ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")
        scales = {
            **dict.fromkeys(("q_norm", "k_norm"), config.head_dim),
            **dict.fromkeys((*norms, "input_out_norm"), dim),
            **scales,
        }
        layers = lambda name: config.kv_layers if name in OF_KV else every  # noqa: E731
        keys = iter(jax.random.split(key, len(kernels) + 3))

        def normal(*shape: int, by: int) -> jax.Array:
            return (jax.random.normal(next(keys), shape) / math.sqrt(by)).astype(dtype)

        return {
            "embedding": {"embedding": normal(config.vocab_size, dim, by=dim)},
            "input_embedding": {
                "embedding": normal(config.input_vocab_size, every * inputs, by=inputs)
            },
            "input_proj": {"kernel": normal(dim, every * inputs, by=1)},
            "input_norm": {"scale": jnp.ones(inputs, dtype)},
            "norm": {"scale": jnp.ones(dim, dtype)},
            "layers": {
                name: {"kernel": normal(layers(name), *shape, by=shape[0])}
                for name, shape in kernels.items()
            }
            | {
                name: {"scale": jnp.ones((layers(name), width), dtype)}
                for name, width in scales.items()
            },
        }

    def _kernels(self, head_dim: int, mlp_dim: int) -> dict[str, tuple[int, int]]:
        config, dim, inputs = self.config, self.config.hidden_dim, self.config.input_dim
        heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
        return {
            "q_proj": (dim, heads),
            "k_proj": (dim, kv_heads),
            "v_proj": (dim, kv_heads),
            "o_proj": (heads, dim),
            "gate_proj": (dim, mlp_dim),
            "up_proj": (dim, mlp_dim),
            "down_proj": (mlp_dim, dim),
            "input_gate": (dim, inputs),
            "input_out": (inputs, dim),
        }

    def layers(self, params: Params) -> LayerParams:
        count = self.config.num_layers
        local = jnp.asarray([self.config.is_local(layer) for layer in range(count)])
        return {**params["layers"], "index": jnp.arange(count), "is_local": local}

    def _embedded(
        self, params: Params, token_ids: Int[Array, "*lead"]
    ) -> tuple[Float[Array, "*lead hidden"], Float[Array, "*lead inputs"]]:
        config = self.config
        x = rows_of(params["embedding"]["embedding"], token_ids, params["norm"]["scale"].dtype)
        x *= jnp.asarray(math.sqrt(config.hidden_dim), x.dtype)
        known = jnp.where(token_ids < config.input_vocab_size, token_ids, 0)
        own = params["input_embedding"]["embedding"][known]
        own *= jnp.asarray(math.sqrt(config.input_dim), x.dtype)
        made = linear(x, params["input_proj"]) * config.hidden_dim**-0.5
        made = made.reshape(*token_ids.shape, config.num_layers, config.input_dim)
        made = self._norm(made, params["input_norm"]).reshape(own.shape)
        return x, ((made + own) * math.sqrt(0.5)).astype(x.dtype)

    def _from_input(
        self, layer: LayerParams, x: Float[Array, "*lead hidden"], state: jax.Array
    ) -> Float[Array, "*lead hidden"]:
        """Returns a layer's output for its per-layer input, gated by `x`."""
        width = self.config.input_dim
        start = state.shape[-1] + (layer["index"] - self.config.num_layers) * width
        gate = jax.nn.gelu(linear(x, layer["input_gate"]), approximate=True)
        gate *= jax.lax.dynamic_slice_in_dim(state, start, width, axis=-1)
        return self._norm(linear(gate, layer["input_out"]), layer["input_out_norm"])

    def queries(self, layer: LayerParams, x: jax.Array, places: PositionEncoding) -> jax.Array:
        normed = self._norm(self._attending(layer, x), layer["attention_norm"])
        flat = linear(normed, layer["q_proj"])
        return self._heads(layer, flat, layer["q_norm"], places)  # Of unit scale already.

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: PositionEncoding
    ) -> tuple[jax.Array, jax.Array]:
        normed = self._norm(self._attending(layer, x), layer["attention_norm"])
        keys, values = linear(normed, layer["k_proj"]), linear(normed, layer["v_proj"])
        keys = self._heads(layer, keys, layer["k_norm"], places)
        return keys, self._heads(layer, values, None, None)

    def _stream(self, x: jax.Array) -> Float[Array, "*lead hidden"]:
        return x[..., : self.config.hidden_dim]

    def _attending(self, layer: LayerParams, x: jax.Array) -> Float[Array, "*lead hidden"]:
        """Returns the state that a layer computes queries from."""
        return self._stream(x)

    def _heads(
        self, layer: LayerParams, flat: jax.Array, scale: Params | None, places: PositionEncoding
    ) -> Float[Array, "*lead head head_dim"]:
        heads = flat.reshape(*flat.shape[:-1], -1, self.config.head_dim)
        heads = self._norm(heads, scale)
        return heads if places is None else rotate(heads, _places(layer, places))

    def _mlp(self, layer: LayerParams, x: jax.Array) -> jax.Array:
        gate = jax.nn.gelu(self._gate(layer, x), approximate=True)
        return linear(gate * linear(x, layer["up_proj"]), layer["down_proj"])

    def _gate(self, layer: LayerParams, x: jax.Array) -> jax.Array:
        return linear(x, layer["gate_proj"])

    def _logits(self, params: Params, x: Float[Array, "*lead hidden"]) -> jax.Array:
        logits = head_product(params, self._norm(x, params["norm"]))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _norm(self, x: jax.Array, params: Params | None = None) -> jax.Array:
        """Returns `x` over its root mean square, in float32; scaled where there is a scale."""
        wide = normalise(x, self.config.norm_eps)
        return (wide if params is None else scaled(wide, params)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Gemma3n(_Gemma):
    """`Gemma3nConfig` made into a `Decoder`. Hashes by its configuration.

    Further parameters are `stream_in` and `stream_out` `[stream - 1, hidden, hidden]`.
    """

    config: Gemma3nConfig
    blocked_kernels: ClassVar[bool] = True

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        config = self.config
        dim, streams, rank = config.hidden_dim, config.num_streams, config.laurel_rank
        kernels = {
            "laurel_left": (dim, rank),
            "laurel_right": (rank, dim),
            "router": (dim, streams),
            "predict": (streams, streams**2),
            "correct": (streams, streams),
        }
        scales: dict[str, int] = dict.fromkeys(("laurel_norm", "router_norm", "corrected"), dim)
        key, *stream_keys = jax.random.split(key, 3)
        params = self._fresh(key, dtype, kernels, scales)
        for name, own in zip(("stream_in", "stream_out"), stream_keys, strict=True):
            drawn = jax.random.normal(own, (streams - 1, dim, dim))
            params[name] = {"kernel": (drawn / math.sqrt(dim)).astype(dtype)}
        return params

    def layers(self, params: Params) -> LayerParams:
        sparsity = self.config.sparsity or (0.0,) * self.config.num_layers
        cutoffs = [NormalDist().inv_cdf(part) if part else 0.0 for part in sparsity]
        return {
            **super().layers(params),
            "is_sparse": jnp.asarray([part > 0 for part in sparsity]),
            "cutoff": jnp.asarray(cutoffs, jnp.float32),
        }

    def encode_positions(self, positions: Int[Array, "*lead"]) -> PositionEncoding:
        config = self.config
        full = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        local = frequencies(config.head_dim, config.local_rope_theta)
        return rotations(positions, full), rotations(positions, local)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        x, inputs = self._embedded(params, token_ids)
        others = jnp.einsum("...d,sde->...se", x, params["stream_in"]["kernel"])
        streams = jnp.concatenate([x[..., None, :], _scaled_as(x, others)], axis=-2)
        return jnp.concatenate([streams.reshape(*token_ids.shape, -1), inputs], axis=-1)

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
        added = self._from_input(layer, first, x)
        streams = streams.at[..., 1:, :].add(added[..., None, :])
        flat = streams.reshape(*lead, -1)
        return x.at[..., : flat.shape[-1]].set(flat.astype(x.dtype))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        streams = self._streams(x)
        first, others = streams[..., 0, :], streams[..., 1:, :]
        others = jnp.einsum("...sd,sde->...se", others, params["stream_out"]["kernel"])
        total = first + jnp.sum(_scaled_as(first, others), axis=-2)
        return self._logits(params, total / self.config.num_streams)

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

    def _gate(self, layer: LayerParams, x: jax.Array) -> jax.Array:
        gate = super()._gate(layer, x)
        if not any(self.config.sparsity):
            return gate
        mean, deviation = (f(gate, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
        least = mean + deviation * layer["cutoff"].astype(gate.dtype)
        return jnp.where(layer["is_sparse"], jax.nn.relu(gate - least), gate)

    def _attending(self, layer: LayerParams, x: jax.Array) -> Float[Array, "*lead hidden"]:
        return self._predicted(layer, x)[..., 0, :]


@dataclasses.dataclass(frozen=True)
class Gemma4(_Gemma):
    """`Gemma4Config` made into a `Decoder`. Hashes by its configuration."""

    config: Gemma4Config
    blocked_kernels: ClassVar[bool] = True

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        params = self._fresh(key, dtype, {}, {"out": 1})
        stacks = params["layers"].items()
        narrowed = {
            name: {leaf: self._narrowed(f"layers.{name}.{leaf}", y) for leaf, y in stack.items()}
            for name, stack in stacks
        }
        return {**params, "layers": narrowed}

    def own_shape(self, path: str, layer: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how much of a layer's slice of a parameter is its own: the first entries."""
        config, name = self.config, path.split(".")[-2]
        head_dim = config.local_head_dim if config.is_local(layer) else config.head_dim
        mlp_dim = config.own_mlp_dim if layer < config.kv_own else config.mlp_dim
        if name in ("q_norm", "k_norm"):
            return (head_dim,)
        return self._kernels(head_dim, mlp_dim).get(name, shape)

    def _narrowed(self, path: str, stack: jax.Array) -> jax.Array:
        """Returns a stack with zeros outside each layer's own entries."""
        for layer in range(stack.shape[0]):
            own = self.own_shape(path, layer, stack.shape[1:])
            for axis, size in enumerate(own):
                beyond = (layer, *[slice(None)] * axis, slice(size, None))
                stack = stack.at[beyond].set(0) if size < stack.shape[1 + axis] else stack
        return stack

    def encode_positions(self, positions: Int[Array, "*lead"]) -> PositionEncoding:
        config = self.config
        full = frequencies(config.head_dim, config.rope_theta)
        full[int(config.rotated * config.head_dim // 2) :] = 0
        local = frequencies(config.local_head_dim, config.local_rope_theta)
        return rotations(positions, full), rotations(positions, local)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        return jnp.concatenate(self._embedded(params, token_ids), axis=-1)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        norm, stream = self._norm, self._stream(x)
        out = linear(self._side_by_side(layer, attended), layer["o_proj"])
        stream += norm(out, layer["post_attention_norm"])
        stream += norm(self._mlp(layer, norm(stream, layer["mlp_norm"])), layer["post_mlp_norm"])
        stream += self._from_input(layer, stream, x)
        stream = scaled(stream, layer["out"])
        return x.at[..., : stream.shape[-1]].set(stream)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        return self._logits(params, self._stream(x))

    def _heads(
        self, layer: LayerParams, flat: jax.Array, scale: Params | None, places: PositionEncoding
    ) -> Float[Array, "*lead head head_dim"]:
        """Returns normalised, rotated heads, filled up with zeros where the layer's are narrow."""
        config, lead = self.config, flat.shape[:-1]
        wide, narrow = config.head_dim, config.local_head_dim

        def of_width(width: int, index: int) -> jax.Array:
            heads = flat[..., : flat.shape[-1] // wide * width].reshape(*lead, -1, width)
            heads = self._norm(heads, scale and {"scale": scale["scale"][..., :width]})
            heads = heads if places is None else rotate(heads, places[index])
            return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, wide - width)])

        return jnp.where(layer["is_local"], of_width(narrow, 1), of_width(wide, 0))

    def _side_by_side(self, layer: LayerParams, heads: jax.Array) -> Float[Array, "*lead heads"]:
        """Returns the input of `o_proj`: heads of the layer's own width, padded with zeros."""
        lead, narrow = heads.shape[:-2], self.config.local_head_dim
        flat = heads.reshape(*lead, -1)
        near = heads[..., :narrow].reshape(*lead, -1)
        near = jnp.pad(near, [(0, 0)] * len(lead) + [(0, flat.shape[-1] - near.shape[-1])])
        return jnp.where(layer["is_local"], near, flat)


def linear(x: jax.Array, params: Params) -> jax.Array:
    """Returns a linear map of the last axis."""
    return project(x, params["kernel"])


def scaled(x: jax.Array, params: Params) -> jax.Array:
    """Returns `x` times a scale for each entry of its last axis, or one for all."""
    return x * jnp.broadcast_to(params["scale"], x.shape)


def _places(layer: LayerParams, places: PositionEncoding) -> Any:
    return jax.tree.map(partial(jnp.where, layer["is_local"]), places[1], places[0])


def _scaled_as(
    first: Float[Array, "*lead hidden"], others: Float[Array, "*lead stream hidden"]
) -> jax.Array:
    """Returns the other streams with the magnitude of the first."""
    square = lambda x: jnp.mean(x * x, axis=-1, keepdims=True)  # noqa: E731
    magnitude = jnp.sqrt(square(first))[..., None, :]
    return others * magnitude / jnp.sqrt(jnp.maximum(square(others), _LEAST_SQUARE))
