# SPDX-License-Identifier: Apache-2.0
"""The Flax transformer: one decoder whose options cover the common open model families.

Linen defines the parameters and the arithmetic of *one* layer; the core loops over parameters
stacked along a leading layer axis.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import NOWHERE, attend, mixer_at
from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, PositionEncoding
from utio_jax.core.layer import head_product, layer_at, project
from utio_jax.core.platform import on_enough_rows, product_apart
from utio_jax.core.quantised import rows_of
from utio_jax.models.rope import RopeScaling, frequencies, rotate, rotations

Activation = Literal["squared_relu", "gelu", "exact_gelu", "relu", "swiglu", "geglu"]
"""Of the MLP; the last two are gated and have three matrices. `gelu` is the tanh approximation."""

Norm = Literal["rms", "rms_plus_one", "layer"]
"""RMSNorm; the same with scales stored as their difference to one (Gemma); LayerNorm with bias."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(DecoderConfig):
    """Sizes and options of `Transformer`; defaults are Llama's.

    Attributes:
      mlp_dim: width of the MLP's hidden layer.
      activation: of the MLP.
      norm: of the residual stream before each block, and at the end.
      norm_eps: added to the mean square or variance.
      post_norms: whether each block's output is normalised too, before it is added (Gemma 2).
      qk_norm: whether queries and keys are normalised per head, before rotation (Qwen 3).
      qkv_bias: whether queries, keys and values have biases.
      output_bias: whether the attention's output projection has one.
      mlp_bias: whether the MLP's matrices have.
      tie_embeddings: whether the head is the transposed embedding.
      embedding_scale: factor of input embeddings.
      positions: `"rope"`, or `"learned"` embeddings that are added (GPT-2).
      rope_theta: base of the rotary frequencies.
      rope_scaling: of these.
      local_rope_theta: the base in layers with a window, never stretched; None means as in others.
      query_scale: factor of queries; None means `head_dim ** -0.5`.
      logit_softcap: logits become `cap * tanh(logit / cap)`; None leaves them alone.
      turn_norm: whether the last norm ends each turn, and the next turn reads normalised states
        (looped models). Else it opens the head alone.
      exit_gate: whether there is a gate on the states after each turn, see `Transformer.exit_gate`.
    """

    mlp_dim: int
    activation: Activation = "squared_relu"
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    query_scale: float | None = None
    logit_softcap: float | None = None
    turn_norm: bool = False
    exit_gate: bool = False
    sum_norms: ClassVar[bool] = False
    """True if norms follow each block's sum with its input (BERT), instead of opening the block."""
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "activation": get_args(Activation),
        "norm": get_args(Norm),
        "positions": ("rope", "learned"),
    }
    """Values that fields may have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{type(self).__name__} needs {name} to be one of {', '.join(allowed)}. "
                    f"Got {name}={getattr(self, name)!r}."
                )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so TransformerConfig needs an even head_dim. "
                f"Got head_dim={self.head_dim}."
            )

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.activation in ("swiglu", "geglu")


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich 2019), computed in float32."""

    eps: float
    plus_one: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        start = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = self.param("scale", start, (x.shape[-1],))
        wide = normalise(x, self.eps)
        if self.plus_one:
            return (wide * jnp.broadcast_to(1 + scale.astype(jnp.float32), x.shape)).astype(x.dtype)
        return wide.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


# By means in float32, one after the other: the difference of mean squares loses digits.
LayerNorm = partial(nn.LayerNorm, use_fast_variance=False)


def norm_of(config: TransformerConfig, *, rms: bool = False) -> Any:
    """Returns the configured norm; with `rms` an RMSNorm even where that is LayerNorm."""
    if config.norm == "layer" and not rms:
        return LayerNorm(config.norm_eps)
    return RMSNorm(config.norm_eps, config.norm == "rms_plus_one")


class Projection(nn.Module):
    """Linear map whose kernel may lie in blocks of columns, which `nn.Dense` refuses."""

    features: int
    use_bias: bool
    kernel_init: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.is_initializing():
            self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        out = project(x, self.get_variable("params", "kernel"))
        if not self.use_bias:
            return out
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return out + jnp.broadcast_to(bias, out.shape)


class Layer(nn.Module):
    """One layer, in the pieces of the `Decoder` protocol."""

    config: TransformerConfig

    def setup(self) -> None:
        config = self.config
        # Output projections start at zero: every exit starts as the same model.
        into_residual = nn.initializers.zeros
        dense = lambda features, bias, init=nn.initializers.lecun_normal(): Projection(  # noqa: E731
            features, use_bias=bias, kernel_init=init
        )
        self.attention_norm = norm_of(config)
        self.q_proj = dense(config.num_heads * config.head_dim, config.qkv_bias)
        self.k_proj = dense(config.num_kv_heads * config.head_dim, config.qkv_bias)
        self.v_proj = dense(config.num_kv_heads * config.head_dim, config.qkv_bias)
        self.o_proj = dense(config.embed_dim, config.output_bias, into_residual)
        self.mlp_norm = norm_of(config)
        if config.qk_norm:
            self.q_norm, self.k_norm = norm_of(config, rms=True), norm_of(config, rms=True)
        if config.post_norms:
            self.post_attention_norm, self.post_mlp_norm = norm_of(config), norm_of(config)
        if config.gated:
            self.gate_proj = dense(config.mlp_dim, config.mlp_bias)
        self.up_proj = dense(config.mlp_dim, config.mlp_bias)
        self.down_proj = dense(config.embed_dim, config.mlp_bias, into_residual)

    def __call__(
        self,
        x: Float[Array, "*lead token dim"],
        places: PositionEncoding,
        visible: Bool[Array, "*#lead token token"],
        keys_values: tuple[jax.Array, jax.Array] | None = None,
    ) -> Float[Array, "*lead token dim"]:
        """Returns the layer's output of all tokens.

        Args:
          x: its input.
          places: position encoding of the tokens, see `Transformer.encode_positions`.
          visible: mask of the keys that each query sees.
          keys_values: keys and values made by other layers; None: the layer's own.
        """
        keys, values = keys_values or self.keys_values(x, places)
        cap = self.config.attention_softcap
        return self.finish(x, attend(self.queries(x, places), keys, values, visible, softcap=cap))

    def queries(self, x: jax.Array, places: PositionEncoding) -> jax.Array:
        config = self.config
        queries = product_apart(self.q_proj(self._read(self.attention_norm, x)))
        queries = queries.reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        if config.qk_norm:
            queries = self.q_norm(queries)
        if config.positions == "rope":
            queries = rotate(queries, places)
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        return queries * scale

    def keys_values(self, x: jax.Array, places: PositionEncoding) -> tuple[jax.Array, jax.Array]:
        config = self.config
        normed = self._read(self.attention_norm, x)
        shape = (*x.shape[:-1], config.num_kv_heads, config.head_dim)
        keys, values = (
            product_apart(project(normed)).reshape(shape) for project in (self.k_proj, self.v_proj)
        )
        if config.qk_norm:
            keys = self.k_norm(keys)
        return (rotate(keys, places) if config.positions == "rope" else keys), values

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        after, sums = self.config.post_norms, self.config.sum_norms
        out = self.o_proj(attended.reshape(*x.shape[:-1], -1))
        x = x + (self.post_attention_norm(out) if after else out)
        x = self.attention_norm(x) if sums else x
        out = self.down_proj(self._hidden(self._read(self.mlp_norm, x)))
        x = x + (self.post_mlp_norm(out) if after else out)
        return self.mlp_norm(x) if sums else x

    def _read(self, norm: Any, x: jax.Array) -> jax.Array:
        """Returns the normalised residual stream, the input of a block."""
        return x if self.config.sum_norms else norm(x)

    def _hidden(self, x: jax.Array) -> jax.Array:
        match self.config.activation:
            case "swiglu":
                return nn.silu(self.gate_proj(x)) * self.up_proj(x)
            case "geglu":
                return nn.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x)
            case "gelu" | "exact_gelu" as kind:
                return nn.gelu(self.up_proj(x), approximate=kind == "gelu")
            case "relu":
                return nn.relu(self.up_proj(x))
        return jnp.square(nn.relu(self.up_proj(x)))


_NOT_OF_LAYERS = ("is_local", "ends_turn", "turn_norm")
"""Entries of a layer that no `Layer` has: `Transformer.layers` adds them."""

OF_KV = ("k_proj", "v_proj", "k_norm")
"""Parameters of a layer that only its keys and values need."""


@dataclasses.dataclass(frozen=True)
class Transformer:
    """`TransformerConfig` made into a `Decoder`. Hashes by its configuration.

    Parameters are a nested dict: `embedding/embedding` `[vocab, dim]`; `positions/embedding`
    `[context, dim]` if positions are learned; `layers/...` stacked along a leading layer axis;
    `norm/scale` `[dim]` (and `bias`); `head/kernel` `[dim, vocab]` if it is untied; and
    `exit_gate/kernel` `[dim, 1]` and `bias` if it has a gate.
    """

    config: TransformerConfig
    blocked_kernels: ClassVar[bool] = True

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        config = self.config
        embedding_key, layer_key, head_key, gate_key, position_key = jax.random.split(key, 5)
        x, visible = jnp.zeros((1, config.embed_dim)), jnp.ones((1, 1), bool)
        layer = Layer(config)
        places = (jnp.ones((1, config.head_dim // 2)), jnp.zeros((1, config.head_dim // 2)))
        stack = jax.vmap(lambda one: layer.init(one, x, places, visible)["params"])

        def table(key: jax.Array, rows: int) -> dict[str, jax.Array]:
            return {"embedding": 0.02 * jax.random.normal(key, (rows, config.embed_dim))}

        params = {
            "embedding": table(embedding_key, config.vocab_size),
            "layers": self.own_keys_values(stack(jax.random.split(layer_key, config.stack_layers))),
            "norm": norm_of(config).init(key, x)["params"],
        }
        if config.positions == "learned":
            params["positions"] = table(position_key, config.context_length)
        if not config.tie_embeddings:
            shape = (config.embed_dim, config.vocab_size)
            params["head"] = {"kernel": nn.initializers.lecun_normal()(head_key, shape)}
        if config.exit_gate:
            kernel = nn.initializers.lecun_normal()(gate_key, (config.embed_dim, 1))
            params["exit_gate"] = {"kernel": kernel, "bias": jnp.zeros((1,))}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def own_keys_values(self, layers: LayerParams) -> LayerParams:
        """Returns the stack without K/V projections of layers that read others': shorter axes."""
        own = self.config.kv_layers
        return {
            name: jax.tree.map(lambda leaf: leaf[:own], leaf) if name in OF_KV else leaf
            for name, leaf in layers.items()
        }

    def layers(self, params: Params) -> LayerParams:
        # What is not a parameter comes with the config: which rotation a layer takes, for one.
        config, layers = self.config, params["layers"]
        if config.local_rope_theta is not None:
            windows = config.windows or (0,) * config.num_layers
            layers = {**layers, "is_local": jnp.asarray([window > 0 for window in windows])}
        if config.turn_norm:
            count = config.stack_layers
            norm = {
                name: jnp.broadcast_to(leaf, (count, *leaf.shape))
                for name, leaf in params["norm"].items()
            }
            ends = jnp.arange(count) == count - 1
            layers = {**layers, "ends_turn": ends, "turn_norm": norm}
        return layers

    def encode_positions(self, positions: Int[Array, "*lead"]) -> PositionEncoding:
        config = self.config
        if config.positions == "learned":
            return positions
        of_pair = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        places = rotations(positions, of_pair)
        if config.local_rope_theta is None:
            return places
        return places, rotations(positions, frequencies(config.head_dim, config.local_rope_theta))

    def _places(self, layer: LayerParams, places: PositionEncoding) -> PositionEncoding:
        if self.config.local_rope_theta is None:
            return places
        return jax.tree.map(partial(jnp.where, layer["is_local"]), places[1], places[0])

    def _apply(self, layer: LayerParams, *args: Any, method: str) -> Any:
        params = {name: leaf for name, leaf in layer.items() if name not in _NOT_OF_LAYERS}
        run = partial(Layer(self.config).apply, {"params": params}, method=method)
        return on_enough_rows(run, *args)

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        x = rows_of(params["embedding"]["embedding"], token_ids, params["norm"]["scale"].dtype)
        if self.config.embedding_scale != 1.0:
            x *= jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.positions == "learned":
            x += params["positions"]["embedding"][positions]
        return x

    def queries(self, layer: LayerParams, x: jax.Array, places: PositionEncoding) -> jax.Array:
        return self._apply(layer, x, self._places(layer, places), method="queries")

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: PositionEncoding
    ) -> tuple[jax.Array, jax.Array]:
        return self._apply(layer, x, self._places(layer, places), method="keys_values")

    def rotate_keys(
        self, layer: LayerParams, keys: jax.Array, places: PositionEncoding
    ) -> jax.Array:
        """Returns keys with their positions in them, from keys before rotation."""
        if self.config.positions != "rope":
            return keys
        return rotate(keys, self._places(layer, places))

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        return self._end_turn(layer, self._apply(layer, x, attended, method="finish"))

    def _end_turn(self, layer: LayerParams, x: jax.Array) -> jax.Array:
        """Returns a layer's output, normalised after the last layer of a turn."""
        if not self.config.turn_norm:
            return x
        normed = norm_of(self.config).apply({"params": layer["turn_norm"]}, x)
        return jnp.where(layer["ends_turn"], normed, x)

    def exit_gate(self, params: Params) -> tuple[Float[Array, "dim one"], Float[Array, " one"]]:
        """Returns kernel and bias of the gate: the logit of stopping after a turn."""
        return params["exit_gate"]["kernel"], params["exit_gate"]["bias"]

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        normed = x
        if not self.config.turn_norm:
            normed = norm_of(self.config).apply({"params": params["norm"]}, x)
        head = partial(head_product, params, tied=self.config.tie_embeddings)
        logits = on_enough_rows(head, normed)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class FlaxTransformer(nn.Module):
    """`Transformer` as one Flax module: the forward pass at one depth, a `lax.scan` over layers.

    It has the parameters of `Transformer`, in their tree:

        module = FlaxTransformer(model.decoder.config)
        logits = module.apply({"params": model.params}, token_ids, lengths)
    """

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        token_ids: Int[Array, "batch token"],
        lengths: Int[Array, " batch"] | None = None,
        *,
        depth: int | None = None,
    ) -> Float[Array, "batch token vocab"]:
        """Returns the logits of all tokens after `depth` layers.

        Args:
          token_ids: right-padded rows.
          lengths: real tokens per row; None: all are real.
          depth: number of layers, the first ones of the stack; None: all. Static.

        Raises:
          ValueError: a depth that the model does not have, or upper layers that read the keys and
            values of different layers.
        """
        config, decoder = self.config, Transformer(self.config)
        if self.is_initializing():
            for name, leaves in decoder.init(self.make_rng("params")).items():
                self.put_variable("params", name, leaves)
        depth = config.num_layers if depth is None else depth
        own, above = min(depth, config.kv_own), {*config.kv_source[config.kv_own :]}
        if not 0 <= depth <= config.num_layers or len(above) > 1:
            raise ValueError(
                f"Wanted a depth from 0 to {config.num_layers}, and one kv_source for all upper "
                f"layers. Got depth={depth}, kv_source={config.kv_source!r:.100}."
            )
        params = self.variables["params"]
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        keys_at = positions
        if lengths is not None:
            keys_at = jnp.where(positions < lengths[:, None], positions, NOWHERE)
        places = decoder.encode_positions(positions)
        layer = Layer(config, parent=None)  # No variables of this module: `apply` gets them.

        def run(x: jax.Array, index: Any, shared: Any = None) -> tuple[jax.Array, Any]:
            # An index into the stack: slices `[:depth]` of it would copy the weights.
            weights = layer_at(decoder, params, index)
            at, visible = decoder._places(weights, places), mixer_at(decoder, index).visible
            own = {name: leaf for name, leaf in weights.items() if name not in _NOT_OF_LAYERS}
            apply: Any = partial(layer.apply, {"params": own})
            keys_values = shared or apply(x, at, method="keys_values")
            out = apply(x, at, visible(positions, keys_at), keys_values)
            return decoder._end_turn(weights, out), keys_values

        x = decoder.embed(params, token_ids, positions)
        x, made = jax.lax.scan(run, x, jnp.arange(own))
        if depth > own:

            def keys_values(row: int) -> Any:
                if row < own:
                    return made[0][row], made[1][row]
                return decoder.keys_values(layer_at(decoder, params, row), x, places)

            rows = zip(*map(keys_values, config.kv_read(own)), strict=True)
            shared = tuple(jnp.concatenate(heads, axis=-2) for heads in rows)
            x, _ = jax.lax.scan(partial(run, shared=shared), x, jnp.arange(own, depth))
        return decoder.unembed(params, x)
