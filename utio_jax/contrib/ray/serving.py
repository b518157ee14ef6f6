# SPDX-License-Identifier: Apache-2.0
"""Replicas of the OpenAI-compatible server by Ray Serve: its ASGI application as an ingress.

Ray Serve's proxy takes HTTP, gives each request to the emptier of two replicas, notices replicas
that die and starts others. What a dead replica was answering is lost: its clients ask again.
"""

# Where Ray is not installed, types are checked all the same.
# (The name ray is taken for this folder, then.)
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Any

from utio_jax.contrib.ray.actors import cluster, device_of, keep_to, own_words
from utio_jax.serving import Address, Application, Limits

_WAITING = 256
"""Requests that Serve gives to a replica beyond its slots; they wait in the server's own queue."""


class Replica:
    """A device's process: the server's application, and its engine in a thread."""

    async def __init__(self, command: Any, cpus: int) -> None:
        """Returns once everything is compiled."""
        keep_to(cpus)
        limits = Limits(request_seconds=command.request_seconds)
        sizes: dict[str, Any] = {"slots": command.slots, "capacity": command.capacity}
        key = Address(key_file=command.api_key_file).key()
        self._app = Application(command.served(), limits=limits, key=key, **sizes)
        changed = asyncio.Event()
        self._app.on_change = changed.set
        self._life = self._app.lifespan()
        await self._life.__aenter__()
        await changed.wait()
        if self._app.dead is not None:
            raise self._app.dead

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application; Ray Serve asks for it once the constructor has ended."""

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
        """Raises where Ray Serve shall start another one instead."""
        if self._app.dead is not None:
            raise RuntimeError("The engine has ended.")


def serve(
    command: Any, *, address: str, replicas: int, cpus: int | None, host: str, port: int
) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
      command: has `served()`, `slots`, `capacity` and limits; it is sent to the replicas.
      address: of a cluster, see `cluster`.
      replicas: how many, each with a device.
      cpus: of each, where there are neither GPUs nor TPUs; None: those of the cluster, shared out.
      host: where Ray Serve's proxy listens.
      port: likewise.

    Raises:
      ValueError: there is no such cluster, no room, or a replica cannot be made.
    """
    with cluster(address, library="ray.serve"):
        import ray
        from ray import serve as ray_serve

        device = device_of(replicas, cpus, ray.cluster_resources())
        # The proxy and Serve's controller are actors without processors of their own.
        ray_serve.start(http_options={"host": host, "port": port})
        deployment = ray_serve.deployment(
            ray_serve.ingress()(Replica),
            name="server",
            num_replicas=replicas,
            max_ongoing_requests=command.slots + _WAITING,
            ray_actor_options=device,
            health_check_period_s=2.0,
            max_constructor_retry_count=2,
        )
        app = deployment.bind(command, int(device.get("num_cpus", 0)))
        try:
            ray_serve.run(app, name="utio-jax", route_prefix="/")
        except RuntimeError as error:
            found = ray_serve.status().applications.get("utio-jax")
            told = [each.message for each in found.deployments.values()] if found else []
            said = own_words("\n".join([str(error), *told]))
            why = "; ".join([str(error), *told])[-2000:]
            raise ValueError(said or f"Wanted replicas. Ray Serve says: {why}") from error
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has put its own there.
            signal.signal(number, lambda *_: ended.set())
        print(f"ready at http://{host}:{port}", file=sys.stderr, flush=True)
        ended.wait()
        ray_serve.shutdown()
