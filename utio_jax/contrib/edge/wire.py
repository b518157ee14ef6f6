# SPDX-License-Identifier: Apache-2.0
"""Messages between an edge and its cloud: ZeroMQ with CURVE, headers and hidden states as bytes.

    ask      header (`Ask`), states of the next tokens at the exit
    answer   b"t" token, log-probability, slots      the token
             b"m" position                           states from there on have to come first
             b"r" text                               refused: another model, protocol or size
             b"f" text                               a fault of the cloud

A cloud may forget any row at any time: the edge keeps the states of its text, and sends them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
from typing import NamedTuple

import numpy as np
import zmq
import zmq.utils.monitor
from jaxtyping import Float
from zmq.utils import z85

PROTOCOL = 3
"""Both sides have to speak the same."""

FORMATS = ("float32", "float16", "int8")
"""Of states on the wire. int8 has a scale for each token, its largest magnitude over 127."""

MOST_SAID = 2**16
"""Bytes of a message without its states."""

TOKEN, MISSING = struct.Struct("<cIfI"), struct.Struct("<cI")
"""Answers of a fixed size."""

_ASK = struct.Struct("<H16sHHIIIIfIff")
_FLOATS = {"float32": "<f4", "float16": "<f2"}
_KEYLESS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CloudLostError(ConnectionError):
    """The cloud cannot be reached, has gone, is silent, or answers nonsense."""


class Ask(NamedTuple):
    """What an edge says with the states of its next tokens."""

    protocol: int
    model: bytes  # As `identify` returns it.
    exit: int
    states: int  # Their type's place in `FORMATS`.
    text: int  # Its number among those of this edge.
    slots: int  # Tokens that it will have at most.
    first: int  # Position of the first of these states.
    seed: int
    temperature: float  # This and the next three as `SamplingParams` has them.
    top_k: int
    top_p: float
    min_p: float

    def pack(self) -> bytes:
        """Returns it as bytes."""
        return _ASK.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Ask:
        """Returns what a header says. Raises ValueError where it is none."""
        if len(data) != _ASK.size:
            raise ValueError(f"Wanted a header of {_ASK.size} bytes. Got {len(data)}.")
        ask = cls(*_ASK.unpack(data))
        if ask.states >= len(FORMATS) or ask.top_k >= 2**31:
            raise ValueError(f"Wanted a header with a type of states and top-k. Got {ask}.")
        return ask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How an edge reaches its cloud.

    Attributes:
      host: of the cloud.
      port: likewise.
      key: that the cloud has, too: at least 16 bytes.
      states: type in which they cross the wire: `"float32"`, `"float16"` or `"int8"`.
      seconds: that an answer may take, connection included.
      falls_back: what happens where the cloud is lost: True, tokens come from the exit, and are
        counted; False, `CloudLostError`.
    """

    host: str
    port: int
    key: bytes = dataclasses.field(repr=False)
    states: str = "float16"
    seconds: float = 10.0
    falls_back: bool = True

    def __post_init__(self) -> None:
        check_key(self.key)
        if self.states not in FORMATS:
            raise ValueError(
                f"Wanted states to cross the wire as {', '.join(FORMATS)}. Got "
                f"states={self.states!r:.40}."
            )
        if not 0 < self.port < 2**16 or not self.seconds > 0:
            raise ValueError(
                "Wanted a port from 1 to 65535, and more than 0 seconds. Got "
                f"port={self.port}, seconds={self.seconds}."
            )

    def lost(self, why: str) -> CloudLostError:
        """Returns the error of a cloud that is not there, or no more."""
        alone = ", or let tokens come from the exit while it is away: falls_back=True"
        return CloudLostError(
            f"Wanted the cloud at {self.host}:{self.port}. It is lost: {why}. Start it again"
            f"{'' if self.falls_back else alone}."
        )


class Connection:
    """An edge's connection with a cloud. Made anew after an error."""

    def __init__(self, link: Link) -> None:
        """Begins to connect; `ask` says whether that succeeded."""
        self._link, self._context = link, zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger, self._socket.maxmsgsize = 0, MOST_SAID
        self._socket.ipv6 = ":" in link.host
        self._socket.curve_serverkey = zmq.curve_public(server_key(link.key))
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | _KEYLESS
        )
        self._poller = zmq.Poller()
        for each in (self._socket, self._events):
            self._poller.register(each, zmq.POLLIN)
        self._socket.connect(endpoint(link.host, link.port))

    def ask(self, header: bytes, states: bytes) -> bytes:
        """Returns the answer.

        Raises:
          CloudLostError: there is none.
          ValueError: the cloud has another key.
        """
        while self._events.poll(0):  # What was before: rows that are lost are sent again.
            self._events.recv_multipart()
        self._socket.send_multipart([header, states])
        ready = dict(self._poller.poll(round(1000 * self._link.seconds)))
        if self._socket in ready:
            return b"".join(self._socket.recv_multipart())
        if not ready:
            raise self._link.lost(f"no answer within {self._link.seconds:g} s")
        event = zmq.utils.monitor.recv_monitor_message(self._events)["event"]
        if event & _KEYLESS:
            raise ValueError(
                f"Wanted a cloud at {self._link.host}:{self._link.port} that has the same key. "
                "Got none: it hung up during the handshake. Give both the same key."
            )
        gone = event == zmq.EVENT_DISCONNECTED
        raise self._link.lost("it has ended" if gone else "it cannot be reached")

    def close(self) -> None:
        """Hangs up."""
        with contextlib.suppress(zmq.ZMQError):
            self._context.destroy(linger=0)


def endpoint(host: str, port: int) -> str:
    """Returns an address as ZeroMQ writes it.

    >>> endpoint("::1", 9000)
    'tcp://[::1]:9000'
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def server_key(key: bytes) -> bytes:
    """Returns the cloud's CURVE secret.

    Its public half never crosses the wire: a handshake proves that both sides have the key.
    """
    return z85.encode(hashlib.sha256(b"utio_jax.contrib.edge" + key).digest())


def check_key(key: bytes) -> bytes:
    """Returns a key, once it is known to be one.

    Raises:
      ValueError: it is too short to be a secret, or text.
    """
    if not isinstance(key, bytes) or len(key) < 16:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(
            f"Wanted a key of at least 16 bytes, the same on both sides. Got {size}. For example: "
            "secrets.token_bytes(32), kept in a file."
        )
    return key


def bytes_per_token(states: str, dim: int) -> int:
    """Returns the bytes that one token's state takes on the wire.

    >>> [bytes_per_token(each, 160) for each in FORMATS]
    [640, 320, 164]
    """
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": dim + 4}[states]


def pack_states(x: Float[np.ndarray, "token dim"], states: str) -> bytes:
    """Returns states as bytes; int8: all scales, then all numbers.

    Raises:
      ValueError: float16 cannot hold a state, or it is not finite.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if states == "int8":
            scale = np.abs(x).max(axis=1, initial=0.0) / np.float32(127)
            whole = np.rint(x / np.where(scale > 0, scale, 1)[:, None])
            fits = np.isfinite(scale).all()
            data = scale.astype("<f4").tobytes() + whole.astype(np.int8).tobytes()
        else:
            small = x.astype(_FLOATS[states])
            fits, data = np.isfinite(small).all(), small.tobytes()
    if not fits:
        raise ValueError(
            f"Wanted finite states that {states} can hold. Got one of magnitude "
            f"{np.abs(x).max():.3g}. Send them as float32, or, if they are finite, as int8."
        )
    return data


def unpack_states(data: bytes, states: str, dim: int) -> Float[np.ndarray, "token dim"]:
    """Returns what `pack_states` has made bytes of, as float32.

    Raises:
      ValueError: the bytes are of no whole number of tokens, or of none.
    """
    size = bytes_per_token(states, dim)
    count, rest = divmod(len(data), size)
    if rest or not count:
        raise ValueError(
            f"Wanted states of whole tokens, {size} bytes each. Got {len(data)} bytes."
        )
    if states == "int8":
        scale = np.frombuffer(data, "<f4", count)
        whole = np.frombuffer(data, np.int8, offset=4 * count).reshape(count, dim)
        return whole.astype(np.float32) * scale[:, None]
    return np.frombuffer(data, _FLOATS[states]).reshape(count, dim).astype(np.float32)
