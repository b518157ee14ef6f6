# SPDX-License-Identifier: Apache-2.0
"""GGUF files: dequantised tensor by tensor, block by block, to the asked dtype.

`load_file` for a model; `config_of` for the Hugging Face config that the file describes;
`files_beside_weights` for metadata (config, tokenizer, chat template) as files of a folder.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.decoder import Params
from utio_jax.models.chat import find_special_tokens, find_template
from utio_jax.models.families import FAMILIES, read_config
from utio_jax.models.gguf.architectures import (
    OTHER_PARTS,
    architecture_of,
    llama3_scaling,
    read_keys,
    tensor_rules,
)
from utio_jax.models.gguf.header import Header, library, read_header
from utio_jax.models.gguf.tokenizer import tokenizer_of
from utio_jax.models.stacking import place_tensors

# Numbers that are dequantised at once: their intermediates stay in the caches.
_BLOCK = 2**18

_ROPE_FREQS = "rope_freqs.weight"


def load_file(
    file: str | Path,
    *,
    exits: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    sharding: Mesh | None = None,
    weights: str | None = None,
) -> tuple[Any, Params]:
    """Returns the decoder and the parameters of a GGUF file. Errors: see `utio_jax.models.load`."""
    header = read_header(file)
    settings = read_config(config_of(header), source=str(file), exits=exits)
    architecture = architecture_of(header.keys, source=str(file))
    heads = {"attn_q": settings.num_heads, "attn_k": settings.num_kv_heads}

    def read(name: str) -> np.ndarray:
        part = name.split(".")[-2]
        shifted = architecture.norms_plus_one and part.endswith("_norm")
        array = read_tensor(header, name, dtype=dtype, minus_one=shifted)
        interleaved = architecture.rotates_pairs and part in heads
        return _halves(array, heads[part]) if interleaved else array

    return place_tensors(
        FAMILIES[architecture.family].decoder(settings),
        tensor_rules(header.keys["general.architecture"]),
        {
            name: tensor.shape
            for name, tensor in header.tensors.items()
            if name != _ROPE_FREQS and not name.startswith(OTHER_PARTS)
        },
        read,
        dtype=dtype,
        sharding=sharding,
        source=str(file),
        weights=weights,
    )


def config_of(header: Header) -> dict[str, Any]:
    """Returns the `config.json` of the model as a Hugging Face folder.

    Raises ValueError that names all keys and tensors that are not understood.
    """
    source = str(header.file)
    architecture = architecture_of(header.keys, source=source)
    config, problems = read_keys(header.keys, header.tensors)
    if not problems and architecture.local:
        problems += _rotate_in_part(header, config)
    elif not problems and _ROPE_FREQS in header.tensors:
        rope = config["rope_parameters"]
        factors = read_tensor(header, _ROPE_FREQS, dtype=np.float32)
        rope_parameters = None
        if rope.get("rope_type") == "default" and factors.shape == (config["head_dim"] // 2,):
            rope_parameters = llama3_scaling(factors, theta=rope["rope_theta"])
        if rope_parameters is None:
            problems.append(
                f"{_ROPE_FREQS} of shape {factors.shape}: only the divisors of Llama 3's "
                "scaling are supported"
            )
        config["rope_parameters"] = rope_parameters
    if problems:
        raise ValueError(
            f"Wanted a {header.keys['general.architecture']} that can be run, in {source}. Got "
            f"{'; '.join(problems)}."
        )
    read_config(config, source=source)  # Raises ValueError where its family cannot run it.
    return config


def files_beside_weights(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the `config.json` of a file's model, and the text files that go next to it, by name.

    These are tokenizer, chat template and settings as transformers has them. What the file lacks,
    or what cannot be had exactly, is not among them.
    """
    header = read_header(file)
    config, texts = config_of(header), dict[str, str]()
    settings: dict[str, Any] = {}
    with suppress(ValueError):
        texts["tokenizer.json"] = tokenizer_of(file).to_str(pretty=True)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings |= find_special_tokens(file, header.keys)
    with suppress(ValueError):
        chat = find_template(file, header.keys)
        texts["chat_template.jinja"] = chat.template
        for name, template in chat.named.items():
            texts[f"additional_chat_templates/{name}.jinja"] = template
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ends = {name: config[name] for name in names if config[name] is not None}
    for name, value in {"generation_config": ends, "tokenizer_config": settings}.items():
        if value:
            texts[f"{name}.json"] = json.dumps(value, indent=1) + "\n"
    return config, texts


def _rotate_in_part(header: Header, config: dict[str, Any]) -> list[str]:
    """Sets the rotated share of heads in layers without a window. Returns a list of problems."""
    share = 1.0
    if _ROPE_FREQS in header.tensors:
        divisors = read_tensor(header, _ROPE_FREQS, dtype=np.float32).reshape(-1)
        count = int(np.sum(divisors == 1.0))  # Those of pairs that stand still are immense.
        known = count and 2 * divisors.size == config["global_head_dim"]
        if not known or np.any(divisors[count:] < 1e20):
            return [f"{_ROPE_FREQS}: only divisors that stop pairs are supported"]
        share = count / divisors.size
    rope = {"rope_type": "proportional", "partial_rotary_factor": share}
    config["rope_parameters"]["full_attention"] |= rope
    return []


def read_tensor(
    header: Header, name: str, *, dtype: jax.typing.DTypeLike, minus_one: bool = False
) -> np.ndarray:
    """Returns a tensor of the file, rows first.

    The arithmetic is in float32. With `minus_one`, one is taken away before rounding to `dtype`.
    """
    tensor, gguf = header.tensors[name], library()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    out = _aligned(tensor.shape, np.dtype(dtype))
    rows = out.reshape(-1, tensor.shape[-1])
    step = max(1, _BLOCK // rows.shape[1])
    with header.file.open("rb") as opened:
        opened.seek(tensor.offset)
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            # As one long row: the library works on 16 rows at a time, whatever their length.
            raw = np.frombuffer(opened.read(len(block) * tensor.row_bytes), np.uint8)[None]
            # Scales of a damaged file may be infinite, and weights too large for float16.
            with np.errstate(all="ignore"):
                numbers = gguf.dequantize(raw, kind).reshape(block.shape)
                block[...] = numbers - np.float32(1) if minus_one else numbers
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array aligned to a cache line, which JAX uses on a CPU without a copy.

    It does so whatever `may_alias` of `jax.device_put` says: nothing may write to it afterwards.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows reordered from interleaved rotary pairs to rotated halves of a head."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
