# SPDX-License-Identifier: Apache-2.0
"""Trains the shipped model, in two runs, or one of its controls.

    python models/recipes/train.py --preset shared-16 --out T
    python models/recipes/train.py --preset late-shared-16 --trunk T --out out/late

Runs of 60 to 90 minutes on two CPU cores; `--resume` goes on after an interruption.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import tyro
from recipe import run_recipe

from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.options import check_out
from utio_jax.core import avoid_wrong_products
from utio_jax.policies.store import calibration_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains the shipped model's recipe on this Python's standard library, and calibrates it.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      resume: continue from the latest checkpoint.
      steps: optimizer steps; 2200 take 60 to 90 minutes on two CPU cores.
      preset: "shared-16", the shipped model before it has exits, "late-shared-16", which adds them,
        "shared-16-at-6", whose K/V are made by six layers instead of eight, "shared-8-16", with 16
        upper layers instead of 8, or "tiny"; a control without exits: "plain-16", "plain-12",
        "plain-10", "plain-8", "plain-4"; four layers in four turns, with a gate: "looped-4x4";
        exits from the start: "stdlib-16"; exits that a plain run gets late: "late-16"; or layers
        that are added to a finished plain-8, which stays as it is: "grown-16".
      seed: seed for everything random.
      trunk: --out of the run that a preset continues: of shared-16 for "late-shared-16" and of
        plain-16 for "late-16", with as many steps; of plain-8 for "grown-16".
      exit_weight: share of each exit in the loss of these presets. By default 0.2 for
        "late-shared-16", 0.1 for "late-16", 0.3 for "grown-16".
    """

    out: Path = Path("out/train")
    resume: bool = False
    steps: int = 2200
    preset: str = "shared-16"
    seed: int = 0
    trunk: Path | None = None
    exit_weight: float | None = None

    def run(self) -> dict[str, Any]:
        """Trains, calibrates, and returns what was measured."""
        check_out(self.out)
        summary = run_recipe(
            self.out,
            preset=self.preset,
            steps=self.steps,
            seed=self.seed,
            resume=self.resume,
            trunk=self.trunk,
            exit_weight=self.exit_weight,
        )
        if len(summary["bits_per_byte"]) == 1:  # No exits: nothing to calibrate.
            return {**summary, "calibration": None}
        # What was fitted to the weights that were there before means nothing to these.
        calibration_file(self.out / "model").unlink(missing_ok=True)
        calibrated = Calibrate(model=str(self.out / "model")).run()
        return {**summary, "calibration": calibrated["info"]}


if __name__ == "__main__":
    avoid_wrong_products()
    try:
        print(json.dumps(tyro.cli(Train).run()))
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"train: {error}")
