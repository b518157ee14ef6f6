# SPDX-License-Identifier: Apache-2.0
"""Makes small random models of each family with transformers, and what transformers says of them.

    python tests/models/huggingface/make.py FOLDER

Needs torch and transformers, which neither the library nor its tests do: the result is committed
beside this script. `make parity` runs it with a fresh transformers and tests against that.
"""

import json
import sys
from functools import partial
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


def randomise(model: torch.nn.Module) -> None:
    """Fills a small model with numbers far from initialisation, which float16 holds exactly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            wide = 1.5 if "bias.weight" in name or "shared" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(wide * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
    model.eval().half().double()


def make_encoder(kind: str, folder: Path) -> None:
    """Writes a BERT's folder; its states by activation on padded rows, or logits at each depth."""
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20, "num_labels": 5}
    config = transformers.BertConfig(
        vocab_size=48, num_hidden_layers=3, max_position_embeddings=24, **sizes
    )
    torch.manual_seed(len(kind))
    create = partial(getattr(transformers, kind)._from_config, attn_implementation="eager")
    model = create(config)
    randomise(model)
    lengths = torch.tensor([12, 7, 1])
    mask = torch.arange(12)[None, :] < lengths[:, None]
    given = {
        "input_ids": torch.randint(0, 48, (3, 12)),
        "token_type_ids": torch.randint(0, 2, (3, 12)),
        "attention_mask": mask.to(torch.int64),
    }
    expected = {}
    with torch.no_grad():
        if kind == "BertModel":
            for config.hidden_act in ("relu", "gelu_new", "gelu"):
                other = create(config).double().eval()
                other.load_state_dict(model.state_dict())
                states = other(**given, output_hidden_states=True).hidden_states
                expected[config.hidden_act] = torch.stack(states).float()
        else:
            layers, logits = model.bert.encoder.layer, []
            for depth in (1, 2, 3):
                model.bert.encoder.layer = layers[:depth]
                logits.append(model(**given).logits)
            expected["logits"] = torch.stack(logits).float()
    model.half().save_pretrained(folder)
    expected |= {
        "token_ids": given["input_ids"].to(torch.int32),
        "kinds": given["token_type_ids"].to(torch.int32),
        "lengths": lengths.to(torch.int32),
    }
    save_file(expected, folder / "reference.safetensors")


T5S = {
    "t5": {},
    "t5_gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5_gated_tied": {"feed_forward_proj": "gated-gelu"},
}


def make_t5(kind: str, folder: Path) -> None:
    """Writes a T5's folder; the encoder's output, decoder states before each block, and logits.

    Of the second row, half of the source is padding. In float64, since T5 does not scale attention:
    in float32 rounding alone moves logits by up to 1e-4.
    """
    sizes = {"vocab_size": 64, "d_model": 12, "d_kv": 8, "d_ff": 20, "num_heads": 2}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    config = transformers.T5Config(num_layers=2, num_decoder_layers=4, **sizes, **T5S[kind])
    torch.manual_seed(len(kind))
    model_class = transformers.T5ForConditionalGeneration
    model = model_class._from_config(config, attn_implementation="eager")
    if not config.scale_decoder_outputs:  # As of v1.1, whose heads are untied.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    randomise(model)
    sources, targets = torch.randint(1, 64, (2, 24)), torch.randint(0, 64, (2, 26))
    sources[1, 12:] = targets[:, 0] = 0
    with torch.no_grad():
        result = model(sources, (sources > 0).long(), targets, output_hidden_states=True)
    config.tie_word_embeddings = config.scale_decoder_outputs  # As published ones say it.
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    save_file(
        {
            "sources": sources.to(torch.int32),
            "targets": targets.to(torch.int32),
            "encoded": result.encoder_last_hidden_state.float(),
            "states": torch.stack(result.decoder_hidden_states[:-1]).float(),
            "logits": result.logits.float().contiguous(),
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
