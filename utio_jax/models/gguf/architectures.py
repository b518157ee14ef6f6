# SPDX-License-Identifier: Apache-2.0
"""GGUF architectures as data: from their keys to a Hugging Face config, and their tensors.

An `Architecture` turns a file's keys into the `config.json` of its family, so that everything
after it is as for a Hugging Face folder; its rules are those of `utio_jax.models.families` under
GGUF's names. A key that is left out has llama.cpp's default; one that is not known is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from utio_jax.core.decoder import is_integer
from utio_jax.models.config_reader import Reader, among, shown
from utio_jax.models.families import FAMILIES, Rule
from utio_jax.models.gguf.header import Tensor, library
from utio_jax.models.gguf.special import special_pieces, stored_id
from utio_jax.models.rope import RopeScaling, frequencies

# What changes no result here. `gguf.tokenizer` reads the keys of texts.
_HARMLESS = (
    *("general.", "tokenizer.", "quantize.", "{arch}.rope.scaling.finetuned"),
    *("{arch}.vision.", "{arch}.audio."),  # Of parts that are not read: see `OTHER_PARTS`.
)


OTHER_PARTS = ("v.", "a.", "mm.")
"""How the names of tensors begin that encode images and sound, which files of one piece hold."""


class Keys(Reader):
    """Reads a file's keys: those of its architecture without the `{arch}.` that they begin with."""

    def __init__(self, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], arch: str):
        super().__init__(keys, f"{arch}.")
        self.tensors = tensors

    def count(self, name: str, default: int | None = None, *, layer: int | None = None) -> int:
        """Returns a whole number from 1: an array's for one layer, or its only one for all."""
        value = self.stored(name)
        several = isinstance(value, np.ndarray) and value.size
        if several and (layer is not None or np.all(value == value[0])):
            value = value[layer or 0].item()
        return self.checked(name, value, default)

    def token_id(self, name: str, vocab: int) -> int | None:
        """Returns the id of `stored_id`, None where there is none."""
        value = stored_id(self.config, name)
        if value is None or (is_integer(value) and value < vocab):
            return value
        self.problems.append(f"tokenizer.ggml.{name}={shown(value)} in a vocabulary of {vocab}")
        return None

    def rows(self, name: str) -> int:
        """Returns how many rows a tensor has; one that is missing is found missing later."""
        return self.tensors[name].shape[0] if name in self.tensors else 1

    def has(self, *names: str) -> bool:
        """Returns whether the first layer has one of these tensors."""
        return any(f"blk.0.{name}" in self.tensors for name in names)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Rules for reading the GGUF files of one architecture.

    Attributes:
      family: its `model_type` among `utio_jax.models.families.FAMILIES`.
      settings: turns keys, and what all configs have, into what is special about this config.
      rotates_pairs: whether queries and keys rotate neighbours rather than halves: the rows of
        their matrices are interleaved.
      norms_plus_one: whether norms are stored with the one that Gemma adds to them.
      local: what keys of layers with a window end in, where they have sizes of their own. Those of
        the first layer are then the family's `head_dim` and `intermediate_size`.
    """

    family: str
    settings: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    rotates_pairs: bool = False
    norms_plus_one: bool = False
    local: str = ""


def _llama(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.need("tensor_data_layout", "Meta AI original pth")
    return {
        **_rope(keys),
        "hidden_act": "silu",
        "attention_bias": keys.has("attn_q.bias", "attn_output.bias"),
        "mlp_bias": keys.has("ffn_up.bias"),
    }


def _qwen(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_rope(keys),
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": keys.has("attn_q.bias"),
    }


def _nanbeige(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.need("skip_loop_final_norm", True, False)
    return {
        **_rope(keys),
        "hidden_act": "silu",
        "num_loops": keys.count("num_loops", 1),
        "skip_loop_final_norm": bool(keys.stored("skip_loop_final_norm")),
    }


def _gemma2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_rope(keys),
        **_gemma(keys, common, period=2, largest=46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    settings = _gemma_local(keys, common, period=6, largest=62, window=0)
    return {**settings, **_cap(keys, None)}


def _cap(keys: Keys, default: float | None) -> dict[str, Any]:
    """Returns the cap of logits, which a stored 0 turns off."""
    name = "final_logit_softcapping"
    value = keys.stored(name)
    absent = among(value, 0.0) or (value is None and default is None)
    return {name: None if absent else keys.take(name, default or float)}


def _gemma_local(
    keys: Keys, common: dict[str, Any], *, period: int, largest: int = 0, window: int | None = None
) -> dict[str, Any]:
    """Returns the settings of `_gemma` with windows; layers with a window have other rotations.

    A `window` of 0, stored or by default, is none: all layers attend to everything.
    """
    local = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", 10_000.0)}
    full = _rope(keys)["rope_parameters"]
    settings = _gemma(keys, common, period=period, largest=largest)
    if window == 0 and among(keys.stored("attention.sliding_window"), None, 0):
        settings["layer_types"] = ["full_attention"] * common["num_hidden_layers"]
    else:
        window = keys.count("attention.sliding_window")
    return {
        **settings,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "sliding_window": window,
    }


def _gemma_inputs(keys: Keys, common: dict[str, Any], *, period: int, own: int) -> dict[str, Any]:
    """Returns settings that Gemma 3n and 4 share; `own`: layers with K/V if no key says it."""
    shared = keys.stored("attention.shared_kv_layers")
    if isinstance(shared, float) and shared.is_integer():
        shared = int(shared)  # As published files have it.
    if shared is None:
        shared = max(0, common["num_hidden_layers"] - own)
    return {
        **_gemma_local(keys, common, period=period),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": keys.rows("per_layer_token_embd.weight"),
        "num_kv_shared_layers": shared,
    }


def _gemma3n(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3n, whose file says by how many deviations gates are cut off."""
    keys.need("altup.active_idx", 0)
    cut = keys.stored("activation_sparsity_scale")
    if cut is not None and np.shape(cut) != (common["num_hidden_layers"],):
        keys.problems.append(f"{keys.prefix}activation_sparsity_scale={shown(cut)}")
        cut = None
    parts = cut if cut is None else [round(NormalDist().cdf(share), 6) for share in cut.tolist()]
    return {
        **_gemma_inputs(keys, common, period=5, own=20),  # Of both published sizes.
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0),
        "altup_num_inputs": keys.count("altup.num_inputs", 4),
        "laurel_rank": keys.rows("blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": parts,
    }


def _gemma4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    heads = common["num_attention_heads"]
    wide = keys.count("attention.key_length", max(1, common["hidden_size"] // heads))
    keys.need("attention.value_length", wide)
    keys.need("rope.dimension_count", wide)
    pattern = keys.stored("attention.sliding_window_pattern")
    if not isinstance(pattern, np.ndarray):  # Published sizes differ in both, so none is a default.
        keys.refuse("attention.sliding_window_pattern", pattern, "arrays are")
    keys.take("attention.key_length_swa")
    layers, narrow = common["num_hidden_layers"], common["intermediate_size"]
    inputs = _gemma_inputs(keys, common, period=6, own=layers)
    widths = keys.stored("feed_forward_length")
    double = isinstance(widths, np.ndarray) and widths[-1] == 2 * narrow
    if isinstance(widths, np.ndarray):
        own = layers - inputs["num_kv_shared_layers"]
        expected = [narrow] * own + [narrow * (2 if double else 1)] * (layers - own)
        if widths.tolist() != expected:
            keys.problems.append(f"{keys.prefix}feed_forward_length={shown(widths)}")
    return {**inputs, **_cap(keys, 30.0), "global_head_dim": wide, "use_double_wide_mlp": double}


def _gemma(keys: Keys, common: dict[str, Any], *, period: int, largest: int) -> dict[str, Any]:
    """Returns settings that all Gemmas share; every `period`-th layer attends to everything.

    The model of `largest` layers scales its queries by the width of the states.
    """
    layers, heads = common["num_hidden_layers"], common["num_attention_heads"]
    pattern = keys.stored("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and pattern.size >= layers:
        local = pattern[:layers].tolist()
    elif pattern is None or is_integer(pattern, 1):
        every = pattern or period
        local = [layer % every < every - 1 for layer in range(layers)]
    else:
        keys.problems.append(f"{keys.prefix}attention.sliding_window_pattern={shown(pattern)}")
        local = []
    wide = layers == largest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": common["hidden_size"] / heads if wide else common["head_dim"],
        "layer_types": ["sliding_attention" if near else "full_attention" for near in local],
    }


def _rope(keys: Keys) -> dict[str, Any]:
    """Returns the rotations of layers without a window."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.take("rope.freq_base", 10_000.0),
    }
    keys.need("rope.scaling.attn_factor", 1.0)
    keys.need("rope.scaling.type", "none", "linear")
    keys.stored("rope.scaling.original_context_length")  # Of kinds that are refused.
    names = ("rope.scaling.factor", "rope.scale_linear")
    given = [name for name in names if keys.stored(name) is not None]  # The old name comes second.
    factor = keys.stored(given[0]) if given else None
    if not among(factor, None, 0.0) and not among(keys.stored("rope.scaling.type"), "none"):
        factor = keys.take(given[0], float)
        rope |= {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {"rope_parameters": rope}


ARCHITECTURES = {
    "llama": Architecture("llama", _llama, rotates_pairs=True),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "nanbeige": Architecture("nanbeige", _nanbeige, rotates_pairs=True),
    "gemma2": Architecture("gemma2", _gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, norms_plus_one=True),
    "gemma3n": Architecture("gemma3n_text", _gemma3n),
    "gemma4": Architecture("gemma4_text", _gemma4, local="_swa"),
}
"""By `general.architecture`."""


def architecture_of(keys: Mapping[str, Any], *, source: str) -> Architecture:
    """Returns a file's architecture. Raises ValueError where it is not among `ARCHITECTURES`."""
    name = keys.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"Wanted a general.architecture of {', '.join(ARCHITECTURES)} in {source}. "
            f"Got {shown(name)}. Other decoders take part through the `utio_jax.Decoder` protocol."
        )
    return ARCHITECTURES[name]


def tensor_rules(arch: str) -> list[Rule]:
    """Returns the family's rules under GGUF's names of tensors, of those that files may have."""
    gguf, rules = library(), []
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    # Releases of the library before Nanbeige (0.19) have its tensors under Llama's architecture.
    names = gguf.get_tensor_name_map(kinds.get(arch, kinds["llama"]), 1)
    for rule in FAMILIES[ARCHITECTURES[arch].family].rules:
        leaf = "bias" if rule.source.endswith(".bias") else "weight"
        module = rule.source.removesuffix(f".{leaf}").replace("{layer}", "0")
        # All of Gemma 3n's projections of streams are one tensor.
        gguf_name = names.get_name(module) or names.get_name(module.removesuffix(".0"))
        if gguf_name is not None:
            source = f"{gguf_name.replace('blk.0.', 'blk.{layer}.')}.{leaf}"
            rules.append(dataclasses.replace(rule, source=source))
    return rules


def read_keys(
    keys: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the Hugging Face config that a file's keys describe, and what is wrong with them.

    Every key that is neither understood nor known to be harmless is a problem.
    """
    arch = keys["general.architecture"]
    architecture, read = ARCHITECTURES[arch], Keys(keys, tensors, arch)
    local = architecture.local
    _check_general(read)
    vocab, dim = read.rows("token_embd.weight"), read.count("embedding_length")
    heads = read.count("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [FAMILIES[architecture.family].architecture],
        "model_type": architecture.family,
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": read.layers("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": read.count(f"attention.key_length{local}", max(1, dim // heads)),
        "intermediate_size": read.count("feed_forward_length", layer=0 if local else None),
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.take("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": read.token_id("bos_token_id", vocab),
        "pad_token_id": read.token_id("padding_token_id", vocab),
        "eos_token_id": _ends(read, vocab),
    }
    head_dim = config["head_dim"]
    read.need(f"attention.value_length{local}", head_dim)
    read.need(f"rope.dimension_count{local}", head_dim)
    read.need("vocab_size", vocab)
    read.need("expert_count", 0)
    read.need("expert_used_count", 0)
    read.need("attention.causal", True)
    config |= architecture.settings(read, config)
    harmless = tuple(name.format(arch=arch) for name in _HARMLESS)
    read.problems += [
        f"{name}={shown(value)}, which is not understood"
        for name, value in keys.items()
        if name not in read.used and not name.startswith(harmless)
    ]
    return config, read.problems


def _check_general(read: Keys) -> None:
    general = Reader(read.config, "general.")
    general.need("type", "model")
    general.need("quantization_version", 2)
    read.problems += general.problems
    parts = read.config.get("split.count")
    if parts is not None:
        read.used |= {"split.no", "split.count", "split.tensors.count"}
        if not among(parts, 1):
            read.problems.append(
                f"split.count={shown(parts)}: only one file is supported: merge them, "
                "for example with llama-gguf-split --merge"
            )


def _ends(read: Keys, vocab: int) -> int | list[int] | None:
    """Returns the ids that end a text or a turn, see `special_pieces`; the file's EOS is first."""
    named = [read.token_id(f"{name}_token_id", vocab) for name in ("eos", "eot", "eom")]
    ends, _ = special_pieces(read.config)
    ids = sorted((i for i in ends if i < vocab), key=lambda index: (index != named[0], index))
    return ids[0] if len(ids) == 1 else ids or None


def llama3_scaling(factors: np.ndarray, *, theta: float) -> dict[str, Any] | None:
    """Returns the `rope_parameters` of Llama 3.1 whose `head_dim / 2` frequencies `factors` divide.

    Low frequencies are divided in full, high ones are kept. In between, the inverse divisor is
    linear in the frequency, which determines `original_max_position_embeddings` for a
    `low_freq_factor` of 1 and a `high_freq_factor` of 4. None if the divisors are not of that form.
    """
    divisors = np.asarray(factors, np.float64).reshape(-1)
    if np.all(divisors == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(divisors.max())
    between = (divisors > 1.0 + 1e-5) & (divisors < factor * (1 - 1e-5))
    if not np.all(np.isfinite(divisors)) or divisors.min() < 1.0 or not between.any():
        return None
    plain = frequencies(2 * divisors.size, theta)
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    context = max(1, round(np.median((1 + 3 * kept) * 2 * math.pi / plain[between])))
    scaling = RopeScaling(kind="llama3", factor=factor, original_context_length=context)
    scaled = frequencies(2 * divisors.size, theta, scaling)
    if not np.allclose(plain / scaled, divisors, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": context,
    }
