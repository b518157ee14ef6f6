# SPDX-License-Identifier: Apache-2.0
"""Sends answers, whole or as they come, and ends what nobody waits for any more.

Starlette ends a stream whose client has left, but lets a handler that answers at once run on. Here
both wait for news of the engine and of the client at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from utio_jax.engine.requests import Event
from utio_jax.serving.answers import Choice, joined, usage_of
from utio_jax.serving.backend import EngineStoppedError, Generate, Ticket
from utio_jax.serving.errors import ApiError, engine_ended, event_of, fault
from utio_jax.serving.gate import note_fault
from utio_jax.serving.prompt_scores import PromptScores
from utio_jax.serving.reading import Reader, Reading

_NEVER_AGAIN = {"x-should-retry": "false"}


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


class Answer(Response):
    """The answer to a generation: sent while, or after, the engine works on it."""

    def __init__(
        self,
        reading: Reading,
        ticket: Ticket,
        reader: Reader,
        *,
        request_id: str,
        name_of: Any,
        ping_seconds: float,
        seconds: float,
        record: dict[str, Any],
    ) -> None:
        """Makes an answer whose tasks the engine has.

        Args:
          reading: the request.
          ticket: its tasks.
          reader: of the served model.
          request_id: names it.
          name_of: returns a token's own text.
          ping_seconds: between comments in a silent stream.
          seconds: that it may take.
          record: what is logged of the request; numbers are added to it.
        """
        super().__init__(status_code=200)
        self._reading, self._ticket, self._reader = reading, ticket, reader
        self._ping, self._record, self._created = ping_seconds, record, int(time.time())
        self._end = time.monotonic() + seconds
        chat = reading.wanted.chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + request_id
        self._kind = "chat.completion" if chat else "text_completion"
        each = reading.choices // len(reading.prompts)
        tokenizer = reader.model.text.tokenizer
        self._choices = [
            Choice(
                index,
                reading.prompts[index // each],
                reading.wanted,
                tokenizer=tokenizer,
                name_of=name_of,
            )
            for index in range(reading.choices)
        ]
        self._each = each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it; whatever ends this, slots become free."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._reading.stream else self._whole(send))
        except (ClientLeftError, OSError) as error:
            self._record["left"] = type(error).__name__
        finally:
            watcher.cancel()
            self._ticket.cancel()
            self._note()

    def end(self, error: ApiError) -> None:
        """Ends it early, with an error."""
        self._ticket.news.put_nowait((-1, error))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._ticket.news.put_nowait((-1, ClientLeftError()))

    async def _parts(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yields parts of choices as they come; None where nothing has for a while.

        Raises:
          ApiError: it ended otherwise than by its own tokens.
          ClientLeftError: the client did.
        """
        echoed: set[int] = set()
        if self._reading.echo is not None and self._reading.wanted.logprobs is None:
            for part in self._echo(range(len(self._reading.prompts)), None):
                yield part
            echoed = set(range(len(self._reading.prompts)))
        waiting: list[tuple[int, Event]] = []  # New tokens whose prompt has no scores yet.
        while not (self._ticket.done and self._ticket.news.empty()):
            left = self._end - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(self._ping, left))):
                    index, news = await self._ticket.news.get()
            except TimeoutError:
                if left <= self._ping:
                    raise _too_slow() from None
                yield None
                continue
            if isinstance(news, Exception):
                raise _as_error(news)
            target = self._reading.choice_of[index]
            if isinstance(news, PromptScores):
                for part in self._echo([target], news):
                    yield part
                echoed.add(target)
                ready = [each for each in waiting if each[0] // self._each == target]
                waiting = [each for each in waiting if each[0] // self._each != target]
            elif self._reading.echo is not None and target // self._each not in echoed:
                waiting.append((target, news))
                ready = []
            else:
                ready = [(target, news)]
            for choice, event in ready:
                if event.finished is not None and event.finished.reason == "deadline":
                    raise _too_slow()
                part = self._choices[choice].add(event)
                if part is not None:
                    yield part

    async def _guarded(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yields the same; a fault here is an error to the client, too, and logged."""
        try:
            async for part in self._parts():
                yield part
        except (ApiError, ClientLeftError):
            raise
        except Exception as error:
            note_fault(self._record, error)
            raise fault() from error

    def _echo(self, prompts: Any, scores: PromptScores | None) -> list[dict[str, Any]]:
        parts = []
        assert self._reading.echo is not None
        silent = not any(isinstance(task, Generate) for task in self._reading.tasks)
        for row in prompts:
            for choice in self._choices[row * self._each : (row + 1) * self._each]:
                part = choice.echo(self._reading.echo[row], scores)
                part["finish_reason"] = "length" if silent else None
                parts.append(part)
        return parts

    async def _whole(self, send: Send) -> None:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        try:
            async for part in self._guarded():
                if part is not None:
                    parts[part["index"]].append(part)
        except ApiError as error:
            await _send_json(send, error.status_code, error.body(), error.headers)
            return
        body = self._frame([joined(each) for each in parts]) | {"usage": self._usage()}
        await _send_json(send, 200, body)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        begun = False

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:  # Only now: what fails before has a status of its own.
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for part in self._guarded():
                frame = b": ping\n\n" if part is None else _event(self._frame([part], chunk=True))
                await write(frame)
        except ApiError as error:
            if not begun:
                await _send_json(send, error.status_code, error.body(), error.headers)
                return
            self._record["error"] = error.body()["error"]["code"]
            await write(event_of(error), more=False)
            return
        if self._reading.include_usage:
            await write(_event(self._frame([], chunk=True) | {"usage": self._usage()}))
        await write(b"data: [DONE]\n\n", more=False)

    def _frame(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        kind = self._kind + (".chunk" if chunk and self._reading.wanted.chat else "")
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._reader.model.name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        finished = [each.finished for each in self._choices if each.finished is not None]
        tokens = sum(prompt.size for prompt in self._reading.prompts)
        return usage_of(finished, prompt_tokens=tokens, about=self._reading.about)

    def _note(self) -> None:
        usage = self._usage()
        depth = usage["utio"]["mean_depth_decided"]
        self._record |= {
            "prompt_tokens": usage["prompt_tokens"],
            "new_tokens": usage["completion_tokens"],
            "mode": self._reading.about["mode"],
            "mean_depth": None if depth is None else round(depth, 3),
            "seconds_to_first_token": usage["utio"]["seconds_to_first_token"],
        }


def _too_slow() -> ApiError:
    return ApiError(
        504,
        "The answer took longer than this server gives to one. Ask for less.",
        headers=_NEVER_AGAIN,
    )


def _as_error(news: Exception) -> Exception:
    if isinstance(news, (ApiError, ClientLeftError)):
        return news
    if isinstance(news, EngineStoppedError):
        return engine_ended(news.cause)
    return ApiError(400, str(news)[:500]) if isinstance(news, ValueError) else news


def _event(frame: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


async def _send_json(send: Send, status: int, body: dict[str, Any], headers: Any = None) -> None:
    data = json.dumps(body).encode()
    named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    named += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": named})
    with contextlib.suppress(OSError):
        await send({"type": "http.response.body", "body": data})
