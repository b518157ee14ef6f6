# SPDX-License-Identifier: Apache-2.0
"""Options, numbers and calls that training scripts share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from anytime import Trainable, TrainConfig, train
from trunks import make_optimizer

from utio_jax.core import avoid_wrong_products
from utio_jax.core.decoder import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Options of every training script; a script documents those that mean something else.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      steps: optimizer steps.
      rate: peak learning rate of Muon, and of Adam for embedding and norms.
      seed: random seed for the order of the text.
      resume: continue from the latest checkpoint.
    """

    out: Path
    steps: int
    rate: float
    seed: int = 0
    resume: bool = False

    def numbers(self, **others: Any) -> TrainConfig:
        """Returns the recipe's numbers; all windows have the `context`, if one is given."""
        if "context" in others:
            others["long_context"] = others["context"]
        return TrainConfig(steps=self.steps, seed=self.seed, **others)

    def learn(
        self,
        decoder: Trainable,
        stream: np.ndarray,
        recipe: TrainConfig,
        *,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> Params:
        """Returns parameters that Muon and Adam trained; options are those of `train`."""
        optimizer = make_optimizer(recipe, rate=self.rate, weight_decay=weight_decay)
        options |= {"out": self.out, "resume": self.resume, "optimizer": optimizer}
        return train(decoder, stream, recipe, **options)


def main(script: Any) -> None:
    """Runs a script on the options of the command line; prints its result as JSON."""
    avoid_wrong_products()
    print(json.dumps(tyro.cli(script).run()))
