# SPDX-License-Identifier: Apache-2.0
"""Early stopping of thought by a threshold of confidence with a guarantee (LYNX)."""

from utio_jax.contrib.stopping.fitting import (
    StopTrace,
    fit_stop,
    replay_stops,
    trace_stops,
    with_threshold,
)

__all__ = ["StopTrace", "fit_stop", "replay_stops", "trace_stops", "with_threshold"]
