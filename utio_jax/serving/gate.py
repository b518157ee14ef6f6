# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware before every address: the key, the size of bodies, request ids, the log.

What waits for slow clients, limits rates or knows several keys stands in a reverse proxy.
"""

from __future__ import annotations

import contextlib
import hmac
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

OPEN = frozenset(
    {"/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/favicon.ico"}
)
"""Addresses that need no key: they tell nothing of what is asked, and nothing runs for them."""

_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Addresses that are asked all the time: answers are logged where something is wrong."""

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Gate:
    """Checks requests before an application, and logs them behind it.

    Attributes:
      open_requests: that have not been answered to the end.
      refusing: the answer to requests for work: not ready yet, draining. None: they are let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        body_bytes: int,
        key: str | None,
        log: Callable[[dict[str, Any]], None],
        count: Callable[[str, int, float], None],
    ) -> None:
        """Stands before an application.

        Args:
          app: that answers.
          body_bytes: of a request, at most.
          key: that requests bring; None: none.
          log: takes what is to be told of a request.
          count: takes address, status and seconds of a request.
        """
        self._app, self._body_bytes, self._key = app, body_bytes, key
        self._log, self._count = log, count
        self.open_requests = 0
        self.refusing: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        began, headers = time.monotonic(), _texts(scope)
        given = headers.get("x-request-id", "")
        record: dict[str, Any] = {
            "event": "request",
            "id": given if _ID.fullmatch(given) else uuid.uuid4().hex,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": 0,
        }
        scope.setdefault("state", {})["record"] = record

        async def give(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                own = ((b"x-request-id", record["id"].encode()), _NO_SNIFFING)
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        async def answer(error: ApiError) -> None:
            if not record["status"]:
                with contextlib.suppress(OSError):
                    await error.response()(scope, receive, give)

        self.open_requests += 1
        try:
            self._check(scope, headers)
            await self._app(scope, self._bounded(receive), give)
        except ApiError as error:
            await answer(error)
        except OSError as error:  # The client has left.
            record["left"] = type(error).__name__
        except Exception as error:  # A fault of this server: the client shall know, and the log.
            note_fault(record, error)
            await answer(fault())
        finally:
            self.open_requests -= 1
            record["seconds"] = round(time.monotonic() - began, 6)
            if scope["path"] not in _PROBES or record["status"] not in (200, 503):
                self._log(record)
            known = getattr(scope.get("route"), "path", None) or "other"
            self._count(known, record["status"], record["seconds"])

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises ApiError for a request that is not let in."""
        size = headers.get("content-length", "")
        if size and "transfer-encoding" in headers:
            # Two answers to where the body ends: what stands in front may take the other one.
            raise ApiError(
                400,
                "Wanted Content-Length or Transfer-Encoding. Got both.",
                headers={"connection": "close"},
            )
        if scope["path"] not in OPEN:
            if self._key is not None and not _is_key(headers.get("authorization", ""), self._key):
                raise ApiError(
                    401,
                    "Wanted the key of this server: Authorization: Bearer KEY.",
                    headers={"www-authenticate": "Bearer"},
                )
            if self.refusing is not None and scope["method"] == "POST":
                raise self.refusing
        if size.isdigit() and int(size[:20]) > self._body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """Returns a `receive` that raises ApiError once a body is too large."""
        size = 0

        async def take() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._body_bytes:
                raise self._too_large(headers={"connection": "close"})
            return message

        return take

    def _too_large(self, **options: Any) -> ApiError:
        said = f"Wanted a body of at most {self._body_bytes} bytes. Got more."
        return ApiError(413, said, **options)


_NO_SNIFFING = (b"x-content-type-options", b"nosniff")


def _texts(scope: Scope) -> dict[str, str]:
    """Returns a request's headers as text."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _is_key(authorization: str, key: str) -> bool:
    """Returns whether a header is `Bearer KEY`; how long that takes tells nothing of the key."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return same and scheme.lower() == "bearer"


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
