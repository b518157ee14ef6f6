# SPDX-License-Identifier: Apache-2.0
"""What several commands share: texts, policies by name, and a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utio_jax.forward import full_depth
from utio_jax.plan import Policy
from utio_jax.policies import Uniform


def read_documents(files: tuple[Path, ...], split: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the files' text, or a split of the standard library, and what identifies it."""
    from utio_jax.models.corpus import describe, read_files, standard_library

    documents = read_files(files) if files else standard_library(split)
    return documents, describe(documents)


def policy_named(
    model: Any, name: str, *, budget: float, depth: int | None
) -> tuple[Policy, float | None, tuple[float, ...] | None]:
    """Returns a policy; the budget and the shares of its depths if it was fitted, else None.

    Args:
      model: a `utio_jax.models.Model`.
      name: full, uniform, random, or one of the model's calibration.
      budget: for fitted policies.
      depth: for uniform; None means all layers.

    Raises:
      ValueError: an unknown name or budget, or the model has no calibration.
    """
    if name == "full":
        return full_depth(model.decoder), None, None
    if name == "uniform":
        layers = model.decoder.config.num_layers
        return Uniform(depth=layers if depth is None else depth), None, None
    entry = model.calibration.entry(name, budget)
    return model.calibration.policy(name, budget), budget, entry.fractions


@contextmanager
def progress_bar(total: int | None, what: str) -> Iterator[Any]:
    """Shows a progress bar on stderr; the context's value advances it by one."""
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=what, file=sys.stderr, mininterval=1.0, leave=False) as bar:
        yield bar.update
