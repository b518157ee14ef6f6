# SPDX-License-Identifier: Apache-2.0
"""Where the models are that come with the package; nothing is ever written there."""

from __future__ import annotations

from pathlib import Path

SHIPPED = "stdlib-16"
"""The model that commands take by default: six exits, learnt from the first step."""

SHIPPED_MODELS = (SHIPPED, "shared-16")
"""All models that come with the package. The second has no exits: its upper half reads keys and
values made below, so that prompts stop half-way, exactly."""


def shipped_folder(name: str = SHIPPED) -> Path:
    """Returns a shipped model's folder: in the installed package, or in a source checkout.

    Raises:
      ValueError: no model of this name comes with the package.
    """
    if name not in SHIPPED_MODELS:
        raise ValueError(f"Wanted a model of {', '.join(SHIPPED_MODELS)}. Got {name!r}.")
    name = name.replace("-", "_")
    installed, source = Path(__file__).parent / name, Path(__file__).parents[2] / "models" / name
    return installed if installed.is_dir() else source


def is_shipped(path: Path) -> bool:
    """Returns whether a file or folder is part of the package, installed or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    own = (shipped_folder(name).resolve() for name in SHIPPED_MODELS)
    return any(path.resolve().is_relative_to(each) for each in (package, *own))
