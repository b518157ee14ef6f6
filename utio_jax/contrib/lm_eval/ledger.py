# SPDX-License-Identifier: Apache-2.0
"""The record of requests: texts scored and texts written, what they cost, and whose numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.base import Mode
from utio_jax.decoding.generate import Generated
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.evaluate import Quality
from utio_jax.evaluation.generation import Spent, generation_ledger, spent_on
from utio_jax.evaluation.ledger import Ledger

WRITTEN = "generate_until"
"""The kind of request that writes; all others score."""

_ROLLING = "loglikelihood_rolling"
_FULL = "The full model's."
_SCORED_IN_FULL = (
    "The full model's: this mode speeds up new tokens, and here are none, so these requests ran at "
    "full depth."
)
_SCORED_ROUTED = (
    "The routed model's, not the full model's: every token, those of the context too, ran at "
    "the depth decided for it, so per-token log-likelihoods say nothing about the full model."
)
_WRITTEN_ROUTED = (
    "The routed model's, not the full model's: prompts ran at full depth, new tokens at the "
    "depth decided for each."
)
_WRITTEN_VERIFIED = "The full model's, up to ties within 1e-4 nats; drafted, and verified."
_READ_SHALLOWLY = (
    "Not the full model's: most tokens of a context stopped early; what follows it ran in full and "
    "saw what these showed."
)
_WRITTEN_OTHERWISE = "Not the full model's: the mode promises nothing."
# Scored and written text differ in what these mean.
_QUALITY = ("nll_full", "nll", "nll_increase_pct", "kl_full", "agreement", "speedup_ideal")


class RequestLedger:
    """Adds up what one model ran in one mode."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        mode: Mode,
        *,
        budget: float | None,
        prefill: Prefill | None = None,
    ) -> None:
        """Starts with nothing.

        Args:
          decoder: the model.
          params: its parameters.
          mode: that writes; its policy, if it is adaptive, scores.
          budget: that the policy was calibrated for.
          prefill: how contexts are read; None: in full.
        """
        self.prefill = prefill
        self.decoder, self.params, self.mode, self.budget = decoder, params, mode, budget
        self.scored, self.spent = Quality(), Spent()
        self.written: list[tuple[Prompts, Generated]] = []
        self.sampling = SamplingParams()
        self.counts: dict[str, int] = {}
        self.truncated: dict[str, int] = {}

    def count(self, kind: str, *, truncated: bool = False) -> None:
        """Counts a request, and whether it lost tokens at its left."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.truncated[kind] = self.truncated.get(kind, 0) + truncated

    def add_scored(self, quality: Quality) -> None:
        """Adds texts that were scored."""
        self.scored += quality

    def add_written(
        self, prompts: Prompts, generated: Generated, sampling: Sequence[SamplingParams]
    ) -> None:
        """Adds a batch of texts that were written; once some were drawn, the ledger says so."""
        self.spent += spent_on(self.decoder, self.params, self.mode, prompts, generated)
        self.written.append((prompts, generated))
        for each in sampling:
            if each.temperature != 0:
                self.sampling = each

    def ledger(self) -> Ledger:
        """Returns the record of all that was executed so far.

        Where texts were both scored and written, quality, which means something else for each, is
        None; costs are summed, scoring's over full depth and writing's over plain decoding.

        Raises:
          ValueError: nothing was executed.
        """
        if not self.scored.tokens and not self.written:
            raise ValueError("Wanted requests that were run. Got none so far.")
        policy = self.mode.depth_policy
        if policy is None and self.prefill is not None:
            policy = self.prefill.policy
        name = "full" if policy is None else policy.name
        layers = self.decoder.config.num_layers
        if not self.written:
            return self.scored.ledger(name, budget=self.budget, num_layers=layers)
        written = generation_ledger(
            self.decoder,
            self.params,
            self.mode,
            *zip(*self.written, strict=True),
            sampling=self.sampling,
            budget=self.budget,
        )
        if not self.scored.tokens:
            return written
        decided = np.concatenate([row for _, found in self.written for row in found.decided])
        depths, counts = np.unique(decided, return_counts=True)
        both = self.scored + Quality(
            tokens=self.spent.tokens,
            histogram=dict(zip(depths.tolist(), counts.tolist(), strict=True)),
            query_layers=self.spent.executed,
            flops=self.spent.flops,
            flops_full=self.spent.flops_plain,
            flops_ideal=self.spent.flops_ideal,
            flops_gates=self.spent.flops_extra,
        )
        return dataclasses.replace(
            both.ledger(name, budget=self.budget, num_layers=layers),
            involuntary_stays=written.involuntary_stays,
            involuntary_exits=written.involuntary_exits,
            **dict.fromkeys(_QUALITY),
        )

    def report(self) -> dict[str, Any]:
        """Returns the ledger, and of each kind of request: how many, how run, whose numbers.

        `truncated` requests had tokens cut from their left to fit the context.
        """
        kinds = {}
        for kind, count in self.counts.items():
            writes = kind == WRITTEN
            mode = self.mode.name if writes or self.mode.depth_policy is not None else "plain"
            shallow = self.prefill is not None and kind != _ROLLING
            kinds[kind] = {
                "requests": count,
                "truncated": self.truncated[kind],
                "executed": "prompt" if shallow else "full" if mode == "plain" else mode,
                "meaning": _READ_SHALLOWLY if shallow else _meaning(self.mode, writes=writes),
            }
        return {"requests": kinds, **self.ledger().to_dict()}


def _meaning(mode: Mode, *, writes: bool) -> str:
    """Returns whose numbers a request's are."""
    routed, drafts = mode.depth_policy is not None, mode.block > 1
    if not writes:
        return _SCORED_ROUTED if routed else _SCORED_IN_FULL if drafts else _FULL
    if mode.exact:
        return _WRITTEN_VERIFIED if drafts else _FULL
    return _WRITTEN_ROUTED if routed else _WRITTEN_OTHERWISE
