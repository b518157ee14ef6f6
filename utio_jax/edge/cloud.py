# SPDX-License-Identifier: Apache-2.0
"""The cloud of an edge: deep layers behind a socket, with the K/V of each edge's row.

    with Cloud(decoder, params, exit=8, key=key, port=9000) as cloud:
        cloud.wait()

An edge sends states of its tokens at the exit; they are kept until one of them asks for the token
behind it. Then all that wait run the deep layers, in blocks, and leave their own full-depth K/V
there: what `kv="full"` means. So the answer is the full model's, whoever emitted the tokens before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from typing import Any

import jax
import numpy as np

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import round_up
from utio_jax.decoding.sampling import Greedy, PerRowSampling
from utio_jax.devices.lines import Limits, ProcessLostError, greet
from utio_jax.edge.parts import Widths, all_shapes, identify, part_of, read_last, run_part
from utio_jax.edge.wire import (
    ANSWER,
    ASK,
    BUSY,
    EDGE,
    FAULT,
    FIRST,
    FORMATS,
    HELD,
    HELLO,
    MOST_SAID,
    OPEN,
    PROTOCOL,
    REFUSED,
    ROW,
    STATES,
    TOKEN,
    WELCOME,
    Wire,
    bytes_per_token,
    check_key,
    keep_alive,
    pack_states,
    unpack_states,
)

_HELLO_SECONDS = 5.0
"""That a caller has to say who it is, once it has shown that it knows the key."""

_FAULT_LETTERS = 2000
"""Of what is wrong, that an edge is told."""

_GREETED = 32
"""Callers at once that have not shown yet that they know the key; others wait to be accepted."""

_RETRY_SECONDS = 0.1
"""Until callers are accepted again, where the system could not: it had no file or thread left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloudStats:
    """What a cloud has done so far.

    Attributes:
      open_rows: edges that are connected: each holds a row.
      rows: texts that asked for anything.
      tokens: that were given.
      states: tokens that ran the deep layers.
      slots: that ran them, padding included.
    """

    open_rows: int = 0
    rows: int = 0
    tokens: int = 0
    states: int = 0
    slots: int = 0


class Cloud:
    """Serves deep layers to edges; listens from the moment that it is made.

    Each connection holds one row, and frees it when it ends. Blocks of different edges take turns.

    Attributes:
      address: host and port.
    """

    def __init__(  # noqa: PLR0913 (options, each named)
        self,
        decoder: Decoder,
        params: Params,
        *,
        exit: int,  # noqa: A002 (the word everywhere)
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        rows: int = 8,
        slots: int | None = None,
        widths: Widths = Widths(),
        identity: str | None = None,
        warm: bool = True,
    ) -> None:
        """Takes the deep layers, compiles, and begins to listen, in threads.

        Args:
          decoder: the model.
          params: its parameters, all layers included; those before the exit are not kept.
          exit: layers that edges run.
          key: a secret of at least 16 bytes that edges have, too.
          host: where to listen.
          port: 0 takes a free one, see `address`.
          rows: edges at once; more are told that there is no room.
          slots: tokens that a row can hold; None: the model's context.
          widths: shapes that compile.
          identity: what `identify` says of the model, where that is known; None: it is called, and
            reads all weights.
          warm: compiles every program before it answers, rather than while an edge waits.

        Raises:
          ValueError: a size, key, port or exit that cannot be.
          OSError: the port is taken, or the host is not this machine's.
        """
        context, layers = decoder.config.context_length, decoder.config.num_layers
        slots = context if slots is None else slots
        if not 1 <= exit < layers:
            raise ValueError(
                f"Wanted an exit from 1 to {layers - 1}: both sides run some of the model's "
                f"{layers} layers. Got exit={exit}. For example: exit={max(1, layers // 2)}."
            )
        if rows < 1 or not 1 <= slots <= context:
            raise ValueError(
                f"Wanted at least one row, of 1 to {context} tokens, the model's context. Got "
                f"rows={rows}, slots={slots}."
            )
        if not 0 <= port < 2**16:
            raise ValueError(f"Wanted a port up to 65535, or 0 for a free one. Got port={port}.")
        self._key, self._rows, self._slots, self._widths = check_key(key), rows, slots, widths
        self._part = part_of(decoder, params, start=exit)
        self._wanted = {
            "protocol": PROTOCOL,
            "model": identity or identify(decoder, params),
            "exit": exit,
        }
        self._room = round_up(slots, widths.key_step)
        self._device, self._lock = threading.Lock(), threading.Lock()
        self._stats, self._wires = CloudStats(), set[Wire]()
        self._serving = dict[threading.Thread, Wire]()
        self._ended, self._greeting = threading.Event(), threading.Semaphore(_GREETED)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        if warm:
            try:
                self._warm()
            except BaseException:
                self._listener.close()
                raise
        threading.Thread(target=self._listen, name="cloud", daemon=True).start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> CloudStats:
        """What was done so far."""
        with self._lock:
            return dataclasses.replace(self._stats, open_rows=len(self._wires))

    def wait(self) -> None:
        """Returns once the cloud is closed."""
        self._ended.wait()

    def close(self) -> None:
        """Hangs up on all edges, listens no more, and waits for blocks that run."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for wire in serving.values():
            wire.line.close()
        # One that is still inside of XLA when the interpreter ends would abort the process.
        for thread in serving:
            thread.join()

    def _warm(self) -> None:
        all_shapes(self._part, self._widths, self._room)
        row, dim = _Row(self), self._part.decoder.config.embed_dim
        row.add(FIRST.pack(0) + pack_states(np.zeros((1, dim), np.float32), "float32"), "float32")
        row.next_token()
        self._stats = CloudStats()

    def _listen(self) -> None:
        while not self._ended.is_set():
            self._greeting.acquire()
            connection = None
            try:
                connection, _ = self._listener.accept()
                keep_alive(connection)
                threading.Thread(target=self._meet, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # No file, no thread, or the caller is gone again.
                self._greeting.release()
                if connection is not None:
                    connection.close()
                self._ended.wait(_RETRY_SECONDS)

    def _meet(self, connection: socket.socket) -> None:
        try:
            limits = Limits(most=MOST_SAID, held=HELD)
            wire = Wire(greet(connection, self._key, known={EDGE}, limits=limits))
        except (OSError, EOFError, ValueError, RuntimeError):  # RuntimeError: no thread is left.
            connection.close()
            return
        finally:
            self._greeting.release()
        with self._lock:
            self._serving[threading.current_thread()] = wire
        try:
            self._serve(wire)
        except (ProcessLostError, TimeoutError):
            pass  # It has left.
        except (ValueError, RuntimeError) as error:  # Of its messages, or of the device.
            with contextlib.suppress(ProcessLostError):
                wire.send(FAULT, str(error)[:_FAULT_LETTERS].encode())
        finally:
            with self._lock:
                self._wires.discard(wire)
            # What was said last is still on its way: an end of our own making would undo it.
            wire.line.part(_HELLO_SECONDS)
            with self._lock:
                del self._serving[threading.current_thread()]

    def _serve(self, wire: Wire) -> None:
        """Does what an edge asks for, until it leaves."""
        kind, data = wire.receive(seconds=_HELLO_SECONDS)
        states, wrong = self._refusal(kind, data)
        if wrong is not None:
            return wire.send(REFUSED, wrong.encode())
        with self._lock:
            full = len(self._wires) >= self._rows
            if not full:
                self._wires.add(wire)
        if self._ended.is_set():
            return None
        if full:
            said = f"all of its {self._rows} rows are taken"
            return wire.send(BUSY, said.encode())
        row_bytes = self._slots * bytes_per_token(states, self._part.decoder.config.embed_dim)
        wire.line.most = max(MOST_SAID, 1 + FIRST.size + row_bytes)
        wire.send(WELCOME, json.dumps({"slots": self._slots}).encode())
        row: _Row | None = None
        while True:
            kind, data = wire.receive()
            if kind == OPEN:
                row = _Row(self) if row is None else row
                row.open(data)
                self._count(rows=1)
            elif kind in (STATES, ASK) and row is not None:
                row.add(data, states)
                if kind == ASK:
                    wire.send(TOKEN, row.next_token())
            else:
                raise ValueError(
                    f"Wanted a row to be opened, and then states. Got message {kind!r}."
                )

    def _refusal(self, kind: bytes, data: bytes) -> tuple[str, str | None]:
        """Returns the type of an edge's states, and why it is refused; None: it is not."""
        try:
            said = json.loads(data) if kind == HELLO else {}
        except ValueError:
            said = {}
        said = said if isinstance(said, dict) else {}
        theirs = {name: said.get(name) for name in self._wanted}
        if theirs != self._wanted:
            named = [
                ", ".join(f"{name} {value!s:.12}" for name, value in each.items())
                for each in (self._wanted, theirs)
            ]
            return "", (
                f"Wanted an edge with {named[0]}. Got {named[1]}. Start both with the same "
                "version, weights, config and exit."
            )
        states = str(said.get("states"))
        if states not in FORMATS:
            return "", f"Wanted states as {', '.join(FORMATS)}. Got {states!r:.40}."
        return states, None

    def _count(self, **amounts: int) -> None:
        with self._lock:
            old = self._stats
            grown = {name: getattr(old, name) + amount for name, amount in amounts.items()}
            self._stats = dataclasses.replace(old, **grown)


class _Row:
    """One edge's row: its K/V in the deep layers, and the states that have not run them yet."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud, self._part = cloud, cloud._part
        self._cache: KVCache = self._part.empty_cache(cloud._room)
        self._sampling, self._seed = PerRowSampling.of([Greedy()]), np.uint32(0)
        self._waiting: list[np.ndarray] = []
        self._known = self._run = 0

    def open(self, data: bytes) -> None:
        """Begins with a text."""
        if len(data) != ROW.size:
            raise ValueError(f"Wanted a row's method in {ROW.size} bytes. Got {len(data)}.")
        seed, temperature, top_k, top_p, min_p = ROW.unpack(data)
        self._seed = np.uint32(seed)
        self._sampling = PerRowSampling(
            temperature=np.asarray([temperature], np.float32),
            top_k=np.asarray([top_k], np.int32),
            top_p=np.asarray([top_p], np.float32),
            min_p=np.asarray([min_p], np.float32),
        )
        self._waiting, self._known, self._run = [], 0, 0

    def add(self, data: bytes, states: str) -> None:
        """Keeps the states of the next tokens until one of them asks."""
        if len(data) < FIRST.size:
            raise ValueError(f"Wanted a position and states. Got {len(data)} bytes.")
        (first,) = FIRST.unpack_from(data)
        x = unpack_states(data[FIRST.size :], states, self._part.decoder.config.embed_dim)
        if first != self._known:
            raise ValueError(
                f"Wanted states of the token at position {self._known}, which is the row's next. "
                f"Got position {first}."
            )
        if self._known + len(x) > self._cloud._slots:
            raise ValueError(
                f"Wanted rows of at most {self._cloud._slots} tokens, which is what this cloud "
                f"has room for. Got {self._known + len(x)}. Cut the text, or start it with more."
            )
        self._known += len(x)
        self._waiting.append(x)

    def next_token(self) -> bytes:
        """Returns the answer behind the last of the states that wait, once all have run."""
        part, cloud, x = self._part, self._cloud, np.concatenate(self._waiting)
        done = slots = 0
        last: jax.Array | None = None
        with cloud._device:
            for real, wide in cloud._widths.pieces(len(x)):
                block = np.zeros((wide, x.shape[1]), np.float32)
                block[:real] = x[done : done + real]
                where = np.int32(self._run + done), np.int32(real)
                width = cloud._widths.keys(cloud._room, self._run + done + real)
                ran = run_part(part, self._cache, block, *where, width=width)
                self._cache, last = ran.cache, ran.last
                done, slots = done + real, slots + wide
            assert last is not None
            self._run += done
            position = np.int32(self._run - 1)
            found = read_last(part, None, self._sampling, last, np.int32(0), position, self._seed)
            answer = ANSWER.pack(int(found.token_id), float(found.log_probability), slots)
        self._waiting = []
        cloud._count(tokens=1, states=done, slots=slots)
        return answer
