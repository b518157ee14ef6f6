# SPDX-License-Identifier: Apache-2.0
"""Replicas of the OpenAI-compatible server by Ray Serve: its ASGI application as an ingress."""

# Where Ray is not installed, types are checked all the same.
# (The name ray is taken for this folder, then.)
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from utio_jax.core.extras import missing_library
from utio_jax.serving import Application


class Replica:
    """Process of one device: the server's application, and its engine in a thread."""

    async def __init__(self, make: Callable[[], Application]) -> None:
        """Returns once everything is compiled."""
        self._app, changed = make(), asyncio.Event()
        self._app.on_change = changed.set
        self._life = self._app.lifespan()
        await self._life.__aenter__()
        await changed.wait()
        if self._app.dead is not None:
            raise self._app.dead

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application; Ray Serve calls this after the constructor."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await self._app(scope, receive, send)
                return
            await receive()  # Startup: the constructor has started the engine.
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._life.__aexit__(None, None, None)
            await send({"type": "lifespan.shutdown.complete"})

        return app

    def check_health(self) -> None:
        """Raises if Ray Serve should replace this replica."""
        if self._app.dead is not None:
            raise RuntimeError("The engine has ended.")


def replicas(
    make: Callable[[], Application], *, count: int = 1, waiting: int = 256, **device: Any
) -> Any:
    """Returns replicas of a server, for `ray.serve.run`.

    `make` makes the application, in each replica's process, whose device is that of any Ray actor:
    `num_gpus=1`, `num_cpus=2`, `resources={"TPU": 1}`. Serve gives it so many `waiting` requests at
    once; those beyond its slots wait in its own queue. Raises ImportError where Ray is missing.
    """
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise missing_library(error, "utio_jax.contrib.ray") from error
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="server",
        num_replicas=count,
        max_ongoing_requests=waiting,
        ray_actor_options=device,
        health_check_period_s=2.0,
        max_constructor_retry_count=2,
    )
    return deployment.bind(make)
