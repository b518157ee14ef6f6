# SPDX-License-Identifier: Apache-2.0
"""A server in a thread of the test, on a model of milliseconds, and the simplest of clients."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from helpers.folders import save_small_model
from helpers.generation import lively_model
from helpers.models import gated
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import Shapes
from utio_jax.models import Model, load
from utio_jax.policies.signals import Position
from utio_jax.serving import Address, Limits, ServedModel, Server
from utio_jax.staircase.prompts import PromptImportance

CONTEXT = 256
SHAPES = Shapes(prompt_tokens=(64,), prompt_widths=(CONTEXT,), groups=(2,), key_step=CONTEXT)
LENGTHS = Lengths(prompt_step=64, key_step=CONTEXT)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('No tools') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def small_folder(folder: Path, *, bos_id: int | None = 0, template: str | None = TEMPLATE) -> Path:
    """Returns a folder with a model that writes wildly, a byte tokenizer and a chat template."""
    model = lively_model(vocab_size=300, context_length=CONTEXT, bos_id=bos_id)
    save_small_model(folder, model, dtype=jnp.float32)
    config: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def budgets_of(model: Any) -> dict[float, Any]:
    """Returns policies by their budget: of one signal, so that requests may choose."""
    policy = gated(model)
    deeper = dataclasses.replace(policy, thresholds=jnp.asarray([-0.4, -0.2]))
    return {0.5: policy, 0.8: deeper}


def by_importance() -> Prefill:
    """Returns a way to read prompts in which some tokens stop early."""
    policy = PromptImportance(
        signal=Position(), deep=jnp.asarray([0.5]), at_least=1, depths=(2, 4), sinks=1
    )
    return Prefill(policy=policy)


def served_model(folder: Path, **changes: Any) -> ServedModel:
    """Returns the model of a folder with two budgets, and prompts by importance."""
    model: Model = load(folder)
    budgets = budgets_of(model)
    options: dict[str, Any] = {
        "name": "small",
        "text": model,
        "mode": Adaptive(policy=budgets[0.5]),
        "policy": "learned",
        "budget": 0.5,
        "budgets": budgets,
        "prefill": by_importance(),
        "prompt_budget": 0.6,
    }
    return ServedModel(**{**options, **changes})


def alone(model: Any, prompt: Any, new: int, drawn: SamplingParams, **options: Any) -> Generated:
    """Returns what `generate` makes of one text or row of ids, with lengths as the servers have."""
    ids = model.encode([prompt])[0] if isinstance(prompt, str) else prompt
    return generate(
        model.decoder,
        model.params,
        [ids],
        sampling=drawn,
        max_new_tokens=new,
        lengths=LENGTHS,
        **options,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """What came back: `body` is JSON if the answer is."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        """The error object; that it is there, whole, is checked."""
        assert set(self.body) == {"error"}, self.body
        error = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["code"] or self.status == 400
        return error


class Client:
    """Speaks HTTP with a server, a connection for each request."""

    def __init__(self, url: str) -> None:
        self.url = url
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.place = host.strip("[]"), int(port)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answered:
        with self._asked(path, body, method, headers or {}) as response:
            data = response.read()
            named = {name.lower(): value for name, value in response.getheaders()}
            is_json = data and "json" in named.get("content-type", "")
            result = json.loads(data) if is_json else data
            return Answered(status=response.status, headers=named, body=result)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """Yields the events of a stream, parsed; comments and `[DONE]` as they are."""
        with self._asked(path, {**body, "stream": True}, None, {}) as response:
            if response.status != 200:
                raise AssertionError((response.status, response.read()))
            yield from _events(response)

    @contextlib.contextmanager
    def _asked(
        self, path: str, body: Any, method: str | None, headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if data is None else {"Content-Type": "application/json"}
        method = method or ("GET" if data is None else "POST")
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, {**kind, **headers})
            with contextlib.closing(connection.getresponse()) as response:
                yield response

    def completion(self, prompt: Any, **fields: Any) -> Answered:
        return self.ask("/v1/completions", completion(prompt, **fields))

    def connect(self, data: bytes = b"") -> socket.socket:
        """Returns a connection on which bytes have been sent."""
        connection = socket.create_connection(self.place, timeout=60)
        connection.sendall(data)
        return connection

    def leave(self, body: dict[str, Any], *, chunks: int) -> None:
        """Asks, takes so many chunks of the answer, and hangs up."""
        with self.connect(request_bytes(json.dumps(body))) as connection:
            seen = b""
            while seen.count(b"data: ") < chunks:
                part = connection.recv(4096)
                assert part
                seen += part

    def counters(self) -> dict[str, float]:
        lines = self.ask("/metrics").body.decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def wait_for(self, what: Any, *, seconds: float = 20.0) -> None:
        """Waits until a condition holds. Raises AssertionError where it does not in time."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, "It did not come to that in time."
            time.sleep(0.02)

    def settled(self) -> bool:
        """Returns whether no request waits or runs."""
        result = self.counters()
        names = ("utio_open_tasks", "utio_running", "utio_queued")
        return all(result[name] == 0 for name in names)


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return {**body, **fields}


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "small", "messages": [{"role": "user", "content": content}]}
    return {**body, "max_tokens": 8, "temperature": 0, **fields}


def request_bytes(body: bytes | str, **headers: Any) -> bytes:
    """Returns the bytes of a completion's request."""
    data = body if isinstance(body, bytes) else body.encode()
    named = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(data)}
    named |= {"Connection": "close"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in named.items()]
    return b"POST /v1/completions HTTP/1.1\r\n" + "".join(lines).encode() + b"\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    result = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            result += part
    return result


def _events(response: Any) -> Iterator[Any]:
    while line := response.readline():
        if line.startswith(b": "):
            yield line.decode().strip()
        elif line.startswith(b"data: "):
            text = line.removeprefix(b"data: ").decode().strip()
            yield text if text == "[DONE]" else json.loads(text)
        else:
            assert line == b"\n", line


class Running(Client):
    """A server in a thread, until it is closed; `lines` are what it logged."""

    def __init__(self, model: ServedModel, **options: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        given = {"address": Address(port=0), "slots": 4, "shapes": SHAPES, "limits": Limits()}
        self.server = Server(model, **{**given, **options}, log=self.lines.append)
        super().__init__(self.server.url)
        self._thread = threading.Thread(target=self.server.run, name="server")
        self._thread.start()
        try:
            self.wait_for(lambda: self.ask("/ready").status == 200, seconds=300)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Any:
        worker: Any = self.server.app.worker
        return worker._engine

    def close(self) -> None:
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "fault" in line]

    @contextlib.contextmanager
    def limited(self, **changes: Any) -> Iterator[None]:
        """Changes limits for a while; that of bodies stays."""
        service = self.server.app
        old = service.limits
        service.limits = service.reader.limits = dataclasses.replace(old, **changes)
        try:
            yield
        finally:
            service.limits = service.reader.limits = old

    @contextlib.contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Lets each block take longer for a while."""
        engine = self.engine
        advance = engine.advance

        def later() -> Any:
            time.sleep(seconds)
            return advance()

        engine.advance = later
        try:
            yield
        finally:
            engine.advance = advance


@contextlib.contextmanager
def running(model: ServedModel, **options: Any) -> Iterator[Running]:
    """Runs a server until the block is left. It has had no faults then."""
    server = Running(model, **options)
    try:
        yield server
    finally:
        server.close()
    assert not server.faults, server.faults


PROGRAM = Path(__file__).parents[1] / "serving" / "program.py"


class Process(Client):
    """A server in a process of its own, until it is ended; what it logs goes to a file."""

    def __init__(self, arguments: list[str], *, log: Path, wait: bool = True) -> None:
        self.log = log
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
        known = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*paths, *([known] if known else [])])
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            self.wait_for(lambda: self.find("listening") or not self.alive, seconds=120)
            super().__init__(self.find("listening")["url"])
            if wait:
                self.wait_for(lambda: self.ask("/ready").status == 200, seconds=300)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line.startswith("{")]

    def find(self, event: str) -> dict[str, Any]:
        return next((line for line in reversed(self.lines) if line["event"] == event), {})

    @property
    def resident(self) -> int:
        """Bytes of memory that it has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, *, seconds: float = 60.0) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out.decode()

    def close(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.communicate(timeout=60)
