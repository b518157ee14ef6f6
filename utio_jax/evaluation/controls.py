# SPDX-License-Identifier: Apache-2.0
"""The hardest control: plain models of other depths, trained on the same tokens.

A model with exits competes with simply training a shallower one. Such controls are stored in the
model's folder as `controls.json`. Their lower hull gives the loss over the model's own full depth
at any cost between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from utio_jax.core.files import load_json
from utio_jax.evaluation.ledger import convex_hull

FILE = "controls.json"


def load_controls(
    folder: str | Path, *, model_sha256: str
) -> Callable[[float | None], float | None]:
    """Reads a model folder's `controls.json`; returns the loss of their hull by `flops_ratio`.

    In % over the model's own full depth. None where the ratio is, or is less than the cheapest
    control's; everywhere, if there is no such file.

    Raises:
      ValueError: it cannot be read, names no control, or is another model's.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return lambda _: None
    try:
        stored = load_json(file, "the controls of a model")
        own, owner = float(stored["bits_per_byte"]), str(stored["model_sha256"])
        points = [
            (float(row["flops_ratio"]), float(row["bits_per_byte"])) for row in stored["controls"]
        ]
        if not points or min(own, *(bits for _, bits in points)) <= 0:
            raise ValueError("no control, or one without a loss")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"Wanted the controls of a model in {file}. They cannot be read: {error!r}."
        ) from error
    if owner != model_sha256:
        raise ValueError(
            f"Wanted controls of the model with SHA-256 {model_sha256[:16]}. {file} holds those of "
            f"{owner[:16]}. Create them again, or remove the file."
        )
    hull = convex_hull(points)

    def lost(flops_ratio: float | None) -> float | None:
        bits = None if flops_ratio is None else hull(flops_ratio)
        return None if bits is None else round(100 * (bits / own - 1), 3)

    return lost
