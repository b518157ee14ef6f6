# SPDX-License-Identifier: Apache-2.0
"""Model folders: what is saved loads again, and everything wrong with one is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.core.files import flatten, load_tensors, nest, save_tensors
from utio_jax.models import load, save


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    save(tmp_path / "model", tiny.decoder, tiny.params, dtype=jnp.float32)
    return tmp_path / "model"


def test_a_saved_model_loads_again(tiny: Any, folder: Path) -> None:
    model = load(folder)
    assert model.decoder == tiny.decoder
    for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(tiny.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(model.sha256) == 64
    halves = load(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(halves.params)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_files_keep_their_type(tiny: Any, tmp_path: Path) -> None:
    save(tmp_path, tiny.decoder, tiny.params)
    stored = load_tensors(tmp_path / "model.safetensors")
    assert {str(a.dtype) for a in stored.values()} == {"bfloat16"}
    for a, b in zip(
        jax.tree.leaves(load(tmp_path).params), jax.tree.leaves(tiny.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2**-8)


def test_nested_names_round_trip() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nest(flatten(tree)) == tree


def test_every_wrong_tensor_is_named_at_once(folder: Path) -> None:
    stored = load_tensors(folder / "model.safetensors")
    missing = stored.pop("norm.scale")
    stored["extra"] = missing
    stored["embedding.embedding"] = stored["embedding.embedding"][:-1]
    save_tensors(folder / "model.safetensors", stored)
    with pytest.raises(ValueError, match="missing norm.scale") as error:
        load(folder)
    assert "unexpected extra" in str(error.value)
    assert "embedding.embedding has shape (63, 32), wanted (64, 32)" in str(error.value)


def test_broken_files_are_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors file at .*There is none"):
        load(folder)
    (folder / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="is a pickle"):
        load_tensors(folder / "model.bin")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"wings": 2}, "fields of TransformerConfig.*wings"),
        ({"num_layers": None}, "fields of TransformerConfig|num_layers"),
        ({"num_kv_heads": 3}, "num_kv_heads that divides num_heads=4"),
        ({"exits": [2, 1]}, "strictly increasing depths"),
        ({"activation": "relu"}, "activation"),
        ({"norm": "batch"}, "norm"),
        ({"windows": [1, 2]}, "windows of at least 0 for its 4 layers"),
    ],
)
def test_impossible_configs_are_refused(folder: Path, change: dict[str, Any], match: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=match):
        load(folder)


def test_missing_folders_configs_and_tokenizers_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing at"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="tokenizer at .*There is none. Pass token ids"):
        _ = load(folder).tokenizer
    with pytest.raises(ValueError, match="calibration at .*There is none"):
        _ = load(folder).calibration
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json. It is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config at .*There is none"):
        load(folder)
