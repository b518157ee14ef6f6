# SPDX-License-Identifier: Apache-2.0
"""Runs a server in this process until a signal: sockets, signals, shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from utio_jax.serving.app import Application
from utio_jax.serving.gate import Log, log_line
from utio_jax.serving.model import Limits, ServedModel

_BACKLOG = 2048
"""Connections that the system holds until they are taken."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Listening address of a server, and its key.

    Attributes:
      host: an address of this machine.
      port: 0 takes a free one.
      key_file: of the key that requests bring, as text; without it the host is this machine's own.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"Wanted a port of 0 to 65535. Got {self.port}.")
        if self.key_file is None and not _is_loopback(self.host):
            raise ValueError(
                "Wanted a key for an address that others can reach. Got host "
                f"{self.host} without. Name a key file, or stay on 127.0.0.1."
            )

    def check(self) -> None:
        """Raises ValueError if the address is taken, or the key cannot be read."""
        self.key()
        _listen(self).close()

    def key(self) -> str | None:
        """Returns the key of `key_file`.

        Raises:
          ValueError: the file cannot be read, or holds something else than one key.
        """
        if self.key_file is None:
            return None
        try:
            words = self.key_file.read_text("ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"Wanted a key in {self.key_file}. {error}.") from error
        if len(words) != 1:
            raise ValueError(
                f"Wanted one key, without blanks, in {self.key_file}. Got {len(words)} words. "
                "Make one: openssl rand -hex 24."
            )
        return words[0]


class Server:
    """An HTTP server: bound on creation, serving during `run`.

    Attributes:
      app: the application.
      url: of the server.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        address: Address = Address(),
        limits: Limits = Limits(),
        log: Log = log_line,
        **options: Any,
    ) -> None:
        """Binds the socket; compilation starts with `run`.

        `log` is called with each record. Options are `slots`, `capacity`, `shapes` and
        `prefix_cache`, see `Application`.

        Raises:
          ValueError: the address is not available, or see `Engine` and `Address.key`.
        """
        self._log, self._began = log, time.monotonic()
        options |= {"limits": limits, "key": address.key(), "log": log}
        self.app = Application(model, **options)
        self.app.on_change = self._changed
        self._listener = _listen(address)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=math.ceil(limits.drain_seconds),
        )
        self._server = _Uvicorn(config, on_drain=self._draining)

    def run(self) -> dict[str, Any]:
        """Serves until SIGTERM, SIGINT or `stop`; returns statistics.

        At the first nothing new is taken, and open requests have `limits.drain_seconds`. The second
        ends at once. It listens before everything is compiled; `/ready` says when.

        Returns:
          `status`, for the shell: 0 drained, 1 ended by an error or at once; and `new_tokens`.
        """
        for name in ("uvicorn.error", "asyncio"):  # `Gate` logs what goes wrong.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._log({"event": "listening", "url": self.url, "pid": os.getpid()})
        asyncio.run(self._server.serve(sockets=[self._listener]))
        status = int(self._server.force_exit or self.app.dead is not None)
        done = {"status": status, "new_tokens": self.app.worker.stats.new_tokens}
        self._log({"event": "ended", **done})
        return done

    def leave(self, status: int) -> None:
        """Ends the process if the engine is compiling, which cannot be interrupted.

        The interpreter would be taken down under it otherwise. Else nothing happens.
        """
        if self.app.worker.alive:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def stop(self) -> None:
        """Stops the server as a first signal does. Thread-safe."""
        self._server.should_exit = True

    def _draining(self) -> None:
        """Logs that nothing new is taken, and how many choices are open."""
        record: dict[str, Any] = {"event": "draining", "open": len(self.app.worker.open_tasks)}
        self._log({**record, "seconds": self.app.limits.drain_seconds})

    def _changed(self) -> None:
        if self.app.dead is not None:
            self.stop()  # After the errors that open requests get.
            return
        seconds = round(time.monotonic() - self._began, 3)
        self._log({"event": "ready", "url": self.url, "seconds": seconds})


class _Uvicorn(uvicorn.Server):
    """Uvicorn that returns after a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, *, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_drain()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True


def _listen(address: Address) -> socket.socket:
    place = address.host, address.port
    try:
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(place, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(
            f"Wanted an address to listen at. {address.host}:{address.port} cannot be had: "
            f"{error.strerror or error}. Name another port, or 0 for a free one."
        ) from error
    listener.setblocking(False)
    return listener
