# SPDX-License-Identifier: Apache-2.0
"""Timings of programs in turns, next to controls; tables and pictures.

`utio-jax bench` writes its rows; other commands and `benchmarks/` use the same parts.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from utio_jax.bench.timing import time_programs

if TYPE_CHECKING:
    from utio_jax.bench.plots import plot_depths, plot_pareto

__all__ = ["plot_depths", "plot_pareto", "time_programs"]


def __getattr__(name: str) -> Any:
    # Plots import Matplotlib, which timings do not need.
    if name in __all__:
        return getattr(_import_module("utio_jax.bench.plots"), name)
    raise AttributeError(f"module 'utio_jax.bench' has no attribute {name!r}")
