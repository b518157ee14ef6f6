# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}`, always."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from utio_jax.devices import ProcessLostError

_TYPES = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "overloaded"),
    504: ("server_error", "request_timeout"),
}


class ApiError(HTTPException):
    """An answer other than 200, with all that a client needs to act on it.

    Attributes:
      status_code: of HTTP.
      message: what was wanted, what came, what to do.
      param: the field that is wrong, if it is one.
      code: for programs; None: by the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Makes an error; `headers` go with its answer."""
        super().__init__(status_code=status, detail=message, headers=headers)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        """Returns the error object."""
        return error_body(self.status_code, self.message, param=self.param, code=self.code)

    def response(self) -> JSONResponse:
        """Returns the answer."""
        return JSONResponse(self.body(), status_code=self.status_code, headers=self.headers)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the error object of a status."""
    kind, usual = _TYPES.get(status, _TYPES[400 if status < 500 else 500])
    inner = {"message": message, "type": kind, "param": param, "code": code or usual}
    return {"error": inner}


def event_of(error: ApiError) -> bytes:
    """Returns an error as an event of a stream that has begun."""
    return f"data: {json.dumps(error.body())}\n\n".encode()


async def answer_http_error(_: Request, error: Any) -> JSONResponse:
    """Returns the answer to any `HTTPException`, those of the framework included."""
    if isinstance(error, ApiError):
        return error.response()
    message = {
        404: "There is no such address here. See /openapi.json for those that there are.",
        405: "This address does not take that method. See /openapi.json.",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def answer_fault(_: Request, __: Exception) -> JSONResponse:
    """Returns the answer to a fault of the server. What stands before it logs which one."""
    return fault().response()


def fault() -> ApiError:
    """Returns the error of a fault of the server."""
    return ApiError(500, "A fault of this server. It was logged under the request's id.")


def engine_ended(cause: BaseException | None) -> ApiError:
    """Returns the error of requests whose engine is gone: 503 where it is for another process."""
    if isinstance(cause, ProcessLostError):
        said = "Another process of this engine is gone; this one ends, too."
        return ApiError(503, said, code="process_lost", headers={"retry-after": "5"})
    return ApiError(500, "The engine has ended by an error.", code="engine_dead")


async def answer_invalid(_: Request, error: Any) -> JSONResponse:
    """Returns the answer to a body of the wrong shape: 400, and which field it is."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    # Of a list that may be of several kinds, not that it is no text, but that it is too long.
    sizes = [each for each in errors if each.get("type") in ("too_long", "too_short")]
    first = (sizes or errors)[0]
    # Names may be the client's own, and as long as its body; kinds that were tried are no names.
    kinds = re.compile(r"str$|constrained-|list\[")
    place = [str(part)[:80] for part in first.get("loc", ())[:8] if part != "body"]
    place = [part for part in place if not kinds.match(part)]
    kind, said = first.get("type"), str(first.get("msg", "it is wrong"))[:500]
    if kind == "json_invalid":
        return ApiError(400, f"Wanted a body in JSON. {first['ctx']['error']}.").response()
    if not place and kind in ("missing", "model_attributes_type", "dict_type"):
        return ApiError(
            400, "Wanted a JSON object as body, and Content-Type: application/json."
        ).response()
    if not place and kind == "value_error":  # A field that is refused by name.
        said = str(first["ctx"]["error"])
        return ApiError(400, said, param=said.partition(" ")[0], code="unsupported").response()
    return ApiError(
        400, f"{'.'.join(place)}: {said}.", param=place[0] if place else None
    ).response()
