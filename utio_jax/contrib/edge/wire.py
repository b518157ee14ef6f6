# SPDX-License-Identifier: Apache-2.0
"""Messages between an edge and its cloud: ZeroMQ with CURVE, hidden states as bytes, JSON headers.

    ask      header (JSON: `Ask`), states of the next tokens at the exit
    answer   JSON, one of  {"token": 7, "log_probability": -0.3, "slots": 16}  the token
                           {"missing": 0}      states from this position on have to come first
                           {"refused": "..."}  another model, protocol or size: cannot work
                           {"fault": "..."}    of the cloud

A cloud may forget any row at any time: the edge keeps the states of its text, and sends them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from typing import Any

import numpy as np
import zmq
import zmq.utils.monitor
from jaxtyping import Float
from zmq.utils import z85

PROTOCOL = 2
"""Both sides have to speak the same."""

FORMATS = ("float32", "float16", "int8")
"""Of states on the wire. int8 has a scale for each token, its largest magnitude over 127."""

MOST_SAID = 2**16
"""Bytes of a message without its states."""

_FLOATS = {"float32": "<f4", "float16": "<f2"}
_KEYLESS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CloudLostError(ConnectionError):
    """The cloud cannot be reached, has gone, is silent, or answers nonsense."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What an edge says with the states of its next tokens.

    Attributes:
      protocol: see `PROTOCOL`.
      model: see `utio_jax.contrib.edge.identify`.
      exit: layers of the edge.
      states: type of the states.
      text: number of the text among those of this edge.
      slots: tokens that the text will have at most.
      first: position of the first of these states.
      seed: of the text's draws.
      method: temperature, top-k, top-p and min-p, as `PerRowSampling` has them.
    """

    protocol: int
    model: str
    exit: int
    states: str
    text: int
    slots: int
    first: int
    seed: int
    method: list[float]

    @classmethod
    def read(cls, data: bytes) -> Ask:
        """Returns what a header says. Raises ValueError where it is none."""
        said, kinds = read_object(data), {"model": str, "states": str, "method": list}
        names = [field.name for field in dataclasses.fields(cls)]
        ok = set(names) == set(said) and all(type(said[n]) is kinds.get(n, int) for n in names)
        if ok:
            ok = len(said["method"]) == 4 and all(type(e) in (int, float) for e in said["method"])
        if not ok or not 0 <= said["seed"] < 2**32 or not -1 < said["method"][1] < 2**31:
            raise ValueError(f"Wanted a header with {', '.join(names)}. Got {data[:80]!r}.")
        return cls(**said)


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
        check_format(self.states)
        check_key(self.key)
        if not 0 < self.port < 2**16 or not self.seconds > 0:
            raise ValueError(
                "Wanted a port from 1 to 65535, and more than 0 seconds. Got "
                f"port={self.port}, seconds={self.seconds}."
            )

    def lost(self, why: str) -> CloudLostError:
        """Returns the error of a cloud that is not there, or no more."""
        alone = (
            ""
            if self.falls_back
            else (
                ", or let tokens come from the exit while it is away: falls_back=True, or the "
                "command edge without --require-cloud"
            )
        )
        return CloudLostError(
            f"Wanted the cloud at {self.host}:{self.port}. It is lost: {why}. Start it again"
            f"{alone}."
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
        until = time.monotonic() + self._link.seconds
        while True:
            left = max(0, round(1000 * (until - time.monotonic())))
            ready = dict(self._poller.poll(left))
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


def check_format(states: str) -> str:
    """Returns a type of states, once it is known to be one.

    Raises:
      ValueError: it is not.
    """
    if states not in FORMATS:
        raise ValueError(
            f"Wanted states to cross the wire as {', '.join(FORMATS)}. Got states={states!r:.40}."
        )
    return states


def read_object(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError where it is none, or nested too deeply."""
    try:
        said = json.loads(data)
    except RecursionError as error:
        raise ValueError("Wanted JSON. Got one that is nested too deeply.") from error
    if not isinstance(said, dict):
        raise ValueError(f"Wanted a JSON object. Got {data[:40]!r}.")
    return said


def bytes_per_token(states: str, dim: int) -> int:
    """Returns the bytes that one token's state takes on the wire.

    >>> [bytes_per_token(each, 160) for each in FORMATS]
    [640, 320, 164]
    """
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": dim + 4}[check_format(states)]


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
    count, rest = divmod(len(data), bytes_per_token(states, dim))
    if rest or not count:
        raise ValueError(
            f"Wanted states of whole tokens, {bytes_per_token(states, dim)} bytes each. Got "
            f"{len(data)} bytes."
        )
    if states == "int8":
        scale = np.frombuffer(data, "<f4", count)
        whole = np.frombuffer(data, np.int8, offset=4 * count).reshape(count, dim)
        return whole.astype(np.float32) * scale[:, None]
    return np.frombuffer(data, _FLOATS[states]).reshape(count, dim).astype(np.float32)
