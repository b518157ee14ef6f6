# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests that join and leave a running batch of decoding rows."""

from utio_jax.engine.engine import Engine
from utio_jax.engine.led import LedEngine, follow
from utio_jax.engine.planning import RebatchingPlan, RowRates, measure_rates, plan_rebatching
from utio_jax.engine.requests import Event, Finished
from utio_jax.engine.slots import Shapes
from utio_jax.engine.statistics import EngineStats, Percentiles

__all__ = [
    "Engine",
    "EngineStats",
    "Event",
    "Finished",
    "LedEngine",
    "Percentiles",
    "RebatchingPlan",
    "RowRates",
    "Shapes",
    "follow",
    "measure_rates",
    "plan_rebatching",
]
