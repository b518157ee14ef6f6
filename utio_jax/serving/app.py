# SPDX-License-Identifier: Apache-2.0
"""The server's routes as an ASGI application over one engine.

app = Application(model, slots=8)
uvicorn.run(app)                     # or any other ASGI server that speaks "lifespan"
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from utio_jax.core.files import versions
from utio_jax.engine import Engine, Shapes, plan_mode
from utio_jax.engine.depths import thresholds_of
from utio_jax.engine.slots import Served
from utio_jax.serving.answers import Answer
from utio_jax.serving.engine import PromptScorer
from utio_jax.serving.gate import (
    ApiError,
    Gate,
    Log,
    add_handlers,
    engine_ended,
    key_check,
    log_line,
    note_fault,
)
from utio_jax.serving.metrics import Metrics
from utio_jax.serving.model import Limits, ServedModel
from utio_jax.serving.pieces import Piece, PieceReader
from utio_jax.serving.requests import Reader, Reading
from utio_jax.serving.schema import (
    MOST_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from utio_jax.serving.worker import Worker

_STEPS = 8
"""New tokens of each running row in a block, between which requests come and go."""

_LONGEST_RETRY = 60
"""Most seconds of a `Retry-After`: clients of OpenAI's library do not wait longer."""


class Application:
    """An ASGI application that serves one model, from its "lifespan.startup" to its shutdown.

    Attributes:
      model: that is served.
      reader: of requests.
      worker: the engine's thread.
      limits: of queues and times.
      key: that requests bring; None: none.
      slots: choices that run at once.
      planned: whether a depth per token pays here, in words; empty where that was not timed.
      compiled: progress of compilation, in words.
      ready: whether everything is.
      dead: the error that ended the engine; None while it runs.
      on_change: called on the loop where it has become `ready`, or `dead`.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        slots: int = 8,
        capacity: int | None = None,
        shapes: Shapes = Shapes(),
        limits: Limits = Limits(),
        key: str | None = None,
        log: Log = log_line,
        prefix_cache: int | str = 0,
    ) -> None:
        """Stores the options; compilation starts with the lifespan.

        Slots have `capacity` tokens, prompt included, by default 2048; at most the model's context.
        Compiled programs have the given shapes. `log` is given each event, as a record. K/V that
        requests share may take `prefix_cache` bytes, see `Engine`.

        Raises:
          ValueError: the key is empty, the mode cannot serve a policy of `model.budgets`, or see
            `Engine`.
          TypeError: the model's chat template is neither text nor like a `ChatTemplate`.
        """
        if key == "":
            raise ValueError(
                "Wanted a key of at least one character, or None for a server without one. Got an "
                "empty text. Is the variable set that it was read from?"
            )
        engine = Engine(
            model.text.decoder,
            model.text.params,
            tokenizer=model.text.tokenizer,
            slots=slots,
            capacity=model.slot_tokens(capacity),
            mode=model.mode,
            prefill=model.prefill,
            steps=_STEPS,
            shapes=shapes,
            alternatives=min(MOST_LOGPROBS, model.text.decoder.config.vocab_size),
            logits_processor=model.logits_processor,
            prefix_cache=prefix_cache,
        )
        for budget, policy in model.budgets.items():
            try:
                thresholds_of(policy, engine.mode, engine.served.decoder)
            except ValueError as error:
                raise ValueError(
                    f"Wanted budgets that the served mode can run. Budget {budget:g}: {error}"
                ) from error
        if model.no_chat:
            log({"event": "no_chat", "why": model.no_chat})
        self.model, self.limits, self.slots = model, limits, slots
        self.reader = Reader(model, capacity=engine.served.capacity, limits=limits)
        self.worker = Worker(
            engine,
            PromptScorer(engine.served),
            on_ready=self._ready,
            on_death=self._died,
            on_progress=self._compiled,
            plan=functools.partial(self._planned, engine.served),
        )
        self.compiled, self.ready, self.planned = "warming up", False, ""
        self.retry_after = 1  # Seconds, until it is ready.
        self.dead: BaseException | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._log, self.key = log, key
        self.metrics = Metrics(self.worker, layers=model.layers)
        self._gate = Gate(_routes(self), body_bytes=limits.body_bytes, log=log)
        self._created, self._compiling_since = int(time.time()), 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await self._gate(scope, receive, send)

    def check_ready(self) -> None:
        """Raises ApiError until everything is compiled, and once the engine has ended."""
        if self.dead is not None:
            raise engine_ended()
        if not self.ready:
            message = f"Not ready: {self.compiled}. Retry in {self.retry_after} s."
            headers = {"retry-after": str(self.retry_after)}
            raise ApiError(503, message, code="not_ready", headers=headers)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Runs the engine, which starts to compile, and ends it after its current block."""
        self.worker.start()
        yield
        self.worker.stop()

    def begin(self, reading: Reading, request: Request) -> Answer:
        """Queues a request for the engine; returns the answer to send.

        Raises:
          ApiError: it is not ready, the queue is full, or the request is larger than it.
        """
        self.check_ready()
        worker, limits, count = self.worker, self.limits, len(reading.tasks)
        most = self.slots + limits.queue_requests
        if count > most:
            message = f"Wanted at most {most} choices and prompts at once. Got {count}."
            raise ApiError(400, message)
        if (opened := len(worker.open_tasks)) + count > most:
            message = f"The queue is full: {opened} choices are open. Retry in 1 s."
            raise ApiError(429, message, headers={"retry-after": "1"})
        results = worker.hand_in(reading.tasks)
        return Answer(self, reading, results, request.scope["state"]["record"])

    def card(self) -> dict[str, Any]:
        """Returns the model as `/v1/models` lists it."""
        model, context = self.model, self.reader.context
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "utio-jax",
            "max_model_len": context,
            "utio": {
                "mode": model.mode.name,
                "default_mode": "plain" if self.reader.in_full else model.mode.name,
                "layers": model.layers,
                "exits": list(model.text.decoder.config.exits),
                "policy": model.policy,
                "budget": model.budget,
                "budgets": sorted(model.budgets),
                "prompt_budget": model.prompt_budget,
                "chat": model.chat is not None,
                "context_length": context,
            },
        }

    @functools.cached_property
    def pieces(self) -> Callable[[int], Piece]:
        """Returns a token's own name and bytes."""
        return functools.lru_cache(maxsize=2**17)(PieceReader(self.model.text.tokenizer))

    def _planned(self, served: Served) -> None:
        """Times a depth per token; if it is not faster, requests run in full by default.

        In the engine's thread, before requests are taken; nothing without the model's histogram.
        """
        if self.model.histogram is None:
            return
        record: dict[str, Any] = {"event": "planned"}
        try:
            plan = plan_mode(served, self.model.histogram, progress=self._timed)
        except (ValueError, RuntimeError) as error:
            # No room on the machine or in a slot: it stays as the operator asked for it.
            self._log({**record, "why": str(error)})
            return
        ratio = plan.speedup
        self.reader.in_full = ratio <= 1
        budget = self.model.budget
        name = "the depth policy" if budget is None else f"a budget of {budget:g}"
        share = "by it" if budget is None else f"at {budget:g}"
        self.planned = (
            f"With all {self.slots} slots busy, {name} is predicted to be {ratio:.2f} times as "
            "fast as full depth: requests that name neither a mode nor a budget run "
            f"{'in full' if self.reader.in_full else share}."
        )
        record |= {"speedup": round(ratio, 3), "why": self.planned}
        milliseconds = [round(1e3 * seconds, 4) for seconds in (plan.seconds, plan.plain_seconds)]
        self._log(record | dict(zip(("ms", "plain_ms"), milliseconds, strict=True)))

    def _timed(self, done: int, kinds: int) -> None:
        self.compiled = f"timing steps to plan depths, {done} of {kinds}"
        self._log({"event": "timing", "done": done, "kinds": kinds})

    def _compiled(self, done: int, programs: int) -> None:
        now = time.monotonic()
        if not done:
            self._compiling_since = now
        seconds = now - self._compiling_since
        left = round(seconds * (programs - done) / done) if done else None
        self.compiled = f"compiling, {done} of {programs} programs"
        if left is not None:
            self.compiled += f", about {left} s left"
            self.retry_after = min(max(left, 1), _LONGEST_RETRY)
        self._log({"event": "compiling", "done": done, "programs": programs, "seconds_left": left})

    def _ready(self) -> None:
        self.ready = True
        self.on_change()

    def _died(self, error: BaseException) -> None:
        self.dead = error
        record: dict[str, Any] = {"event": "engine_died"}
        note_fault(record, error)
        if not self.ready:
            record["why"] = str(error)  # No prompt is quoted there.
        self._log(record)
        self.on_change()


def _routes(service: Application) -> FastAPI:
    """Returns the routes."""
    error = {"schema": {"type": "object", "required": ["error"]}}
    app = FastAPI(
        title="utio-jax serve",
        version=versions().get("utio-jax", "0"),
        description="OpenAI-compatible completions and chat, with a depth per token. Every error "
        'is {"error": {"message", "type", "param", "code"}}.',
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # FastAPI would name a 422, which no address answers.
        responses={"default": {"description": "An error.", "content": {"application/json": error}}},
        lifespan=service.lifespan,
    )
    add_handlers(app)
    closed = APIRouter(dependencies=[key_check(lambda: service.key)])
    _add_generation(closed, service)
    _add_models(closed, service)
    app.include_router(closed)
    _add_life(app, service)
    return app


def _add_generation(app: APIRouter, service: Application) -> None:
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    about = "Whole, or events where stream=true."
    responses: Any = {200: {"description": about, "content": content}}

    @app.post("/v1/completions", responses=responses)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        return service.begin(await service.reader.completion(body), request)

    @app.post("/v1/chat/completions", responses=responses)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation, by the model's own chat template."""
        return service.begin(await service.reader.chat(body), request)


def _add_models(app: APIRouter, service: Application) -> None:
    reader = service.reader

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the one model."""
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Returns the one model."""
        reader.check_model(name)
        return service.card()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Returns the token ids of a text, or of messages."""
        reader.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Wanted prompt or messages, one of the two.", param="prompt")
        if body.messages is not None:
            if body.add_special_tokens:
                message = (
                    "Wanted add_special_tokens=false with messages: the chat template writes them. "
                    "Got true. Leave it out."
                )
                raise ApiError(400, message, param="add_special_tokens")
            ids = await reader.conversation(body.messages)
        else:
            assert body.prompt is not None
            opened = body.add_special_tokens is not False
            (ids,) = await reader.encode([body.prompt], opened=opened)
        return {"count": ids.size, "max_model_len": reader.context, "tokens": ids.tolist()}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Returns the text of token ids."""
        reader.check_model(body.model)
        vocab = service.model.text.decoder.config.vocab_size
        if body.tokens and max(body.tokens) >= vocab:
            raise ApiError(400, f"Wanted token ids below {vocab}.", param="tokens")
        tokenizer: Any = service.model.text.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Returns the tokenizer's settings, for clients that render prompts themselves."""
        model, names = service.model, ("eos_token", "bos_token", "pad_token")
        return {
            "tokenizer_class": "utio-jax",
            **{name: model.special_tokens.get(name) for name in names},
            "chat_template": None if model.chat is None else model.chat.template,
            "model_max_length": reader.context,
        }


def _add_life(app: FastAPI, service: Application) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Returns 200 while the engine's thread is alive."""
        if service.dead is not None:
            service.check_ready()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str | None]:
        """Returns 200 while requests are accepted: warmed up, and the engine has not ended."""
        service.check_ready()
        mode = service.card()["utio"]["default_mode"]
        return {"status": "ready", "mode": mode, "plan": service.planned or None}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Returns counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return RedirectResponse("openapi.json")

    page = resources.files("utio_jax.serving").joinpath("page.html").read_text("utf-8")
    policy = {"content-security-policy": _page_policy(page)}

    @app.get("/", response_class=HTMLResponse)
    async def root() -> Response:
        """Returns a page to try the model."""
        return HTMLResponse(page, headers=policy)


def _page_policy(page: str) -> str:
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
