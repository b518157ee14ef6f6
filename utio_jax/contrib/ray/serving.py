# SPDX-License-Identifier: Apache-2.0
"""Replicas of the OpenAI-compatible server by Ray Serve: its ASGI application as an ingress.

Ray Serve's proxy takes HTTP, gives each request to the emptier of two replicas, notices replicas
that die and starts others. What a dead replica was answering is lost: its clients ask again.
"""

# Where Ray is not installed, types are checked all the same.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Any

from utio_jax.contrib.ray.actors import cluster, device_of, keep_to, own_words
from utio_jax.engine import Shapes
from utio_jax.serving.app import Service, make_app
from utio_jax.serving.gate import Gate
from utio_jax.serving.hosts import parts
from utio_jax.serving.keys import Keys
from utio_jax.serving.limits import Limits
from utio_jax.serving.worker import Worker

_WAITING = 256
"""Requests that Serve gives to a replica beyond its slots; they wait in the server's own queue."""


class Replica:
    """A device's process: the server's application, and its engine in a thread."""

    async def __init__(self, command: Any, cpus: int) -> None:
        """Returns once everything is compiled."""
        keep_to(cpus)
        model = command.served()
        room, slots = model.room(command.capacity), command.slots
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def died(error: BaseException) -> None:
            if not ready.done():
                ready.set_exception(error)

        engine = parts(model, slots=slots, capacity=room, shapes=Shapes(), lines=None)
        self._worker = Worker(*engine, on_ready=lambda: ready.set_result(None), on_death=died)
        limits = Limits(
            queue_requests=command.queue,
            queue_tokens=command.queue_tokens,
            request_seconds=command.request_seconds,
        )
        service = Service(model, self._worker, capacity=room, slots=slots, limits=limits)
        keys = None if command.api_key_file is None else Keys(command.api_key_file)
        count = service.metrics.request
        self._gate = Gate(make_app(service), limits=limits, keys=keys, count=count)
        self._worker.start()
        await ready
        service.ready = True

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application; Ray Serve asks for it once the constructor has ended."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await self._gate(scope, receive, send)
                return
            await receive()  # Startup: the constructor has started the engine.
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self._worker.stop()
            await send({"type": "lifespan.shutdown.complete"})

        return app

    def check_health(self) -> None:
        """Raises where Ray Serve shall start another one instead."""
        if not self._worker.alive:
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
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
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
            raise ValueError(said or f"Wanted replicas. Ray Serve says: {error}") from error
        print(f"ready at http://{host}:{port}", file=sys.stderr, flush=True)
        ended.wait()
        ray_serve.shutdown()
