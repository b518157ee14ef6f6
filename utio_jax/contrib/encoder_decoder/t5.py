# SPDX-License-Identifier: Apache-2.0
"""T5 as two decoders of the core: a bidirectional encoder, and `T5`, whose rows begin with sources.

Queries and keys carry *notes* after their `key_dim` columns: the token's position, in two digits
that bfloat16 holds exactly, and two flags. `mix` reads positions and kinds of keys from them, so
attention patterns may leave keys out or reorder them. Relative position biases come with the
queries, as a second head for each head: the bias of every bucket of distances.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.contrib.encoders import mean_of_tokens
from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import DecoderConfig, LayerParams, Params
from utio_jax.core.files import nest
from utio_jax.staircase import dense_states

Pair = tuple[jax.Array, jax.Array]
"""Keys and values."""

_NOTES, _DIGIT, _HIDDEN = 4, 256, -1e30

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gated-relu": jax.nn.relu,
    "gated-gelu": jax.nn.gelu,
    "gated-silu": jax.nn.silu,
}
"""Activations of the MLP, by their `feed_forward_proj` in transformers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig(DecoderConfig):
    """Sizes of a stack of T5 layers. `num_heads`, `num_kv_heads` and `head_dim` follow.

    Attributes:
      attention_heads: heads of the model. Each is two query heads: its query, and its biases.
      key_dim: width of a head; keys and values have four columns more.
      mlp_dim: width of the MLP.
      activation: a name of `ACTIVATIONS`.
      buckets: of distances; each has a bias per head.
      max_distance: from which on all distances share a bucket.
      norm_eps: added to the mean square.
    """

    num_heads: int = dataclasses.field(init=False, default=0)
    num_kv_heads: int = dataclasses.field(init=False, default=0)
    head_dim: int = dataclasses.field(init=False, default=0)
    attention_heads: int
    key_dim: int
    mlp_dim: int
    activation: str = "relu"
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads", 2 * self.attention_heads)
        object.__setattr__(self, "num_kv_heads", self.attention_heads)
        object.__setattr__(self, "head_dim", self.key_dim + _NOTES)
        super().__post_init__()
        if self.buckets % 4 or not self.buckets <= self.head_dim:
            raise ValueError(
                f"{type(self).__name__} needs a multiple of 4 buckets, at most key_dim + {_NOTES} "
                f"= {self.head_dim}. Got buckets={self.buckets}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(StackConfig):
    """Sizes of a T5. The layers that the core counts are those of the decoder, two for each block.

    Attributes:
      num_layers: twice the number of decoder blocks: self-attention, then cross-attention with MLP.
      exits: even numbers, since a state is complete after both layers of a block.
      encoder_layers: layers of the encoder.
      source_tokens: places at the start of each row for the encoder's tokens, padding included.
      tie_embeddings: whether the head is the embedding.
      scale_head: whether the head's input is scaled by `embed_dim ** -0.5` (tied heads).
      pad_id: token that fills up sources; the encoder never sees it.
      bos_id: token that opens a target.
    """

    encoder_layers: int
    source_tokens: int
    tie_embeddings: bool = True
    scale_head: bool = True
    pad_id: int = 0
    bos_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(depth % 2 for depth in (self.num_layers, *self.exits)):
            raise ValueError(
                "T5Config needs even num_layers and exits: two layers make a decoder block. Got "
                f"num_layers={self.num_layers}, exits={self.exits}."
            )

    @property
    def encoder(self) -> StackConfig:
        """Sizes of the encoder."""
        names = [field.name for field in dataclasses.fields(StackConfig) if field.init]
        sizes = {name: getattr(self, name) for name in names}
        sizes |= {"num_layers": self.encoder_layers, "context_length": self.source_tokens}
        return StackConfig(**{**sizes, "exits": (), "causal": False})


def bucket_table(buckets: int, max_distance: int, *, bidirectional: bool) -> np.ndarray:
    """Returns the bucket of each offset of a key from its query, from `-max_distance` on.

    The first half of a direction's buckets is one for each distance, the rest grow with its
    logarithm (Raffel et al. 2020, arXiv 1910.10683, section 2.1).
    """
    offset = np.arange(-max_distance, max_distance + 1)
    first, sizes = 0, buckets
    if bidirectional:
        sizes //= 2
        first = np.where(offset > 0, sizes, 0)
    distance = np.abs(offset) if bidirectional else np.maximum(-offset, 0)
    exact = sizes // 2
    # In float32, as transformers computes it: distances at an edge fall on the same side.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    growth = ratio / np.float32(math.log(max_distance / exact)) * np.float32(sizes - exact)
    far = np.minimum(exact + growth.astype(np.int32), sizes - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


def rms_norm(params: Params, x: Float[Array, "*lead dim"], *, eps: float) -> jax.Array:
    """Returns states over their root mean square, times the norm's `scale`."""
    return jnp.broadcast_to(params["scale"], x.shape) * normalise(x, eps).astype(x.dtype)


def _keys_values(config: StackConfig, layer: LayerParams, x: jax.Array) -> list[jax.Array]:
    shape = (*x.shape[:-1], config.attention_heads, config.key_dim)
    return [(x @ layer[name]["kernel"]).reshape(shape) for name in ("k", "v")]


def _with_notes(x: jax.Array, positions: jax.Array, *flags: jax.Array) -> jax.Array:
    """Returns heads `[*lead, head, dim]` with a token's position and two flags after them."""
    notes = jnp.stack([positions // _DIGIT, positions % _DIGIT, *flags], axis=-1).astype(x.dtype)
    notes = jnp.broadcast_to(notes[..., None, :], (*x.shape[:-1], _NOTES))
    return jnp.concatenate([x, notes], axis=-1)


def _positions_in(notes: Float[Array, "*lead note"]) -> Float[Array, "*lead"]:
    """Returns positions; NaN of keys whose values overflowed."""
    notes = notes.astype(jnp.float32)
    return notes[..., 0] * _DIGIT + notes[..., 1]


def _queries(
    config: StackConfig, layer: LayerParams, x: jax.Array, positions: jax.Array, *flags: jax.Array
) -> jax.Array:
    """Returns the query heads of a layer, each followed by its biases."""
    heads = rms_norm(layer["norm"], x, eps=config.norm_eps) @ layer["q"]["kernel"]
    heads = heads.reshape(*x.shape[:-1], config.attention_heads, config.key_dim)
    heads = _with_notes(heads, positions, *flags)
    bias = jnp.pad(layer["bias"].T, ((0, 0), (0, config.head_dim - config.buckets)))
    bias = jnp.broadcast_to(bias.astype(x.dtype), heads.shape)
    pairs = jnp.stack([heads, bias], axis=-2)
    return pairs.reshape(*x.shape[:-1], config.num_heads, config.head_dim)


def _attended(config: StackConfig, layer: LayerParams, attended: jax.Array) -> jax.Array:
    """Returns the output projection of what `_mix` returned."""
    mixed = attended[..., ::2, : config.key_dim]
    return mixed.reshape(*mixed.shape[:-2], -1) @ layer["o"]["kernel"]


def _mlp(config: StackConfig, layer: LayerParams, x: jax.Array) -> jax.Array:
    """Returns states after the MLP and its residual."""
    normed = rms_norm(layer["mlp_norm"], x, eps=config.norm_eps)
    up, activate = normed @ layer["up"]["kernel"], ACTIVATIONS[config.activation]
    gated = "gate" in layer
    hidden = activate(normed @ layer["gate"]["kernel"]) * up if gated else activate(up)
    return x + hidden @ layer["down"]["kernel"]


def _mix(
    config: StackConfig,
    queries: Float[Array, "*lead query head head_dim"],
    keys: Float[Array, "*lead key kv_head head_dim"],
    values: Float[Array, "*lead key kv_head head_dim"],
    seen: Bool[Array, "*#lead query key"],
) -> Float[Array, "*lead query head head_dim"]:
    """Returns softmax attention with biases, and the queries' notes; zeros in heads of biases."""
    dim = config.key_dim
    heads, bias = queries[..., ::2, :], queries[..., 1::2, : config.buckets]
    places = _positions_in(heads[..., 0, dim:]), _positions_in(keys[..., 0, dim:])
    offset = (places[1][..., None, :] - places[0][..., :, None]).astype(jnp.int32)
    most = config.max_distance
    table = jnp.asarray(bucket_table(config.buckets, most, bidirectional=not config.causal))
    bucket = table[jnp.clip(offset, -most, most) + most]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("...qhd,...khd->...hqk", heads[..., :dim], keys[..., :dim])
    index = jnp.broadcast_to(bucket[..., None, :, :], scores.shape)
    by_bucket = jnp.moveaxis(bias, -2, -3).astype(jnp.float32)
    scores += jnp.take_along_axis(by_bucket, index, axis=-1)
    # Chosen, not added to: what is hidden may be NaN.
    scores = jnp.where(jnp.broadcast_to(seen[..., None, :, :], scores.shape), scores, _HIDDEN)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _HIDDEN / 2)
    weights = jnp.exp(scores - jax.lax.stop_gradient(peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(values.dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, values[..., :dim])
    mixed = jnp.concatenate([mixed, heads[..., dim:].astype(mixed.dtype)], axis=-1)
    return jnp.stack([mixed, jnp.zeros_like(mixed)], axis=-2).reshape(queries.shape)


@dataclasses.dataclass(frozen=True)
class T5Encoder:
    """A `utio_jax.contrib.encoders.Encoder`: rows may leave at exits, by `encode_rows`.

    Its parameters are those of the whole `T5`.
    """

    config: StackConfig

    def layers(self, params: Params) -> LayerParams:
        own = params["encoder"]
        table = own["bias"]["table"]
        bias = jnp.broadcast_to(table, (self.config.num_layers, *table.shape))
        return {**own["layers"], "bias": bias}

    def encode_positions(self, positions: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
        return positions

    def embed(self, params: Params, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return params["embedding"]["embedding"][token_ids]

    def queries(self, layer: LayerParams, x: jax.Array, places: jax.Array) -> jax.Array:
        none = jnp.zeros_like(places)
        return _queries(self.config, layer, x, places, none, none)

    def keys_values(self, layer: LayerParams, x: jax.Array, places: jax.Array) -> Pair:
        normed, none = rms_norm(layer["norm"], x, eps=self.config.norm_eps), jnp.zeros_like(places)
        keys, values = _keys_values(self.config, layer, normed)
        return _with_notes(keys, places, none, none), _with_notes(values, places, none, none)

    def mix(self, queries: Any, keys: Any, values: Any, visible: Any) -> jax.Array:
        return _mix(self.config, queries, keys, values, visible)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        return _mlp(self.config, layer, x + _attended(self.config, layer, attended))

    def finish(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns the encoder's output: the final norm of states."""
        return rms_norm(params["encoder"]["norm"], x, eps=self.config.norm_eps)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns products with all tokens' embeddings; T5 has no head of its own there."""
        return self.finish(params, x) @ params["embedding"]["embedding"].T

    def pool(self, params: Params, x: jax.Array, real: jax.Array) -> jax.Array:
        return mean_of_tokens(self.finish(params, x), real)


@dataclasses.dataclass(frozen=True)
class T5:
    """A decoder of the core whose rows are `source_tokens` encoder tokens, then the target.

    Parameters: `embedding`, `encoder` (`layers`, `bias`, `norm`), the decoder's `layers`, `bias`,
    `norm`, and `head` if it is not tied. Decoder layers are one stack: self-attention at even
    indices, with MLPs of zeros that never run, then cross-attention with its MLP.
    """

    config: T5Config

    @property
    def encoder(self) -> T5Encoder:
        """The encoder, as a model of its own."""
        return T5Encoder(self.config.encoder)

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters, drawn as T5's are."""
        return joined(fresh_stacks(self.config, key, dtype))

    def layers(self, params: Params) -> LayerParams:
        is_cross = jnp.arange(self.config.num_layers) % 2 > 0
        table = params["bias"]["table"]
        of_self = jnp.where(is_cross[:, None, None], 0, table[None])
        return {**params["layers"], "bias": of_self, "is_cross": is_cross}

    def encode_positions(self, positions: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
        return positions

    def embed(self, params: Params, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns embeddings of target tokens, and the encoder's output for tokens of sources.

        The encoder needs whole sources: rows that begin at position 0 and are wider than
        `source_tokens`. A source's token in any other block gets NaN, and so does what reads it.
        Padding of sources gets zeros, by which `keys_values` knows it.
        `TokenCost` leaves the encoder out.
        """
        first = self.config.source_tokens
        x = params["embedding"]["embedding"][token_ids]
        encoded = jnp.full_like(x, jnp.nan)
        if token_ids.ndim == 2 and token_ids.shape[1] > first:
            whole = positions[:, 0] == 0

            def encode() -> jax.Array:
                states = self.encode(params, token_ids[:, :first])
                states = jnp.pad(states, ((0, 0), (0, x.shape[1] - first), (0, 0)))
                return jnp.where(whole[:, None, None], states, encoded)

            encoded = jax.lax.cond(jnp.any(whole), encode, lambda: encoded)
        return jnp.where((positions < first)[..., None], encoded, x)

    def encode(self, params: Params, sources: Int[Array, "row token"]) -> jax.Array:
        """Returns the encoder's output for sources filled up with `pad_id`; zeros for padding."""
        encoder, real = self.encoder, sources != self.config.pad_id
        depths, lengths = (self.config.encoder_layers,), jnp.sum(real, axis=1)
        (x,) = dense_states(encoder, params, sources, lengths, depths=depths)
        return jnp.where(real[..., None], encoder.finish(params, x), 0)

    def queries(self, layer: LayerParams, x: jax.Array, places: jax.Array) -> jax.Array:
        is_cross = jnp.broadcast_to(layer["is_cross"], places.shape)
        is_target = places >= self.config.source_tokens
        return _queries(self.config, layer, x, places, is_cross, is_target)

    def keys_values(self, layer: LayerParams, x: jax.Array, places: jax.Array) -> Pair:
        """Returns keys and values: of sources in layers of cross-attention, of targets in others.

        Projects nothing where no token of `x` is of that kind, as in every decoding step's
        cross-attention.
        """
        config, is_cross = self.config, layer["is_cross"]
        is_source = places < config.source_tokens
        is_padding = is_source & jnp.all(x == 0, axis=-1)

        def project(x: jax.Array) -> list[jax.Array]:
            # The encoder's output has its own norm.
            normed = rms_norm(layer["norm"], x, eps=config.norm_eps)
            return _keys_values(config, layer, jnp.where(is_cross, x, normed))

        def nothing(x: jax.Array) -> list[jax.Array]:
            return [jnp.zeros_like(leaf) for leaf in jax.eval_shape(project, x)]

        needed, none = jnp.any(is_source == is_cross), jnp.zeros_like(places)
        keys, values = jax.lax.cond(needed, project, nothing, x)
        return _with_notes(keys, places, is_padding, none), _with_notes(values, none, none, none)

    def mix(self, queries: Any, keys: Any, values: Any, visible: Any) -> jax.Array:
        """Returns attention over keys of one kind: sources in cross-attention, else targets.

        A target that sees targets but no source, as `kv="drop"` hides them, gets NaN there.
        """
        dim = self.config.key_dim
        is_cross, notes = queries[..., 0, dim + 2] > 0, keys[..., 0, dim:]
        # Of an overflowed key the notes are NaN: targets see it, and get NaN.
        is_source, is_padding = _positions_in(notes) < self.config.source_tokens, notes[..., 2] > 0
        kinds = (is_source & ~is_padding)[..., None, :], ~is_source[..., None, :]
        seen = visible & jnp.where(is_cross[..., :, None], *kinds)
        mixed = _mix(self.config, queries, keys, values, seen)
        # Rows of padding alone see nothing and get zeros: through NaN no gradient would pass.
        sees_targets = jnp.any(visible & ~is_source[..., None, :], axis=-1)
        is_lost = is_cross & sees_targets & ~jnp.any(seen, axis=-1)
        # Notes stay: by these layers know targets.
        is_head = jax.lax.broadcasted_iota(jnp.int32, mixed.shape, mixed.ndim - 1) < dim
        return jnp.where(is_lost[..., None, None] & is_head, jnp.nan, mixed)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the states after a layer; those of sources stay what the encoder made them."""
        is_target = attended[..., 0, self.config.key_dim + 3] > 0
        new = x + _attended(self.config, layer, attended)
        mlp = partial(_mlp, self.config, layer)
        new = jax.lax.cond(layer["is_cross"], mlp, lambda x: x, new)
        return jnp.where(is_target[..., None], new, x)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        config = self.config
        x = rms_norm(params["norm"], x, eps=config.norm_eps)
        if config.scale_head:
            x *= jnp.asarray(config.embed_dim**-0.5, x.dtype)
        tied = config.tie_embeddings
        return x @ (params["embedding"]["embedding"].T if tied else params["head"]["kernel"])


def fresh_stacks(config: T5Config, key: jax.Array, dtype: jax.typing.DTypeLike) -> Params:
    """Returns fresh parameters as files have them: self-attention, cross-attention, MLP apart."""
    dim, inner, wide = config.embed_dim, config.attention_heads * config.key_dim, config.mlp_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding.embedding": (config.vocab_size, dim)}
    if not config.tie_embeddings:
        shapes["head.kernel"] = (dim, config.vocab_size)
    gates = ("gate", "up") if config.activation.startswith("gated") else ("up",)
    for side, count, parts in (
        ("encoder", config.encoder_layers, ("self",)),
        ("decoder", config.num_layers // 2, ("self", "cross")),
    ):
        for part in parts:
            shapes |= {f"{side}.{part}.{name}.kernel": (count, dim, inner) for name in "qkv"}
            shapes[f"{side}.{part}.o.kernel"] = (count, inner, dim)
            shapes[f"{side}.{part}.norm.scale"] = (count, dim)
        shapes |= {f"{side}.mlp.{name}.kernel": (count, dim, wide) for name in gates}
        shapes[f"{side}.mlp.down.kernel"] = (count, wide, dim)
        shapes[f"{side}.mlp.mlp_norm.scale"] = (count, dim)
        shapes[f"{side}.bias.table"] = (config.buckets, config.attention_heads)
        shapes[f"{side}.norm.scale"] = (dim,)

    def draw(key: jax.Array, path: str, shape: tuple[int, ...]) -> jax.Array:
        if path.endswith("scale"):
            return jnp.ones(shape, dtype)
        scale = 1.0 if path.startswith("embedding") else shape[-2] ** -0.5
        scale *= config.key_dim**-0.5 if ".q." in path else 1.0
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    keys = zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    return nest({path: draw(key, path, shape) for key, (path, shape) in keys})


def joined(stacks: Params) -> Params:
    """Returns the parameters of a `T5` from such stacks: one of all decoder layers, in turns."""
    encoder, decoder = stacks["encoder"], stacks["decoder"]

    def alternate(even: jax.Array, odd: jax.Array) -> jax.Array:
        return jnp.stack([even, odd], axis=1).reshape(-1, *odd.shape[1:])

    mlp = jax.tree.map(lambda leaf: alternate(jnp.zeros_like(leaf), leaf), decoder["mlp"])
    layers = jax.tree.map(alternate, decoder["self"], decoder["cross"])
    own = {"layers": encoder["self"] | encoder["mlp"]}
    own |= {"bias": encoder["bias"], "norm": encoder["norm"]}
    others = {"layers": layers | mlp, "bias": decoder["bias"], "norm": decoder["norm"]}
    whole = {name: leaf for name, leaf in stacks.items() if name in ("embedding", "head")}
    return {**whole, "encoder": own, **others}
