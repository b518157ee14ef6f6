# SPDX-License-Identifier: Apache-2.0
"""Messages between an edge and its cloud: ZeroMQ with CURVE, headers and hidden states as bytes.

    ask      what `identify` returns, a header (`ASK`), states of the next tokens at the exit
    answer   `TOKEN`        the token after the last of them
             b"m"           the states before these have to come, too
             b"r" text      refused: another model, protocol or size
             b"f" text      a fault of the cloud

States from position 0 on begin a text. A cloud may forget any at any time: the edge keeps its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import numpy as np
import zmq
from jaxtyping import Float
from zmq.utils import z85

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.files import hash_params

PROTOCOL = 5
"""Both sides have to have the same."""

ASK = struct.Struct("<HIIfiff")
"""Bytes of a number (4 or 2), position of the first state, seed, and the fields of a
`SamplingParams` in their order."""

TOKEN = struct.Struct("<cIfI")
"""b"t", a token, its log-probability, token slots that ran in the cloud."""

MOST_SAID = 2**16
"""Bytes of a message without its states."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Connection of an edge to its cloud.

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
        if self.states not in ("float32", "float16") or not self.seconds > 0:
            raise ValueError(
                "Wanted states as float32 or float16, and more than 0 seconds. Got "
                f"states={self.states!r:.40}, seconds={self.seconds}."
            )


def identify(decoder: Decoder, params: Params, exit_: int) -> bytes:
    """Returns the identity that both sides must share: protocol, model and exit.

    The model's 16 letters are a digest of its config, and of its weights and their types.
    """
    text = f"{decoder!r} {hash_params(params)}"
    return f"{PROTOCOL} {hashlib.sha256(text.encode()).hexdigest()[:16]} {exit_}".encode()


def connect(link: Link) -> zmq.Socket[bytes]:
    """Returns a socket for asks; ZeroMQ connects, and connects again, by itself."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.maxmsgsize, socket.ipv6 = 0, MOST_SAID, "[" in link.address
    socket.curve_serverkey = zmq.curve_public(server_key(link.key))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(link.address)
    return socket


def server_key(key: bytes) -> bytes:
    """Returns the cloud's CURVE secret, derived from the shared key.

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
    """Returns states as bytes. Raises ValueError if the type cannot hold one."""
    with np.errstate(over="ignore", invalid="ignore"):
        packed = x.astype(states)
    if not np.isfinite(packed).all():
        raise ValueError(
            f"Wanted finite states that {states} can hold. Got one of magnitude "
            f"{np.abs(x).max():.3g}. Send them as float32."
        )
    return packed.tobytes()
