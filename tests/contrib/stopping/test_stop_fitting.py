# SPDX-License-Identifier: Apache-2.0
"""Thresholds of confidence: replayed as decoding does it, and the guarantee holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers.generation import SMALL, lively_model, run
from scipy import stats

from utio_jax.contrib.stopping import (
    StopTrace,
    fit_stop,
    replay_stops,
    trace_stops,
    with_threshold,
)
from utio_jax.decoding import Confidence, Thinking

SURE = Confidence(threshold=0.0, window=2, cue_ids=tuple(range(0, 64, 3)), min_tokens=3)
RULE = Thinking(end_ids=(62, 63), forced_ids=(1, 2), max_tokens=14, confidence=SURE)


def test_replayed_traces_are_what_decoding_does() -> None:
    model = lively_model()
    prompts = np.random.default_rng(1).integers(0, 64, (6, 4)).tolist()
    options: dict[str, Any] = {"eos_ids": (), "lengths": SMALL}
    traces = trace_stops(
        model.decoder, model.params, prompts, RULE, answer_tokens=3, batch=6, **options
    )
    assert len(traces) == 6
    assert all(trace.whole == 14 for trace in traces)
    new = {"max_new_tokens": 19}
    full = run(model, prompts, thinking=dataclasses.replace(RULE, confidence=None), **new)
    seen = np.concatenate([trace.uncertainty for trace in traces])
    stopped = 0
    for threshold in (*np.quantile(seen, (0.2, 0.5, 0.8)).tolist(), math.inf):
        sure = dataclasses.replace(SURE, threshold=threshold + 1e-5)
        rule = dataclasses.replace(RULE, confidence=sure)
        found = run(model, prompts, thinking=rule, **new)
        tokens, changed = replay_stops(traces, threshold + 1e-5)
        assert [thought.tokens for thought in found.thought] == tokens.tolist()
        for row in range(6):
            one, other = (
                each.token_ids[row][each.thought[row].answer][:3].tolist() for each in (found, full)
            )
            assert (one != other) == changed[row]
        stopped += sum(thought.ended_by == "confidence" for thought in found.thought)
    assert stopped > 8
    with pytest.raises(ValueError, match="with a confidence, which says"):
        trace_stops(model.decoder, model.params, prompts, Thinking(end_ids=(1,)), answer_tokens=1)


def drawn(rng: np.random.Generator, count: int) -> list[StopTrace]:
    """Returns traces whose answers change the more often, the less sure they stop."""
    found = []
    for _ in range(count):
        uncertainty = rng.random(6)
        found.append(
            StopTrace(
                tokens=np.arange(4, 28, 4),
                uncertainty=uncertainty,
                changed=rng.random(6) < uncertainty,
                whole=30,
            )
        )
    return found


def test_a_fitted_threshold_changes_as_few_answers_as_it_should() -> None:
    """A threshold's true risk is that of 3,000 traces; the guarantee is missed in 10 % at most."""
    rng = np.random.default_rng(0)
    many = drawn(rng, 3_000)
    grid = np.linspace(0, 1, 21)
    risks = np.asarray([replay_stops(many, each)[1].mean() for each in grid])
    broken, used = 0, 0
    found = [
        fit_stop(drawn(rng, 60), max_changed=0.2, confidence=0.9, seed=seed) for seed in range(30)
    ]
    for fitted in found:
        if fitted.chosen is not None:
            used += 1
            broken += bool(np.interp(fitted.chosen, grid, risks) > 0.2 + 0.02)
    assert used > 20
    assert broken <= stats.binom.ppf(0.999, 30, 0.1)
    fitted = found[-1]
    settings = [rung.setting for rung in fitted.ladder]
    assert settings == sorted(settings)
    assert fitted.tested == 30
    ratios = [rung.cost for rung in fitted.ladder]
    assert ratios == sorted(ratios, reverse=True)
    rule = with_threshold(RULE, fitted.chosen)
    assert rule.confidence == dataclasses.replace(SURE, threshold=fitted.chosen)


def test_where_no_threshold_has_the_guarantee_thinking_goes_to_its_end() -> None:
    rng = np.random.default_rng(0)
    always = [dataclasses.replace(each, changed=each.changed | True) for each in drawn(rng, 60)]
    fitted = fit_stop(always, max_changed=0.2, confidence=0.9)
    assert fitted.chosen is None
    assert with_threshold(RULE, fitted.chosen).confidence is None
    never = [dataclasses.replace(each, changed=each.changed & False) for each in drawn(rng, 60)]
    fitted = fit_stop(never, max_changed=0.2, confidence=0.9)
    assert fitted.chosen == fitted.ladder[-1].setting
    with pytest.raises(ValueError, match="Wanted at least 58 traces for max_changed=0.1"):
        fit_stop(never[:40])
    none = [
        dataclasses.replace(
            each,
            tokens=each.tokens[:0],
            uncertainty=each.uncertainty[:0],
            changed=each.changed[:0],
        )
        for each in never
    ]
    with pytest.raises(ValueError, match="traces that meet cues"):
        fit_stop(none)
