# SPDX-License-Identifier: Apache-2.0
"""Decoding on an edge device: shallow layers locally, deep ones in a cloud for hard tokens.

After CE-CoLLM (Jin and Wu, arXiv 2411.02829), see docs/contrib/edge.md.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import zmq

from utio_jax.contrib.edge import wire
from utio_jax.contrib.edge.parts import Row
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import canonical
from utio_jax.decoding.requests import check_prompts
from utio_jax.decoding.sampling import SamplingParams, check_sampling, rows_of
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy


@dataclasses.dataclass
class EdgeText:
    """One text of an edge, and its cost.

    Attributes:
      token_ids: new ones, the one that ended the text included.
      decided: layers of the distribution that each was taken from: the exit's, or all.
      log_probabilities: of each in nats, before any sampling method.
      fallbacks: tokens of the exit that a lost cloud would have been asked for.
      edge_layers: token slots that ran a layer on the edge, prompt and padding included.
      cloud_layers: the same in the cloud.
      states_sent: tokens whose states were sent.
      bytes_up: of messages to the cloud, without what ZeroMQ adds; `bytes_down` of its answers.
      seconds_waited: for the cloud's answers.
      lost: error that lost the cloud, or None.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    decided: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    fallbacks: int = 0
    edge_layers: int = 0
    cloud_layers: int = 0
    states_sent: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds_waited: float = 0.0
    lost: str | None = None


class Edge:
    """The shallow part of a model, and its exit. Decodes one text at a time."""

    _socket: zmq.Socket[bytes] | None = None

    def __init__(
        self, decoder: Decoder, params: Params, *, policy: Policy, link: wire.Link | None = None
    ) -> None:
        """Keeps the shallow layers; connects with the first text.

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
        self._model = b"" if link is None else wire.identify(decoder, params, self._exit)
        stacked = {id(leaf) for leaf in jax.tree.leaves(decoder.layers(params))}
        own_params = jax.tree.map(lambda y: y[: self._exit] if id(y) in stacked else y, params)
        self._new_row = partial(Row, decoder, own_params, start=0, stop=self._exit)
        self._row = self._new_row()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the next text connects again."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None

    def __del__(self) -> None:
        self.close()

    def warmup(self) -> None:
        """Compiles every program that texts may need."""
        self._row.compile(self._policy)

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
            context. The cloud has another model, exit or protocol, or the link's type cannot hold
            the states.
        """
        config, text, states = self._config, EdgeText(), list[np.ndarray]()
        (new,) = check_prompts([prompt], config=config, max_new_tokens=max_new_tokens)
        ends = config.eos_ids if eos_ids is None else eos_ids
        check_sampling(sampling, rows=1)
        method, seed = rows_of([sampling]), seed % 2**32
        drawn = seed, *(leaf.item() for leaf in jax.tree.leaves(method))
        self._row.ran = self._sent = 0
        try:
            for _ in range(max_new_tokens):
                for x, real in self._row.run(new):
                    text.edge_layers += len(x) * self._exit
                    if self._link is not None:
                        states.extend(np.asarray(x, np.float32)[:real])
                read = self._row.read(self._policy, method, int(new[-1]), seed)
                token, log_probability, deeper = read
                depth = self._exit
                if deeper and text.lost is None:
                    try:
                        token, log_probability = self._ask(drawn, states, text)
                        depth = config.num_layers
                    except ConnectionError as error:
                        self.close()
                        text.lost = str(error)
                text.fallbacks += bool(deeper) and depth == self._exit
                token = int(token)
                text.decided.append(depth)
                text.token_ids.append(token)
                text.log_probabilities.append(float(log_probability))
                new = np.asarray([token], np.int32)
                on_token(token)
                if token in ends:
                    break
        except BaseException:  # The cache may have been donated, an answer may be on its way.
            self._row = self._new_row()
            self.close()
            raise
        return text

    def _ask(
        self, drawn: tuple[float, ...], states: list[np.ndarray], text: EdgeText
    ) -> tuple[int, float]:
        """Returns the cloud's token and its log-probability, once it has all states.

        Raises:
          ConnectionError: the cloud is lost.
          ValueError: it refuses.
        """
        link, config = self._link, self._config
        assert link is not None
        self._socket = self._socket or wire.connect(link)
        for first in (self._sent, 0):
            data = wire.pack_states(np.stack(states[first:]), link.states)
            header = wire.ASK.pack(np.dtype(link.states).itemsize, first, *drawn)
            began = time.monotonic()
            self._socket.send_multipart([self._model, header, data])
            in_time = self._socket.poll(round(1000 * link.seconds))
            text.seconds_waited += time.monotonic() - began
            if not in_time:
                raise ConnectionError(
                    f"Wanted the cloud at {link.address}. Got no answer within {link.seconds:g} s. "
                    "Is it running, and has it the same key?"
                )
            answer = b"".join(self._socket.recv_multipart())
            text.bytes_up += len(self._model) + len(header) + len(data)
            text.bytes_down += len(answer)
            text.states_sent += len(states) - first
            if answer != b"m":  # It has not forgotten the text, nor been started again.
                break
        kind, detail = answer[:1], answer[1:].decode(errors="replace")
        if kind == b"r":
            raise ValueError(f"Wanted an answer of the cloud at {link.address}. Got: {detail}")
        if kind == b"f":
            raise ConnectionError(f"The cloud at {link.address} failed: {detail}")
        if kind == b"t" and len(answer) == wire.TOKEN.size:
            _, token, log_probability, slots = wire.TOKEN.unpack(answer)
            if token < config.vocab_size and not math.isnan(log_probability):
                self._sent = len(states)
                text.cloud_layers += slots * (config.num_layers - self._exit)
                return token, log_probability
        raise ConnectionError(f"The cloud at {link.address} answers nonsense: {answer[:40]!r}.")
