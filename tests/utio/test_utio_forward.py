# SPDX-License-Identifier: Apache-2.0
"""UTIO's forward pass against the reference, against `score`, and against attention in float64."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.counting import Counting, read_counts
from helpers.models import Model, assert_close, live_model, with_random_lens
from helpers.shared_kv import KINDS
from utio_forward import Text

from utio_jax import Thresholded, reference_states, score, uniform
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.utio import (
    UtioPlan,
    UtioSurrogate,
    bucket_tokens,
    floor_states,
    surrogate_importance,
    utio_forward,
)

LENGTHS = np.asarray([16, 5, 11])
run = jax.jit(utio_forward, static_argnums=0)
reference = jax.jit(reference_states, static_argnums=0)
PLAN = UtioPlan(depths=(1, 2, 4), thresholds=(1.9, 2.1), min_bucket=4)


def shared(kind: str) -> Model:
    return live_model(exits=(2, 3, 4), **KINDS[kind])


def rows_of(model: Model, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    return model.tokens(3, 16, seed=seed), jnp.asarray(LENGTHS)


def splitting(model: Model, plan: UtioPlan) -> UtioPlan:
    """Returns the plan with thresholds at the thirds of the scores, so that all buckets count."""
    result = run(model.decoder, model.params, *rows_of(model), plan)
    real = np.arange(16) < LENGTHS[:, None]
    low, high = np.quantile(np.asarray(result.score)[real], [1 / 3, 2 / 3])
    return dataclasses.replace(plan, thresholds=jnp.asarray([low, high]))


def check_reference(model: Model, plan: UtioPlan) -> Any:
    rows = rows_of(model)
    result = run(model.decoder, model.params, *rows, plan)
    expected = reference(model.decoder, model.params, *rows, result.depths)
    for row, length in enumerate(LENGTHS):
        assert_close(result.x[row, :length], expected[row, :length])
        logits = model.decoder.unembed(model.params, expected[row, :length])
        labels = rows[0][row, 1:length]
        nats = jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], labels[:, None], axis=1)[:, 0]
        assert_close(result.log_likelihood[row, : length - 1], nats)
        assert (result.log_likelihood[row, length - 1 :] == 0).all()
        assert set(np.unique(result.depths[row, :length])) <= set(plan.depths)
        assert (result.depths[row, length:] == 0).all()
    return result


@pytest.mark.parametrize("heat", [True, False])
def test_equals_the_reference_at_the_depths_that_it_chose(tiny, heat):
    result = check_reference(tiny, splitting(tiny, dataclasses.replace(PLAN, heat=heat)))
    assert {1, 2, 4} <= set(np.unique(result.depths))


@pytest.mark.parametrize("kind", ["heads of two layers", "made once"])
def test_upper_layers_read_the_keys_and_values_made_below(kind):
    model = with_random_lens(shared(kind))
    result = check_reference(model, splitting(model, dataclasses.replace(PLAN, depths=(2, 3, 4))))
    assert {2, 3, 4} <= set(np.unique(result.depths))


def test_shares_by_rank_are_static_and_padding_ranks_lowest(tiny):
    plan = UtioPlan(depths=(1, 2, 4), fractions=(0.5, 0.25, 0.25), min_bucket=4)
    result = check_reference(tiny, plan)
    assert (result.depths[0] == 4).sum() == 4
    assert (result.depths[0] == 2).sum() == 4
    assert (result.depths[1] == 4).sum() == 4, "of five tokens and eleven of padding"
    assert (result.depths[1] == 2).sum() == 1


def test_without_heat_it_is_score_under_utios_surrogate(tiny):
    rows, means = rows_of(tiny), jax.random.normal(jax.random.key(3), (2, 32))
    plan = dataclasses.replace(PLAN, heat=False, mean_state=means[0])
    plan = splitting(tiny, plan)
    result = run(tiny.decoder, tiny.params, *rows, plan)
    edges: Any = plan.thresholds
    surrogate = UtioSurrogate(mean_states=means, exits=(1, 2))
    policy = Thresholded(signal=surrogate, thresholds=edges, depths=(1, 2, 4))
    expected = jax.jit(score, static_argnums=0)(tiny.decoder, tiny.params, *rows, policy)
    np.testing.assert_array_equal(result.depths, expected.depths)
    assert_close(result.log_likelihood, expected.log_likelihood)


def test_score_is_the_surrogate_of_what_floor_states_returns(tiny):
    rows, weights = rows_of(tiny), (0.2, 0.5, 0.3)
    plan = splitting(tiny, dataclasses.replace(PLAN, weights=weights, mean_state=jnp.ones(32)))
    result = run(tiny.decoder, tiny.params, *rows, plan)
    x, logits, heat = floor_states(tiny.decoder, tiny.params, *rows, 1)
    scores = surrogate_importance(logits, heat, x, batch_mean=jnp.ones(32), weights=weights)
    edges: Any = plan.thresholds
    buckets = bucket_tokens(scores, depths=(1, 2, 4), thresholds=edges)
    for row, length in enumerate(LENGTHS):
        assert_close(result.score[row, :length], scores[row, :length])
        np.testing.assert_array_equal(
            result.depths[row, :length], buckets.depth_of_token[row, :length]
        )


def test_the_mean_is_that_of_all_real_tokens(tiny):
    result = run(tiny.decoder, tiny.params, *rows_of(tiny), PLAN)
    x, _, _ = floor_states(tiny.decoder, tiny.params, *rows_of(tiny), 1)
    real = np.concatenate([x[row, :length] for row, length in enumerate(LENGTHS)])
    mean = real.mean(axis=0)
    cosine = real @ mean / np.linalg.norm(real, axis=1) / np.linalg.norm(mean)
    outlier = np.concatenate([result.outlier[row, :n] for row, n in enumerate(LENGTHS)])
    np.testing.assert_allclose(outlier, 1 - cosine, atol=1e-5)


def test_heat_is_the_attention_received_of_all_heads_and_layers(tiny_swiglu):
    model, depth = tiny_swiglu, 3
    config = model.decoder.config
    rows = rows_of(model)
    states, _, heat = floor_states(model.decoder, model.params, *rows, depth)
    expected = np.zeros((3, 16))
    before = run_dense(model.decoder, model.params, *rows, depths=(0, 1, 2, depth))
    assert_close(states[0], before[-1][0])
    for index in range(depth):
        layer = jax.tree.map(partial(lambda leaf, i: leaf[i], i=index), model.params["layers"])
        places = model.decoder.encode_positions(jnp.arange(16))
        for row, length in enumerate(LENGTHS):
            x = before[index][row]
            queries = np.asarray(model.decoder.queries(layer, x, places), np.float64)
            keys = np.asarray(model.decoder.keys_values(layer, x, places)[0], np.float64)
            for head in range(config.num_heads):
                for query in range(length):
                    weights = np.exp(keys[: query + 1, head] @ queries[query, head])
                    expected[row, : query + 1] += weights / weights.sum()
    expected /= config.num_heads * depth
    np.testing.assert_allclose(heat, expected, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(np.mean(heat[row, :length]), 1, atol=1e-5)


def test_one_program_whose_loops_over_layers_are_as_many_as_depths(tiny, count_compiles):
    fresh = jax.jit(lambda *args: utio_forward(tiny.decoder, *args))
    args = tiny.params, *rows_of(tiny)
    with count_compiles() as compiles:
        fresh(*args, PLAN)
    assert compiles.count == 1
    others = dataclasses.replace(PLAN, thresholds=(0.0, 0.5), weights=(0.1, 0.2, 0.3))
    with count_compiles() as compiles:
        fresh(*args, others)
        fresh(tiny.params, *rows_of(tiny, seed=1), PLAN)
    assert compiles.count == 0

    for depths, thresholds in (((1, 2, 4), (0.0, 0.5)), ((1, 4), (0.5,)), ((4,), ())):
        plan = dataclasses.replace(PLAN, depths=depths, thresholds=thresholds)
        traced = jax.make_jaxpr(partial(utio_forward, tiny.decoder))
        layers = [stop - start for start, stop in zip((0, *depths), depths, strict=False)]
        assert _scan_lengths(traced(*args, plan).jaxpr) == layers


def _scan_lengths(jaxpr: Any) -> list[int]:
    """Returns the lengths of the outermost scans of a program."""
    lengths = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            lengths.append(eqn.params["length"])
        elif eqn.primitive.name == "jit":
            lengths += _scan_lengths(eqn.params["jaxpr"].jaxpr)
    return lengths


def test_slots_that_run_are_the_blocks_of_tokens_that_go_as_deep(tiny):
    plan, rows = splitting(tiny, PLAN), rows_of(tiny)
    read_counts()
    result = jax.jit(partial(utio_forward, Counting(TINY)))(tiny.params, *rows, plan)
    depths, counts = np.asarray(result.depths), read_counts()
    expected = [3 * 16] + [
        sum(4 * math.ceil(count / 4) for count in (depths >= depth).sum(axis=1)) for depth in (2, 4)
    ]
    assert result.slots.tolist() == expected
    assert counts["finish_layer"] == np.dot(expected, [1, 1, 2])
    # One head at the floor, one for each token that stops deeper, in blocks again.
    heads = [
        4 * math.ceil(count / 4) for depth in (2, 4) for count in (depths == depth).sum(axis=1)
    ]
    assert counts["unembed"] == 48 + sum(heads)


def test_later_tokens_matter_to_heat_alone(tiny):
    plan = dataclasses.replace(PLAN, mean_state=jnp.ones(32), heat=False)
    ids, lengths = rows_of(tiny)
    changed = ids.at[:, 9:].set((ids[:, 9:] + 7) % 64)
    for heat in (False, True):
        plan = splitting(tiny, dataclasses.replace(plan, heat=heat))
        first, second = (run(tiny.decoder, tiny.params, x, lengths, plan) for x in (ids, changed))
        same = np.allclose(first.score[0, :8], second.score[0, :8], atol=1e-5)
        assert same is not heat
        if not heat:
            np.testing.assert_array_equal(first.depths[:, :8], second.depths[:, :8])
            assert_close(first.log_likelihood[:, :8], second.log_likelihood[:, :8])


@pytest.mark.check
def test_gradients_of_static_shares_are_the_references(tiny):
    rows = rows_of(tiny)
    plan = UtioPlan(depths=(1, 2, 4), fractions=(0.25, 0.25, 0.5), min_bucket=4)
    depths = run(tiny.decoder, tiny.params, *rows, plan).depths
    labels, predicted = (
        jnp.pad(rows[0][:, 1:], ((0, 0), (0, 1))),
        np.arange(16) < LENGTHS[:, None] - 1,
    )

    def loss(params: Any) -> jax.Array:
        return -utio_forward(tiny.decoder, params, *rows, plan).log_likelihood.sum()

    def slow(params: Any) -> jax.Array:
        x = reference_states(tiny.decoder, params, *rows, depths)
        logits = jax.nn.log_softmax(tiny.decoder.unembed(params, x))
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return -jnp.where(predicted, chosen, 0.0).sum()

    jax.tree.map(
        assert_close, jax.jit(jax.grad(loss))(tiny.params), jax.jit(jax.grad(slow))(tiny.params)
    )
    with pytest.raises(ValueError, match="Wanted a plan with fractions for gradients"):
        jax.grad(lambda p: utio_forward(tiny.decoder, p, *rows, PLAN).log_likelihood.sum())(
            tiny.params
        )


def test_plans_side_by_side_by_vmap(tiny):
    thresholds = jnp.asarray([[1.9, 2.1], [0.0, 2.2], [jnp.inf, jnp.inf]])
    rows = rows_of(tiny)

    @jax.vmap
    def run_plan(edges: jax.Array) -> Any:
        plan = dataclasses.replace(PLAN, thresholds=edges)
        result = run(tiny.decoder, tiny.params, *rows, plan)
        return result.depths, result.log_likelihood

    together = run_plan(thresholds)
    for index, edges in enumerate(thresholds):
        alone = run(tiny.decoder, tiny.params, *rows, dataclasses.replace(PLAN, thresholds=edges))
        np.testing.assert_array_equal(together[0][index], alone.depths)
        assert_close(together[1][index], alone.log_likelihood)
    assert (np.unique(together[0][2]) == [0, 1]).all()


@pytest.mark.parametrize(
    "kind", [{"thresholds": (1.9, 2.1)}, {"thresholds": None, "fractions": (0.5, 0.25, 0.25)}]
)
def test_scores_that_are_no_numbers_run_every_layer(tiny, kind):
    plan = dataclasses.replace(PLAN, mean_state=jnp.full(32, jnp.nan), **kind)
    result = run(tiny.decoder, tiny.params, *rows_of(tiny), plan)
    deepest = 16 if plan.fractions is None else 4  # Static shares hold no more.
    assert (result.depths[0] == 4).sum() == deepest
    assert np.isfinite(result.log_likelihood).all()


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        ({}, {"depths": (1, 2, 5)}, r"Wanted depths from 1 to 4.*Got depths=\(1, 2, 5\)"),
        ({}, {"depths": (2, 2, 4)}, "strictly increasing depths"),
        ({}, {"thresholds": (1.0,)}, "Wanted 2 thresholds"),
        ({}, {"weights": (math.nan, 0.5, 0.5)}, "three finite weights of at least 0"),
        (KINDS["heads of two layers"], {"depths": (1, 2, 4)}, "Wanted depths from 2 to 4.*floor"),
        (KINDS["of the last of a kind"], {"depths": (2, 3, 4)}, "one kv_source for all upper"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_plans_that_do_not_fit_are_named(tiny, kind, plan, message):
    decoder = Transformer(dataclasses.replace(TINY, **kind))
    with pytest.raises(ValueError, match=message):
        utio_forward(decoder, tiny.params, *rows_of(tiny), dataclasses.replace(PLAN, **plan))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"weights": (0, 1, 0), "heat": False},
            "Wanted attention heat, the only signal.*heat=True",
        ),
        ({"weights": (-0.5, 1.0, 1.0)}, "three finite weights of at least 0"),
        ({"weights": (0.0, 0.0, 0.0)}, "one of them above 0"),
        ({"thresholds": [1.0, math.nan]}, r"thresholds without NaN.*Got \[1\.0, nan\]"),
        ({"thresholds": (2.5, 1.5)}, r"ascending thresholds.*Got \[2\.5, 1\.5\]\. Sort them"),
    ],
)
def test_numbers_that_jit_would_not_see_are_refused_by_the_plan(plan, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **plan)
    arrays = jax.tree.map(jnp.asarray, PLAN)  # As gradients are, whose signs are free.
    assert jax.tree.map(jnp.negative, arrays).weights[0] == -0.5
    axes = jax.tree.map(lambda _: 0, PLAN)
    assert jax.vmap(lambda plan: plan.weights[1], in_axes=(axes,))(
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arrays)
    ).tolist() == [0.25, 0.25]


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_policy_is_not_a_plan(tiny):
    policy: Any = uniform(4)
    with pytest.raises(TypeError, match=r"Wanted a UtioPlan. Got Thresholded.*utio_jax\.score"):
        utio_forward(tiny.decoder, tiny.params, *rows_of(tiny), policy)


def test_losses_of_the_benchmark_are_json() -> None:
    ids, lengths = np.ones((2, 16), np.int32), np.asarray([16, 5])
    batch: Any = SimpleNamespace(token_ids=ids, lengths=lengths)
    result = SimpleNamespace(log_likelihood=jnp.full((2, 16), -2.0), depths=np.ones((2, 16)))
    nats, _ = Text(None, [batch]).read(lambda ids, lengths: result)
    assert json.loads(json.dumps({"loss": nats.mean()})) == {"loss": 2.0}
    assert nats.shape == (15 + 4,)
