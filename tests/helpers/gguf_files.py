# SPDX-License-Identifier: Apache-2.0
"""GGUF files as llama.cpp's converters write them, by the `gguf` library's own writer and names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from utio_jax.core.files import load_tensors

# Where a block of random bytes has its scales, which must be small numbers: bytes of float16.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

# What transformers stores under a name without `.weight`.
_BARE = ("_scale", "_scalar")


def quantised(values: np.ndarray, kind: str, *, seed: int = 0) -> np.ndarray:
    """Returns rows of bytes; those that the library cannot quantise to are made up."""
    stored = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return np.ascontiguousarray(gguf.quantize(values.astype(np.float32), stored)).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // block, size), np.uint8)
    for at in _SCALES[kind]:
        scales = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def dequantised(rows: np.ndarray, kind: str) -> np.ndarray:
    return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]), np.float32)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows as converters of Llama store those of queries and keys."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    file: Path,
    folder: Path,
    *,
    arch: str,
    kinds: Mapping[str, str] = {},
    tensors: Mapping[str, np.ndarray] = {},
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    factors: np.ndarray | None = None,
) -> None:
    """Writes the model of a Hugging Face folder.

    Args:
      file: to write.
      folder: with config and weights.
      arch: GGUF's name of the architecture.
      kinds: quantised types by Hugging Face name of the tensor; others are F32.
      tensors: rows of bytes for the tensors with a kind.
      describe: adds further keys.
      factors: divisors of the rotary frequencies.
    """
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, np.ndarray] = {}
    for part in sorted(folder.glob("model*.safetensors")):
        stored |= load_tensors(part)
    writer = gguf.GGUFWriter(str(file), arch)
    _describe(writer, config)
    describe(writer)
    kinds_of = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    of_arch = kinds_of.get(arch, kinds_of["llama"])  # Of Nanbeige, before the library knows it.
    names = gguf.get_tensor_name_map(of_arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, list[np.ndarray]] = {}
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, values in stored.items():
        module, leaf = (name, "weight") if name.endswith(_BARE) else name.rsplit(".", 1)
        stack = re.fullmatch(r"(model\.altup_\w+)\.\d+", module)
        if stack:  # One tensor of all.
            stacks.setdefault(stack[1], []).append(values)
            continue
        result = names.get_name(module)
        assert result is not None, name
        rows = tensors.get(name, values)
        part = module.rsplit(".", 1)[-1]
        if arch in ("llama", "nanbeige") and part in heads:
            rows = permuted(rows, heads[part])
        if arch in ("gemma2", "gemma3") and module.endswith("norm"):
            rows = rows + np.float32(1)
        kind = gguf.GGMLQuantizationType[kinds[name]] if name in kinds else None
        writer.add_tensor(f"{result}.{leaf}", np.ascontiguousarray(rows), raw_dtype=kind)
    for module, arrays in stacks.items():
        writer.add_tensor(f"{names.get_name(module)}.weight", np.stack(arrays))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("a test")
    writer.add_quantization_version(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    widths = config["intermediate_size"]
    if config.get("use_double_wide_mlp"):
        shared = config["num_kv_shared_layers"]
        widths = [widths] * (config["num_hidden_layers"] - shared) + [2 * widths] * shared
    writer.add_feed_forward_length(widths)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    wide = next(iter(config.get("per_layer_config", {}).values()), {}).get("head_dim")
    if wide:  # Of layers without a window.
        writer.add_key_length_swa(head_dim)
        writer.add_value_length_swa(head_dim)
    writer.add_key_length(wide or head_dim)
    writer.add_value_length(wide or head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] in ("llama", "qwen2", "qwen3", "nanbeige"):
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    else:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


PIECES = ["<|endoftext|>", "<|im_end|>", *(chr(ord("!") + i) for i in range(45)), "!$"]


def write_with_pieces(
    file: Path,
    folder: Path,
    *,
    arch: str = "llama",
    pre: str = "gpt-2",
    template: Any = None,
    opens: bool | None = None,
    **ids: int,
) -> None:
    """Writes a model with a byte-level tokenizer, of which two PIECES are special.

    `ids` are those of special tokens, by the key's name without `_token_id`; `opens` is the key
    `add_bos_token`.
    """

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(PIECES)
        writer.add_token_types([3, 3] + [1] * 46)
        writer.add_token_merges(["! $"])
        if template is not None:
            writer.add_chat_template(template)
        if opens is not None:
            writer.add_add_bos_token(opens)
        for name, index in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)

    write_gguf(file, folder, arch=arch, describe=describe)
