# SPDX-License-Identifier: Apache-2.0
"""Connections that end in time: slow headers, readers that take nothing, what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from utio_jax.serving.errors import error_body
from utio_jax.serving.limits import Limits


def protocol_of(limits: Limits) -> type[TimedConnection]:
    """Returns the class of a server's connections."""
    return type("TimedConnection", (TimedConnection,), {"limits": limits})


class TimedConnection(H11Protocol):
    """Uvicorn's protocol with ends to waiting that it does not have.

    A client has `header_seconds` to bring its headers, and `write_seconds` to take what is ready
    for it. Closing alone would wait for a reader that takes nothing: late ones are aborted.
    """

    limits: Limits

    _headers: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._headers = self._later(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self._headers is None and not self._answering:
            self._headers = self._later(self.limits.header_seconds)
        super().data_received(data)
        # A body that trickles in behind its answer is no request: that timer goes on.
        if self._answering:
            self._headers = _cancelled(self._headers)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self._reader or self._later(self.limits.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._reader = _cancelled(self._reader)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._leave()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers, self._reader = _cancelled(self._headers), _cancelled(self._reader)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # In the middle of an answer.
            return
        most = self.limits.header_bytes
        said = f"Wanted a request in HTTP/1.1, its headers in {most} bytes."
        data = json.dumps(error_body(400, said, code="bad_request")).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(data))),
            ("connection", "close"),
        ]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (answer, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._leave()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _leave(self) -> None:
        """Gives what is left to be sent its time, where the connection is to be closed."""
        if self.transport.is_closing():
            self._reader = self._reader or self._later(self.limits.write_seconds)

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
