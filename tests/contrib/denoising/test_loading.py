# SPDX-License-Identifier: Apache-2.0
"""Mask models from folders: names and options of four families, against plain NumPy."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.models import logits_of
from safetensors.numpy import save_file

from utio_jax.contrib.denoising import Canvas, denoise, load_denoiser, save_denoiser
from utio_jax.core.files import load_tensors
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer

PARITY = Path(os.environ.get("UTIO_PARITY", "none")) / "denoising"
VOCAB, DIM, HEADS, KV_HEADS, MLP, LAYERS, MASK = 32, 16, 4, 2, 24, 2, 31
QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": 30,
}
LLADA = {
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "d_model": DIM,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "mlp_hidden_size": MLP,
    "n_layers": LAYERS,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": False,
    "mask_token_id": MASK,
    "eos_token_id": 30,
}
QWEN_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "block": "model.layers.{}.",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
LLADA_NAMES = {
    "embed": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "block": "model.transformer.blocks.{}.",
    **{name: f"{name}_proj" for name in "qkv"},
    "o": "attn_out",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
    "before": "attn_norm",
    "after": "ff_norm",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "a2d-qwen3": {"config": QWEN | {"head_dim": 8}, "names": QWEN_NAMES, "head_norms": True},
    "sdar": {
        "config": QWEN | {"head_dim": 8, "block_size": 4},
        "names": QWEN_NAMES,
        "head_norms": True,
        "canvas": {"block": 4, "attention": "block"},
    },
    "Dream": {"config": QWEN, "names": QWEN_NAMES, "biases": True, "canvas": {"shift": True}},
    "llada": {"config": LLADA, "names": LLADA_NAMES},
}


def make_folder(folder: Path, kind: str, **changes: Any) -> dict[str, np.ndarray]:
    """Writes a random model of a family; returns its tensors by their names there."""
    family, rng = FAMILIES[kind], np.random.default_rng(len(kind))
    names, size = family["names"], family["config"].get("head_dim", DIM // HEADS)
    draw = lambda *shape: rng.normal(0, 0.4, shape).astype(np.float32)  # noqa: E731
    tensors = {
        f"{names['embed']}.weight": draw(VOCAB, DIM),
        f"{names['norm']}.weight": 1 + draw(DIM),
        f"{names['head']}.weight": draw(VOCAB, DIM),
    }
    rows = {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size}
    for layer in range(LAYERS):
        block = names["block"].format(layer)
        for name in ("before", "after"):
            tensors[f"{block}{names[name]}.weight"] = 1 + draw(DIM)
        for name, out in {**rows, "gate": MLP, "up": MLP}.items():
            tensors[f"{block}{names[name]}.weight"] = draw(out, DIM)
            if family.get("biases") and name in rows:
                tensors[f"{block}{names[name]}.bias"] = draw(out)
        tensors[f"{block}{names['o']}.weight"] = draw(DIM, HEADS * size)
        tensors[f"{block}{names['down']}.weight"] = draw(DIM, MLP)
        if family.get("head_norms"):
            for name in ("q_norm", "k_norm"):
                tensors[f"{block}{names[name]}.weight"] = 1 + draw(size)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": kind, **family["config"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def plain_logits(kind: str, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Returns logits `[token, vocab]` of one row, as the families' papers write their layers."""
    family = FAMILIES[kind]
    names, size = family["names"], family["config"].get("head_dim", DIM // HEADS)
    count, block = len(ids), family["config"].get("block_size")
    angles = np.arange(count)[:, None] / 1000.0 ** (np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x / scale * tensors[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def rotated(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = tensors[f"{names['embed']}.weight"][ids]
    for layer in range(LAYERS):
        at = names["block"].format(layer)
        h = normed(x, at + names["before"])
        q, k, v = (linear(h, at + names[n]).reshape(count, -1, size) for n in "qkv")
        if family.get("head_norms"):
            q, k = normed(q, at + names["q_norm"]), normed(k, at + names["k_norm"])
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        if block:
            place = np.arange(count) // block
            scores = np.where(place[None, :] <= place[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        x = x + linear(mixed, at + names["o"])
        h = normed(x, at + names["after"])
        gate = linear(h, at + names["gate"])
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + names["up"]), at + names["down"])
    return linear(normed(x, names["norm"]), names["head"])


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folders_first_step_is_plain_numpys(kind: str, tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, kind)
    model = load_denoiser(tmp_path)
    expected = Canvas(mask_id=MASK, **FAMILIES[kind].get("canvas", {}))
    assert model.canvas == expected
    assert model.decoder.config.eos_ids == (30,)
    prompt, new = [3, 7, 20, 11, 5, 9], 2
    ids = np.asarray([*prompt, *[MASK] * new])
    logits = plain_logits(kind, tensors, ids)
    logits[:, MASK] = -np.inf
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    result = denoise(
        model.decoder, model.params, [prompt], canvas=model.canvas, max_new_tokens=new, eos_ids=()
    )
    first = int(result.decided_at[0].argmin())
    reader = len(prompt) + first - expected.shift
    others = [len(prompt) + i - expected.shift for i in range(new)]
    assert log_probs[reader].max() == log_probs[others].max()  # The more confident one.
    assert result.token_ids[0, first] == log_probs[reader].argmax()
    np.testing.assert_allclose(result.log_probs[0, first], log_probs[reader].max(), atol=1e-4)


@pytest.mark.skipif(not PARITY.is_dir(), reason="`make parity` makes these models")
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_transformers_layers(kind: str) -> None:
    model, made = (
        load_denoiser(PARITY / kind),
        load_tensors(PARITY / kind / "reference.safetensors"),
    )
    width = model.canvas.block or made["token_ids"].shape[1]  # A first block sees itself alone.
    logits = logits_of(model, made["token_ids"][:, :width])
    np.testing.assert_allclose(logits, made["logits"][:, :width], atol=1e-4)


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


def test_a_model_of_this_library_comes_back(tmp_path: Path) -> None:
    decoder = Transformer(dataclasses.replace(TINY, causal=False))
    params, canvas = (
        jax.jit(decoder.init)(jax.random.key(0)),
        Canvas(mask_id=63, block=8, shift=True),
    )
    save_denoiser(tmp_path, decoder, params, canvas, dtype=jnp.float32)
    model = load_denoiser(tmp_path)
    assert (model.canvas, model.decoder) == (canvas, decoder)
    ids, lengths = jnp.asarray([[1, 2, 3, 4]]), jnp.asarray([4])
    states = [run_dense(decoder, p, ids, lengths, depths=(4,))[0] for p in (params, model.params)]
    np.testing.assert_array_equal(states[0], states[1])
    (tmp_path / "denoising.json").write_text('{"mask": 3}')
    with pytest.raises(ValueError, match="the fields of Canvas"):
        load_denoiser(tmp_path)
