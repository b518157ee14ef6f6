# SPDX-License-Identifier: Apache-2.0
"""Where the model is that comes with the package; nothing is ever written there."""

from __future__ import annotations

from pathlib import Path

SHIPPED = "stdlib-16"
"""The model that comes with the package."""


def shipped_folder() -> Path:
    """Returns the shipped model's folder: in the installed package, or in a source checkout."""
    name = SHIPPED.replace("-", "_")
    installed, source = Path(__file__).parent / name, Path(__file__).parents[2] / "models" / name
    return installed if installed.is_dir() else source


def is_shipped(path: Path) -> bool:
    """Returns whether a file or folder is part of the package, installed or in a checkout."""
    package, own = Path(__file__).resolve().parents[1], shipped_folder().resolve()
    return any(path.resolve().is_relative_to(each) for each in (package, own))
