# SPDX-License-Identifier: Apache-2.0
"""Location of the model that comes with the package; nothing is ever written there."""

from __future__ import annotations

from pathlib import Path

SHIPPED = "shared-16"
"""The model that comes with the package, and that commands take by default.

Its upper half reads keys and values made below; exits at 8, 10 and 12 of 16 layers were added late,
each read through a map of its own."""


def shipped_folder() -> Path:
    """Returns the shipped model's folder: in the installed package, or in a source checkout."""
    name = SHIPPED.replace("-", "_")
    installed, source = Path(__file__).parent / name, Path(__file__).parents[2] / "models" / name
    return installed if installed.is_dir() else source


def is_shipped(path: Path) -> bool:
    """Returns whether a file or folder is part of the package, installed or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return any(path.resolve().is_relative_to(at) for at in (package, shipped_folder().resolve()))
