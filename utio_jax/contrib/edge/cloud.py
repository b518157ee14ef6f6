# SPDX-License-Identifier: Apache-2.0
"""Server of a model's deep layers for edges, with a K/V cache of each edge's text.

States that an edge sends run the deep layers and leave full-depth K/V there (`kv="full"`). So the
answer is the full model's, independent of the side that emitted the earlier tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import jax
import numpy as np
import zmq

from utio_jax.contrib.edge import wire
from utio_jax.contrib.edge.parts import Row
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.sampling import SamplingParams, rows_of


class Cloud:
    """Server of deep layers at its `address`, running from its creation."""

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
        """Compiles every program, and starts to serve in a thread.

        Edges run `exit` layers, and have the same key of at least 16 bytes; texts may be as long as
        the model's context. Port 0 of the address takes a free one. K/V of `rows` texts are kept:
        with more edges, the one that has not asked for the longest time sends its states again.

        Raises:
          ValueError: rows, a key, an address or an exit that cannot be.
        """
        config, layers = decoder.config, decoder.config.num_layers
        dim, most = self._sizes = config.embed_dim, config.context_length
        if not 1 <= exit < layers or rows < 1:
            raise ValueError(
                f"Wanted an exit from 1 to {layers - 1}: both sides run some of the model's "
                f"{layers} layers; and at least one row. Got exit={exit}, rows={rows}. For "
                f"example: exit={max(1, layers // 2)}."
            )
        secret = wire.server_key(key)
        # Its own tree: arrays replaced in the caller's are those of a model that no edge has.
        params = jax.tree.map(lambda leaf: leaf, params)
        self._wanted = wire.identify(decoder, params, exit)
        self._new_row = partial(Row, decoder, params, start=exit, stop=layers)
        self._new_row().compile()
        self._rows, self._most_rows = OrderedDict[bytes, Row](), rows
        self._ended, self._context = threading.Event(), zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        try:
            socket.curve_server, socket.curve_secretkey = 1, secret
            socket.linger, socket.ipv6, socket.backlog = 1000, "[" in address, 1024
            socket.maxmsgsize = wire.MOST_SAID + 4 * dim * most
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
        """Closes the socket after the running block."""
        self._ended.set()
        # A thread inside of XLA when the interpreter ends would abort the process.
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(50):
                edge, *frames = self._socket.recv_multipart()
                try:
                    reply = self._answer(edge, frames)
                except ValueError as error:
                    reply = b"r" + str(error)[:2000].encode()
                except Exception as error:  # Of the device, say: others go on.
                    self._rows.pop(edge, None)  # Its cache was donated.
                    reply = b"f" + str(error)[:2000].encode()
                self._socket.send_multipart([edge, reply])
        self._context.destroy(linger=1000)  # Once it returns, the address is free again.

    def _answer(self, edge: bytes, frames: list[bytes]) -> bytes:
        """Returns the answer to an edge's message. Raises ValueError to reject it."""
        if frames[0] != self._wanted:
            expected, got = (
                header[:80].decode(errors="replace") for header in (self._wanted, frames[0])
            )
            raise ValueError(
                f"Wanted an edge of protocol, model and exit {expected}. Got {got}. Start both "
                "with the same version, weights, config and exit."
            )
        if len(frames) != 3 or len(frames[1]) != wire.ASK.size:
            raise ValueError(f"Wanted a header of {wire.ASK.size} bytes, and states.")
        wide, first, seed, temperature, top_k, top_p, min_p = wire.ASK.unpack(frames[1])
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        dim, most = self._sizes
        size, data = wide * dim, frames[2]
        if wide not in (2, 4) or not data or len(data) % size:
            raise ValueError(f"Wanted states of whole tokens, {size} bytes each. Got {len(data)}.")
        x = np.frombuffer(data, f"<f{wide}").reshape(-1, dim).astype(np.float32)
        if first + len(x) > most:
            raise ValueError(
                f"Wanted at most {most} tokens, the cloud's context. Got {first + len(x)}. Cut the "
                "prompt or max_new_tokens."
            )
        row = self._rows.pop(edge, None)
        if row is None and len(self._rows) == self._most_rows:
            self._rows.popitem(last=False)  # The one idle longest.
        self._rows[edge] = row = row or self._new_row()
        if not first:  # Another text, or this one once more.
            row.ran = 0
        if first != row.ran:
            return b"m"
        slots = sum(len(block) for block, _ in row.run(x))
        token, log_probability, _ = jax.device_get(row.read(None, rows_of([sampling]), 0, seed))
        return wire.TOKEN.pack(b"t", token, log_probability, slots)
