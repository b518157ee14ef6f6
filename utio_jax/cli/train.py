# SPDX-License-Identifier: Apache-2.0
"""`utio-jax train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.options import Rare, check_out
from utio_jax.policies.store import calibration_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains the shipped model's recipe on this Python's standard library, and calibrates it.

    In two runs: `--preset shared-16 --out T`, then `--preset late-shared-16 --trunk T`.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      resume: continue from the latest checkpoint.
      steps: optimizer steps; 2200 take 60 to 90 minutes on two CPU cores.
      preset: "shared-16", the shipped model before it has exits, "late-shared-16", which adds them,
        or "tiny"; a control without exits: "plain-16", "plain-12", "plain-10", "plain-8"; exits
        from the start: "stdlib-16"; exits that a plain run gets late: "late-16"; or layers that are
        added to a finished plain-8, which stays as it is: "grown-16"; or to a plain-8 before its
        rate falls, and all learn: "stacked-16".
      seed: of everything random.
      trunk: of "late-16": the --out of the plain-16 run, of as many steps, that it branches off; of
        "grown-16" and "stacked-16": that of the plain-8 run.
      exit_weight: of these: share of each exit in the loss. By default 0.1; 0.3 for "grown-16" and
        "stacked-16", whose exit 8 has 1.
    """

    EXAMPLES: ClassVar = (
        "train",
        "train --preset plain-12 --out out/plain",
        "train --preset late-16 --trunk out/plain --out out/late",
    )

    out: Path = Path("out/train")
    resume: bool = False
    steps: int = 2200
    preset: str = "shared-16"
    seed: Rare[int] = 0
    trunk: Path | None = None
    exit_weight: Rare[float | None] = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.models.training.recipe import run_recipe

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
            return {"command": "train", **summary, "calibration": None}
        # What was fitted to the weights that were there before means nothing to these.
        calibration_file(self.out / "model").unlink(missing_ok=True)
        calibrated = Calibrate(model=str(self.out / "model"), seed=self.seed).run()
        return {"command": "train", **summary, "calibration": calibrated["info"]}
