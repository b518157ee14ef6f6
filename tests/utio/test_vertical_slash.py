# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in the staircase: what the oracle defines, by causal choices."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.models import gated, random_gates
from helpers.policies import TableSignal

from utio_jax import reference_states, uniform
from utio_jax.core.flops import token_cost
from utio_jax.evaluation.evaluate import evaluate, score_documents
from utio_jax.policies import Learned, Position, given_depths
from utio_jax.staircase import DENSE, CapacityPrefix, MicroBatches, staircase
from utio_jax.utio import History, VerticalSlash

HISTORY = History(recent=5, sinks=1)
SHAPES = tuple(
    cases.Shape(batch, token, depths, executor, kv)
    for kv, batch, token, depths, executor in (
        ("propagate", 3, 33, (1, 2, 4), MicroBatches(min_bucket=2, block=8, query_block=4)),
        ("drop", 2, 40, (2, 3), MicroBatches(min_bucket=4, block=16, query_block=16, key_step=8)),
    )
)


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "executor"))
def run(decoder: Any, params: Any, ids: Any, lengths: Any, policy: Any, attention: Any, **options):
    return staircase(decoder, params, ids, lengths, policy, attention=attention, **options)


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "depths"))
def run_oracle(decoder, params, ids, lengths, depth_of_token, sparse, *, kv, depths):
    layers = np.diff(depths, prepend=0)
    by_layer = jax.tree.map(lambda y: jnp.repeat(y, layers, axis=0), sparse)
    missing = decoder.config.num_layers - depths[-1]
    by_layer = jax.tree.map(lambda y: jnp.concatenate([y, *[y[-1:]] * missing]), by_layer)
    return reference_states(decoder, params, ids, lengths, depth_of_token, kv=kv, sees=by_layer)


def choice(scores: Any, thresholds: Any, history: History = HISTORY) -> Any:
    return VerticalSlash(
        signal=TableSignal(table=jnp.asarray(scores, jnp.float32)),
        thresholds=jnp.asarray(thresholds, jnp.float32),
        history=history,
    )


@pytest.mark.parametrize(
    ("floor", "shape"),
    [("dense floor", SHAPES[1]), pytest.param("all", SHAPES[0], marks=pytest.mark.slow)],
    ids=["dense floor-drop", "all-propagate"],
)
def test_equals_the_oracle_at_the_choices_that_were_made(
    tiny: Any, shape: cases.Shape, floor: str, no_compiles: Any
) -> None:
    thresholds = [0.5] * (len(shape.depths) - (floor == "dense floor"))

    def compare(seed: int) -> float:
        ids, lengths, depths = cases.draw(shape, tiny.decoder.config.vocab_size, seed)
        scores = np.random.default_rng(seed).random((len(thresholds), *ids.shape))
        scores = np.clip(scores + [0, -0.4, 0.4, 1, -1][seed % 5], 0, 1)
        policy = given_depths(jnp.asarray(depths), depths=shape.depths)
        inputs = tiny.decoder, tiny.params, ids, lengths
        attention = choice(scores, thresholds)
        result = run(*inputs, policy, attention, kv=shape.kv, executor=shape.executor)
        real = np.arange(shape.token) < lengths[:, None]
        runs = real & (depths > np.asarray((0, *shape.depths[:-1]))[:, None, None])
        expected = runs & np.pad(scores <= 0.5, ((len(runs) - len(scores), 0), (0, 0), (0, 0)))
        np.testing.assert_array_equal(result.chosen.sparse, expected)
        x = run_oracle(*inputs, depths, result.chosen, kv=shape.kv, depths=shape.depths)
        return float(np.abs(np.asarray(result.x - x))[real].max(initial=0.0))

    compare(0)
    with no_compiles("new scores must not compile anything"):
        assert max(compare(seed) for seed in range(16)) < 1e-4


def whole_pass(model: Any, token: int = 40) -> tuple[Any, ...]:
    """Returns the model, three rows of tokens, their lengths, and a policy that runs all layers."""
    ids = model.tokens(3, token)
    depths = jnp.full(ids.shape, 4)
    policy = given_depths(depths, depths=(2, 4))
    return model.decoder, model.params, ids, jnp.asarray([token, token - 5, 9]), policy


OPTIONS: dict[str, Any] = {"kv": "propagate", "executor": SHAPES[0].executor}


@pytest.mark.check
def test_nobody_sparse_is_dense_and_costs_nothing(tiny: Any) -> None:
    inputs = whole_pass(tiny)
    plain = run(*inputs, DENSE, **OPTIONS)
    none = run(*inputs, choice(np.zeros((2, 3, 40)), [-np.inf] * 2), **OPTIONS)
    assert plain.chosen is None
    assert not np.asarray(plain.work.choices).any()
    assert not np.asarray(none.chosen.sparse).any()
    assert not np.asarray(none.work.choices).any()
    np.testing.assert_array_equal(none.work.key_slots, plain.work.key_slots)
    np.testing.assert_allclose(none.x, plain.x, atol=1e-5)


@pytest.mark.check
def test_it_runs_in_float64(tiny: Any) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny.params)
        inputs = whole_pass(dataclasses.replace(tiny, params=params))
        result = run(*inputs, choice(np.ones((2, 3, 40)), [0.5] * 2), **OPTIONS)
    assert result.x.dtype == np.float64
    single = run(*whole_pass(tiny), choice(np.ones((2, 3, 40)), [0.5] * 2), **OPTIONS)
    np.testing.assert_allclose(result.x, single.x, atol=1e-4)


def steered(model: Any) -> VerticalSlash:
    """Attention that the same gates steer as depth."""
    return VerticalSlash(
        signal=Learned(gates=random_gates(model), exits=(1, 2)),
        thresholds=jnp.asarray([0.2, 0.3]),
        history=HISTORY,
    )


@pytest.mark.check
def test_nothing_depends_on_later_tokens_or_on_other_rows(tiny: Any) -> None:
    attention, policy = steered(tiny), gated(tiny)
    decoder, params, ids, _, _ = whole_pass(tiny)
    lengths = jnp.full(3, 40)
    before = run(decoder, params, ids, lengths, policy, attention, **OPTIONS)
    sparse = np.asarray(before.chosen.sparse)
    assert 0 < sparse[1:].sum() < (np.asarray(before.depths) > 1).sum() * 2
    for changed in (5, 16, 27, 39):
        other = jnp.where(jnp.arange(40)[None, :] >= changed, (ids + 7) % 64, ids)
        after = run(decoder, params, other, lengths, policy, attention, **OPTIONS)
        np.testing.assert_allclose(after.x[:, :changed], before.x[:, :changed], atol=1e-5)
        assert_same_choices(after, before, slice(None), changed)
        assert changed == 39 or np.abs(np.asarray(after.x - before.x))[:, changed:].max() > 0.1
    mates = ids.at[1:].set((ids[1:] + 5) % 64)
    after = run(decoder, params, mates, jnp.asarray([40, 3, 31]), policy, attention, **OPTIONS)
    np.testing.assert_allclose(after.x[0], before.x[0], atol=1e-5)
    assert_same_choices(after, before, slice(0, 1), 40)


def assert_same_choices(after: Any, before: Any, rows: slice, end: int) -> None:
    """Checks which tokens are sparse up to a position: `[segment, row, token]`."""
    ours, theirs = (result.chosen.sparse[:, rows, :end] for result in (after, before))
    np.testing.assert_array_equal(ours, theirs)


def listed(attention: Any) -> Any:
    return dataclasses.replace(attention, thresholds=attention.thresholds.tolist())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda tiny, scores: choice(scores, [0.0] * 4), "each segment of depths=\\(2, 4\\)"),
        (lambda tiny, scores: choice(scores, []), "each but the first. Got .*\\(0,\\)"),
        (lambda tiny, scores: choice(scores, [np.nan]), "numbers.*nan.* in attention by"),
        (lambda tiny, scores: listed(choice(scores, [0.0] * 4)), "depths=\\(2, 4\\).*\\(4,\\)"),
        (lambda tiny, scores: steered(tiny), "depths \\(1, 2\\)"),
        (
            lambda tiny, scores: dataclasses.replace(choice(scores, [0.0]), thresholds=0.5),
            "but the first. Got thresholds of shape \\(\\)",
        ),
        (lambda *_: dataclasses.replace(HISTORY, recent=2.5), "more sinks, integers.*recent=2.5"),
    ],
)  # fmt: skip
def test_impossible_choices_are_refused(
    tiny: Any, make: Any, match: str, unchecked_shapes: None
) -> None:
    with pytest.raises(ValueError, match=match):
        staircase(*whole_pass(tiny), attention=make(tiny, np.zeros((1, 3, 40))))
    prefix, attention = CapacityPrefix(capacities=(64, 64)), choice(np.zeros((1, 3, 40)), [0.5])
    with pytest.raises(ValueError, match=r"executor=MicroBatches\(\).*Got CapacityPrefix"):
        staircase(*whole_pass(tiny), executor=prefix, attention=attention)


def test_all_and_half_of_a_uniform_pass(tiny: Any) -> None:
    """A policy without boundaries has one segment, which a signal before the pass may choose in."""
    decoder, params, ids, lengths, _ = whole_pass(tiny)
    halves = VerticalSlash(signal=Position(), thresholds=jnp.asarray([-20.0]), history=HISTORY)
    result = run(decoder, params, ids, lengths, uniform(4), halves, **OPTIONS)
    real = np.arange(40) < np.asarray(lengths)[:, None]
    np.testing.assert_array_equal(result.chosen.sparse[0], real & (np.arange(40) >= 20))


@pytest.mark.check
def test_evaluation_charges_decisions_and_knows_the_ideal(tiny: Any, text: Any) -> None:
    decoder, params = tiny.decoder, tiny.params
    policy = given_depths(jnp.full((8, 32), 4), depths=(2, 4))
    narrow = choice(np.full((2, 8, 32), 0.3), [0.5], History(recent=5, sinks=1))
    executor = MicroBatches(min_bucket=2, block=16, query_block=8, key_step=32)
    result = evaluate(
        decoder, params, text[:1], dict.fromkeys(("dense", "narrow"), policy), executor=executor,
        attention={"narrow": narrow},
    )  # fmt: skip
    dense, sparse = result["dense"], result["narrow"]
    lengths, cost = text[0].lengths, token_cost(decoder, params)
    assert dense.flops_gates == 0.0
    # The signal asks for 1000 FLOPs per slot.
    assert sparse.flops_gates == 1000.0 * (-(-int(lengths.sum()) // 2) * 2)
    assert sparse.flops < dense.flops + sparse.flops_gates
    # Ideal: two of four layers see at most six keys instead of 32.
    spared = sum(32 - min(position + 1, 6) for n in lengths for position in range(n))
    np.testing.assert_allclose(
        dense.flops_ideal - sparse.flops_ideal, 2 * spared * cost.attention_per_key
    )
    assert sparse.nll != dense.nll


@pytest.mark.slow
def test_documents_are_scored_with_sparse_attention(tiny: Any) -> None:
    documents = [np.asarray(tiny.tokens(1, 40, seed=seed)[0]) for seed in range(2)]
    policy = uniform(4)
    everybody = VerticalSlash(signal=Position(), thresholds=jnp.asarray([jnp.inf]), history=HISTORY)
    result = score_documents(tiny.decoder, tiny.params, documents, policy, rows=2,
                            attention=everybody)  # fmt: skip
    (expected,) = score_documents(
        tiny.decoder, tiny.params, documents[1:], policy, rows=2, attention=everybody
    ).documents
    np.testing.assert_allclose(
        result.documents[1].log_likelihood, expected.log_likelihood, atol=1e-4
    )
    nobody = dataclasses.replace(everybody, thresholds=-everybody.thresholds)
    plain = score_documents(tiny.decoder, tiny.params, documents, policy, rows=2, attention=nobody)
    assert result.quality.nll != plain.quality.nll
