# SPDX-License-Identifier: Apache-2.0
"""Mask models from folders: Tiny-A2D, SDAR, Dream, LLaDA, and those trained by this library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from utio_jax.contrib.denoising.decode import Denoised, denoise
from utio_jax.contrib.denoising.settings import Canvas
from utio_jax.core.decoder import Params
from utio_jax.core.files import save_text
from utio_jax.core.lens import with_config
from utio_jax.models.checkpoint import load, save
from utio_jax.models.config_reader import Config, Reader
from utio_jax.models.families import FAMILIES, Family, Rule, linear_rules
from utio_jax.models.gguf.special import CONTROL, ENDS, NORMAL, USER_DEFINED
from utio_jax.models.gguf.tokenizer import build_tokenizer
from utio_jax.models.huggingface import load_folder, read_json
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.transformer import Transformer

CANVAS_FILE = "denoising.json"
"""The canvas of a model in this library's own layout, next to its config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Denoiser:
    """A mask model with its parameters, its canvas, and the folder of its files."""

    decoder: Any
    params: Params
    canvas: Canvas
    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if there is none."""
        own = (self.folder / CANVAS_FILE).is_file()
        whole, *parts = (self.folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
        if not whole.is_file() and all(part.is_file() for part in parts):
            return _from_pieces(parts[0])
        return load_tokenizer(self.folder / "tokenizer.json", special_in_text=not own)

    def generate(self, prompt: str, **options: Any) -> tuple[str, Denoised]:
        """Returns the text after a prompt, and the result of `denoise`, whose options these are."""
        bos = self.decoder.config.bos_id
        prompts = encode_documents(self.tokenizer, [prompt], bos_id=bos)
        options = {"canvas": self.canvas, "max_new_tokens": 128, **options}
        result = denoise(self.decoder, self.params, prompts, **options)
        ids = result.token_ids[0, : result.lengths[0]].tolist()
        return self.tokenizer.decode(ids), result


def _settings_of(kind: str) -> Callable[[Reader], dict[str, Any]]:
    """Returns the reader of a family whose config is that of an autoregressive one."""

    def settings(read: Reader) -> dict[str, Any]:
        # SDAR and Dream leave a window in their config that nothing reads. No mask is causal.
        config = {**read.config, "model_type": kind, "sliding_window": None, "is_causal": None}
        inner = Reader({**config, "use_sliding_window": False})
        values = FAMILIES[kind].settings(inner)
        read.problems += inner.problems
        return {**values, "causal": False}

    return settings


def _llada(read: Reader) -> dict[str, Any]:
    """LLaDA's config, an OLMo's: other names for a Llama."""
    off = (
        "alibi attention_layer_norm input_emb_norm scale_logits multi_query_attention include_bias"
    )
    needed = {"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms"}
    for name, value in (needed | {"rope": True} | dict.fromkeys(off.split(), False)).items():
        read.need(name, value)
    heads, dim = read.take("n_heads"), read.take("d_model")
    if dim % heads:
        read.problems.append(f"d_model={dim}, no multiple of n_heads={heads}")
    return {
        "vocab_size": read.take("embedding_size", read.take("vocab_size")),
        "num_layers": read.layers("n_layers"),
        "embed_dim": dim,
        "num_heads": heads,
        "num_kv_heads": read.take("n_kv_heads", heads),
        "head_dim": dim // heads,
        "context_length": read.take("max_sequence_length"),
        "mlp_dim": read.take("mlp_hidden_size", read.take("mlp_ratio", 4) * dim),
        "activation": "swiglu",
        "norm_eps": read.take("rms_norm_eps", 1e-5),
        "qkv_bias": bool(read.config.get("include_qkv_bias")),
        "tie_embeddings": bool(read.config.get("weight_tying")),
        "rope_theta": read.take("rope_theta", 10_000.0),
        "causal": False,
    }


_TOP, _BLOCK = "model.transformer.", "model.transformer.blocks.{layer}."
_LLADA = (
    Rule(f"{_TOP}wte.weight", ("embedding.embedding",)),
    Rule(f"{_TOP}ln_f.weight", ("norm.scale",)),
    Rule(f"{_TOP}ff_out.weight", ("head.kernel",), transpose=True),
    *(
        rule
        for source, target in zip(
            ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out"],
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            strict=True,
        )
        for rule in linear_rules(f"{_BLOCK}{source}", f"layers.{target}")
    ),
    Rule(f"{_BLOCK}attn_norm.weight", ("layers.attention_norm.scale",)),
    Rule(f"{_BLOCK}ff_norm.weight", ("layers.mlp_norm.scale",)),
)


def _like(kind: str, architecture: str) -> Family:
    return Family(architecture, _settings_of(kind), FAMILIES[kind].rules)


FAMILIES_OF_MASKS: dict[str, Family] = {
    "a2d-llama": _like("llama", "A2DLlamaLMHeadModel"),
    "a2d-qwen2": _like("qwen2", "A2DQwen2LMHeadModel"),
    "a2d-qwen3": _like("qwen3", "A2DQwen3LMHeadModel"),
    "sdar": _like("qwen3", "SDARForCausalLM"),
    "Dream": _like("qwen2", "DreamModel"),
    "llada": Family("LLaDAModelLM", _llada, _LLADA),
}
"""Mask models of Hugging Face's layout, by `model_type`."""

_MASK_IDS = {"sdar": 151_669, "Dream": 151_666, "llada": 126_336}


def load_denoiser(folder: str | Path, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Denoiser:
    """Reads the folder of a mask model.

    In Hugging Face's layout, special pieces of its tokenizer that end a turn, such as `<|eot_id|>`,
    end a text, too: LLaDA's config names `<|endoftext|>` alone.

    Raises:
      ValueError: another architecture (a mixture of experts, for one), options that cannot be run,
        all of them named; no mask token; or see `utio_jax.models.load`.
    """
    folder = Path(folder)
    if (folder / CANVAS_FILE).is_file():
        stored = read_json(folder / CANVAS_FILE, "a canvas")
        try:
            canvas = Canvas(**stored)
        except TypeError as error:
            raise ValueError(
                f"Wanted the fields of Canvas in {folder / CANVAS_FILE}. Got: {error}."
            ) from error
        model = load(folder, dtype=dtype, lens=False, branches=False)
        decoder, params = model.decoder, model.params
    else:
        config = read_json(folder / "config.json", "a config")
        kind = config.get("model_type")
        if "moe" in str(kind).lower() or config.get("num_experts") or config.get("n_experts"):
            raise ValueError(
                f"Wanted a dense mask model in {folder}. Got {kind!r}, a mixture of experts, which "
                f"this library does not run. Dense ones: {', '.join(FAMILIES_OF_MASKS)}."
            )
        decoder, params = load_folder(folder, dtype=dtype, families=FAMILIES_OF_MASKS)
        canvas = _canvas_of(folder, config)
    canvas.check(decoder)
    model = Denoiser(decoder=decoder, params=params, canvas=canvas, folder=folder)
    if (folder / CANVAS_FILE).is_file():
        return model
    known = dict[int, Any]()
    with suppress(ValueError):  # A model without a tokenizer reads token ids.
        known = model.tokenizer.get_added_tokens_decoder()
    vocab, named = decoder.config.vocab_size, decoder.config.eos_ids
    turns = {i for i, piece in known.items() if piece.special and piece.content in ENDS}
    ends = (*named, *sorted(i for i in turns if i not in named and i < vocab))
    return dataclasses.replace(model, decoder=with_config(decoder, eos_ids=ends))


def save_denoiser(
    folder: str | Path, decoder: Transformer, params: Params, canvas: Canvas, **options: Any
) -> None:
    """Writes a mask model in this library's own layout; options are those of `save`."""
    canvas.check(decoder)
    text = json.dumps(dataclasses.asdict(canvas), indent=1) + "\n"
    save_text(Path(folder) / CANVAS_FILE, text)
    save(folder, decoder, params, **options)


def _from_pieces(file: Path) -> Tokenizer:
    """Returns Qwen 2's tokenizer with the pieces of a `vocab.json`, as Dream is published."""
    folder, settings = file.parent, dict[str, Any]()
    pieces = {index: text for text, index in read_json(file, "a vocabulary").items()}
    kinds = dict.fromkeys(pieces, NORMAL)
    if (folder / "tokenizer_config.json").is_file():
        settings = read_json(folder / "tokenizer_config.json", "a tokenizer's config")
    for index, entry in settings.get("added_tokens_decoder", {}).items():
        pieces[int(index)] = entry["content"]
        kinds[int(index)] = CONTROL if entry.get("special") else USER_DEFINED
    lines = (folder / "merges.txt").read_text("utf-8").splitlines()
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [pieces.get(index, f"[UNUSED{index}]") for index in range(max(pieces) + 1)],
        "token_type": np.asarray([kinds.get(index, NORMAL) for index in range(max(pieces) + 1)]),
        "merges": [line for line in lines if line and not line.startswith("#version")],
    }
    return build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, source=file)


def _canvas_of(folder: Path, config: Config) -> Canvas:
    """Returns the canvas that a Hugging Face folder describes."""
    kind = str(config["model_type"])
    mask = config.get("mask_token_id")
    mask = _MASK_IDS.get(kind) if mask is None else mask
    if mask is None and (folder / "tokenizer_config.json").is_file():
        named: Any = read_json(folder / "tokenizer_config.json", "a config").get("mask_token")
        named = named.get("content") if isinstance(named, Mapping) else named
        if isinstance(named, str):
            mask = load_tokenizer(folder / "tokenizer.json").token_to_id(named)
    if not isinstance(mask, int):
        raise ValueError(
            f"Wanted a mask_token_id in {folder / 'config.json'}, or a mask_token in its "
            f"tokenizer_config.json. Got {mask!r}."
        )
    if kind == "sdar":
        return Canvas(mask_id=mask, block=config.get("block_size") or 4, attention="block")
    return Canvas(mask_id=mask, shift=kind == "Dream")
