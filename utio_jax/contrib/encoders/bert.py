# SPDX-License-Identifier: Apache-2.0
"""BERT from Hugging Face folders: `BertModel` and `BertForSequenceClassification`.

    model, params = load_encoder("folder of a MiniLM, bge or classifier", exits=(2, 4, 6))
    inputs, lengths = pack_encodings(tokenizer.encode_batch(["a text", ("one", "two")]))
    found = encode_rows(model, params, inputs, lengths, policy)

A post-norm layer (Devlin et al. 2018) fits the seven functions of a `Decoder`: queries, keys and
values read the state as it is, and `finish_layer` normalises after each residual. A token's input
is its id and its kind (first or second text): `[row, token, 2]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.contrib.encoders.rows import mean_of_tokens
from utio_jax.core.decoder import LayerParams, Params, Places
from utio_jax.models.config_reader import Reader
from utio_jax.models.families import Rule, linear_rules
from utio_jax.models.huggingface import read_json, read_tensor, where_tensors_are
from utio_jax.models.stacking import place_tensors
from utio_jax.models.transformer import LayerNorm, Transformer, TransformerConfig

Pooling = Literal["mean", "cls"]
"""A row's state: the mean of its tokens', or that of its first token."""

_ACTIVATIONS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """Sizes of a BERT encoder; what of `TransformerConfig` is not named here is BERT's own.

    Attributes:
      num_kinds: kinds of tokens.
      mlp: activation of the MLP: GELU `"exact"`, its `"tanh"` approximation, or `"relu"`.
      pooling: what a row's state is.
      labels: of the classifier; 0: there is none.
    """

    num_kinds: int
    mlp: str = "exact"
    pooling: Pooling = "mean"
    labels: int = 0

    @property
    def id_limits(self) -> tuple[int, int]:
        """How many ids and how many kinds of tokens there are."""
        return self.vocab_size, self.num_kinds

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in get_args(Pooling):
            raise ValueError(
                f"Wanted pooling to be one of {', '.join(get_args(Pooling))}. Got {self.pooling!r}."
            )


@dataclasses.dataclass(frozen=True)
class Bert(Transformer):
    """`BertConfig` made into an `Encoder`. Hashes by its configuration.

    Parameters: `embedding`, `positions` and `kinds` (each with an `embedding`), `norm` of their
    sum, and `layers/...`; of a classifier `pooler` and `head`.
    """

    config: BertConfig

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters."""
        config, dim = self.config, self.config.embed_dim
        params = super().init(key, dtype)

        def draw(index: int, *shape: int) -> jax.Array:
            return 0.02 * jax.random.normal(jax.random.fold_in(key, 1 + index), shape, dtype)

        params["kinds"] = {"embedding": draw(1, config.num_kinds, dim)}
        if config.labels:
            for index, name, out in ((2, "pooler", dim), (3, "head", config.labels)):
                params[name] = {"kernel": draw(index, dim, out), "bias": jnp.zeros(out, dtype)}
        return params

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead 2"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        x = super().embed(params, token_ids[..., 0], positions)
        return self._norm(params["norm"], x + params["kinds"]["embedding"][token_ids[..., 1]])

    def queries(self, layer: LayerParams, x: jax.Array, places: Places) -> jax.Array:
        return self._heads(layer["q_proj"], x) * self.config.head_dim**-0.5

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array]:
        return self._heads(layer["k_proj"], x), self._heads(layer["v_proj"], x)

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        mixed = attended.reshape(*x.shape[:-1], -1)
        x = self._norm(layer["attention_norm"], x + _linear(layer["o_proj"], mixed))
        hidden = _linear(layer["up_proj"], x)
        if self.config.mlp == "relu":
            hidden = jax.nn.relu(hidden)
        else:
            hidden = jax.nn.gelu(hidden, approximate=self.config.mlp == "tanh")
        return self._norm(layer["mlp_norm"], x + _linear(layer["down_proj"], hidden))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns the products with all words' embeddings: a masked-LM head without its map."""
        return x @ params["embedding"]["embedding"].T

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> jax.Array:
        return x[:, 0] if self.config.pooling == "cls" else mean_of_tokens(x, real)

    def _heads(self, linear: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return _linear(linear, x).reshape(
            *x.shape[:-1], self.config.num_heads, self.config.head_dim
        )

    def _norm(self, norm: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return LayerNorm(self.config.norm_eps).apply({"params": norm}, x)  # type: ignore[return-value]


class BertClassifier(Bert):
    """A BERT with `pooler` and `head`: a `Classifier`, whose one head reads all exits."""

    def classify(self, params: Params, pooled: Float[Array, "*lead dim"], depth: int) -> jax.Array:
        return _linear(params["head"], jnp.tanh(_linear(params["pooler"], pooled)))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        return self.classify(params, x, self.config.num_layers)


def _linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    out = x @ params["kernel"]
    return out + jnp.broadcast_to(params["bias"], out.shape)


def _norm_rules(source: str, target: str) -> list[Rule]:
    parts = {"weight": "scale", "bias": "bias"}
    return [Rule(f"{source}.{a}", (f"{target}.{b}",)) for a, b in parts.items()]


_LAYER = "bert.encoder.layer.{layer}."
_RULES = (
    Rule("bert.embeddings.word_embeddings.weight", ("embedding.embedding",)),
    Rule("bert.embeddings.position_embeddings.weight", ("positions.embedding",)),
    Rule("bert.embeddings.token_type_embeddings.weight", ("kinds.embedding",)),
    *_norm_rules("bert.embeddings.LayerNorm", "norm"),
    *linear_rules(f"{_LAYER}attention.self.query", "layers.q_proj"),
    *linear_rules(f"{_LAYER}attention.self.key", "layers.k_proj"),
    *linear_rules(f"{_LAYER}attention.self.value", "layers.v_proj"),
    *linear_rules(f"{_LAYER}attention.output.dense", "layers.o_proj"),
    *_norm_rules(f"{_LAYER}attention.output.LayerNorm", "layers.attention_norm"),
    *linear_rules(f"{_LAYER}intermediate.dense", "layers.up_proj"),
    *linear_rules(f"{_LAYER}output.dense", "layers.down_proj"),
    *_norm_rules(f"{_LAYER}output.LayerNorm", "layers.mlp_norm"),
    *linear_rules("bert.pooler.dense", "pooler"),
    *linear_rules("classifier", "head"),
)


def load_encoder(
    folder: str | Path, *, exits: tuple[int, ...] = (), pooling: Pooling = "mean"
) -> tuple[Bert, Params]:
    """Reads a Hugging Face folder of a BERT: `config.json` and safetensors.

    Of `BertModel`, or `BertForSequenceClassification`, which is a `BertClassifier` and reads its
    first token. A pooler without a classifier and a masked-LM head are left out. Rows may leave at
    `exits`. Sentence encoders say in `1_Pooling` how rows are pooled: all-MiniLM `"mean"`, bge
    `"cls"`.

    Raises:
      ValueError: another architecture, or options that cannot be run, all of them named; files or
        tensors that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    home = where_tensors_are(folder, prefix="bert.")
    head = home.get("bert.classifier.weight", home.get("classifier.weight"))
    labels = 0 if head is None else head[2][0]
    home = {
        name.removeprefix("bert.") if "classifier." in name else name: place
        for name, place in home.items()
        if (labels or ".pooler." not in name) and not name.startswith("cls.")
    }
    config = _read_config(
        folder / "config.json", exits=exits, labels=labels, pooling="cls" if labels else pooling
    )
    return place_tensors(
        BertClassifier(config) if labels else Bert(config),
        _RULES,
        {name: shape for name, (*_, shape) in home.items()},
        lambda name: read_tensor(*home[name][:2]),
        dtype=jnp.float32,
        sharding=None,
        source=str(folder),
    )


def _read_config(source: Path, **options: Any) -> BertConfig:
    stored = read_json(source, "a config")
    if stored.get("model_type") != "bert":
        raise ValueError(
            f"Wanted a model_type of bert in {source}. Got {stored.get('model_type')!r}. Decoders "
            "are read by utio_jax.load; other encoders are a utio_jax.contrib.encoders.Encoder."
        )
    read = Reader(stored)
    read.need("hidden_act", *_ACTIVATIONS)
    read.need("position_embedding_type", "absolute")
    read.need("is_decoder", False)
    read.need("add_cross_attention", False)
    heads, dim = read.take("num_attention_heads"), read.take("hidden_size")
    sizes: dict[str, Any] = {
        "vocab_size": read.take("vocab_size"),
        "num_layers": read.layers(),
        "context_length": read.take("max_position_embeddings"),
        "mlp_dim": read.take("intermediate_size"),
        "num_kinds": read.take("type_vocab_size", 2),
        "norm_eps": read.take("layer_norm_eps", 1e-12),
    }
    if dim % heads:
        read.problems.append(f"hidden_size={dim}, no multiple of num_attention_heads={heads}")
    if read.problems:
        raise ValueError(
            f"Wanted a BERT that can be run, in {source}. "
            f"Got {'; '.join(dict.fromkeys(read.problems))}."
        )
    return BertConfig(
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim // heads,
        causal=False,
        input_shape=(2,),
        norm="layer",
        positions="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu",
        mlp=_ACTIVATIONS[read.take("hidden_act", "gelu")],
        **sizes,
        **options,
    )


def pack_encodings(
    encodings: Sequence[Any], *, longest: int = 512
) -> tuple[Int[np.ndarray, "row token 2"], Int[np.ndarray, " row"]]:
    """Returns a tokenizer's encodings (`ids`, `type_ids`) as a BERT's inputs, and their lengths.

    Rows and tokens are padded to powers of two, up to the `longest` row that the model reads, with
    rows of length 0: few shapes compile. Cut texts by `tokenizer.enable_truncation(longest)`.
    """
    sizes = [len(each.ids) for each in encodings]
    rows, width = (
        max(least, 1 << (count - 1).bit_length())
        for count, least in ((len(sizes), 4), (max(sizes), 16))
    )
    inputs = np.zeros((rows, max(min(width, longest), max(sizes)), 2), np.int32)
    for row, each in enumerate(encodings):
        inputs[row, : len(each.ids)] = np.stack([each.ids, each.type_ids], axis=-1)
    return inputs, np.asarray(sizes + [0] * (rows - len(sizes)), np.int32)
