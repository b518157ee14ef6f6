#!/usr/bin/env bash
# ctranslate2 4.8.5, `Generator.generate_batch(include_prompt_in_result=False)`, which its documentation advises for
# long prompts: what a greedy request returns depends on the other prompts of its batch, without a warning.
# - `repetition_penalty` and `no_repeat_ngram_size` see of a prompt what lies beyond the batch's shortest one. Alone, a
#   request's own prompt is not penalised. With a short request beside it, it is, and the tokens change.
# - Beside a prompt of one token (a BOS alone) all others get their prompts back, but for the first token, and
#   `max_length` counts them. With a prompt of 40 and a max_length of 8 the result is 8 tokens of the prompt, none new.
# Expected: a flag on what is returned leaves the tokens alone, and rows of a batch are independent. With True the whole
# prompt counts, and the tokens are those of transformers. The documentation tells that prompts are forwarded in two
# ways, not what follows. Remedy: use True, and cut the prompt off.
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


as_described = True
for options in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 1}):
    got = {
        "True": new_tokens([prompt], included=True, **options),
        "False, alone": new_tokens([prompt], **options),
        "False, beside a prompt of 2": new_tokens([prompt, prompt[:2]], **options),
    }
    print(*options.items() or ["no penalty"])
    for name, tokens in got.items():
        print(f"  {name}: {tokens}")
    whole, alone, beside = got.values()
    as_described &= whole == beside and (alone != whole if options else alone == whole)
expected, got = new_tokens([prompt], included=True), {}
print("no penalty, what it gets")
for length in (39, 2, 1):
    tokens = new_tokens([prompt, prompt[:length]])
    got[length] = "new" if tokens == expected else "prompt" if tokens == ids[1 : NEW + 1] else "?"
    print(f"  False, beside a prompt of {length}: {tokens}, {got[length]} tokens")
as_described &= [*got.values()] == ["new", "new", "prompt"]
sys.exit(not as_described)
PROGRAM
cd "$folder"
mkdir model
venv/bin/python prompts.py
# Seen:
# no penalty
#   True: [79, 32, 1, 58, 5, 40, 72, 78]
#   False, alone: [79, 32, 1, 58, 5, 40, 72, 78]
#   False, beside a prompt of 2: [79, 32, 1, 58, 5, 40, 72, 78]
# ('repetition_penalty', 1.3)
#   True: [79, 8, 72, 95, 15, 83, 96, 77]
#   False, alone: [79, 32, 1, 58, 5, 40, 72, 78]
#   False, beside a prompt of 2: [79, 8, 72, 95, 15, 83, 96, 77]
# ('no_repeat_ngram_size', 1)
#   True: [79, 8, 72, 95, 15, 83, 96, 77]
#   False, alone: [79, 32, 1, 58, 5, 40, 72, 78]
#   False, beside a prompt of 2: [79, 8, 72, 95, 15, 83, 96, 77]
# no penalty, what it gets
#   False, beside a prompt of 39: [79, 32, 1, 58, 5, 40, 72, 78], new tokens
#   False, beside a prompt of 2: [79, 32, 1, 58, 5, 40, 72, 78], new tokens
#   False, beside a prompt of 1: [74, 65, 61, 59, 14, 66, 5, 37], prompt tokens
