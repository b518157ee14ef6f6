# SPDX-License-Identifier: Apache-2.0
"""The cascade against its parts: UTIO's score, `bucket_tokens`, masks, and the reference."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.generation import PROMPTS, lively_model, run, true_logits
from helpers.policies import DEPTHS, SIGNALS, TableSignal, mean_states, thresholded, tokens

from utio_jax import Thresholded, bucket_tokens, reference_states, score, surrogate_importance
from utio_jax.engine import Engine
from utio_jax.policies import SoftmaxGap
from utio_jax.staircase import MicroBatches
from utio_jax.utio import Cascade, History, SparseQueries

HISTORY = History(recent=3, sinks=1)
EXECUTOR = MicroBatches(min_bucket=2, block=8, query_block=4)


def by_layer(segments: Any) -> SparseQueries:
    """Returns the sparse tokens of each of the four layers, from those of segments."""
    layers = np.repeat(segments, np.diff((0, *DEPTHS)), axis=0)
    return SparseQueries(sparse=jnp.asarray(layers), history=HISTORY)


def test_one_surrogate_steers_depth_and_attention(tiny: Any) -> None:
    decoder, params, ids = tiny.decoder, tiny.params, jnp.asarray(tokens(tiny))
    lengths, buckets = jnp.asarray([17, 9, 1]), thresholded(tiny, SIGNALS["utio_surrogate"](tiny))
    # By hand: the surrogate of the states at the first exit, which all tokens reach densely.
    (x,) = cases.run_dense(decoder, params, ids, lengths, depths=DEPTHS[:1])
    logits, mean = decoder.unembed(params, x), mean_states(tiny)[0]
    importance = surrogate_importance(logits, None, x, batch_mean=mean)
    limit = float(np.quantile(importance, 0.61))
    floor = float(buckets.thresholds[0])
    edges = floor, floor + 1e-3  # Few tokens stop between; the limit lies above.
    buckets = Thresholded(signal=buckets.signal, thresholds=jnp.asarray(edges), depths=DEPTHS)
    real = np.arange(17) < np.asarray(lengths)[:, None]
    sorted_ = bucket_tokens(importance, depths=DEPTHS, thresholds=edges)
    depths = np.where(real, np.asarray(sorted_.depth_of_token), 0)
    runs = depths > np.asarray((0, *DEPTHS[:-1]))[:, None, None]
    sparse = runs & (np.asarray(importance) <= limit)
    sparse[0] = False  # No score yet.

    cascade = Cascade(buckets=buckets, dense_above=limit, history=HISTORY)
    run = jax.jit(partial(score, decoder, executor=EXECUTOR))
    result = run(params, ids, lengths, cascade.policy, attention=cascade.attention)
    np.testing.assert_array_equal(result.depths, depths)
    np.testing.assert_array_equal(result.chosen.sparse, sparse)
    assert sparse[1:].any()
    assert (runs & ~sparse)[1:].any()
    oracle = jax.jit(reference_states, static_argnums=0)
    states = oracle(decoder, params, ids, lengths, jnp.asarray(depths), sees=by_layer(sparse))
    np.testing.assert_allclose(np.asarray(result.x)[real], np.asarray(states)[real], atol=1e-4)
    # One score: attention asks nothing, and a head looks at the first exit alone.
    assert not np.asarray(result.work.choices).any()
    looked, later = (-(-int((depths >= depth).sum()) // 2) * 2 for depth in (1, 2))
    np.testing.assert_array_equal(result.work.heads, [looked, 0, 0, later])


def test_one_score_steers_depth_and_loaded_keys_of_new_tokens() -> None:
    model, limit, edges = lively_model(), 0.6, (0.3, 0.7)
    table = jnp.asarray(np.random.default_rng(5).random((1, 3, 72)), jnp.float32)
    signal = TableSignal(table=jnp.tile(table, (2, 1, 1)))
    buckets = Thresholded(signal=signal, thresholds=jnp.asarray(edges), depths=DEPTHS)
    cascade = Cascade(buckets=buckets, dense_above=limit, history=HISTORY)
    result = run(model, mode=cascade.mode())
    depths = np.asarray(bucket_tokens(table[0], depths=DEPTHS, thresholds=edges).depth_of_token)
    for row, prompt in enumerate(PROMPTS):
        scores, at, new = np.asarray(table[0, row]), np.arange(72), result.token_ids[row]
        decided = depths[row, len(prompt) - 1 :][: new.size]
        np.testing.assert_array_equal(result.decided[row][1:], decided[1:])
        before = np.where(at > len(prompt), np.roll(scores, 1), np.inf)  # Of the token before.
        low = (np.stack([before, scores, scores]) <= limit) & (at >= len(prompt))
        sparse = by_layer(low[:, None])
        logits = true_logits(model, prompt, new, result.decided[row], "propagate", sparse=sparse)
        likely = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(result.log_probabilities[row], likely, atol=1e-4)
    dense = Cascade(buckets=buckets, dense_above=-np.inf, history=HISTORY)
    free = run(model, mode=dense.mode())
    assert result.kv_bytes_read.sum() < free.kv_bytes_read.sum()


@pytest.mark.check
def test_requests_to_an_engine_may_bring_buckets_of_the_same_signal() -> None:
    model, (first, second) = lively_model(), PROMPTS[:2]
    own, other = (
        Thresholded(signal=SoftmaxGap(), thresholds=jnp.asarray(edges), depths=DEPTHS)
        for edges in ((0.9, 0.95), (0.2, 0.3))
    )
    modes = [Cascade(buckets=x, dense_above=0.5, history=HISTORY).mode() for x in (own, other)]
    engine = Engine(model.decoder, model.params, mode=modes[0], slots=2, capacity=64)
    numbers = [
        engine.submit(first, max_new_tokens=16, eos_ids=()),
        engine.submit(second, max_new_tokens=16, eos_ids=(), policy=other),
    ]
    ended, depths = engine.drain(), []
    for number, prompt, mode in zip(numbers, (first, second), modes, strict=True):
        alone = run(model, [prompt], mode=mode, max_new_tokens=16, eos_ids=())
        np.testing.assert_array_equal(ended[number].token_ids, alone.token_ids[0])
        np.testing.assert_array_equal(ended[number].decided, alone.decided[0])
        depths.append(alone.decided[0][1:].mean())
    assert depths[0] != depths[1]


@pytest.mark.usefixtures("unchecked_shapes")
def test_parts_of_two_cascades_are_refused(tiny: Any) -> None:
    buckets = thresholded(tiny, SIGNALS["position"](tiny))
    cascade = Cascade(buckets=buckets, dense_above=0.0, history=HISTORY)
    ids, lengths = jnp.asarray(tokens(tiny)), jnp.asarray([17, 9, 1])
    with pytest.raises(ValueError, match=r"Pass cascade\.policy"):
        score(tiny.decoder, tiny.params, ids, lengths, buckets, attention=cascade.attention)
    with pytest.raises(TypeError, match="Got Cascade.*take cascade.attention"):
        score(tiny.decoder, tiny.params, ids, lengths, buckets, attention=cascade)  # type: ignore
    with pytest.raises(TypeError, match=r"attention=VerticalSlash\(\.\.\.\)\. Got History"):
        dataclasses.replace(cascade.mode(), attention=HISTORY).check(tiny.decoder)
    with pytest.raises(TypeError, match="Got the name 'learned'"):
        dataclasses.replace(cascade.attention, signal="learned").check(tiny.decoder, (1, 2, 4))
    with pytest.raises(TypeError, match="one signal with thresholds.*Got str"):
        _ = Cascade(buckets="learned", dense_above=0.0, history=HISTORY).policy  # type: ignore
    limits: Any
    for limits, match in (([1.0, 2.0], r"each of 3 segments.*\(2,\)"), (np.nan, "numbers.*nan")):
        with pytest.raises(ValueError, match=match):
            _ = Cascade(buckets=buckets, dense_above=limits, history=HISTORY).attention
