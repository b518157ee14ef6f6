# SPDX-License-Identifier: Apache-2.0
"""A model split over two machines at an early exit, with ZeroMQ between its parts."""

from utio_jax.contrib.edge.cloud import Cloud, CloudStats
from utio_jax.contrib.edge.edge import Edge, EdgeRecord, EdgeText
from utio_jax.contrib.edge.parts import Part, Widths, identify, part_of
from utio_jax.contrib.edge.wire import CloudLostError, Link

__all__ = [
    "Cloud",
    "CloudLostError",
    "CloudStats",
    "Edge",
    "EdgeRecord",
    "EdgeText",
    "Link",
    "Part",
    "Widths",
    "identify",
    "part_of",
]
