# SPDX-License-Identifier: Apache-2.0
"""What stands before every address: keys, sizes and times of bodies, names, logs, and the way out.

A plain ASGI application around another, since it has to see bytes as they come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from utio_jax.serving.errors import ApiError, fault
from utio_jax.serving.keys import Keys
from utio_jax.serving.limits import Limits

OPEN = frozenset(
    {"/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/favicon.ico"}
)
"""Addresses that need no key: they tell nothing of what is asked, and nothing runs for them."""

BODIES = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
"""Addresses that take a body, in JSON."""

_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Addresses that are asked all the time: answers are logged where something is wrong."""

_DISCARDED, _DISCARD_SECONDS = 2**25, 2.0
"""Bytes of an unwanted body that are taken, and the time for that, before a connection closes."""

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Gate:
    """Lets requests in, and sees them out.

    Attributes:
      open_requests: that have not been answered to the end.
      refusing: what a request for work is told: not ready yet, draining. None: nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        keys: Keys | None,
        log: Callable[[dict[str, Any]], None],
        count: Callable[[str, int, float], None],
    ) -> None:
        """Stands before an application.

        Args:
          app: that answers.
          limits: of bodies, times and keys.
          keys: that are let in; None: everybody.
          log: takes what is to be told of a request.
          count: takes address, status and seconds of a request.
        """
        self._app, self._limits, self._keys = app, limits, keys
        self._log, self._count = log, count
        self._of_key: dict[str, int] = {}
        self.open_requests = 0
        self.refusing: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        passage = _Passage(scope, receive, send, self._limits)
        self.open_requests += 1
        try:
            await self._pass(passage)
        except ApiError as error:
            await passage.answer(error)
        except OSError as error:  # The client has left.
            passage.record["left"] = type(error).__name__
        except Exception as error:  # A fault of this server: the client shall know, and the log.
            note_fault(passage.record, error)
            await passage.answer(fault())
        finally:
            self.open_requests -= 1
            passage.record["seconds"] = round(time.monotonic() - passage.began, 6)
            if scope["path"] not in _PROBES or passage.record["status"] not in (200, 503):
                self._log(passage.record)
            route = scope.get("route")
            known = getattr(route, "path", None) or "other"
            self._count(known, passage.record["status"], passage.record["seconds"])

    async def _pass(self, passage: _Passage) -> None:
        path = passage.scope["path"]
        name = None
        if passage.header_bytes > self._limits.header_bytes:
            # What came in one piece is taken by the parser, however long.
            raise ApiError(
                431,
                f"Wanted at most {self._limits.header_bytes} bytes of headers. Got more.",
                headers={"connection": "close"},
            )
        if passage.header("transfer-encoding") and passage.header("content-length"):
            # Two answers to where the body ends: what stands in front may take the other one.
            raise ApiError(
                400,
                "Wanted Content-Length or Transfer-Encoding. Got both.",
                headers={"connection": "close"},
            )
        if path not in OPEN:
            if self._keys is not None:
                name = self._keys.name_of(passage.header("authorization"))
                if name is None:
                    raise ApiError(
                        401,
                        "Wanted a key that is known here: Authorization: Bearer KEY.",
                        headers={"www-authenticate": "Bearer"},
                    )
                passage.record["key"] = name
            if self.refusing is not None and passage.scope["method"] == "POST":
                raise self.refusing
        if name is None:
            await passage.through(self._app)
            return
        if self._of_key.get(name, 0) >= self._limits.key_requests:
            raise ApiError(
                429,
                f"Wanted at most {self._limits.key_requests} open requests of a key. Wait for one.",
                headers={"retry-after": "1"},
            )
        self._of_key[name] = self._of_key.get(name, 0) + 1
        try:
            await passage.through(self._app)
        finally:
            self._of_key[name] -= 1
            if not self._of_key[name]:
                del self._of_key[name]


class _Passage:
    """A request on its way in, and its answer on its way out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.began = time.monotonic()
        self._headers = dict(scope["headers"])
        given = self.header("x-request-id") or ""
        self.id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.record: dict[str, Any] = {
            "event": "request",
            "id": self.id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": 0,
        }
        scope.setdefault("state", {})["record"] = self.record
        self._size, self._whole, self._started = 0, False, False

    @property
    def _takes_body(self) -> bool:
        return self.scope["method"] == "POST" and self.scope["path"] in BODIES

    @property
    def header_bytes(self) -> int:
        """Bytes of the request's address and headers."""
        headers = sum(len(name) + len(value) + 4 for name, value in self.scope["headers"])
        return headers + len(self.scope["raw_path"]) + len(self.scope["query_string"])

    def header(self, name: str) -> str | None:
        """Returns a header's text."""
        found = self._headers.get(name.encode())
        return None if found is None else found.decode("latin-1")

    async def through(self, app: ASGIApp) -> None:
        """Lets an application answer.

        Raises:
          ApiError: a body that is not JSON, or says itself that it is too large.
        """
        kind = (self.header("content-type") or "").partition(";")[0].strip().lower()
        if self._takes_body and not kind.endswith("json"):
            raise ApiError(
                415, f"Wanted Content-Type: application/json. Got {kind[:80] or 'none'}."
            )
        said = self.header("content-length") or ""
        if said.isdigit() and int(said[:20]) > self._limits.body_bytes:
            raise self._too_large()
        await app(self.scope, self._take, self._give)

    async def answer(self, error: ApiError) -> None:
        """Sends an error, if nothing has been sent."""
        if self._started:
            return
        try:
            await error.response()(self.scope, self._take, self._give)
        except OSError as left:
            self.record["left"] = type(left).__name__

    async def _take(self) -> Message:
        if self._whole:
            return await self._receive()
        left = self.began + self._limits.body_seconds - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"Wanted the whole body within {self._limits.body_seconds:g} seconds.",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._size > self._limits.body_bytes:
                raise self._too_large()
        else:
            self._whole = True
        return message

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"Wanted a body of at most {self._limits.body_bytes} bytes. Got more.",
            headers={"connection": "close"},
        )

    async def _give(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.record["status"] = message["status"]
            named = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            message = {**message, "headers": [*named, (b"x-content-type-options", b"nosniff")]}
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self._whole:
            # A connection that is closed with bytes unread loses the answer, too.
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _discard(self) -> None:
        """Takes what is left of a body that nobody wants, up to a size and a time."""
        left = _DISCARDED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while left > 0 and not self._whole:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._whole = not message.get("more_body", False)


def note_fault(record: dict[str, Any], error: BaseException) -> None:
    """Adds to a record what failed and where; not its message, which may quote a prompt."""
    record["fault"] = type(error).__name__
    record["trace"] = traceback.format_tb(error.__traceback__)[-6:]


def log_line(record: dict[str, Any]) -> None:
    """Writes a record to stderr, as one line of JSON with the time."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    with contextlib.suppress(OSError):  # Nobody may read it any more.
        sys.stderr.write(json.dumps({"time": stamp, **record}) + "\n")
        sys.stderr.flush()
