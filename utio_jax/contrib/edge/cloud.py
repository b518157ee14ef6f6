# SPDX-License-Identifier: Apache-2.0
"""Server of a model's deep layers for edges, with a K/V cache of each edge's text.

    with Cloud(decoder, params, exit=8, key=key, port=9000) as cloud:
        cloud.wait()

An edge asks for a token with the exit states of all tokens that the cloud has not seen. They run
the deep layers, in blocks, and leave their own full-depth K/V there (`kv="full"`), so the answer is
the full model's, whichever side the earlier tokens came from. Asks of several edges take turns.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
import zmq

from utio_jax.contrib.edge.parts import Widths, all_shapes, identify, part_of, read_last, run_part
from utio_jax.contrib.edge.wire import (
    FORMATS,
    MISSING,
    MOST_SAID,
    PROTOCOL,
    TOKEN,
    Ask,
    bytes_per_token,
    check_key,
    endpoint,
    server_key,
    unpack_states,
)
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import round_up
from utio_jax.decoding.sampling import SamplingParams

_POLL_MS = 50


@dataclasses.dataclass
class CloudStats:
    """What a cloud has done so far.

    Attributes:
      texts: that asked for anything.
      tokens: answered.
      states: tokens that ran the deep layers.
      slots: that ran them, padding included.
    """

    texts: int = 0
    tokens: int = 0
    states: int = 0
    slots: int = 0


@dataclasses.dataclass
class _Row:
    """One edge's text: its K/V in the deep layers, and how many tokens have run them."""

    cache: Any
    text: int = -1
    known: int = 0


class Cloud:
    """Serves deep layers to edges; listens from the moment that it is made.

    Attributes:
      address: host and port.
      stats: what was done so far.
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
        """Takes the deep layers, compiles, and begins to serve, in a thread.

        Args:
          decoder: the model.
          params: its parameters, all layers included; those before the exit are not kept.
          exit: layers that edges run.
          key: a secret of at least 16 bytes that edges have, too.
          host: address of this machine to listen at.
          port: 0 takes a free one, see `address`.
          rows: texts whose K/V are kept. With more edges than rows, the one that has not asked for
            the longest time sends its states again.
          slots: tokens that a row can hold; None: the model's context.
          widths: shapes that compile.
          identity: what `identify` says of the model, where that is known; None: it is called, and
            reads all weights.
          warm: compiles every program before it answers, rather than while an edge waits.

        Raises:
          ValueError: a size, key, address or exit that cannot be.
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
        self.stats = CloudStats()
        self._most_rows, self._slots, self._widths = rows, slots, widths
        self._part = part_of(decoder, params, start=exit)
        self._wanted = {
            "protocol": PROTOCOL,
            "model": (identity or identify(decoder, params)).encode(),
            "exit": exit,
        }
        self._room = round_up(slots, widths.key_step)
        self._rows: OrderedDict[bytes, _Row] = OrderedDict()
        self._ended, self._context = threading.Event(), zmq.Context()
        self._context.max_sockets = 4096
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._listen(host, port, check_key(key))
            if warm:
                self._warm()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="cloud", daemon=True)
        self._thread.start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Returns once the cloud is closed."""
        self._ended.wait()

    def close(self) -> None:
        """Listens no more, once the block that runs has ended."""
        self._ended.set()
        # A thread inside of XLA when the interpreter ends would abort the process.
        self._thread.join()

    def _listen(self, host: str, port: int, key: bytes) -> None:
        dim, socket = self._part.decoder.config.embed_dim, self._socket
        socket.curve_server, socket.curve_secretkey = 1, server_key(key)
        socket.linger, socket.ipv6, socket.backlog = 1000, ":" in host, 1024
        socket.maxmsgsize = MOST_SAID + self._slots * bytes_per_token("float32", dim)
        try:
            socket.bind(endpoint(host, port))
        except zmq.ZMQError as error:
            raise ValueError(
                f"Wanted an address to listen on. Got {endpoint(host, port)}: {error}. Name "
                "another port, or 0 for a free one, and an address of this machine: 127.0.0.1 for "
                "edges on it alone, 0.0.0.0 for all."
            ) from error
        self.address = host, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _warm(self) -> None:
        all_shapes(self._part, self._widths, self._room)
        x = np.zeros((1, self._part.decoder.config.embed_dim), np.float32)
        row = _Row(cache=self._part.empty_cache(self._room))
        ask = Ask(PROTOCOL, b"", 0, 0, 0, 0, 0, 0, 0.0, 0, 1.0, 0.0)
        self._next_token(row, x, ask)
        self.stats = CloudStats()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(_POLL_MS):
                edge, *frames = self._socket.recv_multipart()
                try:
                    said = self._answer(edge, frames)
                except ValueError as error:
                    said = b"r" + str(error)[:2000].encode()
                except Exception as error:  # Of the device, say: others go on.
                    self._rows.pop(edge, None)  # Its cache was donated.
                    said = b"f" + str(error)[:2000].encode()
                self._socket.send_multipart([edge, said])
        self._context.destroy(linger=1000)

    def _answer(self, edge: bytes, frames: list[bytes]) -> bytes:
        """Returns the answer to an edge's message. Raises ValueError to refuse it."""
        if len(frames) != 2:
            raise ValueError(f"Wanted a header and states. Got {len(frames)} frames.")
        ask = Ask.unpack(frames[0])
        theirs = {name: getattr(ask, name) for name in self._wanted}
        if theirs != self._wanted:
            wanted, got = (
                f"protocol {each['protocol']}, model {each['model'].decode(errors='replace')}, "
                f"exit {each['exit']}"
                for each in (self._wanted, theirs)
            )
            raise ValueError(
                f"Wanted an edge with {wanted}. Got {got}. Start both with the same version, "
                "weights, config and exit."
            )
        x = unpack_states(frames[1], FORMATS[ask.states], self._part.decoder.config.embed_dim)
        if max(ask.slots, ask.first + len(x)) > self._slots:
            raise ValueError(
                f"Wanted prompt and new tokens within the {self._slots} that a row of the cloud "
                f"holds. Got {max(ask.slots, ask.first + len(x))}. Cut the prompt or "
                "max_new_tokens, or start the cloud with more slots."
            )
        row = self._row_of(edge, ask.text)
        if ask.first != row.known:
            return MISSING.pack(b"m", row.known)
        return self._next_token(row, x, ask)

    def _row_of(self, edge: bytes, text: int) -> _Row:
        """Returns the row of an edge; it may be that of another one, which has been idle."""
        row = self._rows.pop(edge, None)
        if row is None and len(self._rows) >= self._most_rows:
            _, row = self._rows.popitem(last=False)
            row.text = -1
        if row is None:
            row = _Row(cache=self._part.empty_cache(self._room))
        if row.text != text:
            row.text, row.known = text, 0
            self.stats.texts += 1
        self._rows[edge] = row
        return row

    def _next_token(self, row: _Row, x: np.ndarray, ask: Ask) -> bytes:
        """Runs states through the deep layers; returns the token behind the last one."""
        part, done, slots = self._part, 0, 0
        last: Any = None
        for real, wide in self._widths.pieces(len(x)):
            block = np.zeros((wide, x.shape[1]), np.float32)
            block[:real] = x[done : done + real]
            width = self._widths.keys(self._room, row.known + real)
            where = np.int32(row.known), np.int32(real)
            ran = run_part(part, row.cache, block, *where, width=width)
            row.cache, last, row.known = ran.cache, ran.last, row.known + real
            done, slots = done + real, slots + wide
        sampling = SamplingParams(
            temperature=np.asarray([ask.temperature], np.float32),
            top_k=np.asarray([ask.top_k], np.int32),
            top_p=np.asarray([ask.top_p], np.float32),
            min_p=np.asarray([ask.min_p], np.float32),
        )
        position = np.int32(row.known - 1)
        found = read_last(part, None, sampling, last, np.int32(0), position, np.uint32(ask.seed))
        token, log_probability = jax.device_get((found.token_id, found.log_probability))
        stats = self.stats
        stats.tokens, stats.states = stats.tokens + 1, stats.states + done
        stats.slots += slots
        return TOKEN.pack(b"t", token, log_probability, slots)
