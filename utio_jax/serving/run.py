# SPDX-License-Identifier: Apache-2.0
"""Runs a server in this process until it is told to end: sockets, signals, and the way out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from utio_jax.devices import Lines, ProcessLostError
from utio_jax.engine import Shapes
from utio_jax.engine.led import order
from utio_jax.serving.app import Service, make_app
from utio_jax.serving.backend import Backend
from utio_jax.serving.connections import protocol_of
from utio_jax.serving.errors import ApiError, engine_ended
from utio_jax.serving.gate import Gate, log_line, note_fault
from utio_jax.serving.hosts import SILENT_SECONDS, parts
from utio_jax.serving.keys import Keys
from utio_jax.serving.limits import Limits
from utio_jax.serving.model import ServedModel
from utio_jax.serving.worker import Worker

_BACKLOG = 2048
"""Connections that the system holds until they are taken."""

_FAREWELL_SECONDS = 3.0
"""In which requests are refused where another process of the engine is gone."""

Log = Callable[[dict[str, Any]], None]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, and to whom.

    Attributes:
      host: an address of this machine.
      port: 0 takes a free one.
      key_file: of hashes of the keys that are let in, see `utio_jax.serving.keys.Keys`; None:
        everybody.
      insecure: whether others than this machine may come without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"Wanted a port of 0 to 65535. Got {self.port}.")
        if self.key_file is None and not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                "Wanted keys for an address that others can reach. Got host "
                f"{self.host} without. Name a key file, stay on 127.0.0.1, or say that it may be "
                "insecure."
            )


class Server:
    """A server that listens, and serves while `run` runs.

    Attributes:
      url: where it is.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        address: Address = Address(),
        slots: int = 8,
        capacity: int | None = None,
        shapes: Shapes = Shapes(),
        limits: Limits = Limits(),
        log: Log = log_line,
        lines: Lines | None = None,
    ) -> None:
        """Listens. Nothing is compiled yet.

        Args:
          model: what is served.
          address: where.
          slots: choices that run at once.
          capacity: tokens of each, prompt included; None: the model's context, 2048 at most.
          shapes: which programs there are.
          limits: of requests.
          log: takes each thing worth telling, as a record.
          lines: to the other processes over whose devices the model is spread, each of them in
            `follow_server`; None: there are none.

        Raises:
          ValueError: the address cannot be had, or see `Engine` and `Keys`.
        """
        room = model.room(capacity)
        keys = None if address.key_file is None else Keys(address.key_file)
        self._lines = lines
        self._limits, self._log = limits, log
        told: Any = {"on_ready": self._ready, "on_death": self._died}
        engine, scorer = parts(model, slots=slots, capacity=room, shapes=shapes, lines=lines)
        self.worker: Backend = Worker(engine, scorer, **told)
        self.service = Service(model, self.worker, capacity=room, slots=slots, limits=limits)
        self.gate = Gate(
            make_app(self.service),
            limits=limits,
            keys=keys,
            log=log,
            count=self.service.metrics.request,
        )
        self.gate.refusing = _busy("This server is warming up. Come again soon.")
        self._status = 0
        self._drain: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = _listen(address)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> dict[str, Any]:
        """Serves until SIGTERM, SIGINT or `stop`; returns what was done.

        The first drains: new requests get a 503, open ones have `limits.drain_seconds`. The second
        ends at once. It listens before everything is compiled; `/ready` says when.

        Returns:
          `status`, for the shell: 0 drained, 1 ended by an error or at once; and `new_tokens`.
        """
        try:
            return asyncio.run(self._serve())
        finally:
            self._listener.close()

    def leave(self, status: int) -> None:
        """Ends the process where the engine is in a compilation, which nothing can stop.

        The interpreter would be taken down under it otherwise. Else nothing happens.
        """
        if self.worker.alive:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def stop(self) -> None:
        """Tells it to end, as a signal does. From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._told)

    async def _serve(self) -> dict[str, Any]:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        limits = self._limits
        config = uvicorn.Config(
            self.gate,
            http=protocol_of(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, round(limits.idle_seconds)),
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=limits.header_bytes,
        )
        self._server = _Uvicorn(config)
        self._loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                self._loop.add_signal_handler(name, self._told)  # In the main thread alone.
        self.worker.start()
        if self._lines is not None:
            self._lines.watch(SILENT_SECONDS, on_loss=self.worker.end_by, on_end=self._asked_to_end)
        self._log({"event": "listening", "url": self.url, "pid": os.getpid()})
        await self._server.serve(sockets=[self._listener])
        self.worker.stop()
        # Else they end with status 1, as this process does, for it is gone.
        if self._lines is not None and not self._status and not self.worker.alive:
            with contextlib.suppress(ProcessLostError):
                self._lines.part(order("stop"))
        done = {"status": self._status, "new_tokens": self.worker.new_tokens}
        self._log({"event": "ended", **done})
        return done

    def _ready(self) -> None:
        self.service.ready = True
        if not self.service.draining:
            self.gate.refusing = None
        seconds = round(time.monotonic() - self._began, 3)
        self._log({"event": "ready", "url": self.url, "seconds": seconds})

    def _told(self) -> None:
        """Takes a signal: the first drains, the second ends at once."""
        if self._drain is None:
            self._drain_once()
            return
        self._status = 1
        self._end_all("This server was told to end at once.")
        self._server.should_exit = self._server.force_exit = True

    def _asked_to_end(self) -> None:
        """Takes a signal that another process has had. From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._drain_once)

    def _drain_once(self) -> None:
        if self._drain is None:
            self._log({"event": "draining", "open": len(self.service.answers)})
            self.service.draining = True
            self.gate.refusing = _busy("This server is ending.", close=True)
            self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        end = time.monotonic() + self._limits.drain_seconds
        while self.gate.open_requests and time.monotonic() < end:  # Bodies on their way, too.
            await asyncio.sleep(0.02)
        if self.service.answers:
            self._end_all("This server is ending, and could not wait for the rest of the answer.")
            await asyncio.sleep(0.2)
        self._server.should_exit = True

    def _died(self, error: BaseException) -> None:
        self.service.dead, self._status = error, 1
        self.gate.refusing = engine_ended(error)
        record: dict[str, Any] = {"event": "engine_died"}
        note_fault(record, error)
        if isinstance(error, ProcessLostError) or not self.service.ready:
            record["why"] = str(error)  # It quotes nobody: no prompt has been seen.
        self._log(record)

        async def leave() -> None:
            for _ in range(50):  # What was open has heard of it: let it be sent.
                await asyncio.sleep(0.02)
                if not self.service.answers:
                    break
            # Whoever sends requests here shall see 503 before nobody answers any more.
            await asyncio.sleep(_FAREWELL_SECONDS if isinstance(error, ProcessLostError) else 0.1)
            self._server.should_exit = self._server.force_exit = True

        self._leaving = asyncio.get_running_loop().create_task(leave())

    def _end_all(self, why: str) -> None:
        for answer in [*self.service.answers]:
            answer.end(ApiError(503, why, code="shutting_down", headers={"connection": "close"}))


class _Uvicorn(uvicorn.Server):
    """Uvicorn without hands on signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _busy(message: str, *, close: bool = False) -> ApiError:
    headers = {"retry-after": "1"} | ({"connection": "close"} if close else {})
    return ApiError(503, message, code="not_ready", headers=headers)


def _listen(address: Address) -> socket.socket:
    listener = None
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ValueError(
            f"Wanted an address to listen at. {address.host}:{address.port} cannot be had: "
            f"{error.strerror or error}. Name another port, or 0 for a free one."
        ) from error
    return listener
