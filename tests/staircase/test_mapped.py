# SPDX-License-Identifier: Apache-2.0
"""Frozen tokens that show mapped keys and values: what the reference defines, and what it costs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.models import Model, with_random_maps

from utio_jax import uniform
from utio_jax.attention.cache import init_cache
from utio_jax.core.flops import token_cost
from utio_jax.policies import given_depths
from utio_jax.prompts.maps import with_kv_maps
from utio_jax.staircase import MicroBatches, staircase
from utio_jax.staircase.reference import reference_states

STOPS = (1, 2, 3)


def test_a_token_that_stops_runs_one_product_and_no_projection(tiny: Any) -> None:
    counting = with_random_maps(Model(Counting(tiny.decoder.config), tiny.params), STOPS)
    executor = MicroBatches(min_bucket=4, block=8, query_block=4, key_step=32)
    ids, lengths = tiny.tokens(3, 17), jnp.asarray([17, 9, 4])
    depths = np.random.default_rng(1).choice([1, 2, 4], (3, 17))
    real = np.arange(17) < np.asarray(lengths)[:, None]
    policy = given_depths(jnp.asarray(depths), depths=(1, 2, 4))
    run = jax.jit(
        lambda policy: staircase(
            counting.decoder, counting.params, ids, lengths, policy, kv="mapped", executor=executor
        )
    )
    jax.block_until_ready(run(policy))
    read_counts()
    result = jax.block_until_ready(run(policy))
    counts, work = read_counts(), result.work
    up = lambda n: -(-int(n) // 4) * 4  # noqa: E731
    live = [up((real & (depths > start)).sum()) for start in (0, 1, 2)]
    # The first segment projects K/V of all; behind it of those that run alone.
    assert np.asarray(work.keys_values).tolist() == [3 * 17, live[1], 2 * live[2]]
    assert counts["keys_values"] == np.asarray(work.keys_values).sum()
    stops = [up((real & (depths == depth)).sum()) for depth in (1, 2)]
    assert np.asarray(work.kv_maps).tolist() == [3 * stops[0], 2 * stops[1], 0]
    cost = token_cost(counting.decoder, counting.params)
    config = tiny.decoder.config
    of_one = 4 * config.embed_dim * config.num_kv_heads * config.head_dim
    bare = dataclasses.replace(work, kv_maps=np.zeros(3, np.int32))
    assert cost.flops(work) - cost.flops(bare) == of_one * np.sum(work.kv_maps)


@pytest.mark.parametrize("depths", [(2,), (1, 2, 3)])
def test_layers_that_nothing_reads_have_no_maps(tiny: Any, depths: tuple[int, ...]) -> None:
    model = with_random_maps(tiny, STOPS)
    ids, lengths = tiny.tokens(2, 12), jnp.asarray([12, 12])
    table = np.resize(depths, (2, 12))
    policy = given_depths(jnp.asarray(table), depths=depths)
    options: dict[str, Any] = {"kv": "mapped", "executor": MicroBatches(min_bucket=1, block=1)}
    run = partial(staircase, model.decoder, model.params, ids, lengths, policy, **options)
    result = jax.jit(run)()
    stops = [(table == depth).sum() * (depths[-1] - depth) for depth in depths]
    assert np.asarray(result.work.kv_maps).tolist() == stops
    x = reference_states(model.decoder, model.params, ids, lengths, jnp.asarray(table), kv="mapped")
    np.testing.assert_allclose(result.x, x, atol=1e-4)
    # New tokens may run more layers: a cache has the K/V of all.
    cache = init_cache(model.decoder.config, batch=2, slots=12)
    kept = jax.jit(partial(run, cache=cache))()
    stops = [(table == depth).sum() * (4 - depth) for depth in depths]
    assert np.asarray(kept.work.kv_maps).tolist() == stops


def test_all_layers_of_a_token_are_one_product_of_maps(tiny: Any) -> None:
    """Not one per layer: what is traced multiplies a state once per stop, by all layers' maps."""
    model = with_random_maps(tiny, STOPS)
    x = jnp.zeros((5, tiny.decoder.config.embed_dim))
    for stop in STOPS:
        traced = jax.make_jaxpr(partial(model.decoder.map_keys_values, depth=stop))(model.params, x)
        products = [
            equation for equation in traced.eqns if equation.primitive.name == "dot_general"
        ]
        layers = tiny.decoder.config.num_layers - stop
        assert [product.outvars[0].aval.shape for product in products] == [(5, layers * 2 * 2 * 8)]


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(tiny: Any) -> None:
    inputs = tiny.tokens(1, 5), jnp.asarray([5])
    with pytest.raises(ValueError, match='KV maps for kv="mapped".*utio-jax fit-prompt'):
        staircase(tiny.decoder, tiny.params, *inputs, uniform(2), kv="mapped")
    few = with_random_maps(tiny, (2,))
    with pytest.raises(ValueError, match=r"stops at depths \(2,\).*Got \[1\]"):
        staircase(few.decoder, few.params, *inputs, uniform(1), kv="mapped")

    class NoRotation:
        config = tiny.decoder.config

    with pytest.raises(ValueError, match="rotate_keys.*NoRotation"):
        with_kv_maps(NoRotation(), tiny.params, {})  # type: ignore[arg-type]
