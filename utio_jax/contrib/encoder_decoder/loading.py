# SPDX-License-Identifier: Apache-2.0
"""T5 from Hugging Face folders: v1.0, v1.1, flan, mT5."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.contrib.encoder_decoder.t5 import ACTIVATIONS, T5, T5Config, fresh_stacks, joined
from utio_jax.core.decoder import Params
from utio_jax.models.config_reader import Reader
from utio_jax.models.families import Family, Rule
from utio_jax.models.huggingface import load_folder, read_json

# Of the first checkpoints, where transformers does not read it, either.
_UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",)
_COPIES = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}


def rules_of(activation: str) -> tuple[Rule, ...]:
    """Returns the places of a checkpoint's tensors in `fresh_stacks`."""
    gated = activation.startswith("gated")
    gate = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    rules = [
        Rule("shared.weight", ("embedding.embedding",)),
        Rule("lm_head.weight", ("head.kernel",), transpose=True),
    ]
    names = {"SelfAttention": "self", "EncDecAttention": "cross", "DenseReluDense": "mlp"}
    for side, parts in {"encoder": (*names,)[::2], "decoder": (*names,)}.items():
        for index, name in enumerate(parts):
            source, target = f"{side}.block.{{layer}}.layer.{index}", f"{side}.{names[name]}"
            is_mlp = name == parts[-1]
            kernels = gate | {"wo": "down"} if is_mlp else {letter: letter for letter in "qkvo"}
            for stored, own in kernels.items():
                weight = f"{source}.{name}.{stored}.weight"
                rules.append(Rule(weight, (f"{target}.{own}.kernel",), transpose=True))
            norm = "mlp_norm" if is_mlp else "norm"
            rules.append(Rule(f"{source}.layer_norm.weight", (f"{target}.{norm}.scale",)))
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(table, (f"{side}.bias.table",)))
        rules.append(Rule(f"{side}.final_layer_norm.weight", (f"{side}.norm.scale",)))
    return (*rules,)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A T5 with its parameters as files have them, a stack for each kind of layer."""

    config: T5Config

    def init(self, key: jax.Array) -> Params:
        return fresh_stacks(self.config, key, jnp.float32)


def load_t5(
    folder: str | Path,
    *,
    source_tokens: int = 512,
    target_tokens: int = 128,
    exits: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[T5, Params]:
    """Reads a Hugging Face folder of a T5: `config.json` and safetensors.

    All rows have `source_tokens` places for the source; targets have at most `target_tokens`, the
    one that opens them included. The model may be read at `exits`, even numbers: two for each
    decoder block. Empty: those that the config names under `utio_jax`, or the last.

    Raises:
      ValueError: another architecture, or options that cannot be run, all of them named; files or
        tensors that are missing, unexpected or of another shape.
    """
    if jnp.dtype(dtype) == jnp.float16:
        raise ValueError(
            "Wanted float32 or bfloat16 for a T5, whose states exceed float16's range of 65504. "
            "Got dtype=float16. bfloat16 is as small: dtype='bfloat16'."
        )
    folder = Path(folder)
    sizes = {"source_tokens": source_tokens, "context_length": source_tokens + target_tokens}
    mlp = str(read_json(folder / "config.json", "a config").get("feed_forward_proj"))
    family = Family(
        architecture="T5ForConditionalGeneration",
        settings=_settings,
        rules=rules_of(mlp),
        decoder=_Stored,
        config=partial(T5Config, **sizes),
    )
    options: Any = {"exits": exits, "dtype": dtype, "unread": _UNREAD, "copies": _COPIES}
    stored, params = load_folder(folder, families={"t5": family, "mt5": family}, **options)
    return T5(stored.config), joined(params)


def _settings(read: Reader) -> dict[str, Any]:
    read.need("is_encoder_decoder", True)
    read.need("feed_forward_proj", *ACTIVATIONS)
    read.need("is_causal", True)
    # Transformers reads these two, and the name they follow from only where they are absent.
    mlp = str(read.take("feed_forward_proj", "relu"))
    read.need("is_gated_act", mlp.startswith("gated-"))
    read.need("dense_act_fn", "gelu_new" if mlp == "gated-gelu" else mlp.removeprefix("gated-"))
    layers, tied = read.layers("num_layers"), bool(read.config.get("tie_word_embeddings", True))
    # Transformers 5 says of every mT5 that its head is tied, and scales the input of none.
    scaled = tied and read.config.get("model_type") != "mt5"
    return {
        "vocab_size": read.take("vocab_size"),
        "num_layers": 2 * read.take("num_decoder_layers", layers),
        "encoder_layers": layers,
        "embed_dim": read.take("d_model"),
        "attention_heads": read.take("num_heads"),
        "key_dim": read.take("d_kv"),
        "mlp_dim": read.take("d_ff"),
        "activation": mlp,
        "buckets": read.take("relative_attention_num_buckets", 32),
        "max_distance": read.take("relative_attention_max_distance", 128),
        "norm_eps": read.take("layer_norm_epsilon", 1e-6),
        "tie_embeddings": tied,
        "scale_head": bool(read.config.get("scale_decoder_outputs", scaled)),
        "pad_id": read.take("pad_token_id", 0, least=0),
        "bos_id": read.take("decoder_start_token_id", 0, least=0),
    }
