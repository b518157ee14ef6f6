# SPDX-License-Identifier: Apache-2.0
"""Decoding on an edge: shallow layers here, deep ones of a cloud for tokens that need them.

    policy = Thresholded(signal=SoftmaxGap(), thresholds=jnp.asarray([0.5]), depths=(8, 16))
    edge = Edge(decoder, params, policy=policy, link=Link(host="10.0.0.7", port=9000, key=key))
    found = edge.generate(prompt, max_new_tokens=64)
    found.token_ids, found.decided, found.record.bytes_up

After CE-CoLLM (Jin and Wu, arXiv 2411.02829). Without a link the edge stands alone: every token
comes from the exit, as from the model truncated there.
"""

from __future__ import annotations

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.contrib.edge.parts import Widths, all_shapes, identify, part_of, read_last, run_part
from utio_jax.contrib.edge.wire import (
    FORMATS,
    MISSING,
    PROTOCOL,
    TOKEN,
    Ask,
    CloudLostError,
    Connection,
    Link,
    pack_states,
)
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import canonical, check_prompts, round_up
from utio_jax.decoding.sampling import SamplingParams, check_sampling, rows_of
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy


@dataclasses.dataclass(kw_only=True)
class EdgeRecord:
    """What one text took, here, in the cloud and between the two.

    Attributes:
      tokens: new ones.
      at_exit: of these, emitted from the exit.
      by_cloud: given by the cloud.
      fallbacks: of those at the exit, the ones that the cloud would have been asked for, had it not
        been lost.
      edge_layers: token slots that ran a layer on the edge, prompt and padding included.
      cloud_layers: likewise in the cloud.
      states_sent: tokens whose states were sent.
      bytes_up: of messages to the cloud, without what ZeroMQ adds.
      bytes_down: likewise from it.
      seconds_waited: for the cloud's answers.
      lost: why the cloud was lost; None: it was not.
    """

    tokens: int = 0
    at_exit: int = 0
    by_cloud: int = 0
    fallbacks: int = 0
    edge_layers: int = 0
    cloud_layers: int = 0
    states_sent: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds_waited: float = 0.0
    lost: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeText:
    """What `Edge.generate` returns.

    Attributes:
      token_ids: new tokens, `[new]`, the one that ended the text included.
      decided: layers behind the distribution that each was taken from, `[new]`: the exit's, or all.
      log_probabilities: of each in nats, `[new]`, before any sampling method.
      finish_reason: `"eos"`, `"stop"` or `"length"`.
      record: what it took.
    """

    token_ids: np.ndarray
    decided: np.ndarray
    log_probabilities: np.ndarray
    finish_reason: str
    record: EdgeRecord


class Edge:
    """The shallow part of a model, and its exit. Decodes one text at a time.

    Attributes:
      exit: layers that run here.
      link: to the cloud; None: it stands alone.
      policy: which tokens go deeper. Another one of the same signal compiles nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        *,
        policy: Policy,
        link: Link | None = None,
        slots: int | None = None,
        widths: Widths = Widths(),
        identity: str | None = None,
    ) -> None:
        """Takes the shallow layers. Nothing is connected before there is a text.

        Args:
          decoder: the model.
          params: its parameters, all layers included; those behind the exit are not kept.
          policy: which tokens go deeper: causal, of depths `(exit, num_layers)`.
          link: to a cloud; None: none is ever asked.
          slots: tokens that a text can have, prompt included; None: the model's context.
          widths: shapes that compile.
          identity: what `identify` says of the model, where that is known; None: it is called, and
            reads all weights.

        Raises:
          ValueError: a policy or a size that does not fit the model.
        """
        context, depths = decoder.config.context_length, _depths_of(policy, decoder)
        slots = context if slots is None else slots
        if not 1 <= slots <= context:
            raise ValueError(
                f"Wanted 1 to {context} slots, the model's context. Got slots={slots}."
            )
        self.exit, self.link, self.policy = depths[0], link, policy
        self._widths, self._slots = widths, slots
        self._room = round_up(slots, widths.key_step)
        self._part = part_of(decoder, params, stop=self.exit)
        self._cache = self._part.empty_cache(self._room)
        self._model = identity or ("" if link is None else identify(decoder, params))
        self._connection: Connection | None = None
        self._hangs_up: Callable[[], object] = lambda: None
        self._texts = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the cloud. Another text would connect again."""
        self._hangs_up()
        self._connection = None

    def warmup(self) -> None:
        """Compiles every program that texts may need."""
        all_shapes(self._part, self._widths, self._room)
        row = _Row(self, [0], rows_of([SamplingParams()]), 0, 1)
        row.run()
        row.read()

    def generate(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = SamplingParams(),
        seed: int = 0,
        eos_ids: Sequence[int] | None = None,
        on_token: Callable[[int], bool | None] = lambda token: None,
    ) -> EdgeText:
        """Returns the text behind a prompt.

        The prompt, too, runs here up to the exit; the policy is asked first about its last token.

        Args:
          prompt: token ids, at least one.
          max_new_tokens: at most.
          sampling: how tokens are drawn. Draws are those of `utio_jax.generate`.
          seed: of the draws.
          eos_ids: tokens that end the text; None takes the model's own, `()` none.
          on_token: called with each token's id as it comes; what returns True ends the text.

        Raises:
          ValueError: an empty prompt, ids outside the vocabulary, more tokens than edge or cloud
            have room for, a policy that does not fit, a cloud with another key, model, exit or
            protocol, or states that the link's type cannot hold.
          CloudLostError: the cloud is lost, and the link does not fall back.
        """
        config = self._part.decoder.config
        (ids,) = check_prompts([prompt], config=config, max_new_tokens=max_new_tokens)
        depths = _depths_of(self.policy, self._part.decoder)
        if depths[0] != self.exit:
            raise ValueError(
                f"Wanted a policy of depths=({self.exit}, {depths[1]}), those of this edge, which "
                f"has no other layers. Got policy {self.policy.name!r} with depths={depths}. Make "
                "another Edge for it."
            )
        total = ids.size + max_new_tokens
        if total > self._slots:
            raise ValueError(
                f"Wanted prompt and new tokens within the {self._slots} that a row of the edge "
                f"holds. Got {total}. Cut the prompt or max_new_tokens, or start the edge with "
                "more slots."
            )
        ends = config.eos_ids if eos_ids is None else tuple(eos_ids)
        method = check_sampling(sampling, rows=1) or rows_of([sampling])
        self._texts += 1
        row = _Row(self, ids.tolist(), method, int(np.int64(seed).astype(np.uint32)), total)
        found, reason = list[tuple[int, int, float]](), ""
        try:
            while not reason:
                row.run()
                found.append(row.next_token())
                token = found[-1][0]
                row.ids.append(token)
                stopped = on_token(token) is True
                if token in ends:
                    reason = "eos"
                elif stopped or len(found) == max_new_tokens:
                    reason = "stop" if stopped else "length"
        except BaseException:  # The cache may have been donated, an answer may be on its way.
            self._cache = self._part.empty_cache(self._room)
            self.close()
            raise
        tokens, decided, log_probabilities = zip(*found, strict=True)
        row.record.tokens, row.record.at_exit = len(found), decided.count(self.exit)
        row.record.by_cloud = len(found) - row.record.at_exit
        return EdgeText(
            token_ids=np.asarray(tokens, np.int32),
            decided=np.asarray(decided, np.int32),
            log_probabilities=np.asarray(log_probabilities, np.float32),
            finish_reason=reason,
            record=row.record,
        )

    def _connected(self, link: Link) -> Connection:
        if self._connection is None:
            self._connection = Connection(link)
            self._hangs_up = weakref.finalize(self, self._connection.close)
        return self._connection


class _Row:
    """One text while it is decoded."""

    def __init__(
        self, edge: Edge, ids: list[int], sampling: SamplingParams, seed: int, slots: int
    ) -> None:
        self.ids, self.record = ids, EdgeRecord()
        self._edge, self._sampling, self._seed, self._slots = edge, sampling, seed, slots
        self._policy = None if edge.link is None else canonical(edge.policy)
        self._states: list[np.ndarray] = []
        self._ran = self._sent = 0
        self._last: Any = None

    def run(self) -> None:
        """Runs tokens that have not run yet up to the exit."""
        edge = self._edge
        for real, wide in edge._widths.pieces(len(self.ids) - self._ran):
            block = np.zeros(wide, np.int32)
            block[:real] = self.ids[self._ran : self._ran + real]
            where = np.int32(self._ran), np.int32(real)
            width = edge._widths.keys(edge._room, self._ran + real)
            ran = run_part(edge._part, edge._cache, block, *where, width=width)
            edge._cache, self._last = ran.cache, ran.last
            self._ran += real
            self.record.edge_layers += wide * edge.exit
            if edge.link is not None:
                self._states.extend(np.asarray(ran.states, np.float32)[:real])

    def read(self) -> Any:
        """Returns what the exit says comes next, and whether the cloud should be asked."""
        token, position = np.int32(self.ids[-1]), np.int32(self._ran - 1)
        row = self._sampling, self._last, token, position, np.uint32(self._seed)
        return read_last(self._edge._part, self._policy, *row)

    def next_token(self) -> tuple[int, int, float]:
        """Returns the next token, the layers behind it, and its log-probability."""
        found, link, edge = self.read(), self._edge.link, self._edge
        if link is not None and bool(found.goes):
            if self.record.lost is None:
                began = time.monotonic()
                try:
                    token, log_probability = self._ask(link)
                    return token, edge._part.decoder.config.num_layers, log_probability
                except CloudLostError as error:
                    edge.close()
                    self.record.lost = str(error)
                    if not link.falls_back:
                        raise
                finally:
                    self.record.seconds_waited += time.monotonic() - began
            self.record.fallbacks += 1
        return int(found.token_id), edge.exit, float(found.log_probability)

    def _ask(self, link: Link) -> tuple[int, float]:
        """Returns the cloud's token and its log-probability, once it has all states."""
        edge, record, method = self._edge, self.record, self._sampling
        config = edge._part.decoder.config
        fields = (method.temperature, method.top_k, method.top_p, method.min_p)
        for _ in range(3):  # It may have forgotten the text once, or been started again.
            header = Ask(
                PROTOCOL,
                edge._model.encode(),
                edge.exit,
                FORMATS.index(link.states),
                edge._texts,
                self._slots,
                self._sent,
                self._seed,
                *(np.asarray(field)[0].item() for field in fields),
            ).pack()
            states = pack_states(np.stack(self._states[self._sent :]), link.states)
            answer = edge._connected(link).ask(header, states)
            record.bytes_up += len(header) + len(states)
            record.bytes_down += len(answer)
            record.states_sent += len(self._states) - self._sent
            kind, said = answer[:1], answer[1:].decode(errors="replace")
            if kind == b"r":
                raise ValueError(
                    f"Wanted the cloud at {link.host}:{link.port} to work with. It says: {said}"
                )
            if kind == b"f":
                raise link.lost(said)
            if kind == b"m" and len(answer) == MISSING.size:
                self._sent = min(MISSING.unpack(answer)[1], len(self._states) - 1)
                continue
            if kind == b"t" and len(answer) == TOKEN.size:
                _, token, log_probability, slots = TOKEN.unpack(answer)
                if token < config.vocab_size and not math.isnan(log_probability):
                    self._sent = len(self._states)
                    record.cloud_layers += slots * (config.num_layers - edge.exit)
                    return token, log_probability
            raise link.lost(f"it answers nonsense ({answer[:40]!r})")
        raise link.lost("it forgets the text as soon as it has been sent: it has too few rows")


def _depths_of(policy: Policy, decoder: Decoder) -> tuple[int, ...]:
    """Returns a policy's depths, once it is known to be one that an edge can have."""
    layers, depths = decoder.config.num_layers, check_policy(policy, decoder)
    if len(depths) != 2 or depths[1] != layers or not policy.causal:
        raise ValueError(
            f"Wanted a causal policy of two depths, the edge's exit and the model's {layers} "
            f"layers. Got policy {policy.name!r} with depths={depths}. For example: "
            "Thresholded(signal=SoftmaxGap(), thresholds=..., "
            f"depths=({layers // 2}, {layers}))."
        )
    return depths
