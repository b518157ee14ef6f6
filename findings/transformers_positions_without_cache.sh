#!/usr/bin/env bash
# transformers 5.24.0 (4.57.6 alike), eager and SDPA: without an `attention_mask`, `use_cache` decides who attends to
# whom. With False, each step of `position_ids` other than 1 begins a document that sees nothing before it; with True,
# as by default, all tokens see all before them. So a switch for memory changes the loss, and so does gradient
# checkpointing, which turns the cache off in training (its warning names the cache, not the loss).
# - One text from which tokens were pruned (positions 0 to 4, then 7 to 11) falls into two texts without the cache.
# - Two packed texts (0 to 4, then 0 to 4) see each other with the cache, as under a mask of ones.
# Expected: one answer. The guide to padding-free training has packing by positions, but neither names `use_cache` nor
# gaps; huggingface/transformers#46634 is about the mask of ones alone. Remedy: of one text, pass a mask of ones; of
# packed texts, `use_cache=False` and no mask, or a mask of four dimensions.
# pip finds torch's build for CPUs where PIP_EXTRA_INDEX_URL names PyTorch's index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'transformers==5.24.0' 'torch==2.13.0' \
    'numpy==2.4.6'
cat > "$folder/positions.py" <<'PROGRAM'
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, logging

logging.set_verbosity_error()
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    initializer_range=0.3,
)
torch.manual_seed(0)
ids = torch.randint(3, 64, (1, 10))
ones, first = torch.ones_like(ids), list(range(5))
rows = {"plain": list(range(10)), "pruned": first + [7, 8, 9, 10, 11], "packed": first + first}
as_described = True
for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, positions in rows.items():
        inputs = {"position_ids": torch.tensor([positions]), "labels": ids}

        def loss(**options):
            return float(model(ids, **inputs, **options).loss)

        model.train()
        losses = {
            "cache": loss(),
            "no cache": loss(use_cache=False),
            "no cache, ones": loss(use_cache=False, attention_mask=ones),
        }
        model.gradient_checkpointing_enable()
        losses["checkpointing"] = loss()
        model.gradient_checkpointing_disable()
        model.eval()
        # Without the cache, does the second half come out as if the first were not there?
        second = {"input_ids": ids[:, 5:], "position_ids": inputs["position_ids"][:, 5:]}
        with torch.no_grad():
            alone = model(**second).logits
            after = model(ids, position_ids=inputs["position_ids"], use_cache=False).logits[:, 5:]
        cut = bool(torch.allclose(alone, after, atol=1e-4))
        print(f"{attention}, {name}:", ", ".join(f"{key} {value:.3f}" for key, value in losses.items()), end="; ")
        print(f"cut without cache: {cut}")
        same = {key: abs(value - losses["cache"]) < 1e-4 for key, value in losses.items()}
        apart = name != "plain"
        as_described &= cut == apart and same["no cache, ones"]
        as_described &= same["no cache"] == same["checkpointing"] == (not apart)
sys.exit(not as_described)
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/positions.py"
# Seen:
# eager, plain: cache 5.104, no cache 5.104, no cache, ones 5.104, checkpointing 5.104; cut without cache: False
# eager, pruned: cache 5.093, no cache 4.567, no cache, ones 5.093, checkpointing 4.567; cut without cache: True
# eager, packed: cache 5.376, no cache 4.567, no cache, ones 5.376, checkpointing 4.567; cut without cache: True
# sdpa, the same numbers
