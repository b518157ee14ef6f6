# SPDX-License-Identifier: Apache-2.0
"""A model split over two machines at an early exit; the caller carries the messages.

After CE-CoLLM (Jin and Wu, arXiv 2411.02829), see docs/contrib/edge.md. An edge asks with bytes:

    ask      a header (`ASK`), then states of the next tokens at the exit
    answer   `TOKEN`        the token after the last of them
             b"m"           the states before these have to come, too
             b"r" text      refused: another model, protocol or size

A cloud may forget a text at any time: the edge keeps its states. States that the cloud runs leave
full-depth K/V there (`kv="full"`). So its answer is the full model's, independent of the side that
emitted the earlier tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from utio_jax.contrib.edge.parts import Row
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.files import hash_params
from utio_jax.decoding.loop import canonical
from utio_jax.decoding.requests import check_prompts
from utio_jax.decoding.sampling import SamplingParams, check_sampling, rows_of
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy

__all__ = ["Cloud", "Edge", "EdgeText"]

PROTOCOL = 7
"""Both sides have to have the same."""

ASK = struct.Struct("<16s16sIIfiff")
"""`identify`, a text's id, position of the first state, seed, fields of a `SamplingParams`."""

TOKEN = struct.Struct("<cIfI")
"""b"t", a token, its log-probability, token slots that ran in the cloud."""


def identify(decoder: Decoder, params: Params, exit_: int) -> bytes:
    """Returns a digest of what both sides must share: protocol, config, weights, types, exit."""
    text = f"{PROTOCOL} {decoder!r} {hash_params(params)} {exit_}"
    return hashlib.sha256(text.encode()).digest()[:16]


class Cloud:
    """The deep layers of a model, for any number of edges and threads."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        *,
        exit: int,  # noqa: A002 (the word everywhere)
        rows: int = 8,
    ) -> None:
        """Compiles every program.

        Edges run `exit` layers; texts may be as long as the model's context. K/V of `rows` texts
        are kept: of more, the one that has not asked for the longest time sends its states again.

        Raises:
          ValueError: rows or an exit that cannot be.
        """
        config, layers = decoder.config, decoder.config.num_layers
        if not 1 <= exit < layers or rows < 1:
            raise ValueError(
                f"Wanted an exit from 1 to {layers - 1}: both sides run some of the model's "
                f"{layers} layers; and at least one row. Got exit={exit}, rows={rows}. For "
                f"example: exit={max(1, layers // 2)}."
            )
        # Its own tree: arrays replaced in the caller's are those of a model that no edge has.
        params = jax.tree.map(lambda leaf: leaf, params)
        self._config, self._model = config, identify(decoder, params, exit)
        self._new_row = partial(Row, decoder, params, start=exit, stop=layers)
        (fresh := self._new_row()).compile()
        self._dtype = fresh.last.dtype
        self._rows, self._most_rows = OrderedDict[bytes, Row](), rows
        self._lock = threading.Lock()

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to an edge's message; messages take turns."""
        try:
            with self._lock:
                return self._answer(message)
        except ValueError as error:
            return b"r" + str(error)[:2000].encode()

    def _answer(self, message: bytes) -> bytes:
        """Returns the answer to a message. Raises ValueError to reject it."""
        if len(message) < ASK.size:
            raise ValueError(f"Wanted at least {ASK.size} bytes. Got {len(message)}.")
        model, text, first, seed, *drawn = ASK.unpack_from(message)
        if model != self._model:
            raise ValueError(
                "Wanted an edge of this cloud's protocol, model and exit. Got another one. Start "
                "both with the same version, weights, config and exit."
            )
        names = "temperature", "top_k", "top_p", "min_p"
        sampling = rows_of([SamplingParams(**dict(zip(names, drawn, strict=True)))])
        x = np.frombuffer(message, self._dtype, offset=ASK.size)
        x = x.reshape(-1, self._config.embed_dim)
        most = self._config.context_length
        if not 0 < len(x) <= most - first:
            raise ValueError(
                f"Wanted 1 to {most} tokens, the cloud's context. Got {len(x)} after {first}. Cut "
                "the prompt or max_new_tokens."
            )
        row = self._rows.pop(text, None)  # It returns once it has run: its cache is donated.
        row = row if first else self._new_row()
        if row is None or row.ran != first:
            return b"m"
        before = row.slots
        row.run(x)
        token, log_probability, _ = jax.device_get(row.read(None, sampling, 0, seed))
        self._rows[text] = row
        if len(self._rows) > self._most_rows:
            self._rows.popitem(last=False)  # The one idle longest.
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
      lost: error that lost the cloud, or None.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    decided: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    fallbacks: int = 0
    edge_layers: int = 0
    cloud_layers: int = 0
    lost: str | None = None


class Edge:
    """The shallow part of a model, and its exit. A text's hard tokens come from the cloud."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        *,
        policy: Policy,
        ask: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Keeps the shallow layers.

        The policy says which tokens go deeper: causal, of depths `(exit, num_layers)`, or else a
        ValueError. `ask` carries a message to `Cloud.answer` and returns the answer; an OSError,
        such as a timeout, loses the cloud. None: every token comes from the exit.
        """
        layers, depths = decoder.config.num_layers, check_policy(policy, decoder)
        if len(depths) != 2 or depths[1] != layers or not policy.causal:
            raise ValueError(
                f"Wanted a causal policy of two depths, the edge's exit and the model's {layers} "
                f"layers. Got policy {policy.name!r} with depths={depths}. For example: "
                "Thresholded(signal=SoftmaxGap(), thresholds=..., "
                f"depths=({layers // 2}, {layers}))."
            )
        self._config, self._exit, self._send = decoder.config, depths[0], ask
        self._policy = None if ask is None else canonical(policy)
        self._model = b"" if ask is None else identify(decoder, params, self._exit)
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
        header = partial(ASK.pack, self._model, uuid.uuid4().bytes)
        states = np.zeros((new.size + max_new_tokens, config.embed_dim), row.last.dtype)
        sent = 0
        for _ in range(max_new_tokens):
            x = row.run(new)
            states[row.ran - new.size : row.ran] = x
            read = row.read(self._policy, method, int(new[-1]), seed)
            token, log_probability, deeper = jax.device_get(read)
            depth = self._exit
            if deeper and text.lost is None:
                try:
                    messages = (
                        header(first, *drawn) + states[first : row.ran].tobytes()
                        for first in (sent, 0)  # All, if the cloud has forgotten the text.
                    )
                    token, log_probability = self._ask(messages, text)
                    depth, sent = config.num_layers, row.ran
                except OSError as error:
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

    def _ask(self, messages: Iterable[bytes], text: EdgeText) -> tuple[int, float]:
        """Returns the cloud's token and its log-probability, by the first message that suffices.

        Raises:
          OSError: the cloud is lost.
          ValueError: it refuses.
        """
        send: Any = self._send
        answer = next((answer for answer in map(send, messages) if answer != b"m"), b"m")
        detail = answer[1:2001].decode(errors="replace")
        if answer[:1] == b"r":
            raise ValueError(f"Wanted an answer of the cloud. Got: {detail}")
        if answer[:1] == b"t" and len(answer) == TOKEN.size:
            _, token, log_probability, slots = TOKEN.unpack(answer)
            if token < self._config.vocab_size and np.isfinite(log_probability):
                text.cloud_layers += slots * (self._config.num_layers - self._exit)
                return token, log_probability
        raise ConnectionError(f"Wanted a token of the cloud. Got {answer[:200]!r}.")
