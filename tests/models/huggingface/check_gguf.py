# SPDX-License-Identifier: Apache-2.0
"""Exits with 1 unless this library reads a GGUF file as transformers does, and what it saves, too.

    python tests/models/huggingface/check_gguf.py out/llm/SmolLM2-135M-Instruct.Q4_1.gguf

Run by `make parity`. Logits, token ids of 10,000 lines, and rendered chats. transformers (5.23)
knows no pre-tokenizer by the name `smollm` and reads digits together, so its tokenizer of the file
is then given SmolLM2's own rule: each digit by itself (`tokenizer.json` of its repository).
"""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.mixed_lines import library_lines, mixed_lines

from utio_jax.models import load, save
from utio_jax.staircase.reference import dense_states

file = Path(sys.argv[1])
model = load(file)
config = model.decoder.config
ids = np.random.default_rng(0).integers(0, config.vocab_size, (4, 64)).astype(np.int32)
ids[0] = model.encode(["The capital of France is Paris. " * 20])[0][:64]
(x,) = dense_states(
    model.decoder, model.params, jnp.asarray(ids), jnp.full(4, 64), depths=(config.num_layers,)
)
logits = np.asarray(model.decoder.unembed(model.params, x))
faults = 0


def check_logits(what: str, **source: str) -> None:
    global faults
    peer = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = peer(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    worst = float(np.abs(logits - expected).max())
    print(f"{what}: logits of {ids.size} tokens at most {worst:.1e} apart")
    faults += worst > 1e-3


at = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
check_logits("the file, as transformers reads it", **at)
peer = transformers.AutoTokenizer.from_pretrained(**at)
rule = pre_tokenizers.Digits(individual_digits=True)
lines = [*mixed_lines(6000), *library_lines(4000)]


def check_ids(what: str) -> int:
    ours = [encoding.ids for encoding in model.tokenizer.encode_batch(lines)]
    different = [a != b for a, b in zip(ours, peer(lines)["input_ids"], strict=True)]
    print(f"{what}: {sum(different)} of {len(lines)} lines differ")
    return sum(different)


check_ids("token ids, as transformers reads the file")
peer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [rule, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
)
faults += check_ids("token ids, with SmolLM2's own rule for digits")

user, bot = {"role": "user", "content": "Hi é <b>\n"}, {"role": "assistant", "content": "Yes."}
for messages in (
    [user],
    [{"role": "system", "content": "Be brief."}, user],
    [user, bot, user],
    [user, {**bot, "tool_calls": None}],
):
    for prompt in (True, False):
        expected = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        result = model.chat_template.render(messages, add_generation_prompt=prompt)
        faults += result != expected
print(f"chats: {faults} faults so far")

with tempfile.TemporaryDirectory() as folder:
    save(folder, model.decoder, model.params, like=model.folder, dtype=jnp.float32)
    check_logits("the folder that save writes", pretrained_model_name_or_path=folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    faults += check_ids("token ids of that folder")
    faults += peer.apply_chat_template([user], tokenize=False) != model.chat_template.render(
        [user], add_generation_prompt=False
    )
print(f"{file}: {faults} faults")
sys.exit(faults > 0)
