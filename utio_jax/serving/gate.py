# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware for all routes: API key, body size, request ids, log, and errors.

Errors are as OpenAI's clients read them: `{"error": {message, type, param, code}}`, always. What
waits for slow clients, limits rates or knows several keys stands in a reverse proxy.
"""

from __future__ import annotations

import asyncio
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

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = frozenset({"/", "/docs", "/health", "/ready", "/metrics", "/openapi.json"})
"""Addresses without a key: they show nothing of requests, and run nothing."""

_PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Addresses that are asked all the time: answers are logged where something is wrong."""

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_TYPES = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "overloaded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "overloaded"),
    504: ("server_error", "request_timeout"),
}

Log = Callable[[dict[str, Any]], None]
"""Takes what is to be logged, as a record."""


class ApiError(HTTPException):
    """An error response: `body` is the error object, `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        kind, usual = _TYPES.get(status, _TYPES[400 if status < 500 else 500])
        inner = {"message": message, "type": kind, "param": param, "code": code or usual}
        self.body = {"error": inner}

    def response(self) -> JSONResponse:
        """Returns the answer."""
        return JSONResponse(self.body, status_code=self.status_code, headers=self.headers)


def fault() -> ApiError:
    """Returns the 500 for an internal error; the middleware logs it."""
    return ApiError(500, "A fault of this server. It was logged under the request's id.")


def engine_ended() -> ApiError:
    """Returns the error of requests whose engine is gone."""
    return ApiError(500, "The engine has ended by an error.", code="engine_dead")


def add_handlers(app: FastAPI) -> None:
    """Gives an application one format for all errors, those of the framework included."""

    async def http(_: Request, error: Any) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response()
        message = f"{error.detail}: see /openapi.json for the addresses and their methods."
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def invalid(_: Request, error: Any) -> JSONResponse:
        return _invalid(error.errors()).response()

    async def broken(_: Request, __: Exception) -> JSONResponse:
        return fault().response()

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, broken)


def _invalid(errors: Any) -> ApiError:
    """Returns the 400 for an invalid body, with the name of the field."""
    # Of a list that may be of several kinds, not that it is no text, but that it is too long.
    sizes = [error for error in errors if error.get("type") in ("too_long", "too_short")]
    first = (sizes or errors)[0]
    # Names may be the client's own, and as long as its body; kinds that were tried are no names.
    kinds = re.compile(r"str$|constrained-|list\[")
    place = [str(part)[:80] for part in first.get("loc", ())[:8] if part != "body"]
    place = [part for part in place if not kinds.match(part)]
    kind, message = first.get("type"), str(first.get("msg", "it is wrong"))[:500]
    if kind == "json_invalid":
        return ApiError(400, f"Wanted a body in JSON. {first['ctx']['error']}.")
    if not place and kind in ("missing", "model_attributes_type", "dict_type"):
        return ApiError(400, "Wanted a JSON object as body, and Content-Type: application/json.")
    if not place and kind == "value_error":  # A field that is refused by name.
        message = str(first["ctx"]["error"])
        return ApiError(400, message, param=message.partition(" ")[0], code="unsupported")
    return ApiError(400, f"{'.'.join(place)}: {message}.", param=place[0] if place else None)


class Gate:
    """Checks requests before an application, and logs them after it.

    Attributes:
      refusing: the error that requests for work get; None: they are let in.
      key: that requests bring; None: none.
    """

    def __init__(self, app: ASGIApp, *, body_bytes: int, key: str | None, log: Log) -> None:
        """Wraps an application; request bodies have at most `body_bytes`."""
        self._app, self._body_bytes, self.key, self._log = app, body_bytes, key, log
        self.refusing: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record: dict[str, Any] = {
            "event": "request",
            "id": given if _ID.fullmatch(given) else uuid.uuid4().hex,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": 0,
        }
        scope.setdefault("state", {})["record"] = record

        is_head = scope["method"] == "HEAD"
        if is_head:  # Answered as GET, without the body.
            scope = {**scope, "method": "GET"}

        async def give(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                own = (b"x-request-id", record["id"].encode()), _NO_SNIFFING
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        async def answer(error: ApiError) -> None:
            if not record["status"]:
                with contextlib.suppress(OSError):
                    await error.response()(scope, receive, give)

        try:
            self._check(scope, headers)
            await self._app(scope, self._bounded(receive), give)
        except ApiError as error:
            await answer(error)
        except asyncio.CancelledError:  # It has had its time to drain.
            message = "Server is shutting down before this answer was complete."
            await answer(ApiError(503, message, code="shutting_down"))
            raise
        except OSError as error:  # The client has left.
            record["left"] = type(error).__name__
        except Exception as error:  # A fault of this server, answered and logged.
            note_fault(record, error)
            await answer(fault())
        finally:
            record["seconds"] = round(time.monotonic() - began, 6)
            if scope["path"] not in _PROBES or record["status"] not in (200, 503):
                self._log(record)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError for a rejected request."""
        size = headers.get("content-length", "")
        if size and "transfer-encoding" in headers:
            # Two answers to where the body ends: what stands in front may take the other one.
            message = "Wanted Content-Length or Transfer-Encoding. Got both."
            raise ApiError(400, message, headers={"connection": "close"})
        if scope["path"] not in OPEN:
            if self.key is not None and not _is_key(headers.get("authorization", ""), self.key):
                message = "Wanted the key of this server: Authorization: Bearer KEY."
                raise ApiError(401, message, headers={"www-authenticate": "Bearer"})
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
        message = f"Wanted a body of at most {self._body_bytes} bytes. Got more."
        return ApiError(413, message, **options)


_NO_SNIFFING = (b"x-content-type-options", b"nosniff")


def _is_key(authorization: str, key: str) -> bool:
    """Returns whether a header is `Bearer KEY`, compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return same and scheme.lower() == "bearer"


def note_fault(record: dict[str, Any], error: BaseException) -> None:
    """Adds an exception's type and location to a record, without its message (may quote text)."""
    record["fault"] = type(error).__name__
    record["trace"] = traceback.format_tb(error.__traceback__)[-6:]


def log_line(record: dict[str, Any]) -> None:
    """Writes a record to stderr, as one line of JSON with the time."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    with contextlib.suppress(OSError):  # Nothing may read it any more.
        sys.stderr.write(json.dumps({"time": stamp, **record}) + "\n")
        sys.stderr.flush()
