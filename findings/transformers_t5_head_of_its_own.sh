#!/usr/bin/env bash
# transformers 5.24.0 reads `tie_word_embeddings: false` of a T5 or mT5 and stores `true`. A head of its own that is in
# the weights is kept and saved, so 5.24 reads its own folder back alike. 4.57.6 follows the key: it drops that head for
# the embeddings, without an error, and logits are another model's. A new model has no head of its own in 5.24, whatever
# the key says. A tied mT5 differs by version, too: 4.57.6 multiplies the head's input by d_model ** -0.5 and 5.24 does
# not, so at a d_model of 16 logits are 4 times as large: log-probabilities change, the first choice does not.
# Expected: a folder that is loaded and saved keeps its key, and is one model in both versions. Remedy: after saving
# with version 5, write `false` back into config.json of T5 1.1, flan-T5 and mT5.
# pip finds torch's build for CPUs where PIP_EXTRA_INDEX_URL names PyTorch's index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/heads.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, MT5Config, T5Config, logging
from transformers import MT5ForConditionalGeneration as MT5
from transformers import T5ForConditionalGeneration as T5

logging.set_verbosity_error()
logging.disable_progress_bar()
task, root = sys.argv[1], Path(sys.argv[2])
sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
ids, first = torch.tensor([[7, 8, 9]]), torch.tensor([[0, 5]])


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=first).logits


if task == "make":
    for kind, of_kind in ((T5, T5Config), (MT5, MT5Config)):
        for tied in (True, False):
            torch.manual_seed(0)
            config = of_kind(**sizes, decoder_start_token_id=0, tie_word_embeddings=tied)
            model = kind(config)
            with torch.no_grad():
                for _, parameter in sorted(model.named_parameters()):
                    if parameter.ndim > 1:
                        parameter.normal_()
            place = root / f"{config.model_type}-{'tied' if tied else 'own'}"
            model.save_pretrained(place)
            torch.save(logits_of(model), place / "expected.pt")
elif task == "resave":
    for place in sorted(root.iterdir()):
        AutoModelForSeq2SeqLM.from_pretrained(place).save_pretrained(place)
    for kind, of_kind in ((T5, T5Config), (MT5, MT5Config)):
        model = kind(of_kind(**sizes, tie_word_embeddings=False))
        print(f"  new, tie_word_embeddings=False: own head {model.lm_head.weight is not model.shared.weight}")
else:
    for place in sorted(root.iterdir()):
        logits = logits_of(AutoModelForSeq2SeqLM.from_pretrained(place))
        expected = torch.load(place / "expected.pt")
        ratio = float(logits.norm() / expected.norm())
        same = torch.allclose(logits, ratio * expected, atol=1e-3)
        are = f"{ratio:.2f} times what they were" if same else "another model's"
        key = json.loads((place / "config.json").read_text()).get("tie_word_embeddings")
        print(f"  {place.name}, config says {key}: logits are {are}")
PROGRAM
old=$folder/4.57.6/bin/python new=$folder/5.24.0/bin/python
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" \
        'torch==2.13.0' 'numpy==2.4.6'
done
{
    "$old" "$folder/heads.py" make "$folder/models"
    for reader in "$old" "$new"; do
        echo "made by 4.57.6, read by $(basename "${reader%/bin/python}")"
        "$reader" "$folder/heads.py" read "$folder/models"
    done
    echo "read and saved by 5.24.0"
    "$new" "$folder/heads.py" resave "$folder/models"
    for reader in "$old" "$new"; do
        echo "then read by $(basename "${reader%/bin/python}")"
        "$reader" "$folder/heads.py" read "$folder/models"
    done
} | tee "$folder/seen"
cat > "$folder/described" <<'SEEN'
made by 4.57.6, read by 4.57.6
  mt5-own, config says False: logits are 1.00 times what they were
  mt5-tied, config says True: logits are 1.00 times what they were
  t5-own, config says False: logits are 1.00 times what they were
  t5-tied, config says None: logits are 1.00 times what they were
made by 4.57.6, read by 5.24.0
  mt5-own, config says False: logits are 1.00 times what they were
  mt5-tied, config says True: logits are 4.00 times what they were
  t5-own, config says False: logits are 1.00 times what they were
  t5-tied, config says None: logits are 1.00 times what they were
read and saved by 5.24.0
  new, tie_word_embeddings=False: own head False
  new, tie_word_embeddings=False: own head False
then read by 4.57.6
  mt5-own, config says True: logits are another model's
  mt5-tied, config says True: logits are 1.00 times what they were
  t5-own, config says True: logits are another model's
  t5-tied, config says True: logits are 1.00 times what they were
then read by 5.24.0
  mt5-own, config says True: logits are 1.00 times what they were
  mt5-tied, config says True: logits are 4.00 times what they were
  t5-own, config says True: logits are 1.00 times what they were
  t5-tied, config says True: logits are 1.00 times what they were
SEEN
diff "$folder/described" "$folder/seen"
# Seen: the lines of "described", as they stand above.
