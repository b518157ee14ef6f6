# SPDX-License-Identifier: Apache-2.0
"""What is served: a model that reads and writes text, how it decodes, what a request may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utio_jax.decoding.base import Mode
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.text import TextModel
from utio_jax.decoding.thinking import Thinking
from utio_jax.policies.depth import Thresholded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """How a model's conversations become tokens.

    Attributes:
      template: the Jinja program, for clients that ask.
      encode: returns the token ids `[token]` of messages, with the assistant's turn opened. Raises
        ValueError for messages that the template does not take.
      eos_ids: what ends an answer.
    """

    template: str
    encode: Callable[[Sequence[Mapping[str, Any]]], np.ndarray]
    eos_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model under a name, and what the operator lets requests choose.

    Attributes:
      name: what requests call it.
      text: the model.
      mode: how its engine decodes.
      chat: None where it has no chat template.
      policy: name of the depth policy; None without one.
      budget: of a request that names none; None without a policy.
      budgets: policies that a request may choose by their budget.
      prefill: how prompts are read; None: in full.
      prompt_budget: what that costs over reading them in full.
      thinking: how long a request's choices may think that says nothing of it; None: requests may
        say nothing of it.
      special_tokens: texts of `eos_token`, `bos_token` and others, by name.
    """

    name: str
    text: TextModel
    mode: Mode
    chat: Chat | None = None
    policy: str | None = None
    budget: float | None = None
    budgets: Mapping[float, Thresholded] = dataclasses.field(default_factory=dict)
    prefill: Prefill | None = None
    prompt_budget: float | None = None
    thinking: Thinking | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.text.decoder.config.num_layers

    def room(self, capacity: int | None) -> int:
        """Returns the tokens of a slot: by default the model's context, 2048 at most."""
        context = self.text.decoder.config.context_length
        return int(min(context + self.mode.block, 2048)) if capacity is None else capacity

    def card(self, *, context: int, created: int) -> dict[str, Any]:
        """Returns the model as `/v1/models` lists it.

        Args:
          context: tokens that a request's prompt and answer have together.
          created: seconds since 1970.
        """
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "utio-jax",
            "max_model_len": context,
            "utio": {
                "mode": self.mode.name,
                "layers": self.layers,
                "policy": self.policy,
                "budget": self.budget,
                "budgets": sorted(self.budgets),
                "prompt_budget": self.prompt_budget,
                "chat": self.chat is not None,
                "thinking": self.thinking is not None,
                "context_length": context,
            },
        }
