# SPDX-License-Identifier: Apache-2.0
"""A model split over two machines at an early exit, with ZeroMQ between its parts."""

from utio_jax.core.extras import missing_library

try:
    import zmq  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_library(error, "utio_jax.contrib.edge") from error

from utio_jax.contrib.edge.cloud import Cloud
from utio_jax.contrib.edge.edge import Edge, EdgeText
from utio_jax.contrib.edge.wire import Link

__all__ = ["Cloud", "Edge", "EdgeText", "Link"]
