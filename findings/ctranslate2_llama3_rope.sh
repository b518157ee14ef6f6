#!/usr/bin/env bash
# ctranslate2 4.8.5: a checkpoint whose rope is scaled as in Llama 3.1 to 3.3 ("llama3") is converted without an error,
# and then runs with plain, unscaled rope. The converter knows the type and refuses others ("not yet implemented"), but
# stores neither the factor nor `original_max_position_embeddings`, and the engine falls back to a factor of 1.
# Expected: logits of transformers, as for "linear" scaling (to 2e-5 here). A tiny Llama with Llama 3.1's rope has other
# first choices at one of seven of 400 positions; its logits are those of the same weights with plain rope. Beside
# transformers 4.57.6 the base of every scaled rope is lost, too (10,000 for 500,000): of the first choices "linear" has
# 0.185 there, "llama3" 0.043. Remedy: compare logits after conversion.
# pip finds torch's build for CPUs where PIP_EXTRA_INDEX_URL names PyTorch's index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'ctranslate2==4.8.5' 'transformers==5.24.0' \
    'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/rope.py" <<'PROGRAM'
import sys

import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
VOCAB = 300
words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t2"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="t0", eos_token="t1", unk_token="t2"
)


def model_of(rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_theta": 500000.0, **rope},
    )
    return LlamaForCausalLM(config).eval()


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def converted_logits(model, name):
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    ctranslate2.converters.TransformersConverter(name).convert(name + "-ct2")
    generator = ctranslate2.Generator(name + "-ct2", device="cpu")
    return np.array(generator.forward_batch([ids]))[0]


def compared(name, got, expected):
    apart = float(abs(got - expected).max())
    same = float((got.argmax(-1) == expected.argmax(-1)).mean())
    print(f"{name}: logits to {apart:.1e}, equal first choices {same:.3f}")
    return apart, same


ids = np.random.default_rng(0).integers(3, VOCAB, 400).tolist()
linear = {"rope_type": "linear", "factor": 8.0}
llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3["original_max_position_embeddings"] = 8192
plain = logits_of(model_of({"rope_type": "default"}))
of_linear, of_llama3 = model_of(linear), model_of(llama3)
right, _ = compared("linear", converted_logits(of_linear, "linear"), logits_of(of_linear))
converted = converted_logits(of_llama3, "llama3")
wrong, same = compared("llama3", converted, logits_of(of_llama3))
unscaled, _ = compared("llama3, against transformers with plain rope", converted, plain)
sys.exit(not (right < 1e-3 and unscaled < 1e-3 and wrong > 0.1 and same < 0.99))
PROGRAM
cd "$folder"
venv/bin/python rope.py
# Seen:
# linear: logits to 2.1e-05, equal first choices 1.000
# llama3: logits to 2.9e+00, equal first choices 0.860
# llama3, against transformers with plain rope: logits to 3.1e-05, equal first choices 1.000
