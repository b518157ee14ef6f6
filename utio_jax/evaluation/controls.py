# SPDX-License-Identifier: Apache-2.0
"""The hardest control: plain models of other depths, trained on the same tokens.

A model with exits competes with simply training a shallower one. Such controls stand in the model's
folder as `controls.json`, and their lower hull says what they lose, over the model's own full
depth, at any cost between them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utio_jax.core.files import load_json, save_text
from utio_jax.evaluation.ledger import convex_hull

FILE = "controls.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainControl:
    """A model without exits, trained on as many tokens.

    `flops_ratio` is of its pass over that of the model it is a control of; `bits_per_byte` of the
    test split.
    """

    layers: int
    flops_ratio: float
    bits_per_byte: float
    tokens: int
    seed: int
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainControls:
    """All controls of a model.

    Attributes:
      model_sha256: of the model's weights.
      bits_per_byte: of the model itself at full depth, on the same text.
      controls: one for each depth.
    """

    model_sha256: str
    bits_per_byte: float
    controls: tuple[PlainControl, ...]

    def nll_increase_pct(self, flops_ratio: float | None) -> float | None:
        """Returns the hull's loss at a cost, in % over the model's full depth.

        None where the cost is, or is less than the cheapest control's.
        """
        if flops_ratio is None:
            return None
        points = [(control.flops_ratio, control.bits_per_byte) for control in self.controls]
        bits = convex_hull(points)(flops_ratio)
        return None if bits is None else round(100 * (bits / self.bits_per_byte - 1), 3)


def plain_hull(model: Any) -> Callable[[float | None], float | None]:
    """Returns `PlainControls.nll_increase_pct` of a `models.Model`; without controls, None."""
    found: PlainControls | None = model.plain_controls
    return (lambda _: None) if found is None else found.nll_increase_pct


def save_controls(folder: str | Path, found: PlainControls) -> None:
    """Writes a model folder's `controls.json`."""
    save_text(Path(folder) / FILE, json.dumps(dataclasses.asdict(found), indent=1) + "\n")


def load_controls(folder: str | Path, *, model_sha256: str) -> PlainControls | None:
    """Reads a model folder's `controls.json`; None where there is none.

    Raises:
      ValueError: it cannot be read, names no control, or is another model's.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return None
    try:
        stored: dict[str, Any] = dict(load_json(file, "the controls of a model"))
        rows = [PlainControl(**row) for row in stored.pop("controls")]
        found = PlainControls(controls=tuple(rows), **stored)
        if not rows or any(row.bits_per_byte <= 0 for row in rows):
            raise ValueError("no control, or one without a loss")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Wanted the controls of a model in {file}. They cannot be read: {error!r}."
        ) from error
    if found.model_sha256 != model_sha256:
        raise ValueError(
            f"Wanted controls of the model with SHA-256 {model_sha256[:16]}. {file} holds those of "
            f"{found.model_sha256[:16]}. Make them anew, or remove the file."
        )
    return found
