# SPDX-License-Identifier: Apache-2.0
"""Ends a thought after a number of tokens, or when the model is sure of its last words.

After LYNX (arXiv 2512.05325) and DEER (arXiv 2504.15895), see docs/contrib/stopping.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
from utio_jax.contrib.stopping.budget import ThinkingBudget, Thought
from utio_jax.core import Decoder
from utio_jax.core.documents import check_ids
from utio_jax.decoding import generate

__all__ = [
    "Answered",
    "Confidence",
    "ThinkingBudget",
    "Thought",
    "Trace",
    "fit_confidence",
    "generate_until_sure",
    "trace_answers",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
    """Rule for ending a thought: after tokens that the model was sure of.

    Minus the mean log-probability of the last `window` thought tokens has to lie below `threshold`,
    in nats (-inf: nowhere). It is asked after `min_tokens` at least, and `window`; only after
    tokens of `cue_ids`, such as the ends of sentences, where there are any.
    """

    threshold: float
    window: int = 8
    cue_ids: Sequence[int] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.threshold) or self.window < 1 or self.min_tokens < 0:
            raise ValueError(f"Wanted nats, window from 1 on, min_tokens from 0 on. Got {self}.")

    def ask(self, token_ids: Sequence[int], surprise: Sequence[float]) -> float:
        """Returns the mean surprise of a thought's last tokens; inf where it may not end."""
        asks = not len(self.cue_ids) or token_ids[-1] in self.cue_ids
        asks &= len(token_ids) >= max(self.window, self.min_tokens)
        return float(np.mean(surprise[-self.window :])) if asks else math.inf


@dataclasses.dataclass(kw_only=True)
class Answered:
    """A prompt, a thought and the answer after it, as token ids.

    `surprise` has the nats of each thought token, `means` what was asked after it. `ended_by` is
    "confidence", "budget", "model" (which wrote the end), or "eos": the text ended, unanswered.
    """

    prompt: list[int]
    thought: list[int] = dataclasses.field(default_factory=list)
    surprise: list[float] = dataclasses.field(default_factory=list)
    means: list[float] = dataclasses.field(default_factory=list)
    ended_by: str = "budget"
    answer: list[int] = dataclasses.field(default_factory=list)

    def add(self, token: int, nats: float, end: list[int], confidence: Confidence) -> None:
        """Adds a token to the thought, which may end after it."""
        self.thought.append(token)
        self.surprise.append(nats)
        self.means.append(confidence.ask(self.thought, self.surprise))
        if self.thought[-len(end) :] == end:
            self.ended_by = "model"
        elif self.means[-1] < confidence.threshold:
            self.ended_by = "confidence"


def generate_until_sure(
    decoder: Decoder,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    end_ids: Sequence[int],
    confidence: Confidence,
    max_thought: int,
    max_answer: int,
    chunk: int = 32,
    **options: Any,
) -> list[Answered]:
    """Returns a thought for each prompt, cut when the model is sure, and the answer after it.

    `end_ids` close the thought, unless the model has written them. Every `chunk` tokens the host
    looks, and all texts are read again. Options are `utio_jax.generate`'s, such as `mode`.

    Raises:
      ValueError: limits too small, or beyond the model's context; options that these replace.
    """
    check_ids(end_ids, vocab_size=decoder.config.vocab_size, what="end_ids")
    most = max(map(len, prompts), default=0) + max_thought + len(end_ids) + max_answer
    rules = [name for name in ("stop_sequences", "stop_when") if name in options]
    if most > decoder.config.context_length or chunk < 1 or rules:
        raise ValueError(
            f"Wanted at most {decoder.config.context_length} tokens, the model's context, chunks "
            f"from 1 on, and no other rules. Got {most}, {chunk=}, {rules}. Lower max_thought."
        )
    end, *texts = ([int(token) for token in ids] for ids in (end_ids, *prompts))
    rows = [Answered(prompt=text) for text in texts]
    for done in range(0, max_thought, chunk):
        # Rows that have ended stay: the batch keeps its shape, and rows their seeds.
        texts = [row.prompt + row.thought for row in rows]
        room = min(chunk, max_thought - done)
        result = generate(decoder, params, texts, max_new_tokens=room, **options)
        columns = result.token_ids, result.log_probabilities, result.finish_reasons
        for row, new, logs, reason in zip(rows, *columns, strict=True):
            for token, log in zip(new.tolist(), logs.tolist(), strict=True):
                if row.ended_by == "budget":
                    row.add(token, -log, end, confidence)
            if row.ended_by == "budget" and reason == "eos":
                row.ended_by = "eos"
        if all(row.ended_by != "budget" for row in rows):
            break
    closing = {"confidence": end, "budget": end}
    texts = [row.prompt + row.thought + closing.get(row.ended_by, []) for row in rows]
    result = generate(decoder, params, texts, max_new_tokens=max_answer, **options)
    for row, new in zip(rows, result.token_ids, strict=True):
        row.answer = [] if row.ended_by == "eos" else new.tolist()
    return rows


class Trace(NamedTuple):
    """Results of ending a prompt's thought at every possible token.

    `ends` has three values for each possible end: tokens thought, the window's mean surprise in
    nats, and True if the answer differs from that after all `whole` tokens.
    """

    ends: list[tuple[int, float, bool]]
    whole: int

    def replay(self, threshold: float) -> tuple[int, bool]:
        """Returns the tokens thought under a threshold, and whether the answer changes."""
        for size, nats, changed in self.ends:
            if nats < threshold:
                return size, changed
        return self.whole, False


def trace_answers(
    decoder: Decoder,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    confidence: Confidence,
    same: Callable[[list[int], list[int]], bool] = list.__eq__,
    **how: Any,
) -> list[Trace]:
    """Returns a trace of each prompt, valid for any threshold; each place costs an answer.

    `same` compares answers; the rest is as in `generate_until_sure`.
    """
    never, at_once = dataclasses.replace(confidence, threshold=-math.inf), dict(how, max_thought=0)
    rows = generate_until_sure(decoder, params, prompts, confidence=never, **how)
    asked = [
        [(size, nats) for size, nats in enumerate(row.means[:-1], 1) if nats < math.inf]
        for row in rows
    ]
    traces = [Trace([], len(row.thought)) for row in rows]
    # One place of every prompt at a time: the batch keeps its shape, and rows their seeds.
    for turn in range(max(map(len, asked), default=0)):
        places = [row[turn] if turn < len(row) else (0, math.inf) for row in asked]
        cut = [row.prompt + row.thought[:size] for row, (size, _) in zip(rows, places, strict=True)]
        again = generate_until_sure(decoder, params, cut, confidence=never, **at_once)
        for row, trace, (size, nats), other in zip(rows, traces, places, again, strict=True):
            if size:
                trace.ends.append((size, nats, not same(row.answer, other.answer)))
    return traces


def fit_confidence(
    traces: Sequence[Trace], *, max_changed: float = 0.1, confidence: float = 0.95, seed: int = 0
) -> Fitted:
    """Returns the largest threshold at which few answers change, at a confidence.

    With probability `confidence` over their draw, at most `max_changed` of such prompts get another
    answer than after the whole thought. A rung's cost is its share of the thought tokens.

    Raises:
      ValueError: fewer traces than that takes, or none in which a confidence is asked.
    """
    bound: dict[str, Any] = {"max_risk": max_changed, "confidence": confidence}
    fits = halves(np.arange(len(traces)), units="traces", bound="max_changed", seed=seed, **bound)
    fit_traces, others = (
        [traces[i] for i in np.flatnonzero(half).tolist()] for half in (fits, ~fits)
    )
    seen = [nats for trace in fit_traces for _, nats, _ in trace.ends]
    if not seen:
        raise ValueError("Wanted traces that are asked. Got none. Name other cues or windows.")
    # Quantiles, from the lowest on: a lower threshold ends fewer thoughts, and later.
    ladder = np.unique(np.quantile(seen, np.linspace(0, 1, 25)[1:])).tolist()
    whole = sum(trace.whole for trace in fit_traces)
    costs = [
        sum(trace.replay(threshold)[0] for trace in fit_traces) / whole for threshold in ladder
    ]
    risks = np.asarray([[trace.replay(threshold)[1] for trace in others] for threshold in ladder])
    return fit_with_guarantee(risks, settings=ladder, costs=costs, **bound)
