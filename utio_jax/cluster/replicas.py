# SPDX-License-Identifier: Apache-2.0
"""Replicas of an engine by Ray Serve: one actor for each, which streams what comes of a task.

Beside `actors` the only module that imports Ray, and only when it is called. Ray Serve starts the
replicas, shares tasks out, notices those that die and starts others. Its own proxies are off: who
speaks HTTP with clients calls `Pool.stream` in its own process.
"""

# Where Ray is not installed, types are checked all the same.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, runtime_checkable

from utio_jax.cluster.actors import check_model, cluster, device_of, keep_to, own_words
from utio_jax.cluster.job import Ray

_HEALTH_SECONDS, _HEALTH_TIMEOUT, _STATE_SECONDS = 2.0, 30.0, 5.0
_DEPLOYMENT = "engine"


class ReplicaLostError(Exception):
    """The replica that worked on a task is gone, or cannot be reached."""


@runtime_checkable
class Station(Protocol):
    """What works in a replica.

    Attributes:
      model_sha256: of the model that it has loaded.
    """

    model_sha256: str

    async def start(self) -> None:
        """Returns once tasks can be taken: everything is compiled."""
        ...

    def stream(self, task: Any) -> AsyncIterator[Any]:
        """Yields what comes of a task. Closed early, the task ends."""
        ...

    def state(self) -> Any:
        """Returns what there is to tell."""
        ...

    def check(self) -> None:
        """Raises where it cannot work any more."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicas:
    """Which replicas there are, and where.

    Attributes:
      name: of the Serve application.
      address: of a cluster, see `utio_jax.cluster.Ray`.
      count: replicas; the fewest, where there may be more.
      most: that Serve may start as tasks come; None: no more than `count`.
      slots: tasks that a replica runs at once.
      cpus: processors of a replica, where there are no GPUs or TPUs. None: all, shared out.
      drain_seconds: that a replica has for its tasks where Serve takes it out.
    """

    name: str
    address: str
    count: int
    slots: int
    most: int | None = None
    cpus: int | None = None
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("--replicas", self.count), ("--replica-cpus", self.cpus)):
            if value is not None and value < 1:
                raise ValueError(f"Wanted {name} of at least 1. Got {value}.")
        if self.most is not None and self.most < self.count:
            raise ValueError(
                f"Wanted --most-replicas of at least --replicas {self.count}. Got {self.most}."
            )

    @property
    def ongoing(self) -> int:
        """Tasks that Serve gives to a replica at once: those that run, and a few that are next.

        >>> Replicas(name="", address="", count=2, slots=8).ongoing
        10
        """
        return self.slots + math.ceil(self.slots / 4)

    def scaling(self) -> dict[str, Any]:
        """Returns what Ray Serve is told of their number."""
        if self.most is None:
            return {"num_replicas": self.count}
        return {
            "autoscaling_config": {
                "min_replicas": self.count,
                "initial_replicas": self.count,
                "max_replicas": self.most,
                "target_ongoing_requests": self.slots,
            }
        }


class Pool:
    """Replicas in a Ray cluster, as one process sees them.

    Attributes:
      count: of replicas, at least.
    """

    def __init__(
        self, options: Replicas, make: Callable[[], Station], *, model_sha256: str
    ) -> None:
        """Joins the cluster, or starts one on this machine. No replica is started yet.

        Args:
          options: which replicas.
          make: makes a replica's station. It is sent there, so it has to be picklable.
          model_sha256: of the model that all have to have.

        Raises:
          ImportError: Ray is not installed.
          ValueError: there is no such cluster, or no room for the replicas.
        """
        self._options, self._make, self._sha = options, make, model_sha256
        self.count = options.count
        self._joined = contextlib.ExitStack()
        most = options.most or options.count
        asked = Ray(address=options.address, concurrency=most, cpus=options.cpus)
        self._joined.enter_context(cluster(asked, library="ray.serve"))
        try:
            import ray

            what = f"--replicas {most}"
            self._device = device_of(asked, ray.cluster_resources(), actors=what)
        except BaseException:
            self._joined.close()
            raise
        self._handle: Any = None

    def deploy(self) -> None:
        """Starts the replicas; returns once all can take tasks.

        Raises:
          ValueError: a replica cannot be made.
        """
        from ray import serve

        options = self._options
        quiet = {"enable_access_log": False, "log_level": "ERROR"}
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        deployment = serve.deployment(
            _Replica,
            name=_DEPLOYMENT,
            max_ongoing_requests=options.ongoing,
            ray_actor_options=self._device,
            health_check_period_s=_HEALTH_SECONDS,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=options.drain_seconds,
            max_constructor_retry_count=2,
            logging_config=quiet,
            **options.scaling(),
        )
        app = deployment.bind(self._make, self._sha, int(self._device.get("num_cpus", 0)))
        try:
            handle = serve.run(app, name=options.name, route_prefix=None, logging_config=quiet)
        except RuntimeError as error:
            details = serve.status().applications.get(options.name)
            told = [each.message for each in details.deployments.values()] if details else []
            said = own_words("\n".join([str(error), *told]))
            raise ValueError(said or f"Wanted replicas. Ray Serve says: {error}") from error
        self._handle = handle.options(stream=True)
        self._control = handle

    async def stream(self, task: Any) -> AsyncIterator[Any]:
        """Yields what comes of a task, in whichever replica has room for it first.

        Raises:
          ReplicaLostError: it died, or was taken away.
        """
        from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
        from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

        gone = (RayActorError, WorkerCrashedError, ObjectLostError)
        gone = (*gone, DeploymentUnavailableError, ReplicaUnavailableError)
        found = self._handle.stream.remote(task)
        try:
            async for item in found:
                yield item
        except gone as error:
            raise ReplicaLostError from error
        finally:
            found.cancel()

    async def states(self) -> list[Any]:
        """Returns what each replica has to tell; none where they do not tell it in time."""
        found = self._control.broadcast("state")
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                return await found.results_async(return_exceptions=True)
        except Exception:  # One is dying, say: the next look will tell.
            return []

    def leave(self) -> None:
        """Ends the replicas, and leaves the cluster."""
        from ray import serve

        with contextlib.suppress(Exception):  # It may be gone.
            if self._options.address != "local":
                serve.delete(self._options.name)
        self._joined.close()


class _Replica:
    """A device's process: a station, and its tasks."""

    async def __init__(self, make: Callable[[], Station], model_sha256: str, cpus: int) -> None:
        if cpus:
            keep_to(cpus)
        self._station = make()
        check_model(self._station.model_sha256, model_sha256)
        await self._station.start()

    async def stream(self, task: Any) -> AsyncIterator[Any]:
        """Yields what comes of a task."""
        async with contextlib.aclosing(self._station.stream(task)) as found:  # type: ignore[type-var]
            async for item in found:
                yield item

    def state(self) -> Any:
        """Returns what there is to tell."""
        return self._station.state()

    def check_health(self) -> None:
        """Raises where Ray Serve shall start another one instead."""
        self._station.check()
