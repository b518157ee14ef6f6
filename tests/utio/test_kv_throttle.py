# SPDX-License-Identifier: Apache-2.0
"""Throttled decoding against masks over all keys: what is seen, what is read, what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engine import alone, assert_as_alone, engine_of, pool
from helpers.generation import (
    PROMPTS,
    DepthAt,
    context_of,
    depth_table,
    lively_model,
    run,
    true_logits,
)
from helpers.marks import slow
from helpers.models import assert_equal
from helpers.policies import SurePasses, TableSignal

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.loop import advance, begin
from utio_jax.evaluation.generation import generation_ledger
from utio_jax.policies.base import exceeds
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.policies.signals import Chance, MaxProbability, Position
from utio_jax.utio import History, SparseQueries, Throttled, VerticalSlash

DEPTHS = (1, 2, 4)
HISTORY = History(recent=9, sinks=2)
NEVER, ALWAYS = jnp.full(3, -jnp.inf), jnp.full(3, jnp.inf)


def throttle(thresholds: Any = 0.6, **changes: Any) -> VerticalSlash:
    options: dict[str, Any] = {"history": HISTORY} | changes
    # Scores of a bfloat16 model's states are bfloat16, too.
    table = jnp.asarray(np.random.default_rng(5).random((2, 3, 72)), jnp.bfloat16)
    options.setdefault("signal", TableSignal(table=table, price=0.0))
    return VerticalSlash(thresholds=jnp.broadcast_to(jnp.asarray(thresholds), (3,)), **options)


def deep() -> DepthAt:
    """A policy under which every token runs every layer."""
    return DepthAt(table=jnp.full((3, 64), 4, jnp.int32), depths=DEPTHS)


def masked(limit: Any, prompt: list[int], row: int) -> SparseQueries:
    """Returns which of a row's new tokens the oracle throttles in each layer, off the table."""
    scores = np.asarray(limit.signal.table)[:, row]
    at = np.arange(scores.shape[1])
    before = np.where(at > len(prompt), np.roll(scores[0], 1), np.nan)  # Of the token before.
    asked = jnp.asarray(np.stack([before, *scores]), jnp.float32)
    low = ~np.asarray(exceeds(asked, limit.thresholds[:, None])) & (at >= len(prompt))
    layers = np.repeat(low, np.diff((0, *DEPTHS)), axis=0)
    return SparseQueries(sparse=jnp.asarray(layers)[:, None], history=HISTORY)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "propagate": ("propagate", jnp.array([0.6, 0.4, 0.8]), {}),
    "drop, windows": ("drop", jnp.array([0.6, 0.4, 0.8]), {"windows": (0, 3, 9, 0)}),
    "all throttled, one key head": ("propagate", ALWAYS, {"num_kv_heads": 1}),
    "dense first, a key head each, capped": (
        "propagate",
        jnp.array([-jnp.inf, 0.7, 0.7]),
        {"num_kv_heads": 4, "attention_softcap": 2.0},
    ),
}


@pytest.mark.parametrize("case", [next(iter(CASES)), *slow(*[*CASES][1:])])
def test_generation_is_the_masked_oracle(case: str) -> None:
    kv, thresholds, changes = CASES[case]
    model, limit = lively_model(**changes), throttle(thresholds)
    policy = DepthAt(table=depth_table(DEPTHS, shape=(3, 64), seed=2), depths=DEPTHS)
    result = run(model, mode=Throttled(policy=policy, kv=kv, attention=limit))
    free = run(model, mode=Adaptive(policy=policy, kv=kv))
    moved = 0.0
    for row, prompt in enumerate(PROMPTS):
        new, sparse = result.token_ids[row], masked(limit, prompt, row)
        logits = true_logits(model, prompt, new, result.decided[row], kv, sparse=sparse)
        steps = np.arange(new.size)
        np.testing.assert_allclose(logits[steps, new], logits.max(axis=-1), atol=1e-4)
        likely = jax.nn.log_softmax(jnp.asarray(logits))[steps, new]
        np.testing.assert_allclose(result.log_probabilities[row], likely, atol=1e-4)
        moved = max(moved, np.abs(free.log_probabilities[row] - likely).max())
    assert moved > 1e-3  # Not vacuous: without the throttle something else comes out.


# --- What it costs, and how it composes.


@pytest.mark.check
def test_rows_read_what_they_need(model: Any) -> None:
    """Row 0 always reads everything, the others their history; histories are read of all rows."""
    table = jnp.broadcast_to(jnp.array([9.0, 0.0, 0.0])[None, :, None], (2, 3, 64))
    limit = throttle(0.5, signal=TableSignal(table=table, price=0.0))
    mode = Throttled(policy=deep(), attention=limit)
    result = run(model, mode=mode)
    per_slot = 2 * 2 * 8 * 4
    # The first segment of the first of 39 steps has no score to go by: dense.
    steps = 39
    views = (steps * 4 - 1) * HISTORY.size
    slots = views + np.array([steps * 4 * 64, 64, 64])
    np.testing.assert_allclose(result.work.key_slots, slots.mean(), rtol=1e-5)  # The batch's.
    np.testing.assert_array_equal(result.kv_bytes_read, slots * per_slot)
    lengths = np.array([len(prompt) + 39 for prompt in PROMPTS])
    np.testing.assert_array_equal(result.kv_bytes_held, lengths * 4 * per_slot)
    row = generation_ledger(model.decoder, model.params, mode, [PROMPTS], [result])
    dense = steps * 4 * 64 * per_slot * 3
    assert row.kv_bytes_ratio == pytest.approx(float(result.kv_bytes_read.sum()) / dense)
    assert row.flops_ratio is not None
    assert row.flops_ratio < 1


@pytest.mark.slow
def test_rows_do_not_feel_their_batch_and_new_thresholds_compile_nothing(
    model: Any, no_compiles: Any
) -> None:
    signal = Chance(key=jax.random.key(4))
    mode = Throttled(policy=uniform(4, exits=DEPTHS), attention=throttle(0.5, signal=signal))
    together = run(model, mode=mode)
    with no_compiles():
        run(model, mode=dataclasses.replace(mode, attention=throttle(0.2, signal=signal)))
        reordered = run(model, [PROMPTS[2], PROMPTS[0], PROMPTS[1]], mode=mode)
    for row, other in enumerate((1, 2, 0)):
        np.testing.assert_array_equal(together.token_ids[row], reordered.token_ids[other])


def test_a_boundary_runs_one_head_for_policy_and_throttle(model: Any) -> None:
    policy = SurePasses(threshold=0.2, depths=DEPTHS)
    alone = run(model, mode=Adaptive(policy=policy))
    limit = throttle(NEVER, signal=MaxProbability())
    both = run(model, mode=Throttled(policy=policy, attention=limit))
    np.testing.assert_array_equal(both.work.heads, alone.work.heads)
    assert_equal(both.token_ids, alone.token_ids)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(model: Any) -> None:
    shallow = Thresholded(signal=Position(), thresholds=jnp.zeros(1), depths=(1, 4))
    mode = Throttled(policy=shallow, attention=throttle())
    with pytest.raises(ValueError, match=r"depths=\(1, 4\).*shape \(3,\)"):
        run(model, mode=mode)
    one = VerticalSlash(history=HISTORY, signal=Position(), thresholds=jnp.zeros(1))
    mode = Throttled(policy=uniform(4), attention=one)
    with pytest.raises(ValueError, match="a policy with a boundary"):
        run(model, mode=mode)
    ahead = dataclasses.replace(Position(), causal=False)
    mode = Throttled(policy=deep(), attention=throttle(signal=ahead))
    with pytest.raises(ValueError, match="causal signal"):
        run(model, mode=mode)


@pytest.mark.slow
def test_requests_get_what_they_get_alone(model: Any) -> None:
    signal = Chance(key=jax.random.key(4))
    policy = uniform(4, exits=DEPTHS)
    mode = Throttled(policy=policy, attention=throttle(0.5, signal=signal))
    engine = engine_of(model, mode)
    numbers = {request.submit(engine): request for request in pool(6)}
    result = engine.drain()
    for number, request in numbers.items():
        assert_as_alone(result[number], alone(model, mode, None, request))
    fewer = Thresholded(signal=policy.signal, thresholds=jnp.zeros(1), depths=(1, 4))
    with pytest.raises(ValueError, match=r"depths=\(1, 2, 4\), at which the mode decides more"):
        engine.submit([1], policy=fewer, max_new_tokens=1)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")  # Lowering rebuilds the mode around descriptions.
def test_the_cache_is_not_copied(model: Any) -> None:
    easy = throttle(
        0.5, signal=Chance(key=jax.random.key(4)), history=History(recent=1400, sinks=8)
    )
    context = context_of(model, Throttled(policy=uniform(4, exits=DEPTHS), attention=easy))
    lengths = np.array([3, 7, 1], np.int32)
    rows = np.zeros((3, 8), np.int32), lengths, lengths + 40, np.arange(3, dtype=np.uint32)
    state = begin(context, *rows, slots=4096)
    cache: Any = state.cache
    held = cache.keys.nbytes + cache.values.nbytes
    memory = advance.lower(context, state, np.int32(9), widths=(4096,)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 8  # Of a row one layer, and little else.
