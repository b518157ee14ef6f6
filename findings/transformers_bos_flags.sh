#!/usr/bin/env bash
# transformers 5.24.0: `add_bos_token` of a `tokenizer_config.json` has no effect beside a `tokenizer.json`, true or
# false, and the tokenizer's own `add_bos_token` then says False, even where it adds one. In 4.57.6 the same folder with
# `LlamaTokenizerFast` (the class that the DeepSeek-R1 distills of Qwen name) obeys the flag both ways. So one folder
# gives other ids for one text: a loss, a harness' score or a calibration is with BOS under one version and without it
# under the other. No warning names it. Expected: the flag decides in both, as the code of 5.24 reads that rebuilds the
# post-processor for explicit flags (they are dropped before). Remedy: compare ids, not configs; put BOS into the
# post-processor of `tokenizer.json`, which both versions obey where the flag agrees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/flags.py" <<'PROGRAM'
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, __version__

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
pieces = {piece: index for index, piece in enumerate(letters)} | {"<s>": 256, "</s>": 257}
tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<s>", "</s>"])
plain = processors.ByteLevel(trim_offsets=False)
opening = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
seen = {}
for name, own in (("plain", plain), ("opening", opening)):
    tokenizer.post_processor = own
    for flag in (True, False):
        with tempfile.TemporaryDirectory() as place:
            tokenizer.save(f"{place}/tokenizer.json")
            config = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": flag}
            config |= {"bos_token": "<s>", "eos_token": "</s>", "legacy": False}
            Path(place, "tokenizer_config.json").write_text(json.dumps(config))
            Path(place, "config.json").write_text(json.dumps({"model_type": "qwen2"}))
            loaded = AutoTokenizer.from_pretrained(place)
            ids = loaded("Hi")["input_ids"]
            seen[name, flag] = ids[0] == 256, loaded.add_bos_token
            print(f"{__version__}, {name} tokenizer.json, add_bos_token {flag}: {ids}, says {loaded.add_bos_token}")
if __version__.startswith("4"):
    as_described = all(got == (flag, flag) for (_, flag), got in seen.items())
else:
    as_described = all(got == (name == "opening", False) for (name, _), got in seen.items())
sys.exit(0 if as_described else 1)
PROGRAM
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" 'numpy==2.4.6'
    TRANSFORMERS_VERBOSITY=error "$folder/$version/bin/python" -W ignore "$folder/flags.py"
done
# Seen:
# 4.57.6, plain tokenizer.json, add_bos_token True: [256, 39, 72], says True
# 4.57.6, plain tokenizer.json, add_bos_token False: [39, 72], says False
# 4.57.6, opening tokenizer.json, add_bos_token True: [256, 39, 72], says True
# 4.57.6, opening tokenizer.json, add_bos_token False: [39, 72], says False
# 5.24.0, plain tokenizer.json, add_bos_token True: [39, 72], says False
# 5.24.0, plain tokenizer.json, add_bos_token False: [39, 72], says False
# 5.24.0, opening tokenizer.json, add_bos_token True: [256, 39, 72], says False
# 5.24.0, opening tokenizer.json, add_bos_token False: [256, 39, 72], says False
