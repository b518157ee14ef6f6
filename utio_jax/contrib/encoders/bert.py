# SPDX-License-Identifier: Apache-2.0
"""BERT from Hugging Face folders: `BertModel` and `BertForSequenceClassification`.

The layers are those of `utio_jax.models.transformer`, bidirectional and with norms after each sum
(Devlin et al. 2018). A token's input is its id and its kind (first or second text):
`[row, token, 2]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.contrib.encoders import linear, mean_of_tokens
from utio_jax.core.decoder import Params
from utio_jax.models.config_reader import Reader
from utio_jax.models.families import Family, Rule, linear_rules
from utio_jax.models.huggingface import load_folder, read_json, where_tensors_are
from utio_jax.models.transformer import Transformer, TransformerConfig, norm_of

Pooling = Literal["mean", "cls"]
"""A row's state: the mean of its tokens', or that of its first token."""

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""How a classifier's numbers are read, see `BertConfig.problem`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """Sizes of a BERT encoder.

    Attributes:
      num_kinds: kinds of tokens.
      pooling: of token states into a row's state.
      labels: of the classifier; 0: there is none.
      problem: of the classifier, by transformers' `problem_type`: regressions and several labels at
        once are answers without a most probable class.
    """

    num_kinds: int
    pooling: Pooling = "mean"
    labels: int = 0
    problem: Problem = "single_label_classification"
    sum_norms = True
    choices = {**TransformerConfig.choices, "pooling": get_args(Pooling)}
    choices |= {"problem": get_args(Problem)}

    @property
    def id_limits(self) -> tuple[int, int]:
        """The number of token ids and of token types."""
        return self.vocab_size, self.num_kinds


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
        key, *keys = jax.random.split(key, 4)
        params = super().init(key, dtype)

        def draw(*shape: int) -> jax.Array:
            return 0.02 * jax.random.normal(keys.pop(), shape, dtype)

        params["kinds"] = {"embedding": draw(config.num_kinds, dim)}
        if config.labels:
            for name, out in {"pooler": dim, "head": config.labels}.items():
                params[name] = {"kernel": draw(dim, out), "bias": jnp.zeros(out, dtype)}
        return params

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead 2"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        x = super().embed(params, token_ids[..., 0], positions)
        x += params["kinds"]["embedding"][token_ids[..., 1]]
        return norm_of(self.config).apply({"params": params["norm"]}, x)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns the products with all words' embeddings: a masked-LM head without its map."""
        return x @ params["embedding"]["embedding"].T

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> jax.Array:
        return x[:, 0] if self.config.pooling == "cls" else mean_of_tokens(x, real)


class BertClassifier(Bert):
    """A BERT with `pooler` and `head`: a `Classifier`, whose one head reads all exits."""

    def classify(self, params: Params, pooled: Float[Array, "*lead dim"], depth: int) -> jax.Array:
        return linear(params["head"], jnp.tanh(linear(params["pooler"], pooled)))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        return self.classify(params, x, self.config.num_layers)


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
_MLPS = {"gelu": "exact_gelu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


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
    head = where_tensors_are(folder, prefix="bert.").get("classifier.weight")
    labels = 0 if head is None else head[2][0]
    pooling = "cls" if labels else pooling
    problem = read_json(folder / "config.json", "a config").get("problem_type")
    problem = problem or ("regression" if labels == 1 else "single_label_classification")
    family = Family(
        architecture="BertModel",
        settings=_settings,
        rules=_RULES,
        decoder=BertClassifier if labels else Bert,
        config=partial(BertConfig, labels=labels, pooling=pooling, problem=problem),
    )
    unread = ("cls.",) if labels else ("cls.", "bert.pooler.")
    return load_folder(folder, exits=exits, families={"bert": family}, unread=unread)


def _settings(read: Reader) -> dict[str, Any]:
    read.need("hidden_act", *_MLPS)
    read.need("position_embedding_type", "absolute")
    read.need("is_decoder", False)
    read.need("add_cross_attention", False)
    if any("TokenClassification" in str(name) for name in read.config.get("architectures") or ()):
        read.problems.append("a classifier of tokens (architectures); labels here are of rows")
    heads, dim = read.take("num_attention_heads"), read.take("hidden_size")
    if dim % heads:
        read.problems.append(f"hidden_size={dim}, no multiple of num_attention_heads={heads}")
    return {
        "vocab_size": read.take("vocab_size"),
        "num_layers": read.layers(),
        "embed_dim": dim,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": dim // heads,
        "context_length": read.take("max_position_embeddings"),
        "causal": False,
        "input_shape": (2,),
        "num_kinds": read.take("type_vocab_size", 2),
        "mlp_dim": read.take("intermediate_size"),
        "activation": _MLPS.get(read.take("hidden_act", "gelu")),
        "norm": "layer",
        "norm_eps": read.take("layer_norm_eps", 1e-12),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "positions": "learned",
    }


def pack_encodings(
    encodings: Sequence[Any], *, longest: int = 512
) -> tuple[Int[np.ndarray, "row token 2"], Int[np.ndarray, " row"]]:
    """Returns a tokenizer's encodings as a BERT's inputs, and their lengths.

    Rows and tokens are padded to powers of two, up to the `longest` row that the model reads, with
    rows of length 0: few shapes compile. Cut texts by `tokenizer.enable_truncation(longest)`. What
    the tokenizer itself padded is left out, by the `attention_mask`.

    Raises:
      ValueError: texts that the tokenizer cut below `longest`, as a `tokenizer.json` may say.
    """
    pairs = [
        np.stack([encoding.ids, encoding.type_ids], axis=-1)[
            np.asarray(encoding.attention_mask) > 0
        ]
        for encoding in encodings
    ]
    sizes = [len(pair) for pair in pairs]
    sized = zip(encodings, sizes, strict=True)
    cut = [size for encoding, size in sized if encoding.overflowing and size < longest]
    if cut:
        raise ValueError(
            f"Wanted texts whole, or cut to longest={longest} tokens. Got texts that the tokenizer "
            f"cut to {min(cut)}. Call tokenizer.no_truncation(), or give longest={min(cut)}."
        )
    rows, width = (
        max(least, 1 << (count - 1).bit_length())
        for count, least in ((len(sizes), 4), (max(sizes), 16))
    )
    inputs = np.zeros((rows, max(min(width, longest), max(sizes)), 2), np.int32)
    for row, pair in enumerate(pairs):
        inputs[row, : len(pair)] = pair
    return inputs, np.asarray(sizes + [0] * (rows - len(sizes)), np.int32)
