# SPDX-License-Identifier: Apache-2.0
"""Messages between an edge and its cloud: ZeroMQ with CURVE, headers and hidden states as bytes.

    ask      header (`Ask`), states of the next tokens at the exit
    answer   b"t" token, log-probability, slots      the token
             b"m" position                           states from there on have to come first
             b"r" text                               refused: another model, protocol or size
             b"f" text                               a fault of the cloud

A cloud may forget any row at any time: the edge keeps the states of its text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import NamedTuple

import numpy as np
import zmq
from jaxtyping import Float
from zmq.utils import z85

PROTOCOL = 4
"""Both sides have to have the same."""

FORMATS = {"float32": "<f4", "float16": "<f2"}
"""Types of states on the wire."""

MOST_SAID = 2**16
"""Bytes of a message without its states."""

ASK, TOKEN, MISSING = struct.Struct("<H16sHHIIIfIff"), struct.Struct("<cIfI"), struct.Struct("<cI")


class Ask(NamedTuple):
    """The header of an edge's message, in the layout `ASK`."""

    protocol: int
    model: bytes  # As `identify` returns it.
    exit: int
    wide: int  # Bytes of a number: 4 or 2.
    text: int  # Its number among those of this edge.
    first: int  # Position of the first of these states.
    seed: int
    temperature: float  # This and the next three as `SamplingParams` has them.
    top_k: int
    top_p: float
    min_p: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How an edge reaches its cloud.

    Attributes:
      address: `tcp://HOST:PORT`, as `Cloud.address`.
      key: that the cloud has, too: at least 16 bytes.
      states: type in which they cross the wire: `"float32"` or `"float16"`.
      seconds: that an answer may take, connection included; a cloud that takes longer is lost.
    """

    address: str
    key: bytes = dataclasses.field(repr=False)
    states: str = "float16"
    seconds: float = 10.0

    def __post_init__(self) -> None:
        server_key(self.key)
        if self.states not in FORMATS or not self.seconds > 0:
            raise ValueError(
                f"Wanted states as {' or '.join(FORMATS)}, and more than 0 seconds. Got "
                f"states={self.states!r:.40}, seconds={self.seconds}."
            )


def connect(link: Link) -> zmq.Socket[bytes]:
    """Returns a socket for asks; ZeroMQ connects, and connects again, by itself."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.maxmsgsize, socket.ipv6 = 0, MOST_SAID, "[" in link.address
    socket.curve_serverkey = zmq.curve_public(server_key(link.key))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(link.address)
    return socket


def answer_to(socket: zmq.Socket[bytes], link: Link, ask: Ask, states: bytes) -> bytes:
    """Returns the cloud's answer. Raises ConnectionError: there is none in time."""
    socket.send_multipart([ASK.pack(*ask), states])
    if not socket.poll(round(1000 * link.seconds)):
        raise ConnectionError(
            f"Wanted the cloud at {link.address}. Got no answer within {link.seconds:g} s. Is it "
            "running, and has it the same key?"
        )
    return b"".join(socket.recv_multipart())


def server_key(key: bytes) -> bytes:
    """Returns the cloud's CURVE secret, made of the key that both sides have.

    Its public half never crosses the wire: a handshake proves that both sides have the key.

    Raises:
      ValueError: the key is too short to be a secret, or text.
    """
    if not isinstance(key, bytes) or len(key) < 16:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(
            f"Wanted a key of at least 16 bytes, the same on both sides. Got {size}. For example: "
            "secrets.token_bytes(32), kept in a file."
        )
    return z85.encode(hashlib.sha256(b"utio_jax.contrib.edge" + key).digest())


def pack_states(x: Float[np.ndarray, "token dim"], states: str) -> bytes:
    """Returns states as bytes. Raises ValueError where the type cannot hold one."""
    with np.errstate(over="ignore", invalid="ignore"):
        packed = np.asarray(x).astype(FORMATS[states])
    if not np.isfinite(packed).all():
        raise ValueError(
            f"Wanted finite states that {states} can hold. Got one of magnitude "
            f"{np.abs(x).max():.3g}. Send them as float32."
        )
    return packed.tobytes()


def unpack_states(data: bytes, wide: int, dim: int) -> Float[np.ndarray, "token dim"]:
    """Returns states of `wide` bytes a number, as float32. Raises ValueError for half tokens."""
    if wide not in (2, 4) or not data or len(data) % (wide * dim):
        raise ValueError(
            f"Wanted states of whole tokens, {wide * dim} bytes each. Got {len(data)} bytes."
        )
    return np.frombuffer(data, f"<f{wide}").reshape(-1, dim).astype(np.float32)
