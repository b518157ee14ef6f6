# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's text model in its sizes with per-layer inputs (E2B, E4B): shared K/V, two head widths.

A token's state is `[hidden | layers * inputs]`: one stream, and what each layer reads of the token
itself, as in Gemma 3n (`utio_jax.models.gemma3n`). A layer adds attention, MLP and its input, each
normalised before and after, and scales the sum.

Layers differ in width: heads with a window are narrower, and the MLP may be wider in layers that
read others' K/V. All are stacked as the widest, narrower ones filled up with zeros, which change no
result: the product of a narrow layer, its keys and values cost what those of a wide one do.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, Places
from utio_jax.models.gemma3n import (
    from_input,
    linear,
    rms_norm,
    scaled,
    state_width,
    token_inputs,
)
from utio_jax.models.rope import frequencies, rotate, rotations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Sizes and options of `Gemma4`.

    `embed_dim` is the width of a whole state, `hidden_dim + num_layers * input_dim`; `head_dim`
    that of heads without a window, and of the cache.

    Attributes:
      hidden_dim: width of the stream.
      input_dim: width of what each layer reads of the token itself.
      input_vocab_size: tokens with such inputs of their own; others have those of token 0.
      mlp_dim: width of the widest MLP's hidden layer.
      own_mlp_dim: of layers that read their own K/V.
      local_head_dim: width of heads with a window.
      norm_eps: added to mean squares.
      rope_theta: base of the rotary frequencies in layers without a window.
      rotated: share of a head that rotates there, the fastest pairs; the rest stands still.
      local_rope_theta: the base in layers with one.
      logit_softcap: logits become `cap * tanh(logit / cap)`; None leaves them alone.
    """

    hidden_dim: int
    input_dim: int
    input_vocab_size: int
    mlp_dim: int
    own_mlp_dim: int
    local_head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rotated: float = 0.25
    local_rope_theta: float = 10_000.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        width = state_width(self.hidden_dim, 1, self.num_layers, self.input_dim)
        if self.embed_dim != width:
            raise ValueError(
                "Gemma4Config needs an embed_dim of hidden_dim + num_layers * input_dim = "
                f"{width}. Got embed_dim={self.embed_dim}."
            )
        for narrow, wide in (("local_head_dim", "head_dim"), ("own_mlp_dim", "mlp_dim")):
            if getattr(self, narrow) > getattr(self, wide):
                raise ValueError(
                    f"Gemma4Config needs a {narrow} of at most {wide}={getattr(self, wide)}. Got "
                    f"{narrow}={getattr(self, narrow)}."
                )
        if self.head_dim % 2 or self.local_head_dim % 2 or self.rotated > 1:
            raise ValueError(
                "RoPE rotates pairs, so Gemma4Config needs an even head_dim and local_head_dim, "
                f"and at most all of a head rotated. Got head_dim={self.head_dim}, "
                f"local_head_dim={self.local_head_dim}, rotated={self.rotated}."
            )

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer has a window."""
        return bool(self.windows) and self.windows[layer] > 0


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """`Gemma4Config` made into a `Decoder`. Hashes by its configuration.

    Parameters are a nested dict: `embedding` `[vocab, hidden]`, which is the head, too; of inputs
    `input_embedding` `[input_vocab, layer * input]`, `input_proj` and `input_norm`; `norm`; and
    `layers`, stacked along a leading layer axis. Those of keys and values have only the layers that
    make any.
    """

    config: Gemma4Config

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters: normal, by the square root of the inputs; norms of one."""
        config = self.config
        dim, inputs = config.hidden_dim, config.input_dim
        heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        own, every = config.kv_layers, config.num_layers
        shapes = {
            "q_proj": (every, dim, heads),
            "k_proj": (own, dim, kv_heads),
            "v_proj": (own, dim, kv_heads),
            "o_proj": (every, heads, dim),
            "gate_proj": (every, dim, config.mlp_dim),
            "up_proj": (every, dim, config.mlp_dim),
            "down_proj": (every, config.mlp_dim, dim),
            "input_gate": (every, dim, inputs),
            "input_out": (every, inputs, dim),
            "q_norm": (every, config.head_dim),
            "k_norm": (own, config.head_dim),
            "attention_norm": (every, dim),
            "post_attention_norm": (every, dim),
            "mlp_norm": (every, dim),
            "post_mlp_norm": (every, dim),
            "input_out_norm": (every, dim),
            "out": (every, 1),
        }
        keys = iter(jax.random.split(key, len(shapes) + 3))

        def normal(*shape: int, by: int) -> jax.Array:
            return (jax.random.normal(next(keys), shape) / math.sqrt(by)).astype(dtype)

        def of_layers(name: str, shape: tuple[int, ...]) -> dict[str, jax.Array]:
            if len(shape) == 2:
                return {"scale": self._narrowed(f"layers.{name}.scale", jnp.ones(shape, dtype))}
            kernel = normal(*shape, by=shape[1])
            return {"kernel": self._narrowed(f"layers.{name}.kernel", kernel)}

        return {
            "embedding": {"embedding": normal(config.vocab_size, dim, by=dim)},
            "input_embedding": {
                "embedding": normal(config.input_vocab_size, every * inputs, by=inputs)
            },
            "input_proj": {"kernel": normal(dim, every * inputs, by=1)},
            "input_norm": {"scale": jnp.ones(inputs, dtype)},
            "norm": {"scale": jnp.ones(dim, dtype)},
            "layers": {name: of_layers(name, shape) for name, shape in shapes.items()},
        }

    def own_shape(self, path: str, layer: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how much of a layer's slice of a parameter is its own: the first entries."""
        config, name = self.config, path.split(".")[-2]
        if config.is_local(layer):
            head = config.local_head_dim
            if name in ("q_norm", "k_norm"):
                return (head,)
            if name in ("q_proj", "o_proj"):
                wide = config.num_heads * head
                return (shape[0], wide) if name == "q_proj" else (wide, shape[1])
            if name in ("k_proj", "v_proj"):
                return (shape[0], config.num_kv_heads * head)
        if layer < config.kv_own:
            if name in ("gate_proj", "up_proj"):
                return (shape[0], config.own_mlp_dim)
            if name == "down_proj":
                return (config.own_mlp_dim, shape[1])
        return shape

    def _narrowed(self, path: str, stack: jax.Array) -> jax.Array:
        """Returns a stack with zeros where layers have nothing of their own."""
        for layer in range(stack.shape[0]):
            own = self.own_shape(path, layer, stack.shape[1:])
            for axis, size in enumerate(own):
                beyond = (layer, *[slice(None)] * axis, slice(size, None))
                stack = stack.at[beyond].set(0) if size < stack.shape[1 + axis] else stack
        return stack

    def layers(self, params: Params) -> LayerParams:
        # Which layer it is and its kind are no parameters: they come with the config.
        count = self.config.num_layers
        local = jnp.asarray([self.config.is_local(layer) for layer in range(count)])
        return {**params["layers"], "index": jnp.arange(count), "is_local": local}

    def encode_positions(self, positions: Int[Array, "*lead"]) -> Places:
        config = self.config
        full = frequencies(config.head_dim, config.rope_theta)
        full[int(config.rotated * config.head_dim // 2) :] = 0
        local = frequencies(config.local_head_dim, config.local_rope_theta)
        return rotations(positions, full), rotations(positions, local)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        x = params["embedding"]["embedding"][token_ids]
        x *= jnp.asarray(math.sqrt(self.config.hidden_dim), x.dtype)
        inputs = token_inputs(self.config, params, x, token_ids)
        return jnp.concatenate([x, inputs], axis=-1)

    def queries(self, layer: LayerParams, x: jax.Array, places: Places) -> jax.Array:
        flat = linear(self._norm(self._stream(x), layer["attention_norm"]), layer["q_proj"])
        return self._heads(layer, flat, layer["q_norm"], places)  # Of unit scale already.

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array]:
        normed = self._norm(self._stream(x), layer["attention_norm"])
        keys, values = linear(normed, layer["k_proj"]), linear(normed, layer["v_proj"])
        keys = self._heads(layer, keys, layer["k_norm"], places)
        return keys, self._heads(layer, values, None, None)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        norm, stream = self._norm, self._stream(x)
        out = linear(self._side_by_side(layer, attended), layer["o_proj"])
        stream += norm(out, layer["post_attention_norm"])
        normed = norm(stream, layer["mlp_norm"])
        gate = jax.nn.gelu(linear(normed, layer["gate_proj"]), approximate=True)
        out = linear(gate * linear(normed, layer["up_proj"]), layer["down_proj"])
        stream += norm(out, layer["post_mlp_norm"])
        stream += from_input(self.config, layer, stream, x)
        stream = scaled(stream, layer["out"])
        return x.at[..., : stream.shape[-1]].set(stream)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        normed = self._norm(self._stream(x), params["norm"])
        logits = normed @ params["embedding"]["embedding"].T
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def reduce_head(self, params: Params, token_ids: Int[Array, " kept"]) -> Params:
        table = params["embedding"]["embedding"][token_ids]
        return {"norm": params["norm"], "embedding": {"embedding": table}}

    def _stream(self, x: jax.Array) -> Float[Array, "*lead hidden"]:
        return x[..., : self.config.hidden_dim]

    def _heads(
        self, layer: LayerParams, flat: jax.Array, scale: Params | None, places: Places
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
        """Returns what `o_proj` reads: heads of the layer's own width, and zeros."""
        lead, narrow = heads.shape[:-2], self.config.local_head_dim
        flat = heads.reshape(*lead, -1)
        near = heads[..., :narrow].reshape(*lead, -1)
        near = jnp.pad(near, [(0, 0)] * len(lead) + [(0, flat.shape[-1] - near.shape[-1])])
        return jnp.where(layer["is_local"], near, flat)

    def _norm(self, x: jax.Array, params: Params | None = None) -> jax.Array:
        return rms_norm(x, params, eps=self.config.norm_eps)
