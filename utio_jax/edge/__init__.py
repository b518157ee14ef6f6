# SPDX-License-Identifier: Apache-2.0
"""A model in two processes: shallow layers on an edge, deep ones in a cloud behind a socket."""

from utio_jax.edge.cloud import Cloud, CloudStats
from utio_jax.edge.edge import Edge, EdgeRecord, EdgeText, EdgeToken
from utio_jax.edge.parts import Part, Widths, identify, part_of
from utio_jax.edge.wire import CloudLostError, Link

__all__ = [
    "Cloud",
    "CloudLostError",
    "CloudStats",
    "Edge",
    "EdgeRecord",
    "EdgeText",
    "EdgeToken",
    "Link",
    "Part",
    "Widths",
    "identify",
    "part_of",
]
