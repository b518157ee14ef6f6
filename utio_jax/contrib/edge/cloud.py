# SPDX-License-Identifier: Apache-2.0
"""Server of a model's deep layers for edges, with a K/V cache of each edge's text.

    with Cloud(decoder, params, exit=8, key=key, address="tcp://0.0.0.0:9000") as cloud:
        cloud.wait()

States that an edge sends run the deep layers and leave full-depth K/V there (`kv="full"`), so the
answer is the full model's, whichever side the earlier tokens came from.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
import zmq

from utio_jax.contrib.edge import wire
from utio_jax.contrib.edge.parts import Row, identify
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.sampling import SamplingParams, rows_of


class Cloud:
    """Serves deep layers to edges at its `address`, from the moment that it is made."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        *,
        exit: int,  # noqa: A002 (the word everywhere)
        key: bytes,
        address: str = "tcp://127.0.0.1:0",
        rows: int = 8,
    ) -> None:
        """Compiles every program, and begins to serve, in a thread.

        Edges run `exit` layers, and have the same key of at least 16 bytes; texts may be as long as
        the model's context. Port 0 of the address takes a free one. K/V of `rows` texts are kept:
        with more edges, the one that has not asked for the longest time sends its states again.

        Raises:
          ValueError: rows, a key, an address or an exit that cannot be.
        """
        layers, dim = decoder.config.num_layers, decoder.config.embed_dim
        if not 1 <= exit < layers or rows < 1:
            raise ValueError(
                f"Wanted an exit from 1 to {layers - 1}: both sides run some of the model's "
                f"{layers} layers; and at least one row. Got exit={exit}, rows={rows}. For "
                f"example: exit={max(1, layers // 2)}."
            )
        self._decoder, self._params, self._most_rows = decoder, params, rows
        self._exit, self._layers = exit, layers
        self._wanted = (wire.PROTOCOL, identify(decoder, params), exit)
        self._rows: OrderedDict[bytes, tuple[int, Row]] = OrderedDict()  # Numbers of texts, rows.
        self._new_row().compile()
        self._ended, self._context = threading.Event(), zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        try:
            socket.curve_server, socket.curve_secretkey = 1, wire.server_key(key)
            socket.linger, socket.ipv6, socket.backlog = 1000, "[" in address, 1024
            socket.maxmsgsize = wire.MOST_SAID + 4 * dim * decoder.config.context_length
            socket.bind(address)
            self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"Wanted an address to listen on. Got {address}: {error}. Name another port, or 0 "
                "for a free one, and an address of this machine: tcp://127.0.0.1:0 for edges on it "
                "alone, tcp://0.0.0.0:9000 for all."
            ) from error
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

    def _serve(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(50):
                edge, *frames = self._socket.recv_multipart()
                try:
                    said = self._answer(edge, frames)
                except ValueError as error:
                    said = b"r" + str(error)[:2000].encode()
                except Exception as error:  # Of the device, say: others go on.
                    self._rows.pop(edge, None)  # Its cache was donated.
                    said = b"f" + str(error)[:2000].encode()
                self._socket.send_multipart([edge, said])
        self._context.destroy(linger=1000)  # Once it returns, the address is free again.

    def _answer(self, edge: bytes, frames: list[bytes]) -> bytes:
        """Returns the answer to an edge's message. Raises ValueError to refuse it."""
        if len(frames) != 2 or len(frames[0]) != wire.ASK.size:
            raise ValueError(f"Wanted a header of {wire.ASK.size} bytes, and states.")
        ask, config = wire.Ask(*wire.ASK.unpack(frames[0])), self._decoder.config
        if ask[:3] != self._wanted:
            wanted, got = (
                f"protocol {protocol}, model {model.decode(errors='replace')}, exit {exit_}"
                for protocol, model, exit_ in (self._wanted, ask[:3])
            )
            raise ValueError(
                f"Wanted an edge with {wanted}. Got {got}. Start both with the same version, "
                "weights, config and exit."
            )
        x = wire.unpack_states(frames[1], ask.wide, config.embed_dim)
        if ask.first + len(x) > config.context_length or ask.top_k >= 2**31:
            raise ValueError(
                f"Wanted at most {config.context_length} tokens, the cloud's context, and a top-k "
                f"of 31 bits. Got {ask.first + len(x)} and {ask.top_k}. Cut the prompt or "
                "max_new_tokens."
            )
        row = self._row_of(edge, ask.text)
        if ask.first != row.ran:
            return wire.MISSING.pack(b"m", row.ran)
        return self._next_token(row, x, ask)

    def _new_row(self) -> Row:
        return Row(self._decoder, self._params, start=self._exit, stop=self._layers)

    def _row_of(self, edge: bytes, text: int) -> Row:
        """Returns the row of an edge; it may be that of another one, which has been idle."""
        known, row = self._rows.pop(edge, (-1, None))
        if row is None and len(self._rows) >= self._most_rows:
            _, (_, row) = self._rows.popitem(last=False)
        row = row or self._new_row()
        if known != text:
            row.ran = 0
        self._rows[edge] = text, row
        return row

    def _next_token(self, row: Row, x: np.ndarray, ask: wire.Ask) -> bytes:
        """Runs states through the deep layers; returns the token behind the last one."""
        before = row.slots
        row.run(x)
        options = {name: getattr(ask, name) for name in wire.Ask._fields[-4:]}
        sampling = rows_of([SamplingParams(**options)])
        token, log_probability, _ = jax.device_get(row.read(None, sampling, 0, ask.seed))
        return wire.TOKEN.pack(b"t", token, log_probability, row.slots - before)
