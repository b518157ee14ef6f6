#!/usr/bin/env bash
# ctranslate2 4.8.5, `Generator.generate_batch(include_prompt_in_result=False)`: beside a request whose prompt is one
# token (a BOS alone) all others get their prompts back in their results, but for the first token, and `max_length`
# counts them. With a prompt of 40 and a max_length of 8 the result is 8 tokens of the prompt, none of them new. Beside
# a prompt of 2 tokens the same request gets 8 new ones. Expected: no prompt in the result, as the flag says, and rows
# of a batch that are independent. No warning, and the result has the right length.
# Remedy: send prompts of one token on their own, or use True and cut the prompt off.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'ctranslate2==4.8.5' 'numpy==2.4.6'
cat > "$folder/prompts.py" <<'PROGRAM'
import sys

import ctranslate2
import numpy as np

VOCAB, DIM, PROMPT, NEW = 100, 64, 40, 8
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(scale=0.15, size=shape).astype(np.float32)


# A Llama of two layers with random weights.
spec = ctranslate2.specs.TransformerDecoderModelSpec.from_config(
    2, 4, pre_norm=True, ffn_glu=True, rms_norm=True, rotary_dim=0, rotary_interleave=False
)
decoder = spec.decoder
decoder.embeddings.weight, decoder.projection.weight = normal(VOCAB, DIM), normal(VOCAB, DIM)
decoder.scale_embeddings = False
norms = [decoder.layer_norm]
for layer in decoder.layer:
    attention, ffn = layer.self_attention, layer.ffn
    attention.linear[0].weight, attention.linear[1].weight = normal(3 * DIM, DIM), normal(DIM, DIM)
    ffn.linear_0.weight, ffn.linear_0_noact.weight = normal(2 * DIM, DIM), normal(2 * DIM, DIM)
    ffn.linear_1.weight = normal(DIM, 2 * DIM)
    norms += [attention.layer_norm, ffn.layer_norm]
for norm in norms:
    norm.gamma = np.ones(DIM, np.float32)
spec.register_vocabulary(["<s>", "</s>", "<unk>", *(f"t{i}" for i in range(3, VOCAB))])
spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
spec.validate()
spec.optimize()
spec.save("model")
generator = ctranslate2.Generator("model", device="cpu")
ids = rng.integers(3, VOCAB, PROMPT).tolist()
prompt = [f"t{i}" for i in ids]


def new_tokens(prompts, *, included=False, **options):
    result = generator.generate_batch(
        prompts,
        max_length=NEW + PROMPT * included,
        end_token=[],
        include_prompt_in_result=included,
        **options,
    )[0]
    return result.sequences_ids[0][PROMPT * included :][:NEW]


expected = new_tokens([prompt], included=True)
got = {}
for length in (None, 39, 2, 1):
    result = new_tokens([prompt] if length is None else [prompt, prompt[:length]])
    got[length] = "new" if result == expected else "prompt" if result == ids[1 : NEW + 1] else "?"
    beside = "alone" if length is None else f"beside a prompt of {length}"
    print(f"{beside}: {result}, {got[length]} tokens")
sys.exit(list(got.values()) != ["new", "new", "new", "prompt"])
PROGRAM
cd "$folder"
mkdir model
venv/bin/python prompts.py
# Seen:
# alone: [79, 32, 1, 58, 5, 40, 72, 78], new tokens
# beside a prompt of 39: [79, 32, 1, 58, 5, 40, 72, 78], new tokens
# beside a prompt of 2: [79, 32, 1, 58, 5, 40, 72, 78], new tokens
# beside a prompt of 1: [74, 65, 61, 59, 14, 66, 5, 37], prompt tokens
