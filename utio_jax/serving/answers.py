# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's format, sent whole or as a stream.

Starlette cancels a stream whose client has left, but not a handler that answers at once. Here
both wait for the engine and the client at the same time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from utio_jax.decoding.requests import Completion, Event
from utio_jax.decoding.state import Columns
from utio_jax.decoding.text import TextReader
from utio_jax.serving.gate import ApiError, engine_ended, fault, note_fault, shutting_down
from utio_jax.serving.pieces import token_name
from utio_jax.serving.requests import Reading
from utio_jax.serving.worker import EngineStoppedError, Results

if TYPE_CHECKING:
    from utio_jax.serving.app import Application

_NOT_NUMBERS = "The model's logits are NaN: its numbers overflowed, or its weights hold NaN."
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""What ends a choice, in OpenAI's words. Other ends of the engine's are errors here."""


class Choice:
    """One choice of an answer, while tokens arrive."""

    def __init__(
        self, service: Application, index: int, prompt: np.ndarray, reading: Reading
    ) -> None:
        self.index, self.prompt, self.reading = index, prompt, reading
        self.finished: Completion | None = None
        # Of its tokens so far: the log counts these, however the choice ends.
        self.new_tokens = self.decided = 0
        self.first_at: float | None = None
        self._pieces, self._role = service.pieces, reading.chat
        # Where the next token begins in the choice's text, and where its new text does.
        self._offset = self._prompt_end = 0
        self._echoed = ""
        self._tokenizer = service.model.text.tokenizer
        self._reader: TextReader | None = None  # Of its new text, where offsets are wanted.
        # Of its tokens so far, where they are wanted.
        utio = reading.body.utio
        self._depths: list[int] | None = [] if utio is not None and utio.depths else None

    def echo(self, text: str, scores: Columns | None) -> dict[str, Any]:
        """Returns the choice's first part where the prompt belongs to it."""
        if scores is not None and np.isnan(scores.log_probabilities[1:]).any():
            raise ApiError(500, _NOT_NUMBERS)  # The first has no prediction.
        depths = [(text, 0)] if self._depths is not None else None
        self._echoed = text
        part = self._part(text, scores, self.prompt, depths, reason=None)
        self._offset = self._prompt_end = len(text)
        return part

    def add(self, event: Event) -> dict[str, Any] | None:
        """Returns the new part of a choice for a streamed chunk, or None."""
        reason = None
        if event.token_ids.size and self.first_at is None:
            self.first_at = time.monotonic()
        self.new_tokens += event.token_ids.size
        self.decided += int(event.decided.sum())
        if event.finished is not None:
            if event.finished.reason == "nan":
                raise ApiError(500, _NOT_NUMBERS)
            self.finished = event.finished
            reason = FINISH_REASONS[event.finished.reason]
        if not event.text and not event.token_ids.size and reason is None:
            return None
        depths, known = None, self._depths
        if known is not None:
            known += event.decided.tolist()
            depths = [(piece, known[number]) for piece, number in event.pieces]
        tokens = event if self.reading.logprobs is not None else None
        return self._part(event.text, tokens, event.token_ids, depths, reason=reason)

    def _part(
        self,
        text: str,
        tokens: Columns | None,
        ids: np.ndarray,
        depths: list[tuple[str, int]] | None,
        *,
        reason: str | None,
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"index": self.index}
        logprobs = self._chat_logprobs if self.reading.chat else self._list_logprobs
        logs = None if tokens is None else logprobs(tokens)
        if self.reading.chat:
            part["delta"] = {"role": "assistant"} if self._role else {}
            if text or self._role:
                part["delta"]["content"] = text
            self._role = False
        else:
            part["text"] = text
        part |= {"logprobs": logs, "finish_reason": reason}
        if depths is not None:
            pieces, numbers = [piece for piece, _ in depths], [depth for _, depth in depths]
            part["utio"] = {"pieces": pieces, "depths": numbers}
        if self.reading.body.return_token_ids:
            part["token_ids"] = ids.tolist()
        return part

    def _list_logprobs(self, tokens: Columns) -> dict[str, Any]:
        names = [self._pieces(int(token)).name for token in tokens.token_ids]
        numbers = [_number(log_probability) for log_probability in tokens.log_probabilities]
        tops, count = [], self.reading.logprobs or 0
        for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
            if number is None:
                tops.append(None)
                continue
            top = {name: number} if count else {}
            for token, value in self._top(tokens, place, count):
                if token == int(tokens.token_ids[place]):
                    continue
                other = self._pieces(token).name
                # Some vocabularies spell one text by two tokens.
                top[token_name(token) if other in top else other] = value
            tops.append(top)
        return {
            "tokens": names,
            "token_logprobs": numbers,
            "top_logprobs": tops,
            "text_offset": self._starts(tokens),
        }

    def _starts(self, tokens: Columns) -> list[int]:
        """Returns where in the choice's text each token begins, in characters.

        Tokens of one character begin where it does. After a stop string, all are at the end.
        """
        size, echoed, starts = math.inf, "", list[int]()
        if not isinstance(tokens, Event):
            size, echoed, reader = len(self._echoed), self._echoed, TextReader(self._tokenizer, ())
        else:
            reader = self._reader = self._reader or TextReader(self._tokenizer, self.prompt)
            if tokens.finished is not None:
                size = self._prompt_end + len(tokens.finished.text)
        for token in tokens.token_ids:
            text, piece = reader.add(int(token)), self._pieces(int(token))
            if not text and echoed.startswith(piece.name, self._offset):
                text = piece.name  # A special piece that the prompt spells.
            end = self._offset + len(text)
            # What the token itself adds: its text may end characters that others have begun.
            own = len(piece.name) if piece.is_text else len(text)
            starts.append(int(min(max(self._offset, end - own), size)))
            self._offset = end
        return starts

    def _chat_logprobs(self, tokens: Columns) -> dict[str, Any]:
        content = []
        for place, (token, number) in enumerate(
            zip(tokens.token_ids, tokens.log_probabilities, strict=True)
        ):
            count = self.reading.logprobs or 0
            tops = [self._named(*top) for top in self._top(tokens, place, count)]
            content.append({**self._named(int(token), _number(number)), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _named(self, token: int, number: float | None) -> dict[str, Any]:
        piece = self._pieces(token)
        return {"token": piece.name, "logprob": number, "bytes": [*piece.data]}

    def _top(self, tokens: Columns, place: int, count: int) -> list[tuple[int, float]]:
        if tokens.alternatives is None:
            return []
        known = tokens.alternatives
        ids, values = known.token_ids[place][:count], known.log_probabilities[place][:count]
        return [(int(i), _number(v) or 0.0) for i, v in zip(ids, values, strict=True)]


def _number(value: Any) -> float | None:
    """Returns a log-probability as JSON can hold it: none for NaN, -9999 for -inf."""
    number = float(value)
    if math.isnan(number):
        return None
    return max(number, -9999.0)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a whole choice from the parts that a stream would have carried."""
    whole = dict(parts[0])
    chat = "delta" in whole
    texts = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
    whole["finish_reason"] = parts[-1]["finish_reason"]
    if chat:
        del whole["delta"]
        message = {"role": "assistant", "content": "".join(texts), "refusal": None}
        whole = {"index": whole.pop("index"), "message": message, **whole}
    else:
        whole["text"] = "".join(texts)
    for name in ("logprobs", "utio"):
        values = [part[name] for part in parts if part.get(name) is not None]
        if values:
            whole[name] = {
                key: None if first is None else [x for part in values for x in part[key]]
                for key, first in values[0].items()
            }
    if not chat and whole.get("logprobs") is not None:  # A stop string may span several parts.
        starts, size = whole["logprobs"]["text_offset"], len(whole["text"])
        whole["logprobs"]["text_offset"] = [min(start, size) for start in starts]
    if "token_ids" in whole:
        whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return whole


class ClientLeftError(Exception):
    """Raised when the client has closed the connection."""


class Answer(Response):
    """The answer to a generation request, streamed or sent whole."""

    def __init__(
        self, service: Application, reading: Reading, results: Results, record: dict[str, Any]
    ) -> None:
        """Stores a request whose tasks the engine has, and its log `record`."""
        super().__init__(status_code=200)
        self._reading, self._results, self._record = reading, results, record
        self._service, self._ping = service, service.limits.ping_seconds
        self._began = time.monotonic()
        self._end = self._began + service.limits.request_seconds
        kind = "chat.completion" if reading.chat else "text_completion"
        name = ("chatcmpl-" if reading.chat else "cmpl-") + record["id"]
        self._head = {"id": name, "object": kind, "created": int(time.time())}
        self._head["model"] = service.model.name
        self._each = reading.body.n or 1
        each_prompt = [prompt for prompt in reading.prompts for _ in range(self._each)]
        self.choices = [
            Choice(service, index, prompt, reading) for index, prompt in enumerate(each_prompt)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer, and frees its slots on every exit."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._reading.body.stream:
                await self._stream(send)
            else:
                await (await self._whole())(scope, receive, send)
        except (ClientLeftError, OSError) as error:
            self._record["left"] = type(error).__name__
        finally:
            watcher.cancel()
            for task in self._reading.tasks:
                self._service.worker.cancel(task)
            self._record |= self._spent()
            for choice in self.choices:
                if choice.finished is not None:
                    self._service.metrics.finished(choice.finished)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._results.put_nowait((None, ClientLeftError()))

    async def _parts(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yields parts of choices as they arrive; None after a pause.

        Raises `ApiError` where it ended otherwise than by its own tokens.
        """
        reading, prompts = self._reading, range(len(self._reading.prompts))
        open_tasks = self._service.worker.open_tasks
        # Prompts that are still to be echoed, and new tokens that come after them.
        unsaid: dict[int, list[tuple[int, Event]]] = {}
        if reading.echo is not None and reading.logprobs is not None:
            unsaid = {row: [] for row in prompts}
        elif reading.echo is not None:
            for row in prompts:
                for part in self._echo(row, None):
                    yield part
        while not (open_tasks.keys().isdisjoint(reading.tasks) and self._results.empty()):
            left = self._end - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(self._ping, left))):
                    task, news = await self._results.get()
            except TimeoutError:
                if left <= self._ping:
                    raise _too_slow() from None
                yield None
                continue
            if isinstance(news, Exception):
                raise _as_error(news)
            assert task is not None
            if not isinstance(news, Event):
                for part in self._echo(task.target, news):
                    yield part
                ready = unsaid.pop(task.target)
            else:
                ready = [(task.target, news)]
                if task.target // self._each in unsaid:
                    unsaid[task.target // self._each] += ready
                    ready = []
            for choice, event in ready:
                if event.finished is not None and event.finished.reason == "deadline":
                    raise _too_slow()
                part = self.choices[choice].add(event)
                if part is not None:
                    yield part

    def _echo(self, row: int, scores: Columns | None) -> list[dict[str, Any]]:
        assert self._reading.echo is not None
        text, first = self._reading.echo[row], row * self._each
        silent = not any(task.options for task in self._reading.tasks)
        return [
            choice.echo(text, scores) | {"finish_reason": "length" if silent else None}
            for choice in self.choices[first : first + self._each]
        ]

    async def _whole(self) -> JSONResponse:
        parts: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async for part in self._parts():
            if part is not None:
                parts[part["index"]].append(part)
        choices = [joined(choice_parts) for choice_parts in parts]
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage()})

    async def _stream(self, send: Send) -> None:
        """Sends events as they arrive; an error after the first is an event, too."""
        head, begun = dict(self._head), False
        options = self._reading.body.stream_options
        counts = options is not None and bool(options.include_usage)
        if self._reading.chat:
            head["object"] += ".chunk"
        if counts:  # Of all chunks but the last.
            head["usage"] = None

        async def write(frame: Any, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:  # Only now: what fails before has a status of its own.
                start = {"type": "http.response.start", "status": 200, "headers": _STREAM}
                await send(start)
                begun = True
            if isinstance(frame, dict):
                frame = f"data: {json.dumps(frame, separators=(',', ':'))}\n\n"
            body = {"type": "http.response.body", "body": frame.encode(), "more_body": more}
            await send(body)

        try:
            async for part in self._parts():
                await write(": ping\n\n" if part is None else {**head, "choices": [part]})
        except (ClientLeftError, OSError):
            raise
        except asyncio.CancelledError:  # It has had its time to drain.
            if begun:
                await write(shutting_down().body, more=False)
            raise
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, ApiError):
                note_fault(self._record, error)
                error = fault()
            self._record["error"] = error.body["error"]["code"]
            await write(error.body, more=False)
            return
        if counts:
            await write({**head, "choices": [], "usage": self._usage()})
        await write("data: [DONE]\n\n", more=False)

    def _spent(self) -> dict[str, Any]:
        """Returns the log's counts of tokens so far, and the time to the slowest first one."""
        new = sum(item.new_tokens for item in self.choices)
        first = [item.first_at - self._began for item in self.choices if item.first_at is not None]
        return {
            "prompt_tokens": sum(prompt.size for prompt in self._reading.prompts),
            "new_tokens": new,
            "mode": self._reading.about["mode"],
            "mean_depth": round(sum(x.decided for x in self.choices) / new, 3) if new else None,
            "seconds_to_first_token": round(max(first), 6) if first else None,
        }

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts of finished choices, with depths and times under `utio`."""
        finished = [item.finished for item in self.choices if item.finished is not None]
        read = sum(prompt.size for prompt in self._reading.prompts)
        new = sum(item.token_ids.size for item in finished)

        def mean(name: str) -> float | None:
            return sum(int(getattr(item, name).sum()) for item in finished) / new if new else None

        def longest(name: str) -> float | None:
            known = [value for item in finished if (value := getattr(item, name)) is not None]
            return round(max(known), 6) if known else None

        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": new}
        usage["total_tokens"] = read + new
        first = [item.finished for item in self.choices[:: self._reading.body.n or 1]]
        cached = sum(item.cached_tokens for item in first if item is not None)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        usage["utio"] = {
            **self._reading.about,
            "mean_depth_decided": mean("decided"),
            "mean_depth_executed": mean("executed"),
            "seconds_in_queue": longest("seconds_in_queue"),
            "seconds_to_first_token": longest("seconds_to_first_token"),
        }
        return usage


_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def _too_slow() -> ApiError:
    message = "The answer took longer than this server's time limit. Ask for fewer tokens."
    return ApiError(504, message, headers={"x-should-retry": "false"})


def _as_error(news: Exception) -> Exception:
    if isinstance(news, EngineStoppedError):
        return engine_ended()
    if isinstance(news, OSError):  # Not the client's connection, whose errors mean that it left.
        return RuntimeError(repr(news)).with_traceback(news.__traceback__)
    return ApiError(400, str(news)[:500]) if isinstance(news, ValueError) else news
