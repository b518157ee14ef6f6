# SPDX-License-Identifier: Apache-2.0
"""`utio-jax finetune`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import OfModel, OfText, Rare, check_out, read_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune(OfModel, OfText):
    """Teaches the exits of a stock model to predict; transformers can load what is written.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      steps: optimizer steps.
      tokens_per_step: positions predicted in one step.
      context: tokens of a training window; at most the model's own.
      rate: peak learning rate. By default 3e-4, and 3e-5 with --late.
      late: learn from the model as it was instead of the text: its exits get a map each (from the
        lens, where it has one) and a small share of the loss, and the model is to stay what it is.
      exit_weight: share of each exit in the loss, beside the last layer's 1. By default 0.5, and
        0.1 with --late.
      shared_kv: layers that keep their keys and values; all above read those of the last of them,
        so that prompts cost these layers alone and the cache has no others. It learns from the
        model as it was, which takes long; written in this package's own layout.
      seed: of everything random.
      resume: continue from the latest checkpoint.
    """

    EXAMPLES: ClassVar = (
        "finetune FILES --model DIR --exits 8 16 24 32",
        "finetune FILES --model DIR --exits 8 16 24 32 --late",
        "finetune FILES --model DIR --exits 8 16 24 32 --resume",
    )

    exits: tuple[int, ...] = ()
    out: Path = Path("out/finetune")
    steps: int = 500
    tokens_per_step: Rare[int] = 4096
    context: int = 512
    rate: Rare[float | None] = None
    late: bool = False
    exit_weight: Rare[float | None] = None
    shared_kv: Rare[int | None] = None
    seed: Rare[int] = 0
    resume: bool = False

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.models.training.finetune import FinetuneConfig, finetune

        if self.token_ids is None and not self.files:
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        config = FinetuneConfig(
            steps=self.steps,
            tokens_per_step=self.tokens_per_step,
            context=self.context,
            rate=self.rate,
            late=self.late,
            exit_weight=self.exit_weight,
            shared_kv=self.shared_kv,
            seed=self.seed,
        )
        check_out(self.out)
        # A lens would no longer fit what comes out; the maps of late exits learn on.
        drop = self.lens == "auto" and not self.late
        plain = dataclasses.replace(self, lens="none") if drop else self
        model = plain.load()
        documents, _ = read_documents(model, self.files, self.token_ids, None)
        found = finetune(model, documents, config, out=self.out, resume=self.resume)
        for depth, *losses in zip(
            found["exits"], found["loss_before"], found["loss_after"], strict=True
        ):
            print(
                f"exit {depth:3d}: {losses[0]:8.4f} -> {losses[1]:8.4f} nats per token",
                file=sys.stderr,
            )
        before, after = found["loss_before"][-1], found["loss_after"][-1]
        print(_verdict(before, after, found["out"]), file=sys.stderr)
        increase = round(100 * (after / before - 1), 3)
        return {"command": "finetune", "full_depth_loss_increase_pct": increase, **found}


def _verdict(before: float, after: float, out: str) -> str:
    """Returns what training did to the model itself, in nats per token at full depth."""
    increase = 100 * (after / before - 1)
    said = f"Full depth: {before:.4f} -> {after:.4f} nats per token, {increase:+.1f} %."
    if increase <= _UNHARMED_PCT:
        return said
    return (
        f"{said} The model itself got worse, and every loss in % that is measured on {out} from "
        "now on is over this one, not over what it was. Train longer (--steps), at a smaller "
        "--rate, or on more text that is like what the model knows."
    )


# Of the loss at full depth: what the few held-out documents leave in doubt anyway.
_UNHARMED_PCT = 1.0
