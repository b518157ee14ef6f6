# SPDX-License-Identifier: Apache-2.0
"""The addresses of the server, as a FastAPI application."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import math
import re
import time
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from utio_jax.core.files import versions
from utio_jax.serving.backend import Backend, EngineStoppedError, Generate
from utio_jax.serving.delivery import Answer
from utio_jax.serving.errors import (
    ApiError,
    answer_fault,
    answer_http_error,
    answer_invalid,
    engine_ended,
)
from utio_jax.serving.limits import Limits
from utio_jax.serving.metrics import Metrics
from utio_jax.serving.model import ServedModel
from utio_jax.serving.reading import Reader, Reading
from utio_jax.serving.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)


class ErrorBody(BaseModel):
    """What is wrong, for a person and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorBody


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 500, 503, 504)
}


class Service:
    """What the addresses share.

    Attributes:
      model: that is served.
      reader: of requests.
      worker: the engine's thread.
      limits: of queues.
      slots: choices that run at once.
      answers: that are on their way.
      ready: whether everything is compiled.
      compiled: how far that is, in words.
      dead: what has ended the engine; None: it runs.
      metrics: counters.
    """

    def __init__(
        self, model: ServedModel, worker: Backend, *, capacity: int, slots: int, limits: Limits
    ) -> None:
        """Serves nothing yet."""
        self.model, self.worker, self.limits, self.slots = model, worker, limits, slots
        self.reader = Reader(model, capacity=capacity, limits=limits)
        self.answers: set[Answer] = set()
        self.ready = False
        self.compiled = "warming up"
        self.dead: BaseException | None = None
        self.draining = False
        self.created = int(time.time())
        self.metrics = Metrics(worker, layers=model.layers)

    @functools.cached_property
    def _decode(self) -> Any:
        decode = self.model.text.tokenizer.decode
        return functools.lru_cache(maxsize=2**17)(lambda token: decode([token]))

    def begin(self, reading: Reading, request: Request) -> Answer:
        """Hands a request to the engine; returns its answer, which is yet to be sent.

        Raises:
          ApiError: the queue is full, or the request is larger than it.
        """
        worker, limits = self.worker, self.limits
        most = self.slots + limits.queue_requests
        if len(reading.tasks) > most:
            raise ApiError(
                400, f"Wanted at most {most} choices and prompts at once. Got {len(reading.tasks)}."
            )
        waiting = worker.waiting_tokens
        if worker.open_tasks + len(reading.tasks) > most or (
            waiting and waiting + reading.size > limits.queue_tokens
        ):
            raise ApiError(
                503,
                f"The queue is full: {worker.open_tasks} choices, {waiting} prompt tokens wait.",
                headers={"retry-after": str(self.retry_after())},
            )
        record = request.scope["state"]["record"]
        try:
            ticket = worker.hand_in(reading.tasks)
        except EngineStoppedError as error:
            raise engine_ended(error.cause) from None
        answer = _Tracked(
            reading,
            ticket,
            self.reader,
            request_id=record["id"],
            name_of=self._decode,
            ping_seconds=limits.ping_seconds,
            seconds=limits.request_seconds,
            record=record,
        )
        answer.service = self
        self.answers.add(answer)
        return answer

    def retry_after(self) -> int:
        """Returns the seconds in which half of what waits should be done."""
        rate = self.worker.tokens_per_second
        if not rate:  # Nobody knows yet.
            return 1
        waiting = [ticket.tasks[index] for ticket, index in self.worker.waiting]
        new = sum(task.options["max_new_tokens"] for task in waiting if isinstance(task, Generate))
        return max(1, min(60, math.ceil((self.worker.waiting_tokens + new) / rate / 2)))


class _Tracked(Answer):
    """An answer that its service knows of until it is sent."""

    service: Service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.service.answers.discard(self)
            for choice in self._choices:
                if choice.finished is not None:
                    self.service.metrics.finished(choice.finished)


def make_app(service: Service) -> FastAPI:
    """Returns the application. `Gate` stands before it."""
    known = versions()
    app = FastAPI(
        title="utio-jax serve",
        version=known.get("utio-jax", "0"),
        description="OpenAI-compatible completions and chat, with a depth per token.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(Exception, answer_fault)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokenizer(app, service)
    _add_life(app, service, known)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    def responses(example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
        content = {
            "application/json": {"schema": {"type": "object"}, "example": example},
            "text/event-stream": {"example": "data: {...}\n\n"},
        }
        return {200: {"description": "Whole, or events where stream=true.", "content": content}}

    text = responses({"choices": [{"index": 0, "text": "..."}]})
    message = responses({"choices": [{"index": 0, "message": {"content": "..."}}]})

    @app.post("/v1/completions", responses=text)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        return service.begin(await service.reader.completion(body), request)

    @app.post("/v1/chat/completions", responses=message)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation, by the model's own chat template."""
        return service.begin(await service.reader.chat(body), request)


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        return service.model.card(context=service.reader.room, created=service.created)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the one model."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Tells of the one model."""
        service.reader.check_model(name)
        return card()


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    reader, model = service.reader, service.model

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Returns the token ids of a text, or of messages."""
        reader.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Wanted prompt or messages, one of the two.", param="prompt")
        if body.messages is not None:
            ids = await reader.conversation(body.messages)
        else:
            assert body.prompt is not None
            opened = body.add_special_tokens is not False
            ids = (await reader.encode([body.prompt], opened=opened))[0]
        return {"count": ids.size, "max_model_len": reader.room, "tokens": ids.tolist()}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Returns the text of token ids."""
        reader.check_model(body.model)
        vocab = model.text.decoder.config.vocab_size
        if body.tokens and max(body.tokens) >= vocab:
            raise ApiError(400, f"Wanted token ids below {vocab}.", param="tokens")
        tokenizer: Any = model.text.tokenizer
        found = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": found}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Tells what clients need that make prompts themselves."""
        special = {
            name: model.special_tokens.get(name) for name in ("eos_token", "bos_token", "pad_token")
        }
        return {
            "tokenizer_class": "utio-jax",
            **special,
            "chat_template": None if model.chat is None else model.chat.template,
            "model_max_length": reader.room,
        }


def _add_life(app: FastAPI, service: Service, known: dict[str, str]) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the process can work."""
        if service.dead is not None:
            return engine_ended(service.dead).response()
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken: compiled, and not on the way out."""
        if service.dead or service.draining or not service.ready:
            state = "draining" if service.draining else service.compiled
            state = "ended" if service.dead else state
            return ApiError(503, f"Not ready: {state}.", code="not_ready").response()
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Tells the versions of what runs."""
        return {"version": known.get("utio-jax", "from a checkout"), **known}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        """Browsers ask for one; there is none."""
        return Response(status_code=204)

    page = resources.files("utio_jax.serving").joinpath("page.html").read_text("utf-8")
    policy = page_policy(page)

    @app.get("/", response_class=HTMLResponse)
    async def root() -> Response:
        """A page to try it."""
        return HTMLResponse(page, headers={"content-security-policy": policy})


def page_policy(page: str) -> str:
    """Returns the Content-Security-Policy under which a page's own style and script run alone."""

    def hashed(tag: str) -> str:
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in inner]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; style-src {hashed('style')}; script-src {hashed('script')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
