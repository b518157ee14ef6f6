# SPDX-License-Identifier: Apache-2.0
"""Thresholds of thinking's confidence, with a guarantee: in most cases the answer stays the same.

    rule = Thinking(end_ids=..., max_tokens=256, confidence=Confidence(threshold=0, cue_ids=...))
    traces = trace_stops(decoder, params, prompts, rule, answer_tokens=8)
    fitted = fit_stop(traces, max_changed=0.1)
    generate(decoder, params, others, thinking=with_threshold(rule, fitted.chosen))

A trace is a prompt that was thought to its end, and the answer that the forced end would have given
at each cue. From it follows what any threshold would have done. Half of the traces make a ladder of
thresholds, the other half tests it from the safe end (`fit_ladder`); a
prompt is one unit, its risk 0 or 1. As LYNX asks at cues of the text and chooses a threshold by
conformal prediction, but with a bound that holds at a confidence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_ladder, halves
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.thinking import Confidence, Thinking

_RUNGS = 24
"""Thresholds on a ladder: quantiles of what the fitting half has seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopTrace:
    """A prompt that was thought to its end, and what stopping at each cue would have changed.

    Tokens thought before each cue's forced end, that cue included; the window's mean uncertainty
    there; whether the answer from there differs from the whole thinking's; tokens of that.
    """

    tokens: Int[np.ndarray, " cue"]
    uncertainty: Float[np.ndarray, " cue"]
    changed: Bool[np.ndarray, " cue"]
    whole: int


def trace_stops(
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    rule: Thinking,
    *,
    answer_tokens: int,
    same: Callable[[np.ndarray, np.ndarray], bool] = np.array_equal,
    batch: int = 16,
    **options: Any,
) -> list[StopTrace]:
    """Returns a trace of each prompt that ended thinking, by itself or by its budget.

    Costs one more pass over prompt and thought for each cue, and its answer: keep cues rare.

    The rule has a confidence, whose threshold is not looked at, and `max_tokens`; answers have at
    most `answer_tokens`, and `same` says whether two of them, token ids `[new]`, are the same.
    Options are those of `utio_jax.generate`, such as `mode` and `eos_ids`. Greedy: an answer that
    is drawn changes by itself.

    Raises:
      ValueError: a rule without confidence or budget, or see `utio_jax.generate`.
    """
    sure = rule.confidence
    if sure is None or rule.max_tokens is None:
        raise ValueError(
            "Wanted a Thinking with a confidence, which says what is asked where, and max_tokens. "
            f"Got {rule}."
        )
    never = dataclasses.replace(sure, threshold=-math.inf)
    full = dataclasses.replace(rule, confidence=never, max_answer_tokens=answer_tokens)
    room = rule.max_tokens + max(len(rule.forced), len(rule.end_ids)) + answer_tokens
    answers: list[np.ndarray | None] = []
    asked: list[tuple[int, int, float]] = []
    behind: list[list[int]] = []
    whole: list[int] = []
    for new, thought, noted in _in_batches(
        decoder, params, prompts, full, room=room, batch=batch, **options
    ):
        index = len(answers)
        ended = thought.start is not None and thought.ended_by != "open"
        answers.append(new[thought.answer] if ended else None)
        whole.append(thought.tokens)
        if not ended or thought.start is None:
            continue
        for place in cues_of(sure, new[thought.start : thought.start + thought.tokens]):
            end = thought.start + place
            asked.append((index, place, float(noted[end - sure.window : end].mean())))
            behind.append([*prompts[index], *new[:end].tolist()])
    # Behind a thought that is cut, what is forced next is the end: a budget of no further token.
    cut = Thinking(
        end_ids=rule.end_ids,
        forced_ids=rule.forced,
        max_tokens=0,
        max_answer_tokens=answer_tokens,
    )
    room = len(rule.forced) + answer_tokens
    again = _in_batches(decoder, params, behind, cut, room=room, batch=batch, **options)
    rows: list[list[tuple[int, float, bool]]] = [[] for _ in answers]
    for (index, place, mean), (new, thought, _) in zip(asked, again, strict=True):
        answer = answers[index]
        changed = answer is not None and not same(new[thought.answer], answer)
        rows[index].append((place, mean, changed))
    return [
        StopTrace(
            tokens=np.asarray([place for place, _, _ in row], np.int64),
            uncertainty=np.asarray([mean for _, mean, _ in row], np.float64),
            changed=np.asarray([changed for _, _, changed in row], np.bool_),
            whole=size,
        )
        for row, size, answer in zip(rows, whole, answers, strict=True)
        if answer is not None
    ]


def cues_of(sure: Confidence, thought: Sequence[int] | np.ndarray) -> list[int]:
    """Returns behind how many thought tokens a confidence is asked, the last one apart."""
    least = max(sure.window, sure.min_tokens, 1)
    known = {int(token) for token in sure.cue_ids}
    places = range(least, len(thought))
    return [place for place in places if not known or int(thought[place - 1]) in known]


def replay_stops(
    traces: Sequence[StopTrace], threshold: float
) -> tuple[Int[np.ndarray, " trace"], Bool[np.ndarray, " trace"]]:
    """Returns tokens that each would have thought under a threshold, and whose answer changes."""
    tokens, changed = [], []
    for trace in traces:
        below = np.flatnonzero(trace.uncertainty < threshold)
        tokens.append(int(trace.tokens[below[0]]) if below.size else trace.whole)
        changed.append(bool(below.size) and bool(trace.changed[below[0]]))
    return np.asarray(tokens, np.int64), np.asarray(changed, np.bool_)


def fit_stop(
    traces: Sequence[StopTrace],
    *,
    max_changed: float = 0.1,
    confidence: float = 0.95,
    seed: int = 0,
) -> Fitted:
    """Returns the largest threshold at which few answers change, at a confidence.

    The guarantee is about prompts like these, each drawn on its own, over their draw: with
    probability `confidence`, at most `max_changed` of them get another answer than full thinking
    gives. A rung's cost is thought tokens over those of full thinking, on the fitting half.

    Nothing else may have been fitted on these prompts.

    Raises:
      ValueError: fewer traces than the guarantee takes, or none that meets a cue.
    """
    mine = halves(
        np.arange(len(traces)),
        units="traces",
        max_risk=max_changed,
        confidence=confidence,
        bound="max_changed",
        seed=seed,
    )
    fits, tests = ([traces[i] for i in np.flatnonzero(part).tolist()] for part in (mine, ~mine))
    seen = np.concatenate([trace.uncertainty for trace in fits])
    if not seen.size:
        raise ValueError(
            "Wanted traces that meet cues. Got none in the fitting half. Name other cue_ids, or a "
            "smaller window or min_tokens."
        )
    # From the lowest on: a lower threshold stops fewer, and later.
    levels = np.linspace(0, 1, _RUNGS + 1)[1:]
    ladder = np.unique(np.quantile(seen, levels)).tolist()
    whole = sum(trace.whole for trace in fits)
    risks = np.stack([replay_stops(tests, each)[1] for each in ladder])
    ratios = [float(replay_stops(fits, each)[0].sum() / max(whole, 1)) for each in ladder]
    return fit_ladder(ladder, ratios, risks, max_risk=max_changed, confidence=confidence)


def with_threshold(thinking: Thinking, threshold: float | None) -> Thinking:
    """Returns the rule that traces were made with, with a threshold; None: without confidence."""
    if threshold is None or thinking.confidence is None:
        return dataclasses.replace(thinking, confidence=None)
    sure = dataclasses.replace(thinking.confidence, threshold=threshold)
    return dataclasses.replace(thinking, confidence=sure)


def _in_batches(
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    rule: Thinking,
    *,
    room: int,
    batch: int,
    **options: Any,
) -> list[tuple[np.ndarray, Any, np.ndarray]]:
    """Returns new tokens, thought and uncertainty of each prompt; all batches of one size."""
    found = []
    for first in range(0, len(prompts), batch):
        some = list(prompts[first : first + batch])
        filled = some + [some[0]] * (batch - len(some))
        result = generate(decoder, params, filled, thinking=rule, max_new_tokens=room, **options)
        rows = zip(result.token_ids, result.thought, result.uncertainty, strict=True)
        found += list(rows)[: len(some)]
    return found
