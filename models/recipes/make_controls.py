# SPDX-License-Identifier: Apache-2.0
"""Writes `controls.json` of a trained model: plain models of other depths, on the same tokens.

    for depth in 8 10 12 16; do
        python models/recipes/train.py --preset plain-$depth --out out/$depth > out/$depth.json
    done
    python models/recipes/make_controls.py models/shared_16 out/*.json

Each file is what `train.py` prints. Depths that the model's file has already, and no file
given here, stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
from recipe import PRESETS, bits_of_test_split

from utio_jax.core.files import save_json
from utio_jax.core.flops import depth_flops, token_cost
from utio_jax.evaluation.controls import FILE, load_controls
from utio_jax.models.checkpoint import load
from utio_jax.models.tokenizer import encode_documents
from utio_jax.models.transformer import Transformer


def main(folder: Path, files: list[Path]) -> None:
    """Adds runs to a model's controls."""
    model: Any = load(folder, lens=False)  # A lens changes nothing at full depth.
    config, width = model.decoder.config, model.decoder.config.context_length
    load_controls(folder, model_sha256=model.sha256)  # Another model's are refused.
    written = folder / FILE
    known = json.loads(written.read_text()) if written.is_file() else {"controls": []}
    rows = {row["layers"]: row for row in known["controls"]}

    def flops(decoder: Transformer) -> float:
        params = jax.eval_shape(decoder.init, jax.random.key(0))
        depths = [decoder.config.num_layers]
        cost = token_cost(decoder, params)
        return float(depth_flops(cost, depths, width=width, key_widths=[width])[0])

    full = flops(Transformer(config))
    for file in files:
        run = json.loads(file.read_text())
        ((layers, bits),) = [(int(depth), bits) for depth, bits in run["bits_per_byte"].items()]
        # A plain model makes keys and values in all of its layers, whatever this one does.
        plain = Transformer(PRESETS[run["preset"]])
        rows[layers] = {
            "layers": layers,
            "flops_ratio": round(flops(plain) / full, 4),
            "bits_per_byte": bits,
            "tokens": run["tokens"],
            "seed": run["seed"],
            "command": "python models/recipes/train.py "
            f"--preset {run['preset']} --steps {run['steps']}",
        }
    own = known.get("bits_per_byte")
    if own is None:
        own = bits_of_test_split(
            model.decoder,
            model.params,
            lambda texts: encode_documents(model.tokenizer, texts, bos_id=config.bos_id),
        )[str(config.num_layers)]
    controls = [rows[layers] for layers in sorted(rows)]
    save_json(written, {"model_sha256": model.sha256, "bits_per_byte": own, "controls": controls})
    print(written)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the trained model")
    parser.add_argument("files", type=Path, nargs="+", help="what train.py printed")
    args = parser.parse_args()
    main(args.folder, args.files)
