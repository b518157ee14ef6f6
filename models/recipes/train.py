# SPDX-License-Identifier: Apache-2.0
"""Trains the shipped model, in two runs, or one of its controls.

    python models/recipes/train.py --preset shared-16 --out T
    python models/recipes/train.py --preset late-shared-16 --trunk T --out out/late

Runs of 60 to 90 minutes on two CPU cores; `--resume` goes on after an interruption.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tyro
from recipe import Train

from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.options import check_out
from utio_jax.core import avoid_wrong_products
from utio_jax.policies.store import calibration_file


def calibrated(script: Train) -> dict[str, Any]:
    """Trains, calibrates, and returns what was measured."""
    check_out(script.out)
    summary = script.run()
    if len(summary["bits_per_byte"]) == 1:  # No exits: nothing to calibrate.
        return {**summary, "calibration": None}
    # What was fitted to the weights that were there before means nothing to these.
    calibration_file(script.out / "model").unlink(missing_ok=True)
    result = Calibrate(model=str(script.out / "model")).run()
    return {**summary, "calibration": result["info"]}


if __name__ == "__main__":
    avoid_wrong_products()
    try:
        print(json.dumps(calibrated(tyro.cli(Train))))
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"train: {error}")
