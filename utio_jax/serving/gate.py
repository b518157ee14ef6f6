# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's form, the API key, and the ASGI middleware that bounds and logs requests.

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
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from utio_jax.serving.schema import CONSTRAINTS, UNSUPPORTED

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


def shutting_down() -> ApiError:
    """Returns the error of requests that the time to drain was too short for."""
    message = "Server is shutting down before this answer was complete."
    return ApiError(503, message, code="shutting_down")


def engine_ended() -> ApiError:
    """Returns the error of requests whose engine is gone."""
    return ApiError(500, "The engine has ended by an error.", code="engine_dead")


def add_handlers(app: FastAPI) -> None:
    """Gives an application one format for all errors, those of the framework included."""

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            message = f"{error.detail}: see /openapi.json for the addresses and their methods."
            error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors()).response()

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> JSONResponse:
        return fault().response()


_KIND = re.compile(r"str$|constrained-|list\[")
"""Kinds of a field that pydantic has tried: they stand in a place like names."""


def _most_telling(errors: Any) -> Any:
    """Returns the error that a client learns most from.

    A field of several kinds has errors of each kind. One of a wrong type says little: the value is
    of another kind, whose own error says what is wrong with it.
    """
    for error in errors:
        if error["type"] in ("too_long", "too_short"):
            return error
    of_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    telling = [error for error in of_field if not error["type"].endswith("_type")]
    return max(telling, key=lambda error: len(error["loc"]), default=errors[0])


def _invalid(errors: Any) -> ApiError:
    """Returns the 400 for an invalid body, with the name of the field."""
    first = _most_telling(errors)
    if first["type"] == "json_invalid":
        return ApiError(400, f"Wanted a body in JSON. {first['ctx']['error']}.")
    if first["loc"] == ("body",):
        body = first.get("input")
        got = "nothing" if body is None else f"JSON's {type(body).__name__}"
        got = "a body of another type" if isinstance(body, (bytes, str)) else got
        message = "Wanted a JSON object as body, and Content-Type: application/json."
        return ApiError(400, f"{message} Got {got}.")
    # Names may be the client's own, and as long as its body.
    place = [str(part)[:80] for part in first["loc"][1:9]]
    place = [part for part in place if not _KIND.match(part)]
    if place[0] in UNSUPPORTED:
        message = f"{place[0]}: not supported by this server. Leave it out."
        if CONSTRAINTS.fullmatch(place[0]):
            message += " In Python: Engine(logits_processor=), docs/extending.md."
        return ApiError(400, message, param=place[0])
    return ApiError(400, f"{'.'.join(place)}: {first['msg'][:500]}.", param=place[0])


_BEARER = HTTPBearer(auto_error=False, description="The key of `--api-key-file`, if any.")


def key_check(key_of: Callable[[], str | None]) -> Any:
    """Returns the dependency of routes that want a key, as `Bearer KEY`; None: they want none."""

    async def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> None:
        key = key_of()
        # Compared in constant time.
        sent = b"" if given is None else given.credentials.strip().encode()
        if key is not None and not hmac.compare_digest(sent, key.encode()):
            message = "Wanted the key of this server: Authorization: Bearer KEY."
            raise ApiError(401, message, headers={"www-authenticate": "Bearer"})

    return Depends(check)


class Gate:
    """Middleware that gives requests an id, bounds their bodies, and logs them."""

    def __init__(self, app: ASGIApp, *, body_bytes: int, log: Log) -> None:
        """Wraps an application; request bodies have at most `body_bytes`."""
        self._app, self._body_bytes, self._log = app, body_bytes, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.monotonic(), Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record: dict[str, Any] = {
            "event": "request",
            "id": given if _ID.fullmatch(given) else uuid.uuid4().hex,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": 0,
        }
        scope.setdefault("state", {})["record"] = record
        if scope["method"] == "HEAD":  # Answered as GET; the HTTP server sends no body.
            scope = {**scope, "method": "GET"}

        async def give(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                own = {"x-request-id": record["id"], "x-content-type-options": "nosniff"}
                MutableHeaders(scope=message).update(own)
            await send(message)

        async def answer(error: ApiError) -> None:
            if not record["status"]:
                with contextlib.suppress(OSError):
                    await error.response()(scope, receive, give)

        try:
            if "content-length" in headers and "transfer-encoding" in headers:
                # Two answers to where the body ends: what stands in front may take the other one.
                message = "Wanted Content-Length or Transfer-Encoding. Got both."
                raise ApiError(400, message, headers={"connection": "close"})
            size = headers.get("content-length", "")
            if size.isdigit() and int(size[:20]) > self._body_bytes:
                raise self._too_large()
            await self._app(scope, self._bounded(receive), give)
        except ApiError as error:
            await answer(error)
        except asyncio.CancelledError:  # It has had its time to drain.
            record.setdefault("error", "shutting_down")
            await answer(shutting_down())
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
