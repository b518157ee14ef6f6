# SPDX-License-Identifier: Apache-2.0
"""Mask models from folders: four families, which are stock models under other names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.folders import STOCK
from helpers.models import assert_equal, live_params
from tokenizers import Tokenizer, models, pre_tokenizers

from utio_jax.contrib.denoising import Canvas, load_denoiser, save_denoiser
from utio_jax.core.files import load_tensors, save_tensors
from utio_jax.models import load
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer

FAMILIES = {"a2d-qwen3": "qwen3", "sdar": "qwen3", "Dream": "qwen2_window", "llada": "llama"}
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}
LLADA_SETTINGS = {
    "vocab_size": "embedding_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}
SETTINGS = {"mask_token_id": 47, "eos_token_id": 30, "block_size": 4, "rope_theta": 1000.0}


def make_folder(folder: Path, kind: str, **changes: Any) -> None:
    """Writes a stock model as one of a family."""
    config = json.loads((STOCK / FAMILIES[kind] / "config.json").read_text())
    tensors = load_tensors(STOCK / FAMILIES[kind] / "model.safetensors")
    del config["rope_parameters"]
    if kind == "llada":
        config = {LLADA_SETTINGS.get(name, name): value for name, value in config.items()}
        config["vocab_size"] = 40  # Without the rows that fill up the table.
        for old, new in LLADA_NAMES.items():
            tensors = {name.replace(old, new): leaf for name, leaf in tensors.items()}
    save_tensors(folder / "model.safetensors", tensors)
    config |= {"model_type": kind, **SETTINGS, **changes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "canvas"),
    [
        ("a2d-qwen3", {}),
        ("sdar", {"block": 4, "attention": "block"}),
        ("Dream", {"shift": True}),
        ("llada", {}),
    ],
)
def test_a_family_is_a_stock_model_that_sees_both_ways(
    kind: str, canvas: dict[str, Any], tmp_path: Path
) -> None:
    make_folder(tmp_path, kind, is_causal=False)
    model, stock = load_denoiser(tmp_path), load(STOCK / FAMILIES[kind])
    changes = {"causal": False, "windows": (), "eos_ids": (30,), "rope_theta": 1000.0}
    assert model.canvas == Canvas(mask_id=47, **canvas)
    assert model.decoder.config == dataclasses.replace(stock.decoder.config, **changes)
    assert_equal(model.params, stock.params)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sdar", {"model_type": "sdar_moe"}, "a dense mask model .*'sdar_moe', a mixture"),
        ("llada", {"model_type": "llada2_moe"}, "mixture of experts"),
        ("llada", {"layer_norm_type": "low_precision"}, "layer_norm_type='low_precision'"),
        ("llada", {"include_bias": True}, "include_bias=True"),
        ("Dream", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("a2d-qwen3", {"model_type": "qwen3"}, "a model_type of a2d-llama"),
        ("a2d-qwen3", {"mask_token_id": None}, "a mask_token_id in"),
    ],
)
def test_what_is_not_read_is_named(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, kind, **changes)
    with pytest.raises(ValueError, match=message):
        load_denoiser(tmp_path)


def test_dreams_tokenizer_is_made_from_its_pieces(tmp_path: Path) -> None:
    """It is published without a tokenizer.json, as vocab.json, merges.txt, added_tokens_decoder."""
    make_folder(tmp_path, "Dream")
    pieces = {letter: index for index, letter in enumerate([*"abcĠ123", "ab", "Ġab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(pieces))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    added = {
        "40": {"content": "<|im_end|>", "special": True},
        "47": {"content": "<|mask|>", "special": True},
        "42": {"content": "<tool>", "special": False},
    }
    settings = {"added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load_denoiser(tmp_path)
    ids = model.tokenizer.encode("ab ab12<|mask|><tool>c<|im_end|>").ids
    assert ids == [7, 8, 4, 5, 47, 42, 2, 40]
    assert model.tokenizer.decode(ids) == "ab ab12<tool>c"
    assert model.decoder.config.eos_ids == (30, 40), "the end of a turn as well"


def test_the_tokenizers_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    """LLaDA's config names <|endoftext|> alone, and its instruct model ends with <|eot_id|>."""
    make_folder(tmp_path, "llada")
    named = {3: "<|eot_id|>", 4: "<tool>", 30: "<|endoftext|>"}
    words = {named.get(i, f"w{i}"): i for i in range(48)}  # Of two pieces a file keeps any one.
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*named.values()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load_denoiser(tmp_path)
    assert model.decoder.config.eos_ids == (30, 3)


def test_a_model_of_this_library_comes_back(tmp_path: Path) -> None:
    decoder = Transformer(dataclasses.replace(TINY, causal=False))
    params, canvas = live_params(decoder), Canvas(mask_id=63, block=8, shift=True)
    save_denoiser(tmp_path, decoder, params, canvas, dtype=jnp.float32)
    model = load_denoiser(tmp_path)
    assert (model.canvas, model.decoder) == (canvas, decoder)
    assert_equal(model.params, params)
    (tmp_path / "denoising.json").write_text('{"mask": 3}')
    with pytest.raises(ValueError, match="the fields of Canvas"):
        load_denoiser(tmp_path)
