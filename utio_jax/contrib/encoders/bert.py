# SPDX-License-Identifier: Apache-2.0
"""BERT encoders from Hugging Face folders: sentence embeddings and classes, rows that leave early.

    model = load_encoder("folder of all-MiniLM-L6-v2")       # bert: MiniLM, bge, classifiers
    vectors = model.embed(["a text", "another"])
    found = model.encode(["a text", "another"], policy)      # rows leave, see `encode_rows`

A post-norm layer (Devlin et al. 2018) fits the seven functions of a `Decoder`: queries, keys and
values read the state as it is, and `finish_layer` normalises after each residual. A token's input
is its id and its kind (first or second text): `[row, token, 2]`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

from utio_jax.contrib.encoders.rows import Encoded, encode_rows, mean_of_tokens
from utio_jax.core.decoder import DecoderConfig, LayerParams, Params, Places
from utio_jax.core.files import load_json
from utio_jax.models.config_reader import Reader
from utio_jax.models.families import Rule, linear_rules
from utio_jax.models.huggingface import read_json, read_tensor, where_tensors_are
from utio_jax.models.stacking import place_tensors
from utio_jax.models.tokenizer import load_tokenizer
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import uniform

Pooling = Literal["mean", "cls"]
"""A row's state: the mean of its tokens', or that of its first token."""

_ACTIVATIONS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """Sizes of a BERT encoder.

    Attributes:
      num_words: ids that the embedding knows.
      num_kinds: kinds of tokens.
      mlp_dim: width of the MLP's hidden layer.
      activation: of the MLP: GELU `"exact"`, its `"tanh"` approximation, or `"relu"`.
      norm_eps: added to variances.
      pooling: what a row's state is.
      labels: of the classifier; 0: there is none. Otherwise `vocab_size` is that.
    """

    num_words: int
    num_kinds: int
    mlp_dim: int
    activation: str = "exact"
    norm_eps: float = 1e-12
    pooling: Pooling = "mean"
    labels: int = 0

    @property
    def id_limits(self) -> tuple[int, int]:
        """How many ids and how many kinds of tokens there are."""
        return self.num_words, self.num_kinds

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in get_args(Pooling):
            raise ValueError(
                f"Wanted pooling to be one of {', '.join(get_args(Pooling))}. Got {self.pooling!r}."
            )


@dataclasses.dataclass(frozen=True)
class Bert:
    """`BertConfig` made into an `Encoder`. Hashes by its configuration.

    Parameters: `embedding/{words,positions,kinds}` and `embedding/norm`, and `layers/...` stacked
    along a leading layer axis, each linear map a `kernel` `[in, out]` with `bias`, each norm
    `scale` and `bias`.
    """

    config: BertConfig

    def init(self, key: jax.Array) -> Params:
        """Returns fresh parameters."""
        config, dim, layers = self.config, self.config.embed_dim, self.config.num_layers
        linear = lambda a, b, *lead: {"kernel": (*lead, a, b), "bias": (*lead, b)}  # noqa: E731
        norm = lambda *lead: {"scale": (*lead, dim), "bias": (*lead, dim)}  # noqa: E731
        heads = config.num_heads * config.head_dim
        shapes: dict[str, Any] = {
            "embedding": {
                "words": (config.num_words, dim),
                "positions": (config.context_length, dim),
                "kinds": (config.num_kinds, dim),
                "norm": norm(),
            },
            "layers": {
                **{name: linear(dim, heads, layers) for name in ("q_proj", "k_proj", "v_proj")},
                "o_proj": linear(heads, dim, layers),
                "attention_norm": norm(layers),
                "up_proj": linear(dim, config.mlp_dim, layers),
                "down_proj": linear(config.mlp_dim, dim, layers),
                "mlp_norm": norm(layers),
            },
        }
        if config.labels:
            shapes |= {"pooler": linear(dim, dim), "head": linear(dim, config.labels)}

        def draw(path: Any, shape: tuple[int, ...]) -> jax.Array:
            if path[-1].key in ("scale", "bias"):
                return jnp.full(shape, path[-1].key == "scale", jnp.float32)
            name = zlib.crc32(jax.tree_util.keystr(path).encode())
            return 0.02 * jax.random.normal(jax.random.fold_in(key, name), shape)

        is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
        return jax.tree_util.tree_map_with_path(draw, shapes, is_leaf=is_shape)

    def layers(self, params: Params) -> LayerParams:
        return params["layers"]

    def encode_positions(self, positions: Int[Array, "*lead"]) -> Places:
        return positions

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead 2"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        tables = params["embedding"]

        def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
            # No id of this model: NaN, rather than some other word's embedding.
            return table.at[ids].get(mode="fill", fill_value=jnp.nan)

        x = look_up(tables["words"], token_ids[..., 0]) + look_up(tables["positions"], positions)
        return self._norm(tables["norm"], x + look_up(tables["kinds"], token_ids[..., 1]))

    def queries(self, layer: LayerParams, x: jax.Array, places: Places) -> jax.Array:
        return self._heads(_linear(layer["q_proj"], x)) * self.config.head_dim**-0.5

    def keys_values(
        self, layer: LayerParams, x: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array]:
        keys, values = (self._heads(_linear(layer[name], x)) for name in ("k_proj", "v_proj"))
        return keys, values

    def finish_layer(self, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
        out = _linear(layer["o_proj"], attended.reshape(*x.shape[:-1], -1))
        x = self._norm(layer["attention_norm"], x + out)
        hidden = _linear(layer["up_proj"], x)
        match self.config.activation:
            case "relu":
                hidden = jax.nn.relu(hidden)
            case kind:
                hidden = jax.nn.gelu(hidden, approximate=kind == "tanh")
        return self._norm(layer["mlp_norm"], x + _linear(layer["down_proj"], hidden))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns the products with all words' embeddings: a masked-LM head without its map."""
        return x @ params["embedding"]["words"].T

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> jax.Array:
        return x[:, 0] if self.config.pooling == "cls" else mean_of_tokens(x, real)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)

    def _norm(self, norm: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        scale, bias = (jnp.broadcast_to(norm[name], x.shape) for name in ("scale", "bias"))
        return (wide * scale + bias).astype(x.dtype)


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
BERT_RULES = (
    Rule("bert.embeddings.word_embeddings.weight", ("embedding.words",)),
    Rule("bert.embeddings.position_embeddings.weight", ("embedding.positions",)),
    Rule("bert.embeddings.token_type_embeddings.weight", ("embedding.kinds",)),
    *_norm_rules("bert.embeddings.LayerNorm", "embedding.norm"),
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
"""Where the tensors of a BERT are; the last two of a classifier."""


_run = jax.jit(encode_rows, static_argnums=0)


@dataclasses.dataclass(kw_only=True, eq=False)
class TextEncoder:
    """A BERT with its parameters and tokenizer.

    Attributes:
      encoder: the model; a `BertClassifier` if it has a classifier.
      params: its parameters.
      folder: where they are from.
      normalized: whether embeddings have length 1.
      longest: tokens of a row, at which texts are cut.
    """

    encoder: Bert
    params: Params
    folder: Path
    normalized: bool = False
    longest: int

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises ValueError where there is none."""
        found = load_tokenizer(self.folder / "tokenizer.json", special_in_text=True)
        found.enable_truncation(self.longest)
        return found

    def tokens(
        self, texts: Sequence[str | tuple[str, str]]
    ) -> tuple[Int[np.ndarray, "row token 2"], Int[np.ndarray, " row"]]:
        """Returns texts, or pairs of them, as rows of ids and kinds, and the rows' lengths.

        Rows and tokens are padded to powers of two, with rows of length 0: few shapes compile.

        Raises:
          ValueError: there are no texts, or the tokenizer has ids that the model has not.
        """
        if isinstance(texts, str) or not texts:
            raise ValueError(f'Wanted a list of texts, as ["a text"]. Got {texts!r:.80}.')
        found = self.tokenizer.encode_batch([*texts])
        lengths = np.zeros(_power_of_two(len(found), least=4), np.int32)
        lengths[: len(found)] = [len(each.ids) for each in found]
        width = min(_power_of_two(int(lengths.max()), least=16), self.encoder.config.context_length)
        inputs = np.zeros((len(lengths), width, 2), np.int32)
        for row, each in enumerate(found):
            inputs[row, : len(each.ids)] = np.stack([each.ids, each.type_ids], axis=-1)
        most = self.encoder.config.id_limits
        if (inputs.max(axis=(0, 1)) >= most).any():
            raise ValueError(
                f"Wanted ids below {most[0]} and kinds below {most[1]}, as the model has. Got "
                f"{inputs.max(axis=(0, 1)).tolist()}. Is tokenizer.json another model's?"
            )
        return inputs, lengths

    def encode(
        self, texts: Sequence[str | tuple[str, str]], policy: Policy | None = None
    ) -> Encoded:
        """Returns what `encode_rows` does of texts, or pairs of them; no policy: at full depth."""
        inputs, lengths = (jnp.asarray(y) for y in self.tokens(texts))
        policy = uniform(self.encoder.config.num_layers) if policy is None else policy
        found = _run(self.encoder, self.params, inputs, lengths, policy)
        # Cut on the host: slices on the device would compile anew for each number of texts.
        cut = lambda y: None if y is None else np.asarray(y)[: len(texts)]  # noqa: E731
        read = {name: cut(getattr(found, name)) for name in ("pooled", "logits", "depths")}
        return dataclasses.replace(found, **read)

    def embed(
        self, texts: Sequence[str | tuple[str, str]], policy: Policy | None = None
    ) -> Float[np.ndarray, "row dim"]:
        """Returns embeddings; of length 1 where the folder says so."""
        pooled = np.asarray(self.encode(texts, policy).pooled, np.float32)
        if not self.normalized:
            return pooled
        return pooled / np.maximum(np.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def load_encoder(
    folder: str | Path,
    *,
    exits: tuple[int, ...] = (),
    pooling: Pooling | None = None,
) -> TextEncoder:
    """Reads a Hugging Face folder of a BERT: `config.json`, safetensors, perhaps a tokenizer.

    Of `BertModel`, for embeddings, or `BertForSequenceClassification`. What sentence-transformers
    adds is read, too: how rows are pooled, whether normalised, the longest. A pooler without a
    classifier, and a masked-LM head, are left out.

    Rows may leave at `exits`, which decide nothing by themselves. Without `pooling` it is what
    `1_Pooling` says, or the mean; a classifier reads its first token.

    Raises:
      ValueError: another architecture, or options that cannot be run, all of them named; files or
        tensors that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    stored = read_json(folder / "config.json", "a config")
    home = where_tensors_are(folder, prefix="bert.")
    head = home.get("bert.classifier.weight", home.get("classifier.weight"))
    labels = 0 if head is None else head[2][0]
    home = {
        name.removeprefix("bert.") if "classifier." in name else name: place
        for name, place in home.items()
        if (labels or ".pooler." not in name) and not name.startswith("cls.")
    }
    found = _folder_pooling(folder) if pooling is None else pooling
    config = _read_bert_config(
        stored, folder, exits=exits, labels=labels, pooling="cls" if labels else found or "mean"
    )
    decoder, params = place_tensors(
        BertClassifier(config) if labels else Bert(config),
        BERT_RULES,
        {name: shape for name, (*_, shape) in home.items()},
        lambda name: read_tensor(*home[name][:2]),
        dtype=jnp.float32,
        sharding=None,
        source=str(folder),
    )
    longest = config.context_length
    if (folder / "sentence_bert_config.json").is_file():
        said = read_json(folder / "sentence_bert_config.json", "a config").get("max_seq_length")
        longest = min(longest, said or longest)
    return TextEncoder(
        encoder=decoder,
        params=params,
        folder=folder,
        normalized=_normalizes(folder),
        longest=longest,
    )


def _read_bert_config(
    stored: dict[str, Any],
    folder: Path,
    *,
    exits: tuple[int, ...],
    labels: int,
    pooling: Pooling,
) -> BertConfig:
    source = folder / "config.json"
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
    heads, dim, words = (
        read.take(name) for name in ("num_attention_heads", "hidden_size", "vocab_size")
    )
    sizes: dict[str, Any] = {
        "num_layers": read.layers(),
        "context_length": read.take("max_position_embeddings"),
        "mlp_dim": read.take("intermediate_size"),
        "num_kinds": read.take("type_vocab_size", 2),
        "norm_eps": read.take("layer_norm_eps", 1e-12),
    }
    if isinstance(dim, int) and isinstance(heads, int) and (heads < 1 or dim % heads):
        read.problems.append(f"hidden_size={dim}, no multiple of num_attention_heads={heads}")
    if read.problems:
        raise ValueError(
            f"Wanted a BERT that can be run, in {source}. "
            f"Got {'; '.join(dict.fromkeys(read.problems))}."
        )
    return BertConfig(
        vocab_size=labels or words,
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim // heads,
        exits=exits,
        causal=False,
        input_shape=(2,),
        num_words=words,
        activation=_ACTIVATIONS[read.take("hidden_act", "gelu")],
        pooling=pooling,
        labels=labels,
        **sizes,
    )


def _folder_pooling(folder: Path) -> Pooling | None:
    """Returns how sentence-transformers pools; None where it does not say."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    stored = read_json(file, "a config")
    modes = [name for name, on in stored.items() if name.startswith("pooling_mode_") and on]
    names: dict[str, Pooling] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
    }
    if len(modes) != 1 or modes[0] not in names:
        raise ValueError(f"Wanted one of {', '.join(names)} in {file}. Got {modes}.")
    return names[modes[0]]


def _normalizes(folder: Path) -> bool:
    """Whether sentence-transformers' list of modules ends in a normalisation."""
    file = folder / "modules.json"
    modules = load_json(file, "a list of modules") if file.is_file() else []
    return any("Normalize" in str(each.get("type")) for each in modules if isinstance(each, dict))


def _power_of_two(count: int, *, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
