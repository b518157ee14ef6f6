# SPDX-License-Identifier: Apache-2.0
"""Early stopping of thought: where answers stay the same, or by a threshold with a guarantee."""

from utio_jax.contrib.stopping.fitting import (
    StopTrace,
    fit_stop,
    replay_stops,
    trace_stops,
    with_threshold,
)
from utio_jax.contrib.stopping.steady import Steadied, Steady, generate_steadily

__all__ = [
    "Steadied",
    "Steady",
    "StopTrace",
    "fit_stop",
    "generate_steadily",
    "replay_stops",
    "trace_stops",
    "with_threshold",
]
