# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n and 4: costs, parts that are zero, text parts of larger models, what is refused.

That their logits are those of transformers is in `test_huggingface.py`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.folders import STOCK as FOLDER
from helpers.models import copied_parameters

from utio_jax.core.files import load_tensors, save_tensors
from utio_jax.core.flops import token_cost
from utio_jax.models import Model, load, save
from utio_jax.models.families import read_config, text_part

pytestmark = pytest.mark.check

LAYERS = 6


@pytest.fixture(scope="module", params=["gemma3n", pytest.param("gemma4", marks=pytest.mark.slow)])
def model(request: Any) -> Any:
    return load(FOLDER / request.param, exits=(4, LAYERS))


def kernels_of(model: Model) -> dict[str, int]:
    layers = model.params["layers"]
    return {n: 2 * leaf["kernel"][0].size for n, leaf in layers.items() if "kernel" in leaf}


def test_the_cost_of_a_token_of_gemma_3n_is_that_of_its_matrices() -> None:
    """By hand: each matrix twice its size, those that mix streams once per method that needs it."""
    model: Any = load(FOLDER / "gemma3n")
    cost, size = token_cost(model.decoder, model.params), kernels_of(model)
    mixing = size["router"] + size["predict"] + 2 * 4 * 4 * 16
    of_kv = size["k_proj"] + size["v_proj"]
    once = sum(size.values()) - of_kv - size["router"] - size["predict"]
    assert cost.keys_values == of_kv + mixing
    assert cost.query == once + 2 * mixing + size["router"]
    assert cost.head == 2 * 16 * (3 * 16 + 48)


def test_the_cost_of_a_token_of_gemma_4_is_that_of_its_widest_layer() -> None:
    model: Any = load(FOLDER / "gemma4")
    cost, size = token_cost(model.decoder, model.params), kernels_of(model)
    assert cost.keys_values == size["k_proj"] + size["v_proj"] == 2 * 2 * 16 * 2 * 16
    assert cost.query == sum(size.values()) - cost.keys_values
    assert size["up_proj"] == 2 * 16 * 40
    assert cost.attention_per_key == 4 * 4 * 16


def test_what_a_narrow_layer_of_gemma_4_does_not_have_is_zero() -> None:
    """Of parameters as loaded and as made afresh, alike; and its own part is not."""
    model: Any = load(FOLDER / "gemma4")
    for params in (model.params, jax.jit(model.decoder.init)(jax.random.key(0))):
        layers = params["layers"]
        for name, own, wide in (("q_proj", 32, 64), ("k_proj", 16, 32), ("up_proj", 20, 40)):
            kernel = np.asarray(layers[name]["kernel"])
            assert kernel.shape[-1] == wide
            assert not kernel[0, :, own:].any()
            assert kernel[0, :, :own].all()
            assert kernel[1].all() == (name != "up_proj")
        assert not np.asarray(layers["down_proj"]["kernel"])[3, 20:].any()
        assert np.asarray(layers["down_proj"]["kernel"])[4].all()


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_no_fresh_parameter_is_a_copy_of_another(name: str) -> None:
    assert copied_parameters(load(FOLDER / name).decoder) == []


def as_part(
    folder: Path, out: Path, *, prefix: str = "model.language_model.", **config: Any
) -> Path:
    """Writes the model as the text part of one that reads images, with tensors of these."""
    tensors = load_tensors(folder / "model.safetensors")
    inner = {name.replace("model.", prefix, 1): leaf for name, leaf in tensors.items()}
    towers = ("model.vision_tower.conv", "model.audio_tower.conv", "model.embed_vision.embedding")
    out.mkdir()
    save_tensors(
        out / "model.safetensors",
        inner | {f"{name}.weight": np.ones((2, 3), np.int32) for name in towers},
    )
    text = json.loads((folder / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "text_config": text, "eos_token_id": [1, 46], **config}
    (out / "config.json").write_text(json.dumps(whole))
    return out


def test_the_text_part_of_a_model_with_towers_is_taken(model: Any, tmp_path: Path) -> None:
    folder = model.folder
    result: Any = load(as_part(folder, tmp_path / "whole"), exits=(4, LAYERS))
    assert result.decoder.config == dataclasses.replace(model.decoder.config, eos_ids=(1, 46))
    jax.tree.map(np.testing.assert_array_equal, result.params, model.params)
    save(tmp_path / "text", result.decoder, result.params, like=result.folder, dtype=jnp.float32)
    assert load(tmp_path / "text").decoder == result.decoder
    names = set(load_tensors(tmp_path / "text" / "model.safetensors"))
    assert names == set(load_tensors(folder / "model.safetensors"))
    with pytest.raises(ValueError, match="quantization_config: only plain weights"):
        load(as_part(folder, tmp_path / "q", quantization_config={"bits": 4}))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma_3_with_a_vision_tower_is_its_text_part(prefix: str, tmp_path: Path) -> None:
    """As transformers 5 writes it, and as its larger sizes are published."""
    alone = load(FOLDER / "gemma3")
    result = load(as_part(FOLDER / "gemma3", tmp_path / "whole", prefix=prefix))
    assert result.decoder.config == dataclasses.replace(alone.decoder.config, eos_ids=(1, 46))
    jax.tree.map(np.testing.assert_array_equal, result.params, alone.params)
    # Of the 4B model's settings only these are written out.
    part: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 10240, "sliding_window": 1024}
    part |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read_config(text_part({"model_type": "gemma3", "text_config": part}), source="here")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_length) == (262_208, 131_072)


def test_projections_that_no_layer_reads_are_left_out(tmp_path: Path, model: Model) -> None:
    """Published files have those of layers that read others' keys and values, too."""
    folder = Path(shutil.copytree(model.folder, tmp_path / "m"))
    tensors = load_tensors(folder / "model.safetensors")
    spare = {
        name.replace("layers.0", f"layers.{layer}"): leaf
        for name, leaf in tensors.items()
        for layer in (4, 5)
        if name.startswith("model.layers.0.self_attn.") and name.split(".")[4][0] in "kv"
    }
    assert len(spare) == 6
    save_tensors(folder / "model.safetensors", tensors | spare)
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, model.params)
    (name,) = (name for name in spare if "4.self_attn.k_proj" in name)
    save_tensors(folder / "model.safetensors", tensors | {name.replace("4", "6"): spare[name]})
    with pytest.raises(ValueError, match="unexpected model.layers.6.self_attn.k_proj.weight"):
        load(folder)


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 of 6 layers, with none of the same"),
]
OF_GEMMA_3N: list[tuple[dict[str, Any], str]] = [
    ({"altup_active_idx": 1}, "altup_active_idx=1: only 0"),
    ({"intermediate_size": [24, 24, 24, 24, 24, 48]}, "intermediate_size="),
    ({"activation_sparsity_pattern": [0.5]}, "a sparsity from 0 to below 1 for each of its 6"),
]
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
OF_GEMMA_4: list[tuple[dict[str, Any], str]] = [
    ({"attention_k_eq_v": True}, "attention_k_eq_v=True"),
    ({"num_global_key_value_heads": 1}, "num_global_key_value_heads of another number"),
    ({"per_layer_config": {"1": {"head_dim": 16}}}, "a per_layer_config of more than one"),
    ({"per_layer_config": 0}, "a per_layer_config of more than one"),
    ({"per_layer_config": {key: {"head_dim": 6} for key in "135"}}, "local_head_dim of .*_dim=6"),
    ({"rope_parameters": {"full_attention": LINEAR}}, "scaled rotations of layers without a win"),
    ({"rope_parameters": {"full_attention": FULL | {"factor": 2.0}}}, "rope_type='proportional'"),
]


@pytest.mark.parametrize(
    ("case", "settings", "expected"),
    [
        *(("gemma3n", *case) for case in BOTH + OF_GEMMA_3N),
        *(("gemma4", *case) for case in BOTH + OF_GEMMA_4),
    ],
)
def test_what_cannot_be_run_is_named(case: str, settings: Any, expected: str) -> None:
    stored = json.loads((FOLDER / case / "config.json").read_text())
    with pytest.raises(ValueError, match=expected):
        read_config({**stored, **settings}, source="here")
