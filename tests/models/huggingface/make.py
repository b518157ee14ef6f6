# SPDX-License-Identifier: Apache-2.0
"""Makes small random models of each family with transformers, and what transformers says of them.

    python tests/models/huggingface/make.py FOLDER

Needs torch and transformers, which neither the library nor its tests do: the result is committed
beside this script. `make parity` runs it with a fresh transformers and tests against that.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
PARTLY = {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
FAR = {"rope_type": "default", "rope_theta": 1000.0}
NEAR_AND_FAR = ["sliding_attention", "full_attention"]

CASES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": LLAMA_3},
    ),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 12, "tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")
            ],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 6,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": 3 * NEAR_AND_FAR,
            "rope_parameters": {"full_attention": FAR, "sliding_attention": LOCAL},
            "final_logit_softcapping": 5.0,
            "vocab_size_per_layer_input": 40,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 2,
            "laurel_rank": 5,
            "activation_sparsity_pattern": [0.7, 0.3, 0.0, 0.0, 0.6, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 6,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 5,
            "layer_types": 3 * NEAR_AND_FAR,
            "rope_parameters": {"full_attention": PARTLY, "sliding_attention": LOCAL},
            "final_logit_softcapping": 5.0,
            "vocab_size_per_layer_input": 48,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
}


def make(name: str, folder: Path) -> None:
    """Writes a model's folder, split into shards for one family, with its reference values."""
    family, options = CASES[name]
    text = "Text" if family in ("Gemma3", "Gemma3n", "Gemma4") else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SIZES, **options})
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(len(name))
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            # Far from initialisation: every layer, norm and bias must matter.
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Stored, though no parameter.
                buffer.copy_(0.5 + torch.rand_like(buffer))
    model.eval()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder, max_shard_size="20KB" if name == "mistral" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)

    token_ids = torch.randint(0, 48, (2, 24))
    prompt = token_ids[:1, :6]
    with torch.no_grad():
        logits = model(token_ids).logits
        greedy = model.generate(prompt, max_new_tokens=24, do_sample=False)
    save_file(
        {
            "token_ids": token_ids.to(torch.int32),
            "logits": logits.float().contiguous(),
            "prompt": prompt.to(torch.int32).contiguous(),
            "greedy": greedy[:, 6:].to(torch.int32).contiguous(),
        },
        folder / "reference.safetensors",
    )


def make_encoder(kind: str, folder: Path) -> None:
    """Writes a BERT's folder with its outputs on padded rows: means of tokens, or logits."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    config = transformers.BertConfig(**{**sizes, "pad_token_id": 0}, num_labels=5)
    torch.manual_seed(len(kind))
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
    model.eval()
    model.save_pretrained(folder)
    lengths = torch.tensor([24, 9, 1])
    mask = torch.arange(24)[None, :] < lengths[:, None]
    given = {
        "input_ids": torch.randint(0, 48, (3, 24)),
        "token_type_ids": torch.randint(0, 2, (3, 24)),
    }
    with torch.no_grad():
        result = model(**given, attention_mask=mask.to(torch.int64))
    if kind == "BertModel":
        outputs = (result.last_hidden_state * mask[..., None]).sum(1) / lengths[:, None]
    else:
        outputs = result.logits
    save_file(
        {
            "token_ids": given["input_ids"].to(torch.int32),
            "kinds": given["token_type_ids"].to(torch.int32),
            "lengths": lengths.to(torch.int32),
            "outputs": outputs.float().contiguous(),
        },
        folder / "reference.safetensors",
    )


T5S = {
    "t5": {},
    "t5_gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5_gated_tied": {"feed_forward_proj": "gated-gelu"},
}


def make_t5(kind: str, folder: Path) -> None:
    """Writes a T5's folder with its logits; of the second row, half of the source is padding.

    Logits are those of float64, since T5 does not scale attention: in float32 rounding alone moves
    them by up to 1e-4.
    """
    sizes = {"vocab_size": 48, "d_model": 32, "d_kv": 32, "d_ff": 40, "num_heads": 3}
    config = transformers.T5Config(num_layers=2, num_decoder_layers=3, **sizes, **T5S[kind])
    torch.manual_seed(len(kind))
    model_class = transformers.T5ForConditionalGeneration
    model = model_class._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.15 * noise)
    model.eval()
    model.save_pretrained(folder)
    model.double()
    sources, targets = torch.randint(1, 48, (2, 150)), torch.randint(0, 48, (2, 40))
    sources[1, 75:] = targets[:, 0] = 0
    with torch.no_grad():
        logits = model(sources, (sources > 0).long(), targets).logits
    save_file(
        {
            "sources": sources.to(torch.int32),
            "targets": targets.to(torch.int32),
            "logits": logits.float().contiguous(),
        },
        folder / "reference.safetensors",
    )


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in CASES:
        make(name, out / name)
    make_encoder("BertModel", out / "encoders" / "bert")
    make_encoder("BertForSequenceClassification", out / "encoders" / "bert_classifier")
    for kind in T5S:
        make_t5(kind, out / "encoder_decoder" / kind)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")
