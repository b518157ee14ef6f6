# SPDX-License-Identifier: Apache-2.0
"""Teaches the exits of a stock model to predict; transformers can load what is written.

python models/recipes/finetune.py FILES --model DIR --exits 8 16 24 32
python models/recipes/finetune.py FILES --model DIR --exits 8 16 24 32 --late
python models/recipes/finetune.py FILES --model DIR --shared-kv 15
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import tyro
from tuning import FinetuneConfig, finetune

from utio_jax.cli.options import OfModel, OfText, check_out, read_documents
from utio_jax.core import avoid_wrong_products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune(OfModel, OfText):
    """Teaches the exits of a stock model to predict.

    Attributes:
      config: of the run.
      out: folder for checkpoints, log, and the finished model in `out/model`.
      resume: continue from the latest checkpoint.
    """

    config: tyro.conf.OmitArgPrefixes[FinetuneConfig]
    out: Path = Path("out/finetune")
    resume: bool = False

    def run(self) -> dict[str, Any]:
        """Trains, and returns losses before and after."""
        if self.token_ids is None and not self.files:
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        check_out(self.out)
        # A lens would no longer fit what comes out; the maps of late exits learn on.
        drop = self.lens == "auto" and not self.config.late
        model = (dataclasses.replace(self, lens="none") if drop else self).load()
        documents, _ = read_documents(model, self.files, self.token_ids, None)
        result = finetune(model, documents, self.config, out=self.out, resume=self.resume)
        losses = zip(result["exits"], result["loss_before"], result["loss_after"], strict=True)
        for depth, before, after in losses:
            print(f"exit {depth:3d}: {before:.4f} -> {after:.4f} nats per token", file=sys.stderr)
        increase = 100 * (result["loss_after"][-1] / result["loss_before"][-1] - 1)
        if increase > 1.0:  # What the few held-out documents leave in doubt anyway.
            print(
                f"The model itself got worse, by {increase:.1f} %, and every loss in % that is "
                f"measured on {result['out']} from now on is over this one. Train longer "
                "(--steps), at a smaller --rate, or on more text that is like what the model "
                "knows.",
                file=sys.stderr,
            )
        return {"full_depth_loss_increase_pct": round(increase, 3), **result}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; its JSON is the last line."""
    try:
        result = tyro.cli(Finetune, args=arguments, config=(tyro.conf.FlagCreatePairsOff,)).run()
    except (ValueError, FloatingPointError) as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 2
    except SystemExit as ended:  # By tyro: help, or options that exclude each other.
        return 2 if ended.code else 0
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    avoid_wrong_products()
    sys.exit(main())
