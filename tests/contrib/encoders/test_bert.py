# SPDX-License-Identifier: Apache-2.0
"""BERT folders: what transformers says of them, and every fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.folders import STOCK, changed_copy
from helpers.marks import slow
from helpers.models import assert_equal, copied_parameters

from utio_jax.contrib.encoders import encode_rows, fit_row_exits, read_exits
from utio_jax.contrib.encoders.bert import BertClassifier, load_encoder, pack_encodings
from utio_jax.core.files import load_tensors
from utio_jax.policies import StateSimilarity
from utio_jax.policies.depth import given_depths

FOLDER = STOCK / "encoders"
run_exits = jax.jit(read_exits, static_argnums=0, static_argnames="depths")


def reference(case: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns what transformers says of a model, and its inputs."""
    expected = load_tensors(FOLDER / case / "reference.safetensors")
    return expected, np.stack([expected["token_ids"], expected["kinds"]], axis=-1)


@pytest.mark.parametrize(
    ("activation", "pooling"), [("gelu", "mean"), ("gelu_new", "cls"), *slow(("relu", "mean"))]
)
def test_embeddings_at_all_depths_are_those_of_bert(
    tmp_path: Path, activation: str, pooling: Any
) -> None:
    folder = changed_copy(FOLDER / "bert", tmp_path, hidden_act=activation)
    model, params = load_encoder(folder, exits=(1, 2, 3), pooling=pooling)
    expected, inputs = reference("bert")
    lengths, states = expected["lengths"], expected[activation]
    result = run_exits(model, params, inputs, lengths, depths=(1, 2, 3))
    assert result.logits is None
    for row, length in enumerate(lengths):
        pooled = states[:, row, : length if pooling == "mean" else 1].mean(axis=1)
        np.testing.assert_allclose(result.start[row], pooled[0], atol=2e-5)
        np.testing.assert_allclose(result.pooled[:, row], pooled[1:], atol=5e-5)


@pytest.mark.parametrize("name", ["bert", "bert_classifier"])
def test_no_fresh_parameter_is_a_copy_of_another(name: str) -> None:
    model, _ = load_encoder(FOLDER / name, exits=(1, 2, 3))
    assert copied_parameters(model) == []


@pytest.mark.slow
def test_classes_are_those_of_bert_and_rows_leave(tmp_path: Path) -> None:
    tensors: dict[str, Any] = load_tensors(FOLDER / "bert_classifier" / "model.safetensors")
    tensors["cls.predictions.bias"] = np.zeros(48, np.float32)  # A masked-LM head is left out.
    folder = changed_copy(FOLDER / "bert_classifier", tmp_path, tensors)
    model, params = load_encoder(folder, exits=(1, 2, 3))
    expected, inputs = reference("bert_classifier")
    depths = np.asarray([2, 1, 3])
    policy = given_depths(jnp.asarray(depths[:, None]), depths=(1, 2, 3))
    run = jax.jit(encode_rows, static_argnums=0, static_argnames="blocks")
    lengths = jnp.asarray(expected["lengths"])
    result = run(model, params, jnp.asarray(inputs), lengths, policy, blocks=(2, 2))
    logits = expected["logits"][depths - 1, np.arange(3)]
    np.testing.assert_allclose(result.logits, logits, atol=1e-4)


def test_what_a_tokenizer_pads_is_left_out_and_what_it_cuts_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate("_abcdefgh")}, unk_token="_")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = ["c a h", "b"]
    plain = pack_encodings(tokenizer.encode_batch(texts))
    for side in ("right", "left"):
        tokenizer.enable_padding(length=40, direction=side)
        assert_equal(pack_encodings(tokenizer.encode_batch(texts)), plain)
    assert plain[1].tolist() == [3, 1, 0, 0]
    tokenizer.enable_truncation(2)
    with pytest.raises(ValueError, match=r"cut to longest=512.*cut to 2\. .*no_truncation"):
        pack_encodings(tokenizer.encode_batch(texts))
    inputs, lengths = pack_encodings(tokenizer.encode_batch(texts), longest=2)
    assert (inputs[0, :2, 0].tolist(), lengths.tolist()) == ([3, 1], [2, 1, 0, 0])


def test_old_names_of_norms_are_the_same_model(tmp_path: Path) -> None:
    """As bert-base-uncased has them."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def renamed(name: str) -> str:
        for new, before in old.items():
            name = name.replace(new, before)
        return name

    tensors = load_tensors(FOLDER / "bert" / "model.safetensors")
    renamed_tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    copy = changed_copy(FOLDER / "bert", tmp_path / "old", renamed_tensors)
    expected, actual = (load_encoder(path)[1] for path in (FOLDER / "bert", copy))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
def test_texts_and_pairs_are_packed_and_ids_of_another_model_refused() -> None:
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
    model, params = load_encoder(FOLDER / "bert")
    for wrong, most in (([48, 0], 47), ([3, 2], 1)):
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
        ({"num_attention_heads": 5}, "hidden_size=12, no multiple of num_attention_heads=5"),
        ({"architectures": ["BertForTokenClassification"]}, "a classifier of tokens"),
    ]
    for wrong, message in settings:
        with pytest.raises(ValueError, match=message):
            load_encoder(changed_copy(FOLDER / "bert", tmp_path, **wrong))
    short = load_tensors(FOLDER / "bert" / "model.safetensors")
    del short["encoder.layer.1.output.dense.bias"]
    with pytest.raises(ValueError, match="layer.1.output.dense.bias"):
        load_encoder(changed_copy(FOLDER / "bert", tmp_path / "short", short))


@pytest.mark.parametrize(
    ("changes", "labels"),
    [({"problem_type": "multi_label_classification"}, 5), ({"problem_type": None}, 1)],
)
def test_answers_that_are_no_class_have_no_guarantee(
    tmp_path: Path, changes: dict[str, Any], labels: int
) -> None:
    tensors = load_tensors(FOLDER / "bert_classifier" / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name][:labels]
    folder = changed_copy(FOLDER / "bert_classifier", tmp_path, tensors, **changes)
    model, params = load_encoder(folder, exits=(1, 2, 3))
    assert isinstance(model, BertClassifier)
    inputs, lengths = np.ones((4, 5, 2), np.int32), np.full(4, 5)
    with pytest.raises(
        ValueError, match=f"Got {labels} labels and problem '{model.config.problem}"
    ):
        fit_row_exits(
            model, params, StateSimilarity(), jnp.asarray(inputs), jnp.asarray(lengths),
            depths=(1, 2, 3),
        )  # fmt: skip
    assert model.config.problem == changes["problem_type"] or labels == 1
