# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests join and leave a running batch of rows."""

from utio_jax.decoding.requests import Completion, Event
from utio_jax.decoding.state import Alternatives
from utio_jax.engine.engine import Engine
from utio_jax.engine.planning import DepthPlan, plan_mode
from utio_jax.engine.requests import EngineStats
from utio_jax.engine.slots import Shapes

__all__ = [
    "Alternatives",
    "Completion",
    "DepthPlan",
    "Engine",
    "EngineStats",
    "Event",
    "Shapes",
    "plan_mode",
]
