# SPDX-License-Identifier: Apache-2.0
"""Rows over devices, and batches over processes."""

from utio_jax.devices.processes import Shards, local_mesh, share
from utio_jax.devices.rows import Rows, over_rows, place

__all__ = [
    "Rows",
    "Shards",
    "local_mesh",
    "over_rows",
    "place",
    "share",
]
