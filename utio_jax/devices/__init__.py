# SPDX-License-Identifier: Apache-2.0
"""Rows over devices, batches over processes, and what processes tell each other."""

from utio_jax.devices.lines import Lines, ProcessLostError, join
from utio_jax.devices.processes import Shards, local_mesh, share
from utio_jax.devices.rows import Rows, over_rows, place

__all__ = [
    "Lines",
    "ProcessLostError",
    "Rows",
    "Shards",
    "join",
    "local_mesh",
    "over_rows",
    "place",
    "share",
]
