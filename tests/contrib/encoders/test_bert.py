# SPDX-License-Identifier: Apache-2.0
"""BERT folders: what an independent BERT in NumPy says of them, and every fault named."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.contrib.encoders import encode_rows, read_exits
from utio_jax.contrib.encoders.bert import load_encoder, pack_encodings
from utio_jax.core.files import load_tensors, save_tensors
from utio_jax.policies.depth import given_depths

# Made by transformers, where `make parity` runs this.
PARITY = Path(os.environ.get("UTIO_PARITY", "none")) / "encoders"
DIM, WIDE, LAYERS, HEADS, EPS = 24, 40, 3, 3, 1e-12
SIZES = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "layer_norm_eps": EPS,
    "hidden_act": "gelu",
}
LENGTHS = np.asarray([7, 12, 1, 5], np.int32)
run_exits = jax.jit(read_exits, static_argnums=0, static_argnames="depths")


def tensors_of(seed: int, *, labels: int = 0, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors, far from initialisation: every one matters."""
    linear = {f"{prefix}pooler.dense": (DIM, DIM)}
    norms = [f"{prefix}embeddings.LayerNorm"]
    for layer in range(LAYERS):
        block = f"{prefix}encoder.layer.{layer}."
        linear |= {f"{block}attention.self.{name}": (DIM, DIM) for name in ("query", "key")}
        linear |= {f"{block}attention.self.value": (DIM, DIM)}
        linear |= {f"{block}attention.output.dense": (DIM, DIM)}
        linear |= {f"{block}intermediate.dense": (WIDE, DIM), f"{block}output.dense": (DIM, WIDE)}
        norms += [f"{block}attention.output.LayerNorm", f"{block}output.LayerNorm"]
    if labels:
        linear["classifier"] = (labels, DIM)
    shapes = {
        f"{prefix}embeddings.{name}_embeddings.weight": (count, DIM)
        for name, count in (("word", 300), ("position", 32), ("token_type", 2))
    }
    shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    shapes |= {f"{name}.{part}": (DIM,) for name in norms for part in ("weight", "bias")}
    rng = np.random.default_rng(seed)
    result = {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}
    result |= {f"{name}.weight": 1 + result[f"{name}.weight"] for name in norms}
    return {name: array.astype(np.float32) for name, array in result.items()}


def write(folder: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, **settings}))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def bert_by_hand(
    tensors: dict[str, np.ndarray], ids: list[int], kinds: list[int], *, activation: str = "gelu"
) -> list[np.ndarray]:
    """Returns the states `[token, dim]` of one row before and after each layer, in float64."""
    t = {k.removeprefix("bert."): np.asarray(v, np.float64) for k, v in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def act(x: np.ndarray) -> np.ndarray:
        if activation == "relu":
            return np.maximum(x, 0)
        if activation == "gelu_new":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    x = (
        t["embeddings.word_embeddings.weight"][ids]
        + t["embeddings.position_embeddings.weight"][: len(ids)]
        + t["embeddings.token_type_embeddings.weight"][kinds]
    )
    states = [norm(x, "embeddings.LayerNorm")]
    for layer in range(LAYERS):
        block, x = f"encoder.layer.{layer}.", states[-1]
        q, k, v = (linear(x, f"{block}attention.self.{n}") for n in ("query", "key", "value"))
        out = np.zeros_like(x)
        for part in np.split(np.arange(DIM), HEADS):
            scores = q[:, part] @ k[:, part].T / math.sqrt(len(part))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
        out = linear(out, f"{block}attention.output.dense")
        x = norm(x + out, f"{block}attention.output.LayerNorm")
        hidden = act(linear(x, f"{block}intermediate.dense"))
        states.append(norm(x + linear(hidden, f"{block}output.dense"), f"{block}output.LayerNorm"))
    return states


def rows() -> tuple[np.ndarray, list[tuple[list[int], list[int]]]]:
    """Returns padded inputs, and each row's ids and kinds."""
    rng = np.random.default_rng(5)
    inputs = np.full((len(LENGTHS), 16, 2), 1, np.int32)
    contents = []
    for row, length in enumerate(LENGTHS):
        ids, kinds = rng.integers(0, 300, length), np.arange(length) > length // 2
        inputs[row, :length] = np.stack([ids, kinds], axis=-1)
        contents.append((ids.tolist(), kinds.astype(int).tolist()))
    return inputs, contents


@pytest.mark.parametrize(
    ("activation", "pooling"),
    [("gelu", "mean"), ("gelu_new", "cls"), pytest.param("relu", "mean", marks=pytest.mark.slow)],
)
def test_embeddings_at_all_depths_are_those_of_bert(
    tmp_path: Path, activation: str, pooling: Any
) -> None:
    tensors = tensors_of(0)
    folder = write(tmp_path, tensors, hidden_act=activation)
    model, params = load_encoder(folder, exits=(1, 2, 3), pooling=pooling)
    inputs, contents = rows()
    result = run_exits(model, params, inputs, LENGTHS, depths=(1, 2, 3))
    assert result.logits is None
    for row, (ids, kinds) in enumerate(contents):
        states = bert_by_hand(tensors, ids, kinds, activation=activation)
        expected = [x.mean(0) if pooling == "mean" else x[0] for x in states]
        np.testing.assert_allclose(result.start[row], expected[0], atol=2e-5)
        np.testing.assert_allclose(result.pooled[:, row], expected[1:], atol=5e-5)


@pytest.mark.slow
def test_classes_are_those_of_bert_and_rows_leave(tmp_path: Path) -> None:
    tensors = tensors_of(1, labels=4, prefix="bert.")
    tensors["cls.predictions.bias"] = np.zeros(300, np.float32)  # A masked-LM head is left out.
    model, params = load_encoder(write(tmp_path, tensors), exits=(1, 2, 3))
    inputs, contents = rows()
    depths = np.asarray([2, 1, 3, 3])
    policy = given_depths(jnp.asarray(depths[:, None]), depths=(1, 2, 3))
    run = jax.jit(encode_rows, static_argnums=0, static_argnames="blocks")
    result = run(model, params, jnp.asarray(inputs), jnp.asarray(LENGTHS), policy, blocks=(2, 2))
    assert result.logits is not None
    for row, (ids, kinds) in enumerate(contents):
        state = bert_by_hand(tensors, ids, kinds)[depths[row]][0]
        pooled = np.tanh(
            state @ tensors["bert.pooler.dense.weight"].T + tensors["bert.pooler.dense.bias"]
        )
        expected = pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"]
        np.testing.assert_allclose(result.logits[row], expected, atol=1e-4)


@pytest.mark.slow
def test_texts_and_pairs_are_packed_and_ids_of_another_model_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    encodings = tokenizer.encode_batch(["a b", ("c", "d e"), " ".join("abcdefghijklmnop")])
    inputs, lengths = pack_encodings(encodings, longest=20)
    assert (inputs.shape, lengths.tolist()) == ((4, 20, 2), [4, 6, 18, 0])
    assert inputs[0, :4, 0].tolist() == [1, 4, 5, 2]
    assert inputs[1, :6].T.tolist() == [[1, 6, 2, 7, 8, 2], [0, 0, 0, 1, 1, 1]]
    model, params = load_encoder(write(tmp_path, tensors_of(0)))
    for wrong, most in (([300, 0], 299), ([3, 2], 1)):
        given = inputs.copy()
        given[0, 1] = wrong
        message = f"Wanted token ids from 0 to {most}.*another model's tokenizer"
        with pytest.raises(ValueError, match=message):
            read_exits(model, params, jnp.asarray(given), jnp.asarray(lengths), depths=(1,))


def test_what_cannot_be_run_is_named(tmp_path: Path, unchecked_shapes: None) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "roberta"}, "a model_type of bert.*Got 'roberta'"),
        (
            {"hidden_act": "silu", "position_embedding_type": "relative_key"},
            "hidden_act='silu'.*position_embedding_type",
        ),
        (
            {"layer_norm_eps": -1, "type_vocab_size": 1.5},
            "type_vocab_size=1.5: only.*; layer_norm_eps=-1",
        ),
        ({"num_attention_heads": 5}, "hidden_size=24, no multiple of num_attention_heads=5"),
    ]
    for wrong, message in settings:
        with pytest.raises(ValueError, match=message):
            load_encoder(write(tmp_path, tensors_of(0), **wrong))
    short = {k: v for k, v in tensors_of(0).items() if "layer.1.output.dense.bias" not in k}
    with pytest.raises(ValueError, match="layer.1.output.dense.bias"):
        load_encoder(write(tmp_path, short))


@pytest.mark.skipif(not PARITY.is_dir(), reason="made by `make parity` alone")
@pytest.mark.parametrize("case", ["bert", "bert_classifier"])
def test_outputs_are_those_of_transformers(case: str) -> None:
    model, params = load_encoder(PARITY / case)
    expected = load_tensors(PARITY / case / "reference.safetensors")
    inputs = jnp.asarray(np.stack([expected["token_ids"], expected["kinds"]], axis=-1))
    lengths, depth = jnp.asarray(expected["lengths"]), model.config.num_layers
    result = run_exits(model, params, inputs, lengths, depths=(depth,))
    read = result.pooled if result.logits is None else result.logits
    np.testing.assert_allclose(read[0], expected["outputs"], atol=1e-4)
