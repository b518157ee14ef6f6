# SPDX-License-Identifier: Apache-2.0
"""Prunes upper layers and distils: the fixed-depth control of exit branches.

    python models/recipes/pruned.py --out out/pruned --layers 10

Keeps the layers that make keys and values and evenly spaced upper ones, as a branch begins. Then
all weights learn, the embedding included, with the loss of `branches.py`: half cross-entropy, half
KL divergence from the full model (as in Minitron, arXiv 2407.14679). The result is one model of one
depth. `--resume` continues after an interruption.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from anytime import Start
from branches import with_upper
from recipe import bits_of_test_split, tokenise
from run import Run, main
from sharing import distillation

from utio_jax.core.decoder import Params
from utio_jax.models.branches import Branches
from utio_jax.models.checkpoint import load, save
from utio_jax.models.shipped import SHIPPED
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer


def pruned(decoder: Transformer, params: Params, layers: int) -> tuple[Transformer, Params]:
    """Returns a model of `layers` layers: all that make K/V, then evenly spaced upper ones."""
    config = decoder.config
    upper = Branches.copied(decoder, params, (layers - config.kv_own,))
    smaller = dataclasses.replace(
        config, num_layers=layers, exits=(layers,), kv_source=config.kv_source[:layers]
    )
    stack = jax.tree.map(lambda leaf: leaf[:layers], params["layers"])
    return Transformer(smaller), with_upper({**params, "layers": stack}, upper)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prune(Run):
    """Trains a pruned copy of a model with shared K/V on this Python's standard library.

    Attributes:
      out: folder for checkpoints, log, and the finished `model`.
      model: the model's folder.
      layers: that the pruned model has.
      steps: optimizer steps of 6,144 tokens.
    """

    out: Path = Path("out/pruned")
    model: str = SHIPPED
    layers: int = 10
    steps: int = 1250
    rate: float = 0.015

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns what was measured."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = load(self.model, lens=False, branches=False)
        student, first = pruned(model.decoder, model.params, self.layers)
        documents = standard_library("train")
        encode, stream = tokenise(folder, documents, student.config, like=model.folder)
        recipe = self.numbers(warmup=20, decay_fraction=0.7, save_every=50)
        params = self.learn(
            student,
            stream,
            recipe,
            weight_decay=0.05,
            start=Start(params=first),
            objective=distillation(student, model.decoder, model.params, labels=0.5),
        )
        save(folder / "model", student, params, like=model.folder)
        saved: Any = load(folder / "model", lens=False, branches=False)  # In bfloat16.
        return {
            "out": str(self.out),
            "model_sha256": model.sha256,
            "layers": self.layers,
            "tokens": recipe.tokens,
            "bits_per_byte": bits_of_test_split(saved.decoder, saved.params, encode),
        }


if __name__ == "__main__":
    main(Prune)
