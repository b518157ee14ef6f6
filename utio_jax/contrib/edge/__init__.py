# SPDX-License-Identifier: Apache-2.0
"""A model split over two machines at an early exit, with ZeroMQ between its parts.

After CE-CoLLM (Jin and Wu, arXiv 2411.02829), see docs/contrib/edge.md. A text is a connection:

    ask      what `identify` returns, a header (`ASK`), states of the next tokens at the exit
    answer   `TOKEN`        the token after the last of them
             b"m"           the states before these have to come, too
             b"r" text      refused: another model, protocol or size
             b"f" text      a fault of the cloud, or a message that it cannot read

A cloud may forget a text at any time: the edge keeps its states. States that the cloud runs leave
full-depth K/V there (`kv="full"`). So its answer is the full model's, independent of the side that
emitted the earlier tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from utio_jax.contrib.edge.parts import Row
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.extras import missing_library
from utio_jax.core.files import hash_params
from utio_jax.decoding.loop import canonical
from utio_jax.decoding.requests import check_prompts
from utio_jax.decoding.sampling import SamplingParams, check_sampling, rows_of
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy

try:
    import zmq
    from zmq.utils import z85
except ModuleNotFoundError as error:
    raise missing_library(error, "utio_jax.contrib.edge") from error

__all__ = ["Cloud", "Edge", "EdgeText", "Link"]

PROTOCOL = 6
"""Both sides have to have the same."""

ASK = struct.Struct("<IIfiff")
"""Position of the first state, seed, and the fields of a `SamplingParams` in their order."""

TOKEN = struct.Struct("<cIfI")
"""b"t", a token, its log-probability, token slots that ran in the cloud."""

_MOST_SAID = 2**16  # Bytes of a message without its states.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Connection of an edge to its cloud.

    Attributes:
      address: `tcp://HOST:PORT`, as `Cloud.address`.
      key: that the cloud has, too: at least 16 bytes.
      seconds: that an answer may take, connection included; a cloud that takes longer is lost.
    """

    address: str
    key: bytes = dataclasses.field(repr=False)
    seconds: float = 10.0

    def __post_init__(self) -> None:
        server_key(self.key)
        if not self.seconds > 0:
            raise ValueError(f"Wanted more than 0 seconds. Got seconds={self.seconds}.")

    def connect(self) -> zmq.Socket[bytes]:
        """Returns a socket for asks; ZeroMQ connects, and connects again, by itself."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger, socket.maxmsgsize, socket.ipv6 = 0, _MOST_SAID, "[" in self.address
        socket.curve_serverkey = zmq.curve_public(server_key(self.key))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(self.address)
        return socket


def identify(decoder: Decoder, params: Params, exit_: int) -> bytes:
    """Returns the identity that both sides must share: protocol, model and exit.

    The model's 16 letters are a digest of its config, and of its weights and their types.
    """
    text = f"{decoder!r} {hash_params(params)}"
    return f"{PROTOCOL} {hashlib.sha256(text.encode()).hexdigest()[:16]} {exit_}".encode()


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


class Cloud:
    """Server of a model's deep layers at its `address`, running from its creation."""

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
        of more, the one that has not asked for the longest time sends its states again.

        Raises:
          ValueError: rows, a key, an address or an exit that cannot be.
        """
        config, layers = decoder.config, decoder.config.num_layers
        if not 1 <= exit < layers or rows < 1:
            raise ValueError(
                f"Wanted an exit from 1 to {layers - 1}: both sides run some of the model's "
                f"{layers} layers; and at least one row. Got exit={exit}, rows={rows}. For "
                f"example: exit={max(1, layers // 2)}."
            )
        secret, self._config = server_key(key), config
        # Its own tree: arrays replaced in the caller's are those of a model that no edge has.
        params = jax.tree.map(lambda leaf: leaf, params)
        self._wanted = identify(decoder, params, exit)
        self._new_row = partial(Row, decoder, params, start=exit, stop=layers)
        (fresh := self._new_row()).compile()
        self._dtype = fresh.last.dtype
        self._rows, self._most_rows = OrderedDict[bytes, Row](), rows
        self._ended, self._context = threading.Event(), zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        try:
            socket.curve_server, socket.curve_secretkey = 1, secret
            socket.ipv6 = "[" in address
            socket.maxmsgsize = _MOST_SAID + 4 * config.embed_dim * config.context_length
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
                    reply = self._answer(edge, *frames)
                except ValueError as error:
                    reply = b"r" + str(error)[:2000].encode()
                except Exception as error:  # Of a message's form, or of the device: others go on.
                    self._rows.pop(edge, None)  # Its cache was donated.
                    reply = b"f" + str(error)[:2000].encode()
                self._socket.send_multipart([edge, reply])
        self._context.destroy(linger=1000)  # Once it returns, the address is free again.

    def _answer(self, edge: bytes, model: bytes, header: bytes = b"", data: bytes = b"") -> bytes:
        """Returns the answer to an edge's message. Raises ValueError to reject it."""
        if model != self._wanted:
            expected, got = (name[:80].decode(errors="replace") for name in (self._wanted, model))
            raise ValueError(
                f"Wanted an edge of protocol, model and exit {expected}. Got {got}. Start both "
                "with the same version, weights, config and exit."
            )
        first, seed, *drawn = ASK.unpack(header)
        names = "temperature", "top_k", "top_p", "min_p"
        sampling = rows_of([SamplingParams(**dict(zip(names, drawn, strict=True)))])
        x = np.frombuffer(data, self._dtype).reshape(-1, self._config.embed_dim)
        if first + len(x) > (most := self._config.context_length):
            raise ValueError(
                f"Wanted at most {most} tokens, the cloud's context. Got {first + len(x)}. Cut the "
                "prompt or max_new_tokens."
            )
        row = self._rows.pop(edge, None)
        row = row if first else self._new_row()
        if row is None or row.ran != first:
            return b"m"
        while len(self._rows) >= self._most_rows:
            self._rows.popitem(last=False)  # The one idle longest.
        self._rows[edge], before = row, row.slots
        row.run(x)
        token, log_probability, _ = jax.device_get(row.read(None, sampling, 0, seed))
        return TOKEN.pack(b"t", token, log_probability, row.slots - before)


@dataclasses.dataclass
class EdgeText:
    """One text of an edge, and its cost.

    Attributes:
      token_ids: new ones, the one that ended the text included.
      decided: layers of the distribution that each was taken from: the exit's, or all.
      log_probabilities: logarithms of their probabilities in nats, before any sampling method.
      fallbacks: tokens of the exit that a lost cloud would have been asked for.
      edge_layers: token slots that ran a layer on the edge, prompt and padding included.
      cloud_layers: the same in the cloud.
      bytes_up: bytes of messages to the cloud, without what ZeroMQ adds.
      seconds_waited: time of waiting for the cloud's answers.
      lost: error that lost the cloud, or None.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    decided: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    fallbacks: int = 0
    edge_layers: int = 0
    cloud_layers: int = 0
    bytes_up: int = 0
    seconds_waited: float = 0.0
    lost: str | None = None


class Edge:
    """The shallow part of a model, and its exit. A text's hard tokens come from the cloud."""

    def __init__(
        self, decoder: Decoder, params: Params, *, policy: Policy, link: Link | None = None
    ) -> None:
        """Keeps the shallow layers.

        The policy says which tokens go deeper: causal, of depths `(exit, num_layers)`, or else a
        ValueError. Without a link every token comes from the exit.
        """
        layers, depths = decoder.config.num_layers, check_policy(policy, decoder)
        if len(depths) != 2 or depths[1] != layers or not policy.causal:
            raise ValueError(
                f"Wanted a causal policy of two depths, the edge's exit and the model's {layers} "
                f"layers. Got policy {policy.name!r} with depths={depths}. For example: "
                "Thresholded(signal=SoftmaxGap(), thresholds=..., "
                f"depths=({layers // 2}, {layers}))."
            )
        self._config, self._exit, self._link = decoder.config, depths[0], link
        self._policy = None if link is None else canonical(policy)
        self._model = b"" if link is None else identify(decoder, params, self._exit)
        stacked = {id(leaf) for leaf in jax.tree.leaves(decoder.layers(params))}
        own_params = jax.tree.map(lambda y: y[: self._exit] if id(y) in stacked else y, params)
        self._new_row = partial(Row, decoder, own_params, start=0, stop=self._exit)
        self._new_row()  # Refuses models that cannot be cut.

    def warmup(self) -> None:
        """Compiles every program that texts may need."""
        self._new_row().compile(self._policy)

    def generate(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = SamplingParams(),
        seed: int = 0,
        eos_ids: Sequence[int] | None = None,
        on_token: Callable[[int], object] = lambda token: None,
    ) -> EdgeText:
        """Returns the continuation of a prompt.

        The prompt, too, runs here up to the exit; the policy is asked first about its last token.
        Where the cloud is lost, the rest comes from the exit, and `fallbacks` counts it. Draws, by
        `sampling` and `seed`, are those of `utio_jax.generate`. `eos_ids` end the text, by default
        the model's own; `on_token` is called with each token's id as it comes.

        Raises:
          ValueError: the prompt is empty, contains ids outside the vocabulary, or exceeds the
            context. The cloud has another model, exit or protocol.
        """
        config, text, row = self._config, EdgeText(), self._new_row()
        (new,) = check_prompts([prompt], config=config, max_new_tokens=max_new_tokens)
        ends = config.eos_ids if eos_ids is None else eos_ids
        check_sampling(sampling, rows=1)
        method, seed = rows_of([sampling]), seed % 2**32
        drawn = seed, *(leaf.item() for leaf in jax.tree.leaves(method))
        room, sent = new.size + max_new_tokens, 0
        states = np.zeros((room, config.embed_dim), row.last.dtype)
        with contextlib.ExitStack() as opened:
            socket = opened.enter_context(self._link.connect()) if self._link else None
            for _ in range(max_new_tokens):
                x = row.run(new)
                states[row.ran - new.size : row.ran] = x
                read = row.read(self._policy, method, int(new[-1]), seed)
                token, log_probability, deeper = jax.device_get(read)
                depth = self._exit
                if deeper and text.lost is None:
                    try:
                        asked = states[: row.ran]
                        token, log_probability = self._ask(socket, asked, sent, drawn, text)
                        depth, sent = config.num_layers, row.ran
                    except ConnectionError as error:
                        text.lost = str(error)
                text.fallbacks += bool(deeper) and depth == self._exit
                text.decided.append(depth)
                text.token_ids.append(int(token))
                text.log_probabilities.append(float(log_probability))
                text.edge_layers = row.slots * self._exit
                new = np.asarray([token], np.int32)
                on_token(int(token))
                if token in ends:
                    break
        return text

    def _ask(
        self, socket: Any, states: np.ndarray, sent: int, drawn: tuple[float, ...], text: EdgeText
    ) -> tuple[int, float]:
        """Returns the cloud's token and its log-probability, once it has all states.

        Raises:
          ConnectionError: the cloud is lost.
          ValueError: it refuses.
        """
        link: Any = self._link
        for first in (sent, 0):
            frames = self._model, ASK.pack(first, *drawn), states[first:].tobytes()
            began = time.monotonic()
            socket.send_multipart(frames)
            in_time = socket.poll(round(1000 * link.seconds))
            text.seconds_waited += time.monotonic() - began
            if not in_time:
                raise ConnectionError(
                    f"Wanted the cloud at {link.address}. Got no answer within {link.seconds:g} s. "
                    "Is it running, and has it the same key?"
                )
            answer = socket.recv()
            text.bytes_up += sum(map(len, frames))
            if answer != b"m":  # It has not forgotten the text, nor been started again.
                break
        kind, detail = answer[:1], answer[1:].decode(errors="replace")
        if kind == b"r":
            raise ValueError(f"Wanted an answer of the cloud at {link.address}. Got: {detail}")
        if kind == b"t" and len(answer) == TOKEN.size:
            _, token, log_probability, slots = TOKEN.unpack(answer)
            if token < self._config.vocab_size and np.isfinite(log_probability):
                text.cloud_layers += slots * (self._config.num_layers - self._exit)
                return token, log_probability
        raise ConnectionError(f"The cloud at {link.address} failed: {detail[:2000]!r}.")
