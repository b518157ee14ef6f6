# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over one engine: completions, chat, streams, depth per token."""

from utio_jax.core.extras import missing_library

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_library(error, "utio_jax.serving") from error

from utio_jax.serving.app import Application
from utio_jax.serving.model import Limits, ServedModel
from utio_jax.serving.run import Address, Server

__all__ = ["Address", "Application", "Limits", "ServedModel", "Server"]
