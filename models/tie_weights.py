# SPDX-License-Identifier: Apache-2.0
"""Ties calibrations and lenses of earlier versions to the weights beside them; changes no value.

    python models/tie_weights.py models/shared_16/policies.json

Since 0.2.0 a `policies.json` or `lens.json` names the SHA-256 of its weights file, so that no other
gates are read beside it. Run this once on files that you know to belong together.
"""

from __future__ import annotations

import sys
from pathlib import Path

from utio_jax.core.files import load_json, load_tensors, save_owned


def main(arguments: list[str]) -> int:
    """Writes each of the files anew."""
    for file in map(Path, arguments):
        beside = file.with_suffix(".safetensors")
        tensors = load_tensors(beside) if beside.is_file() else {}
        save_owned(file, load_json(file, "a calibration or a lens"), tensors)
        print(f"{file}: {len(tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
