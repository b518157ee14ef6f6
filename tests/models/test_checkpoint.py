# SPDX-License-Identifier: Apache-2.0
"""Model folders: what is saved loads again, and everything wrong with one is said at once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.folders import STOCK, changed_copy, edit_json

from utio_jax.core.files import hash_file, load_tensors, replacing, save_tensors, save_text
from utio_jax.models import Transformer, load, save


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    save(tmp_path / "model", tiny.decoder, tiny.params, dtype=jnp.float32)
    return tmp_path / "model"


def test_a_saved_model_loads_again(tiny: Any, folder: Path) -> None:
    model = load(folder)
    assert model.decoder == tiny.decoder
    jax.tree.map(np.testing.assert_array_equal, model.params, tiny.params)
    assert len(model.sha256) == 64
    halves = load(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(halves.params)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_files_keep_their_type(tiny: Any, tmp_path: Path) -> None:
    save(tmp_path, tiny.decoder, tiny.params)
    stored = load_tensors(tmp_path / "model.safetensors")
    assert {str(a.dtype) for a in stored.values()} == {"bfloat16"}
    close = functools.partial(np.testing.assert_allclose, rtol=2**-8)
    jax.tree.map(close, load(tmp_path).params, tiny.params)


def test_broken_files_are_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="Wanted model.safetensors or .* There is neither"):
        load(folder)
    (folder / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="is a pickle"):
        load_tensors(folder / "model.bin")


@pytest.mark.parametrize("kind", [np.int8, np.bool_, np.complex64])
def test_tensors_that_are_no_floats_are_refused(folder: Path, kind: Any) -> None:
    stored = load_tensors(folder / "model.safetensors")
    for name in ("norm.scale", "layers.q_proj.kernel"):
        stored[name] = np.ones(stored[name].shape, kind)
    save_tensors(folder / "model.safetensors", stored)
    with pytest.raises(ValueError, match="Wanted tensors of float32.*Quantised weights") as error:
        load(folder)
    assert "norm.scale (" in str(error.value)
    assert "layers.q_proj.kernel (" in str(error.value)


def test_the_config_is_the_last_file_that_is_replaced(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights beside an old config would load, and be another model."""
    files = list[str]()

    def noted(*paths: Path) -> Any:
        files.extend(path.name for path in paths)
        return replacing(*paths)

    monkeypatch.setattr("utio_jax.models.checkpoint.replacing", noted)
    save(tmp_path, tiny.decoder, tiny.params)
    assert files == ["model.safetensors", "config.json"]


def test_files_are_hashed_once_until_they_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[Path]()
    monkeypatch.setattr(
        "utio_jax.models.huggingface.hash_file", lambda file: hashed.append(file) or hash_file(file)
    )
    model, file = load(folder), folder / "model.safetensors"
    digests = {model.sha256, model.with_context(8).sha256, load(folder).sha256, hash_file(file)}
    assert (hashed, len(digests)) == ([file], 1)
    save_tensors(file, jax.tree.map(lambda leaf: leaf + 1, load_tensors(file)))
    assert load(folder).sha256 == hash_file(file) != model.sha256


@pytest.mark.parametrize("like", [None, "folder"])
def test_the_layout_of_this_library_holds_no_gemma(
    folder: Path, tmp_path: Path, like: str | None
) -> None:
    model: Any = load(STOCK / "gemma4")
    with pytest.raises(ValueError, match="a GGUF file in whose layout to save a Gemma4. Got"):
        save(tmp_path / "out", model.decoder, model.params, like=like and folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rope_theta": "10000"}, "rope_theta above 0. Got rope_theta='10000'"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "one of linear, llama3.*kind='yarn'"),
        ({"num_layers": 10**7, "exits": []}, "Wanted the 10 tensors of the configured model"),
        ({"wings": 2}, "fields of TransformerConfig.*wings"),
        ({"activation": "tanh"}, "activation"),
    ],
)
def test_impossible_configs_are_refused(
    folder: Path, change: dict[str, Any], match: str, unchecked_shapes: None
) -> None:
    edit_json(folder / "config.json", **change)
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
    with pytest.raises(ValueError, match="Wanted a config at .*There is none.$"):
        load(folder)
    (folder / "small.gguf").touch()
    with pytest.raises(ValueError, match="There is none. A GGUF .* own path: .*small.gguf"):
        load(folder)


def test_nothing_stays_of_the_model_that_a_folder_held(tmp_path: Path) -> None:
    old, new = (changed_copy(STOCK / name, tmp_path / name) for name in ("llama", "qwen2"))
    save_text(old / "generation_config.json", '{"eos_token_id": [3]}')
    save_text(old / "chat_template.jinja", "old")
    save_text(new / "tokenizer_config.json", '{"chat_template": "new"}')
    for like in (old, new):
        model = load(like)
        assert isinstance(model.decoder, Transformer)
        save(tmp_path / "out", model.decoder, model.params, like=like)
    again = load(tmp_path / "out")
    assert again.decoder.config.eos_ids == load(new).decoder.config.eos_ids
    assert again.chat_template.template == load(new).chat_template.template == "new"
