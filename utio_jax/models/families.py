# SPDX-License-Identifier: Apache-2.0
"""Open model families as data: meaning of their configs, and destination of each tensor.

A `Family` turns a Hugging Face `config.json` into the config of a decoder, or says all that it
cannot run; its rules say which tensor of the checkpoint is which parameter. `{layer}` stands for
the index along the leading axis of a stacked array; each tensor is one slice of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from utio_jax.models.config_reader import Config, Reader
from utio_jax.models.gemma import Gemma3n, Gemma3nConfig, Gemma4, Gemma4Config
from utio_jax.models.transformer import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a checkpoint, and the parameters it holds.

    Attributes:
      source: its name, with `{layer}` in place of the index along the parameters' leading axis.
      targets: dotted paths of parameters; several share the last axis evenly, in this order.
      transpose: whether it is stored `[out, in]`.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False


_BLOCK = "model.layers.{layer}."


def _kernel(source: str, target: str) -> Rule:
    return Rule(f"{source}.weight", (f"{target}.kernel",), transpose=True)


def linear_rules(source: str, target: str) -> tuple[Rule, Rule]:
    """Returns where a linear map's weight and bias go."""
    return _kernel(source, target), Rule(f"{source}.bias", (f"{target}.bias",))


def _norms(**sources: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{_BLOCK}{source}.weight", (f"layers.{name}.scale",))
        for name, source in sources.items()
    )


_EVERYWHERE = (
    Rule("model.embed_tokens.weight", ("embedding.embedding",)),
    Rule("model.norm.weight", ("norm.scale",)),
    _kernel("lm_head", "head"),
    *(
        rule
        for block, names in {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }.items()
        for name in names
        for rule in linear_rules(f"{_BLOCK}{block}.{name}", f"layers.{name}")
    ),
    *_norms(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", attention_norm="input_layernorm"),
)

_LLAMA = (*_EVERYWHERE, *_norms(mlp_norm="post_attention_layernorm"))

_OURO = (
    *_EVERYWHERE,
    *_norms(
        post_attention_norm="input_layernorm_2",
        mlp_norm="post_attention_layernorm",
        post_mlp_norm="post_attention_layernorm_2",
    ),
    *linear_rules("model.early_exit_gate", "exit_gate"),
)

_GEMMA = (
    *_EVERYWHERE,
    *_norms(
        post_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    ),
)

_GEMMA_INPUTS = (
    *_GEMMA,
    Rule("model.embed_tokens_per_layer.weight", ("input_embedding.embedding",)),
    _kernel("model.per_layer_model_projection", "input_proj"),
    Rule("model.per_layer_projection_norm.weight", ("input_norm.scale",)),
    _kernel(f"{_BLOCK}per_layer_input_gate", "layers.input_gate"),
    _kernel(f"{_BLOCK}per_layer_projection", "layers.input_out"),
    *_norms(input_out_norm="post_per_layer_input_norm"),
)

_GEMMA_4 = (*_GEMMA_INPUTS, Rule(f"{_BLOCK}layer_scalar", ("layers.out.scale",)))

_GEMMA_3N = (
    *_GEMMA_INPUTS,
    _kernel("model.altup_projections.{layer}", "stream_in"),
    _kernel("model.altup_unembed_projections.{layer}", "stream_out"),
    _kernel(f"{_BLOCK}altup.modality_router", "layers.router"),
    _kernel(f"{_BLOCK}altup.prediction_coefs", "layers.predict"),
    _kernel(f"{_BLOCK}altup.correction_coefs", "layers.correct"),
    _kernel(f"{_BLOCK}laurel.linear_left", "layers.laurel_left"),
    _kernel(f"{_BLOCK}laurel.linear_right", "layers.laurel_right"),
    Rule(f"{_BLOCK}altup.correct_output_scale", ("layers.corrected.scale",)),
    *_norms(router_norm="altup.router_norm", laurel_norm="laurel.post_laurel_norm"),
)

# Matrices are stored `[in, out]`; Q, K and V are one.
_GPT2 = (
    Rule("transformer.wte.weight", ("embedding.embedding",)),
    Rule("transformer.wpe.weight", ("positions.embedding",)),
    Rule("transformer.ln_f.weight", ("norm.scale",)),
    Rule("transformer.ln_f.bias", ("norm.bias",)),
    Rule("lm_head.weight", ("head.kernel",), transpose=True),
    *(
        Rule(f"transformer.h.{{layer}}.{source}.{suffix}", tuple(f"layers.{t}.{leaf}" for t in to))
        for source, to, leaves in (
            ("ln_1", ("attention_norm",), ("scale", "bias")),
            ("ln_2", ("mlp_norm",), ("scale", "bias")),
            ("attn.c_attn", ("q_proj", "k_proj", "v_proj"), ("kernel", "bias")),
            ("attn.c_proj", ("o_proj",), ("kernel", "bias")),
            ("mlp.c_fc", ("up_proj",), ("kernel", "bias")),
            ("mlp.c_proj", ("down_proj",), ("kernel", "bias")),
        )
        for suffix, leaf in zip(("weight", "bias"), leaves, strict=True)
    ),
)


def _no_layer(layer: int) -> bool:
    return False


def _llama_like(
    read: Reader,
    *,
    is_local: Callable[[int], bool] = _no_layer,
    rope_base: float = 10_000.0,
    **options: Any,
) -> dict[str, Any]:
    """Returns the settings that Llama's descendants share; `options` override them."""
    read.need("partial_rotary_factor", 1.0)
    read.need("is_causal", True)
    heads, dim = read.take("num_attention_heads"), read.take("hidden_size")
    layers = read.layers()
    theta, scaling = read.rope(base=rope_base)
    if "activation" not in options:
        read.need("hidden_act", "silu", "swish")
    return {
        "vocab_size": read.take("vocab_size"),
        "num_layers": layers,
        "embed_dim": dim,
        "num_heads": heads,
        "num_kv_heads": read.take("num_key_value_heads", heads),
        "head_dim": read.take("head_dim", dim // heads),
        "context_length": read.take("max_position_embeddings"),
        "windows": read.windows(layers, is_local),
        "mlp_dim": read.take("intermediate_size"),
        "activation": "swiglu",
        "norm_eps": read.take("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(read.config.get("tie_word_embeddings", False)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **options,
    }


def _llama(read: Reader) -> dict[str, Any]:
    bias = bool(read.config.get("attention_bias"))
    return _llama_like(
        read, qkv_bias=bias, output_bias=bias, mlp_bias=bool(read.config.get("mlp_bias"))
    )


def _mistral(read: Reader) -> dict[str, Any]:
    # With layer_types transformers reads the folder as a Ministral, whose layers differ by them.
    return _llama_like(read, is_local=read.local_layers(read.layers(), lambda _: True))


def _qwen(read: Reader) -> dict[str, Any]:
    local = _no_layer
    if read.config.get("use_sliding_window"):
        first = read.take("max_window_layers", 28, least=0)
        local = read.local_layers(read.layers(), lambda layer: layer >= first)
    if read.config["model_type"] == "qwen2":
        return _llama_like(read, is_local=local, qkv_bias=True)
    bias = bool(read.config.get("attention_bias"))
    return _llama_like(read, is_local=local, qk_norm=True, qkv_bias=bias, output_bias=bias)


def _looped(read: Reader, *, turns: int, **options: Any) -> dict[str, Any]:
    """Returns the settings of a model whose layers run several times, each turn with own K/V."""
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        read.need(name, False)
    layers = read.layers()
    is_local = read.local_layers(layers, _no_layer)
    if any(map(is_local, range(layers))):
        read.problems.append("layer_types of sliding_attention: only full_attention is supported")
    settings = _llama_like(read, turn_norm=True, turns=turns, **options)
    if settings["rope_scaling"] is not None:
        read.problems.append("rope_scaling: only plain rotations are supported")
    return {**settings, "num_layers": turns * layers}


def _ouro(read: Reader) -> dict[str, Any]:
    """Ouro (arXiv 2510.25741): norms around each block, and a gate on the states of each turn."""
    read.need("early_exit_threshold", 1.0)
    read.need("early_exit_step")
    turns, layers = read.take("total_ut_steps", 4), read.layers()
    ends = tuple(layers * (turn + 1) for turn in range(turns))
    return _looped(read, turns=turns, post_norms=True, exit_gate=True, exits=ends)


def _nanbeige(read: Reader) -> dict[str, Any]:
    """Nanbeige 4.2 (arXiv 2607.22083): Llama's layers, twice. Other loops are refused."""
    read.need("pretraining_tp", 1)
    for name in _NOT_NANBEIGE:
        read.need(name, False, 0)
    for name in ("insert_ngram_layer_idx", "loop_loss_weights"):
        if read.config.get(name):
            read.refuse(name, read.config[name], "empty lists are")
    read.need("skip_loop_final_norm", True, False)
    if (width := read.config.get("kv_channels")) is not None:
        read.config = {**read.config, "head_dim": read.config.get("head_dim") or width}
        read.need("kv_channels", read.config["head_dim"])
    name = "num_loops" if read.config.get("num_loops") is not None else "total_ut_steps"
    turns = read.take(name)
    norms = not read.config.get("skip_loop_final_norm")
    return {**_looped(read, turns=turns), "turn_norm": norms}


_NOT_NANBEIGE = (
    *("qk_layernorm", "loop_share_kv", "loop_middle_layers", "enable_double_loop_split"),
    *("enable_hyper_connection", "enable_mhc", "enable_h_res_identity", "mhc_diff_for_loop"),
    *("enable_depth_attention", "emb_neighbor_num", "emb_split_num", "ngram_vocab_size_ratio"),
    *("ngram_insert_all_layers", "ngram_embedding_hidden_size"),
)
"""Settings of Nanbeige's class for other models than those that loop all of their layers."""


def _gemma(read: Reader) -> dict[str, Any]:
    """Gemma 2 and 3: scaled embeddings, norms around each block, local layers between global."""
    _need_gemma(read)
    every, caps, of_gemma_3 = 2, (50.0, 30.0), dict[str, Any]()
    if read.config["model_type"] != "gemma2":
        read.config = {**_GEMMA_3_DEFAULTS, **read.config}
        every = read.take("sliding_window_pattern", read.config.get("_sliding_window_pattern", 6))
        caps = (None, None)
        of_gemma_3 = {"rope_base": 1e6, "qk_norm": True, "local_rope_theta": _local_theta(read)}
    return _llama_like(
        read,
        is_local=read.local_layers(read.layers(), lambda layer: (layer + 1) % every != 0),
        activation="geglu",
        norm="rms_plus_one",
        post_norms=True,
        embedding_scale=float(read.take("hidden_size")) ** 0.5,
        query_scale=float(read.take("query_pre_attn_scalar", 256.0)) ** -0.5,
        tie_embeddings=bool(read.config.get("tie_word_embeddings", True)),
        head_dim=read.take("head_dim", 256),
        attention_softcap=read.config.get("attn_logit_softcapping", caps[0]),
        logit_softcap=read.config.get("final_logit_softcapping", caps[1]),
        **of_gemma_3,
    )


_GEMMA_3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Settings of Gemma 3 that published models with a vision tower leave out."""


def _need_gemma(read: Reader) -> None:
    read.need("hidden_activation", "gelu_pytorch_tanh")
    read.need("attention_bias", False)
    read.need("use_bidirectional_attention", False)
    if read.config.get("sliding_window", 0) is None:
        read.problems.append("sliding_window=None: only numbers are supported")


def _local_theta(read: Reader) -> float:
    """Returns the base of rotations in layers with a window, which are never stretched."""
    base = float(read.take("rope_local_base_freq", 10_000.0))
    theta, scaling = read.rope("sliding_attention", base=base)
    if scaling is not None:
        read.problems.append("scaled rotations of local layers: only plain are supported")
    return theta


def _gemma_inputs(
    read: Reader, *, is_local: Callable[[int], bool], shared: int, streams: int
) -> dict[str, Any]:
    """Returns the settings that Gemma 3n and 4 share.

    Layers that are local have a window. By default `shared` layers read the K/V of others.
    """
    _need_gemma(read)
    read.need("tie_word_embeddings", True)
    read.config = {"sliding_window": 512, "head_dim": 256, **read.config}
    layers = read.layers()
    common = _llama_like(read, is_local=is_local, rope_base=1_000_000.0, activation="geglu")
    for name in ("activation", "tie_embeddings", "embed_dim"):
        del common[name]
    hidden, inputs = read.take("hidden_size"), read.take("hidden_size_per_layer_input", 256)
    return {
        **common,
        "embed_dim": streams * hidden + layers * inputs,
        "hidden_dim": hidden,
        "input_dim": inputs,
        "input_vocab_size": read.take("vocab_size_per_layer_input", 262_144),
        "local_rope_theta": _local_theta(read),
        "kv_source": _of_last_own_kind(read, layers, is_local, default=shared),
    }


def _gemma3n(read: Reader) -> dict[str, Any]:
    read.need("altup_active_idx", 0)
    read.need("altup_correct_scale", True)
    widths = read.config.get("intermediate_size")
    if isinstance(widths, list) and widths and all(width == widths[0] for width in widths):
        read.config = {**read.config, "intermediate_size": widths[0]}  # One for each layer.
    streams, layers = read.take("altup_num_inputs", 4), read.layers()
    is_local = read.local_layers(layers, lambda layer: (layer + 1) % 5 != 0)
    common = _gemma_inputs(read, is_local=is_local, shared=15, streams=streams)
    sparsity = read.config.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95 * (layer < 10) for layer in range(layers)] if layers > 10 else []
    return {
        **common,
        "num_streams": streams,
        "laurel_rank": read.take("laurel_rank", 64),
        "sparsity": tuple(map(float, sparsity)),
        "logit_softcap": read.config.get("final_logit_softcapping", 30.0),
    }


def _gemma4(read: Reader) -> dict[str, Any]:
    """Gemma 4 with inputs to each layer; heads without a window are wider, and rotate in part."""
    read.need("attention_k_eq_v", False)
    read.need("enable_moe_block", False)
    stored = read.config.get("rope_parameters") or {}
    rope, rotated = dict(stored.get("full_attention") or _PROPORTIONAL), 1.0
    if rope.get("rope_type") == "proportional" and rope.pop("factor", 1.0) == 1.0:
        rotated = rope.pop("partial_rotary_factor", 1.0)
        rope["rope_type"] = "default"
    local = stored.get("sliding_attention") or {}
    rotations = {"full_attention": rope, "sliding_attention": local}
    read.config = {**read.config, "rope_parameters": rotations}
    layers = read.layers()
    named = read.local_layers(layers, lambda layer: (layer + 1) % 6 != 0)

    def is_local(layer: int) -> bool:
        # As in transformers, the last layer has no window, whatever its type.
        return layer < layers - 1 and named(layer)

    common = _gemma_inputs(read, is_local=is_local, shared=0, streams=1)
    if common.pop("rope_scaling") is not None:
        read.problems.append(
            "scaled rotations of layers without a window: only plain are supported"
        )
    narrow = common["mlp_dim"]
    # One number as published. Transformers writes it per layer, where it is not head_dim.
    wide = read.take("global_head_dim", 512)
    if "per_layer_config" in read.config:
        per_layer = read.config["per_layer_config"]
        per_layer = {} if per_layer is None else per_layer
        first = next(iter(per_layer.values()), {}) if isinstance(per_layer, Mapping) else None
        wide = first.get("head_dim", common["head_dim"]) if isinstance(first, Mapping) else wide
        full = [str(layer) for layer in range(layers) if not is_local(layer)]
        if per_layer not in ({}, {layer: {"head_dim": wide} for layer in full}):
            read.problems.append(
                "a per_layer_config of more than one head_dim in all layers without a window"
            )
    if read.config.get("num_global_key_value_heads") not in (None, common["num_kv_heads"]):
        read.problems.append("num_global_key_value_heads of another number than others")
    shares = bool(common["kv_source"]) and bool(read.config.get("use_double_wide_mlp"))
    return {
        **common,
        "head_dim": wide,
        "local_head_dim": common["head_dim"],
        "mlp_dim": narrow * (2 if shares else 1),
        "own_mlp_dim": narrow,
        "rotated": float(rotated),
        "logit_softcap": read.config.get("final_logit_softcapping"),
    }


_PROPORTIONAL = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1_000_000.0,
}
"""Rotations of Gemma 4's layers without a window, where nothing else is said."""


def _of_last_own_kind(
    read: Reader, layers: int, is_local: Callable[[int], bool], *, default: int
) -> tuple[tuple[int, ...], ...]:
    """Returns a `kv_source` whose upper layers read the last own K/V of their kind."""
    shared = read.take("num_kv_shared_layers", default, least=0)
    if not shared:
        return ()
    own = range(layers - shared)
    last = {is_local(layer): layer for layer in own}
    if any(is_local(layer) not in last for layer in range(len(own), layers)):
        read.problems.append(
            f"num_kv_shared_layers={shared} of {layers} layers, with none of the same kind below"
        )
        return ()
    return (
        *((layer,) for layer in own),
        *((last[is_local(layer)],) for layer in range(len(own), layers)),
    )


def _gpt2(read: Reader) -> dict[str, Any]:
    read.need("activation_function", "gelu_new", "gelu_pytorch_tanh")
    read.need("is_causal", True)
    read.need("scale_attn_weights", True)
    read.need("scale_attn_by_inverse_layer_idx", False)
    read.need("add_cross_attention", False)
    heads, dim = read.take("n_head"), read.take("n_embd")
    return {
        "vocab_size": read.take("vocab_size"),
        "num_layers": read.layers("n_layer"),
        "embed_dim": dim,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": dim // heads,
        "context_length": read.take("n_positions"),
        "mlp_dim": read.take("n_inner", 4 * dim),
        "activation": "gelu",
        "norm": "layer",
        "norm_eps": read.take("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "tie_embeddings": bool(read.config.get("tie_word_embeddings", True)),
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """Rules for reading and writing the checkpoints of one architecture.

    Attributes:
      architecture: its class name in transformers.
      settings: turns a config into the fields of `config`.
      rules: destination of its tensors.
      decoder: its class, made of a `config`.
      config: class of the decoder's configuration.
    """

    architecture: str
    settings: Callable[[Reader], dict[str, Any]]
    rules: tuple[Rule, ...]
    decoder: Callable[[Any], Any] = Transformer
    config: Callable[..., Any] = TransformerConfig


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama, _LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", _qwen, _LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", _qwen, _LLAMA),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, _GPT2),
    "mistral": Family("MistralForCausalLM", _mistral, _LLAMA),
    "ouro": Family("OuroForCausalLM", _ouro, _OURO),
    "nanbeige": Family("NanbeigeForCausalLM", _nanbeige, _LLAMA),
    "gemma2": Family("Gemma2ForCausalLM", _gemma, _GEMMA),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma, _GEMMA),
    "gemma3n_text": Family("Gemma3nForCausalLM", _gemma3n, _GEMMA_3N, Gemma3n, Gemma3nConfig),
    "gemma4_text": Family("Gemma4ForCausalLM", _gemma4, _GEMMA_4, Gemma4, Gemma4Config),
}
"""By `model_type`."""

_WITH_TEXT = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text"}
"""Models of text and other things, and their text parts."""


def text_part(config: Config) -> Config:
    """Returns the config of the text part of a model that reads images or sound, too."""
    kind, inner = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in _WITH_TEXT or not isinstance(inner, Mapping):
        return config
    about = ("eos_token_id", "quantization_config", "utio_jax")
    outer = {name: config[name] for name in about if config.get(name) is not None}
    text = _WITH_TEXT[kind]
    architecture = FAMILIES[text].architecture
    return {**inner, **outer, "model_type": text, "architectures": [architecture]}


def read_config(
    config: Config,
    *,
    source: str,
    exits: tuple[int, ...] = (),
    families: Mapping[str, Family] = FAMILIES,
) -> Any:
    """Returns the config of the decoder that a Hugging Face config describes.

    Without `exits`, the model has those that the config names under `utio_jax`, or the last layer
    alone. `source` is the config's origin, for errors; `families` are those that can be read.

    Raises:
      ValueError: an architecture or options that are not supported, all of them named.
    """
    kind = config.get("model_type")
    if kind == "huginn_raven":
        raise ValueError(
            f"Wanted a looped model whose turns run all layers, Ouro or Nanbeige, in {source}. Got "
            "Huginn, which starts its core from a random state and adds the input in each turn."
        )
    if not isinstance(kind, str) or kind not in families:
        raise ValueError(
            f"Wanted a model_type of {', '.join(families)} in {source}. Got {kind!r}. Other "
            "decoders take part through the `utio_jax.Decoder` protocol."
        )
    read, family = Reader(config), families[kind]
    if config.get("quantization_config"):
        read.problems.append("quantization_config: only plain weights are supported")
    try:
        settings = family.settings(read)
        ends = config.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        stored = (config.get("utio_jax") or {}).get("exits", ())
        if not read.problems:
            exits = exits or tuple(stored) or settings.pop("exits", ())
            return family.config(**{**settings, "exits": exits}, eos_ids=tuple(ends))
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"Wanted the settings of {family.architecture} in {source}. "
            f"Got {type(error).__name__}: {str(error).rstrip('.')}."
        ) from error
    raise ValueError(
        f"Wanted a {family.architecture} that can be run, in {source}. "
        f"Got {'; '.join(dict.fromkeys(read.problems))}."
    )
