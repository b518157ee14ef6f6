# SPDX-License-Identifier: Apache-2.0
"""The served model: text in and out, decoding mode, limits of requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping

from utio_jax.core.decoder import is_integer
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.text import TextModel
from utio_jax.models.chat import RendersChats, chat_template_of
from utio_jax.policies.depth import Thresholded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request and of all open requests. Above 0; counts at least 1.

    Attributes:
      body_bytes: of a request.
      queue_requests: that wait for a slot, each choice of each prompt by itself; more get a 429.
      request_seconds: from a request to its last token.
      ping_seconds: between comments in a stream that has nothing to say.
      drain_seconds: seconds that open requests have after SIGTERM; finite.
    """

    body_bytes: int = 2**20
    queue_requests: int = 256
    request_seconds: float = 300.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 or (value < 1 and not name.endswith("_seconds")):
                raise ValueError(
                    f"Wanted limits of at least 1, and of more than 0 seconds. Got {name}={value}."
                )
        if math.isinf(self.drain_seconds):
            raise ValueError(
                "Wanted finite drain_seconds: an open stream may never end. Got inf. For example: "
                "3600."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model under a name, and the options that requests may choose.

    Attributes:
      name: the model's name in requests.
      text: the model.
      mode: of decoding.
      policy: name of the depth policy; None without one.
      budget: of a request that names none; None without a policy.
      budgets: policies that a request may choose by their budget.
      histogram: share of tokens that stop at each depth of `mode`'s policy, by which the server
        plans whether that pays; None: it plans nothing.
      prefill: of prompts; None: the full model's.
      prompt_budget: FLOPs of `prefill` over a full prefill's.
      logits_processor: of all requests, as a budget for thinking; see `Engine`.
    """

    name: str
    text: TextModel
    mode: Mode = dataclasses.field(default_factory=Plain)
    policy: str | None = None
    budget: float | None = None
    budgets: Mapping[float, Thresholded] = dataclasses.field(default_factory=dict)
    histogram: Mapping[int, float] | None = None
    prefill: Prefill | None = None
    prompt_budget: float | None = None
    logits_processor: LogitsProcessor | None = None

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.text.decoder.config.num_layers

    @property
    def chat(self) -> RendersChats | None:
        """Chat template of the model; None where it has none."""
        return None if isinstance(self._chat, str) else self._chat

    @property
    def no_chat(self) -> str:
        """Reason for having no chat template; empty where the model has one."""
        return self._chat if isinstance(self._chat, str) else ""

    @functools.cached_property
    def _chat(self) -> RendersChats | str:
        try:
            return chat_template_of(self.text)
        except ValueError as error:
            return str(error)

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of `eos_token`, `bos_token` and others, by name.

        They are those of the model's files, with a chat template or without; an end that these do
        not name is the config's.
        """
        ends = self.text.decoder.config.eos_ids
        text = self.text.tokenizer.id_to_token(ends[0]) if ends else None
        named: dict[str, str] = {} if text is None else {"eos_token": text}
        with contextlib.suppress(ValueError):
            named |= getattr(self.text, "special_tokens", {})
        return named if self.chat is None else {**named, **self.chat.special_tokens}

    def slot_tokens(self, capacity: int | None) -> int:
        """Returns the tokens of a slot: what a request may fill; by default 2048 at most."""
        most = int(self.text.decoder.config.context_length) + self.mode.block
        if capacity is None:
            return min(most, 2048)
        return min(most, capacity) if is_integer(capacity) else capacity  # Engines refuse others.
