# SPDX-License-Identifier: Apache-2.0
"""What crosses the wire between an edge and its cloud: messages, states of tokens, and their count.

    up     hello    protocol, model, exit, type of states; once per connection
           open     a row begins: seed and sampling method
           states   of the next tokens at the exit, to be kept
           ask      the same, and the last of them wants the token behind it
    down   welcome, refused, busy; then a token for each ask, or what is wrong

A message is a byte that says its kind, and fixed fields in little-endian order; nothing is
unpickled. Below it lies a `utio_jax.devices.lines.Line`: both sides prove that they know a key, and
every message carries its length and its code of authentication (36 bytes). Nothing is encrypted.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from typing import Any

import numpy as np
from jaxtyping import Float

from utio_jax.devices.lines import HEAD_BYTES, Limits, Line, ProcessLostError, introduce

PROTOCOL = 1
"""Both sides have to speak the same."""

HELLO, OPEN, STATES, ASK = b"H", b"O", b"S", b"A"
WELCOME, REFUSED, BUSY, TOKEN, FAULT = b"W", b"R", b"B", b"T", b"F"

ROW = struct.Struct("<Ififf")
"""Of `OPEN`: seed; temperature, top-k, top-p, min-p, as `PerRowSampling` has them."""

FIRST = struct.Struct("<I")
"""Of `STATES` and `ASK`: position of the first token."""

ANSWER = struct.Struct("<ifI")
"""Of `TOKEN`: id, log-probability in nats, and token slots that the deep layers ran for it."""

FORMATS = ("float32", "float16", "int8")
"""Of states on the wire. int8 has a scale for each token, its largest magnitude over 127."""

_FLOATS = {"float32": "<f4", "float16": "<f2"}

MOST_SAID = 2**16
"""Bytes of a message that is none of states."""

HELD = 16
"""Messages that wait to be received; more of them wait at the other side."""

_VANISHED = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 70_000}
"""When a silent edge is asked whether it is there, in seconds; how often; and how long, in ms, it
may leave without a sign what was sent to it."""

EDGE = 1
"""The number by which an edge introduces itself on its line."""


class CloudLostError(ProcessLostError):
    """The cloud cannot be reached, has gone, is silent, or has no room."""


def check_format(states: str) -> str:
    """Returns a type of states, once it is known to be one.

    Raises:
      ValueError: it is not.
    """
    if states not in FORMATS:
        raise ValueError(
            f"Wanted states to cross the wire as {', '.join(FORMATS)}. Got states={states!r}."
        )
    return states


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


class Wire:
    """Messages of one connection, counted: bytes are all that TCP is given.

    Attributes:
      line: below it.
      messages_sent: so far.
      bytes_sent: likewise.
      messages_received: likewise.
      bytes_received: likewise.
    """

    def __init__(self, line: Line) -> None:
        """Speaks over a line."""
        self.line = line
        self.messages_sent = self.bytes_sent = 0
        self.messages_received = self.bytes_received = 0

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Sends a message.

        Raises:
          ProcessLostError: nobody takes it.
        """
        self.line.send(kind + data)
        self.messages_sent += 1
        self.bytes_sent += HEAD_BYTES + len(kind) + len(data)

    def receive(self, *, seconds: float | None = None) -> tuple[bytes, bytes]:
        """Returns the next message: its kind, and the rest.

        Raises:
          ProcessLostError: none will come.
          TimeoutError: none has come in so many seconds.
        """
        message = self.line.receive(seconds=seconds)
        self.messages_received += 1
        self.bytes_received += HEAD_BYTES + len(message)
        return message[:1], message[1:]

    def counts(self) -> tuple[int, int, int, int]:
        """Returns messages and bytes that were sent, and those that came."""
        return self.messages_sent, self.bytes_sent, self.messages_received, self.bytes_received


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How an edge talks with its cloud.

    Attributes:
      host: of the cloud.
      port: likewise.
      key: that the cloud has, too: at least 16 bytes.
      states: type in which they cross the wire: `"float32"`, `"float16"` or `"int8"`.
      ahead: whether states are sent as soon as they are there, so that few are missing when a token
        asks; those behind the last token that asks are sent for nothing. False: with the request.
      seconds: that an answer may take, a message to leave, and to connect.
      falls_back: what happens where the cloud is lost: True, tokens come from the exit, and are
        counted; False, `CloudLostError`.
    """

    host: str
    port: int
    key: bytes = dataclasses.field(repr=False)
    states: str = "float16"
    ahead: bool = False
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


def keep_alive(connection: socket.socket) -> None:
    """Lets the system find out, in about a minute where it can, that the other side has vanished.

    Raises:
      OSError: it already has.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _VANISHED.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hello(model: str, exit_: int, states: str) -> dict[str, Any]:
    """Returns what an edge says of itself."""
    return {"protocol": PROTOCOL, "model": model, "exit": exit_, "states": states}


def connect(link: Link, *, model: str, exit_: int) -> tuple[Wire, int]:
    """Returns the wire to a cloud that has the same model, and how many tokens its rows hold.

    Args:
      link: where it is.
      model: the digest of the whole model.
      exit_: layers of the edge.

    Raises:
      CloudLostError: it cannot be reached, or has no room.
      ValueError: it has another key, model, exit or protocol.
    """
    where = f"{link.host}:{link.port}"
    try:
        connection = socket.create_connection((link.host, link.port), timeout=link.seconds)
    except OSError as error:
        raise lost(link, f"it cannot be reached ({error})") from error
    try:
        limits = Limits(seconds=link.seconds, most=MOST_SAID, held=HELD)
        line = introduce(connection, link.key, EDGE, limits=limits)
    except ValueError as error:
        connection.close()
        raise ValueError(
            f"Wanted a cloud at {where} that has the same key. Got none: {error}. Give both the "
            "same key."
        ) from error
    except (OSError, EOFError) as error:
        connection.close()
        raise lost(link, f"it does not answer ({error or 'it hung up'})") from error
    wire = Wire(line)
    try:
        wire.send(HELLO, json.dumps(hello(model, exit_, link.states)).encode())
        kind, said = wire.receive(seconds=link.seconds)
    except (ProcessLostError, TimeoutError) as error:
        line.close()
        raise lost(link, f"it does not answer ({line.lost or error})") from error
    except BaseException:  # Ctrl-C: it would keep a row.
        line.close()
        raise
    if kind == WELCOME:
        return Wire(line), int(json.loads(said)["slots"])
    line.close()
    if kind == REFUSED:
        raise ValueError(f"Wanted the cloud at {where} to work with. It says: {said.decode()}")
    if kind == BUSY:
        raise CloudLostError(
            f"Wanted a row of the cloud at {where}. It has none: {said.decode(errors='replace')}. "
            f"Wait until an edge leaves, or start it with more rows{_or_alone(link)}."
        )
    raise lost(link, f"it speaks otherwise ({(kind + said)[:16]!r})")


def lost(link: Link, why: str) -> CloudLostError:
    """Returns the error of a cloud that is not there, or no more."""
    return CloudLostError(
        f"Wanted the cloud at {link.host}:{link.port}. It is lost: {why}. Start it again"
        f"{_or_alone(link)}."
    )


def _or_alone(link: Link) -> str:
    if link.falls_back:
        return ""
    return (
        ", or let tokens come from the exit while it is away: falls_back=True, or utio-jax edge "
        "without --require-cloud"
    )
