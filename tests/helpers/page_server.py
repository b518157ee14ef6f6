# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the HTTP server around the page.

By itself it streams a comment and two tokens. After `take_over` a test sends each event itself, and
so decides when and how a stream is cut into pieces.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import queue
import re
import select
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import utio_jax
from utio_jax.serving.app import _page_policy

PAGE = Path(utio_jax.__file__).parent / "serving" / "page.html"

MODEL: dict[str, Any] = {
    "id": "stand-in-16",
    "object": "model",
    "created": 0,
    "owned_by": "utio-jax",
    "utio": {
        "mode": "adaptive",
        "layers": 16,
        "budgets": [0.4, 0.5, 0.6, 0.8],
        "budget": 0.6,
        "prompt_budget": 0.5,
        "chat": False,
        "context_length": 2048,
    },
}


def inline_texts(html: str) -> dict[str, list[str]]:
    return {
        tag: re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, flags=re.DOTALL)
        for tag in ("style", "script")
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it came."""

    path: str
    key: str | None
    body: Any


class StandIn:
    """The server, and what a test sets.

    Attributes:
      url: where the page is.
      models: what `/v1/models` lists.
      key: the API key that requests have to bring; None asks for none.
      policy: whether the page comes with its Content-Security-Policy.
      refusal: status, headers and body that answer the next request for text, once.
      warming: what `/ready` says, one after the other, before it is.
      plan: what it says of depths per token then.
      asked: requests for text, oldest first.
      left: set when a client went away before its answer was complete.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/"
        self.models = [copy.deepcopy(MODEL)]
        self.key: str | None = None
        self.policy = True
        self.refusal: tuple[int, dict[str, str], bytes] | None = None
        self.warming: list[str] = []
        self.plan: str | None = None
        self.asked: list[Asked] = []
        self.left = threading.Event()
        self._told: queue.Queue[bytes | None] | None = None

    def take_over(self) -> None:
        """From now on streams hold what `send` and `send_bytes` say, until `end`."""
        self._told = queue.Queue()

    def send_bytes(self, data: bytes) -> None:
        assert self._told is not None
        self._told.put(data)

    def send(self, event: Any) -> None:
        self.send_bytes(event_bytes(event))

    def send_text(self, *pieces: str, depths: tuple[int, ...] = (), **choice: Any) -> None:
        self.send(text_chunk(pieces, depths, **choice))

    def end(self, *, done: bool = False) -> None:
        """Ends the stream, with the mark of a complete one or without."""
        assert self._told is not None
        if done:
            self.send("[DONE]")
        self._told.put(None)

    def stream(self, *, chat: bool) -> Iterator[bytes | None]:
        """Yields what to write into an answer; None where nothing is to be said yet."""
        if self._told is None:
            yield b": ping\n\n"
            said = text_chunk(("def", " x"), (4, 16), chat=chat, finish_reason="length")
            for event in (said, usage_chunk(7, 2, mean_depth_decided=10.0), "[DONE]"):
                yield event_bytes(event)
            return
        while True:
            try:
                data = self._told.get(timeout=0.02)
            except queue.Empty:
                yield None
                continue
            if data is None:
                return
            yield data


def event_bytes(event: Any) -> bytes:
    text = event if isinstance(event, str) else json.dumps(event)
    return f"data: {text}\n\n".encode()


def text_chunk(
    pieces: tuple[str, ...], depths: tuple[int, ...] = (), *, chat: bool = False, **choice: Any
) -> dict[str, Any]:
    text = "".join(pieces)
    chosen = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
    chosen |= {"delta": {"content": text}} if chat else {"text": text}
    if depths:
        chosen["utio"] = {"pieces": list(pieces), "depths": list(depths)}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "a-1", "object": kind, "created": 0, "model": "stand-in-16", "choices": [chosen]}


def usage_chunk(prompt: int, completion: int, **about: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage |= {"total_tokens": prompt + completion, "utio": about}
    return {"id": "a-1", "object": "text_completion", "created": 0, "choices": [], "usage": usage}


_JSON = {"Content-Type": "application/json"}


class _Answers(BaseHTTPRequestHandler):
    stand_in: StandIn

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Keeps tests quiet."""

    def do_GET(self) -> None:
        if self.path == "/":
            html = PAGE.read_bytes()
            headers = {"Content-Type": "text/html; charset=utf-8"}
            if self.stand_in.policy:
                headers["Content-Security-Policy"] = _page_policy(html.decode())
            self._answer(200, headers, html)
        elif self.path == "/v1/models":
            if self._may():
                listed = {"object": "list", "data": self.stand_in.models}
                self._answer(200, _JSON, json.dumps(listed).encode())
        elif self.path == "/ready":
            if self.stand_in.warming:
                self._answer(503, _JSON, refusal_body(self.stand_in.warming.pop(0)))
            else:
                said = {"status": "ready", "plan": self.stand_in.plan}
                self._answer(200, _JSON, json.dumps(said).encode())
        elif self.path == "/favicon.ico":  # Browsers ask for it by themselves.
            self._answer(204, {}, b"")
        else:
            self._answer(404, {}, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        self.stand_in.asked.append(Asked(path=self.path, key=self._key(), body=body))
        if self.stand_in.refusal:
            status, headers, refusal = self.stand_in.refusal
            self.stand_in.refusal = None
            self._answer(status, headers, refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for data in self.stand_in.stream(chat=self.path == "/v1/chat/completions"):
                if self._client_left():
                    raise ConnectionResetError
                if data:
                    self.wfile.write(data)
                    self.wfile.flush()
        except ConnectionError:
            self.stand_in.left.set()

    def _key(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def _may(self) -> bool:
        if self.stand_in.key in (None, self._key()):
            return True
        kind = {"type": "authentication_error", "code": "invalid_api_key"}
        self._answer(401, _JSON, refusal_body("Wanted an API key.", **kind))
        return False

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        with contextlib.suppress(BlockingIOError):
            return not self.connection.recv(1, socket.MSG_PEEK)
        return False


def refusal_body(message: str, **fields: Any) -> bytes:
    error = {"message": message, "type": None, "param": None, "code": None, **fields}
    return json.dumps({"error": error}).encode()


@contextlib.contextmanager
def stand_in_server() -> Iterator[StandIn]:
    """Runs the server on a free port of this machine, until the block is left."""
    handler = type("Answers", (_Answers,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        stand_in = handler.stand_in = StandIn(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield stand_in
        finally:
            server.shutdown()
            thread.join()
