# SPDX-License-Identifier: Apache-2.0
"""T5's files: what transformers says of them, and every fault named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.encoder_decoder import EXITS, FOLDER
from helpers.folders import changed_copy
from helpers.marks import slow

from utio_jax.contrib.encoder_decoder import load_t5
from utio_jax.contrib.encoders import encode_rows
from utio_jax.core.files import load_tensors
from utio_jax.policies import given_depths


def test_what_cannot_be_run_is_named(tmp_path: Path, unchecked_shapes: None) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "umt5"}, "a model_type of t5, mt5 .*Got 'umt5'"),
        ({"feed_forward_proj": "gated-tanh", "d_ff": 0}, "feed_forward_proj='gated-tanh'.*d_ff=0"),
        ({"is_causal": False}, "is_causal=False: only True"),
        ({"dense_act_fn": "silu", "is_gated_act": True}, "is_gated_act=True.*dense_act_fn='silu'"),
        ({"relative_attention_num_buckets": 32}, "at most key_dim \\+ 4 = 12. Got buckets=32"),
    ]
    for wrong, message in settings:
        with pytest.raises(ValueError, match=message):
            load_t5(changed_copy(FOLDER / "t5", tmp_path, **wrong))
    with pytest.raises(ValueError, match="even num_layers and exits.*exits=\\(3, 8\\)"):
        load_t5(FOLDER / "t5", exits=(3, 8))
    with pytest.raises(ValueError, match="float32 or bfloat16 for a T5.*Got dtype=float16"):
        load_t5(FOLDER / "t5", dtype="float16")
    lost = "decoder.block.1.layer.1.EncDecAttention.q.weight"
    short = load_tensors(FOLDER / "t5" / "model.safetensors")
    del short[lost]
    with pytest.raises(ValueError, match=f"missing {lost}"):
        load_t5(changed_copy(FOLDER / "t5", tmp_path / "short", short))


def read(case: str) -> tuple[dict[str, np.ndarray], Any, Any]:
    """Returns what transformers says of a model, and the model."""
    expected = load_tensors(FOLDER / case / "reference.safetensors")
    sizes = {f"{name}_tokens": expected[f"{name}s"].shape[1] for name in ("source", "target")}
    return expected, *load_t5(FOLDER / case, exits=EXITS, **sizes)


def test_a_head_of_its_own_is_read_where_the_config_says_that_it_is_tied(tmp_path: Path) -> None:
    """Transformers 5 writes that of every T5, and of every mT5."""
    expected, model, params = read("t5_gated")
    folder = changed_copy(FOLDER / "t5_gated", tmp_path, tie_word_embeddings=True)
    sizes = {f"{name}_tokens": expected[f"{name}s"].shape[1] for name in ("source", "target")}
    again, others = load_t5(folder, exits=EXITS, **sizes)
    assert again == model
    np.testing.assert_array_equal(others["head"]["kernel"], params["head"]["kernel"])
    file = folder / "config.json"
    settings = {**json.loads(file.read_text()), "model_type": "mt5"}
    del settings["scale_decoder_outputs"]  # No mT5 has it: the input of its head is never scaled.
    file.write_text(json.dumps(settings))
    assert load_t5(folder, exits=EXITS, **sizes)[0] == model


def test_embeddings_are_one_under_any_of_their_names_or_refused(tmp_path: Path) -> None:
    """Transformers gives each stack its own; here they share one."""
    tensors = load_tensors(FOLDER / "t5" / "model.safetensors")
    shared = tensors.pop("shared.weight")
    sizes: Any = {"source_tokens": 8, "target_tokens": 8}
    names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    stored = {**tensors, **dict.fromkeys(names, shared)}
    _, params = load_t5(changed_copy(FOLDER / "t5", tmp_path / "copies", stored), **sizes)
    np.testing.assert_array_equal(params["embedding"]["embedding"], shared)
    for name in names:
        own = {**stored, "shared.weight": shared, name: shared + 1}
        with pytest.raises(ValueError, match=f"Got: {name} differs from shared.weight. Models"):
            load_t5(changed_copy(FOLDER / "t5", tmp_path / name, own), **sizes)


@pytest.mark.slow
def test_rows_may_leave_the_encoder() -> None:
    """T5's encoder is one of `utio_jax.contrib.encoders`."""
    expected, model, params = read("t5")
    policy = given_depths(jnp.asarray([[1], [2]]), depths=(1, 2))
    sources, lengths = jnp.asarray(expected["sources"]), jnp.asarray([24, 12])
    result = encode_rows(model.encoder, params, sources, lengths, policy, blocks=(2, 1))
    np.testing.assert_array_equal(result.depths, [1, 2])
    first, second = expected["encoded"]
    np.testing.assert_allclose(result.pooled[1], second[:12].mean(axis=0), atol=1e-4)
    assert abs(result.pooled[0] - first.mean(axis=0)).max() > 0.1


@pytest.mark.parametrize("case", ["t5", "t5_gated", *slow("t5_gated_tied")])
def test_states_of_every_block_are_those_of_transformers(case: str) -> None:
    expected, model, params = read(case)
    sources, targets = expected["sources"], expected["targets"]
    rows = jnp.asarray(np.concatenate([sources, targets], axis=1))
    lengths = jnp.full(len(rows), rows.shape[1])
    states = np.stack(cases.run_dense(model, params, rows, lengths, depths=EXITS))
    states = states[:, :, sources.shape[1] :]
    np.testing.assert_allclose(states[:-1], expected["states"][1:], atol=1e-4)
    logits = model.unembed(params, jnp.asarray(states[-1]))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
