# SPDX-License-Identifier: Apache-2.0
"""Decoding on an edge: shallow layers here, and a cloud that is asked where the exit is not sure.

    exit_ = Thresholded(signal=SoftmaxGap(), thresholds=jnp.asarray([0.5]), depths=(8, 16))
    edge = Edge(decoder, params, policy=exit_, link=Link(host="10.0.0.7", port=9000, key=key))
    found = edge.generate(prompt, max_new_tokens=64)
    found.token_ids, found.decided, found.record.bytes_up

After CE-CoLLM (Jin and Wu, arXiv 2411.02829). Without a link the edge stands alone: every token
comes from the exit, as from the model truncated there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import canonical, check_prompts, round_up
from utio_jax.decoding.sampling import Greedy, PerRowSampling, Sampling, check_sampling
from utio_jax.edge.parts import Next, Widths, all_shapes, identify, part_of, read_last, run_part
from utio_jax.edge.record import EdgeRecord, EdgeText, EdgeToken
from utio_jax.edge.talk import NOTHING_SAID, Talk
from utio_jax.edge.wire import ROW, CloudLostError, Link, Wire, connect
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy


class Edge:
    """The shallow part of a model, and its exit. Decodes one text at a time.

    Attributes:
      exit: layers that run here.
      link: to the cloud; None: it stands alone.
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
          policy: which tokens go deeper: causal, of depths `(exit, num_layers)`. Its thresholds
            may be changed later: `edge.policy = ...` of the same signal compiles nothing.
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
        self.exit, self.link, self._policy = depths[0], link, policy
        self._widths, self._slots = widths, slots
        self._room = round_up(slots, widths.key_step)
        self._part = part_of(decoder, params, stop=self.exit)
        self._cache = self._part.empty_cache(self._room)
        self._model = identity
        if link is not None and identity is None:
            self._model = identify(decoder, params)
        self._wire: Wire | None = None
        self._hangs_up: Callable[[], object] = lambda: None
        self._cloud_slots = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def policy(self) -> Policy:
        """Which tokens go deeper; another one has to be of the same depths.

        Raises:
          ValueError: another one does not fit the model, or the edge.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        depths = _depths_of(policy, self._part.decoder)
        if depths[0] != self.exit:
            raise ValueError(
                f"Wanted a policy of depths=({self.exit}, {depths[1]}), those of this edge, which "
                f"has no other layers. Got policy {policy.name!r} with depths={depths}. Make "
                "another Edge for it."
            )
        self._policy = policy

    def close(self) -> None:
        """Leaves the cloud, which frees its row. Another text would connect again.

        An edge that is no longer used by anything leaves by itself.
        """
        self._hangs_up()
        self._wire = None

    def warmup(self) -> None:
        """Compiles every program that texts may need."""
        all_shapes(self._part, self._widths, self._room)
        row = _Row(self, [0], PerRowSampling.of([Greedy()]), 0, None)
        with self._cache_for_the_next():
            row.run(1)
            row.read()

    def generate(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Greedy(),
        seed: int = 0,
        eos_ids: Sequence[int] | None = None,
        on_token: Callable[[EdgeToken], bool | None] = lambda token: None,
    ) -> EdgeText:
        """Returns the text behind a prompt.

        The prompt, too, runs here up to the exit; the policy is asked first about its last token.

        Args:
          prompt: token ids, at least one.
          max_new_tokens: at most.
          sampling: `Greedy()`, or a method to draw by. Draws are those of `utio_jax.generate`.
          seed: of the draws.
          eos_ids: tokens that end the text; None takes the model's own, `()` none.
          on_token: called with each token as it comes; what returns True ends the text.

        Raises:
          ValueError: an empty prompt, ids outside the vocabulary, more tokens than edge or cloud
            have room for, a cloud with another key, model, exit or protocol, or states that the
            link's type cannot hold.
          CloudLostError: the cloud is lost, and the link does not fall back.
        """
        decoder = self._part.decoder
        (ids,) = check_prompts([prompt], config=decoder.config, max_new_tokens=max_new_tokens)
        ends = decoder.config.eos_ids if eos_ids is None else tuple(eos_ids)
        method, seed = _one_row(sampling), int(np.int64(seed).astype(np.uint32))
        _check_room(ids.size + max_new_tokens, self._slots, "edge")
        talk = self._talk(method, seed)
        if self._wire is not None:
            _check_room(ids.size + max_new_tokens, self._cloud_slots, "cloud")
        row = _Row(self, ids.tolist(), method, seed, talk)
        found, reason = list[EdgeToken](), "length"
        fresh = ids.size
        with self._cache_for_the_next():
            while True:
                row.run(fresh)
                found.append(row.next_token())
                token, fresh = found[-1].token_id, 1
                row.ids.append(token)
                stopped = on_token(found[-1]) is True
                if token in ends or stopped or len(found) == max_new_tokens:
                    reason = "eos" if token in ends else "stop" if stopped else "length"
                    break
        return EdgeText(
            token_ids=np.asarray([each.token_id for each in found], np.int32),
            decided=np.asarray([each.decided for each in found], np.int32),
            log_probabilities=np.asarray([each.log_probability for each in found], np.float32),
            finish_reason=reason,
            record=row.record(found),
        )

    @contextlib.contextmanager
    def _cache_for_the_next(self) -> Iterator[None]:
        """Makes a new cache after an error: the old one may have been donated for nothing."""
        try:
            yield
        except BaseException:
            self._cache = self._part.empty_cache(self._room)
            raise

    def _talk(self, sampling: PerRowSampling, seed: int) -> Talk | None:
        """Returns the talk with the cloud about a text, connected anew where it has to be."""
        if self.link is None:
            return None
        if self._wire is not None and self._wire.line.lost is not None:
            self.close()
        talk = Talk(
            self.link,
            method=_method(sampling, seed),
            most=self._widths.chunks[-1],
            vocab_size=self._part.decoder.config.vocab_size,
        )
        if self._wire is None:
            assert self._model is not None
            try:
                self._wire, self._cloud_slots = connect(
                    self.link, model=self._model, exit_=self.exit
                )
            except CloudLostError as error:
                talk.lose(error)
                return talk
            self._hangs_up = weakref.finalize(self, self._wire.line.close)
        talk.begin(self._wire)
        return talk


class _Row:
    """One text while it is decoded."""

    def __init__(
        self, edge: Edge, ids: list[int], sampling: PerRowSampling, seed: int, talk: Talk | None
    ) -> None:
        self.ids = ids
        self._edge, self._sampling, self._seed, self._talk = edge, sampling, np.uint32(seed), talk
        self._policy = None if edge.link is None else canonical(edge.policy)
        self._ran = self._slots = self._fallbacks = 0
        self._last: jax.Array | None = None

    def run(self, count: int) -> None:
        """Runs the next tokens up to the exit."""
        edge = self._edge
        for real, wide in edge._widths.pieces(count):
            block = np.zeros(wide, np.int32)
            block[:real] = self.ids[self._ran : self._ran + real]
            where = np.int32(self._ran), np.int32(real)
            width = edge._widths.keys(edge._room, self._ran + real)
            ran = run_part(edge._part, edge._cache, block, *where, width=width)
            edge._cache, self._last = ran.cache, ran.last
            self._ran += real
            self._slots += wide
            if self._talk is not None and self._talk.lost is None:
                self._talk.keep(np.asarray(ran.states, np.float32)[:real])
                if self._ran < len(self.ids):  # Whether the last one asks is not known yet.
                    self._talk.go_ahead()

    def read(self) -> Next:
        """Returns what the exit says comes next, and whether the cloud should be asked."""
        assert self._last is not None
        token, position = np.int32(self.ids[-1]), np.int32(self._ran - 1)
        row = self._sampling, self._last, token, position, self._seed
        return read_last(self._edge._part, self._policy, *row)

    def next_token(self) -> EdgeToken:
        """Returns the next token: the exit's, or the cloud's."""
        found, talk = self.read(), self._talk
        if talk is not None:
            if not bool(found.goes):
                talk.go_ahead()
            elif (answer := talk.ask()) is not None:
                layers = self._edge._part.decoder.config.num_layers
                return EdgeToken(token_id=answer[0], decided=layers, log_probability=answer[1])
            else:
                self._fallbacks += 1
        return EdgeToken(
            token_id=int(found.token_id),
            decided=self._edge.exit,
            log_probability=float(found.log_probability),
        )

    def record(self, found: Sequence[EdgeToken]) -> EdgeRecord:
        """Returns what it all took."""
        exit_ = self._edge.exit
        at_exit = sum(each.decided == exit_ for each in found)
        deep = self._edge._part.decoder.config.num_layers - exit_
        return EdgeRecord(
            tokens=len(found),
            at_exit=at_exit,
            by_cloud=len(found) - at_exit,
            fallbacks=self._fallbacks,
            edge_layers=self._slots * exit_,
            **(NOTHING_SAID if self._talk is None else self._talk.told(deep)),
        )


def _one_row(sampling: Sampling) -> PerRowSampling:
    sampling = check_sampling(sampling, rows=1)
    if isinstance(sampling, PerRowSampling):
        return sampling
    return PerRowSampling.of([sampling])


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


def _check_room(wanted: int, slots: int, side: str) -> None:
    if wanted > slots:
        raise ValueError(
            f"Wanted prompt and new tokens within the {slots} that a row of the {side} holds. Got "
            f"{wanted}. Cut the prompt or max_new_tokens, or start the {side} with more slots."
        )


def _method(sampling: PerRowSampling, seed: int) -> bytes:
    """Returns how a row draws, as `OPEN` says it."""
    fields = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return ROW.pack(seed, *(np.asarray(field)[0].item() for field in fields))
