#!/usr/bin/env bash
# transformers 5.24.0: `is_causal: false` in the config.json of a decoder (a Llama here) makes its masks bidirectional:
# logits of the first token depend on later ones, under eager and SDPA attention alike. 4.57.6 loads the same folder by
# the same class as a causal model. So losses, harness scores and generated text of one folder differ by version, and
# those of 5.24 are of a model that sees the tokens it predicts. No error, no warning. Expected: LlamaForCausalLM is
# causal in both, or the key is named at loading. Remedy: delete the key, or set `config.is_causal = True` before the
# model is made. pip finds torch's build for CPUs where PIP_EXTRA_INDEX_URL names PyTorch's index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/causal.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, __version__

place = Path(sys.argv[1])
place.mkdir()
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
stored = {"model_type": "llama", **sizes, **heads}
one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 5]])
as_described = True
for flag in ({}, {"is_causal": False}):
    (place / "config.json").write_text(json.dumps({**stored, **flag}))
    config = AutoConfig.from_pretrained(place)
    for attention in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
            first, second = (model(ids).logits[0, 0] for ids in (one, other))
        change = float((first - second).abs().max())
        sees_later = bool(flag) and __version__.startswith("5")
        as_described &= change > 1 if sees_later else change == 0
        print(f"{__version__}, {flag}, {attention}: the last token moves logits of the first by {change:.2f}")
sys.exit(not as_described)
PROGRAM
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" \
        'torch==2.13.0' 'numpy==2.4.6'
    "$folder/$version/bin/python" "$folder/causal.py" "$folder/model-$version"
done
# Seen:
# 4.57.6, {}, eager: the last token moves logits of the first by 0.00
# 4.57.6, {}, sdpa: the last token moves logits of the first by 0.00
# 4.57.6, {'is_causal': False}, eager: the last token moves logits of the first by 0.00
# 4.57.6, {'is_causal': False}, sdpa: the last token moves logits of the first by 0.00
# 5.24.0, {}, eager: the last token moves logits of the first by 0.00
# 5.24.0, {}, sdpa: the last token moves logits of the first by 0.00
# 5.24.0, {'is_causal': False}, eager: the last token moves logits of the first by 6.97
# 5.24.0, {'is_causal': False}, sdpa: the last token moves logits of the first by 6.97
