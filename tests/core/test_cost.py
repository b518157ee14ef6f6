# SPDX-License-Identifier: Apache-2.0
"""The counted FLOPs against formulas by hand, for this project's transformer."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.attention.mixing import attend
from utio_jax.core.flops import (
    TokenCost,
    count_matmul_flops,
    decided_work,
    depth_flops,
    expected_flops,
    token_cost,
)
from utio_jax.core.work import Work
from utio_jax.models.presets import STDLIB_16, TINY
from utio_jax.models.transformer import Transformer, TransformerConfig

COST = TokenCost(query=1000.0, keys_values=100.0, attention_per_key=2.0, head=50.0)


def cost_by_hand(config: TransformerConfig) -> TokenCost:
    """Returns two FLOPs per weight of every matrix that a token meets."""
    width = config.embed_dim
    queries = config.num_heads * config.head_dim
    mlp_matrices = 3 if config.activation == "swiglu" else 2
    return TokenCost(
        query=2.0 * width * (2 * queries + mlp_matrices * config.mlp_dim),
        keys_values=2.0 * width * 2 * config.num_kv_heads * config.head_dim,
        attention_per_key=2.0 * 2 * queries,
        head=2.0 * width * config.vocab_size,
        kv_map=2.0 * width * 2 * config.num_kv_heads * config.head_dim,
        full_depth=config.num_layers,
    )


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        STDLIB_16,
        dataclasses.replace(TINY, activation="swiglu", tie_embeddings=False, num_kv_heads=4),
    ],
)
def test_a_token_costs_two_flops_per_weight(config):
    decoder = Transformer(config)
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    assert token_cost(decoder, params) == cost_by_hand(config)


@pytest.mark.parametrize(
    "others", [jax.random.key(0), (jnp.ones(3), {"b": jnp.ones(2)}), [()], {"scale": 1.0}]
)
def test_parameters_may_hold_keys_of_a_random_generator_numbers_and_tuples(tiny, others):
    """The state of an NNX layer with dropout does; weights of a layer may be a NamedTuple."""
    params = {**tiny.params, "others": others}
    assert token_cost(tiny.decoder, params) == token_cost(tiny.decoder, tiny.params)


def test_layers_of_two_kinds_cost_their_mean():
    """A conditional costs the mean of its branches, and stacks may be computed from parameters."""

    class Turns(Transformer):
        def layers(self, params):
            kinds = jnp.arange(self.config.num_layers) % 2 > 0
            whole = jax.tree.map(lambda leaf: leaf[:], params["layers"])
            return {**whole, "kind": kinds}

        def queries(self, layer, x, places):
            shape = (*x.shape[:-1], TINY.num_heads, TINY.head_dim)
            run = partial(super().queries, layer, x, places)
            return jax.lax.cond(layer["kind"], run, lambda: jnp.zeros(shape, x.dtype))

    params = jax.eval_shape(Transformer(TINY).init, jax.random.key(0))
    turns, plain = token_cost(Turns(TINY), params), token_cost(Transformer(TINY), params)
    queries = 2.0 * TINY.embed_dim * TINY.num_heads * TINY.head_dim
    assert turns.query == plain.query - queries / 2


def test_what_attention_per_key_says_is_what_attention_does(tiny):
    config = tiny.decoder.config
    per_key = token_cost(tiny.decoder, tiny.params).attention_per_key
    keys = jnp.zeros((50, config.num_kv_heads, config.head_dim))
    for count in (3, 80):
        queries = jnp.zeros((count, config.num_heads, config.head_dim))
        counted = count_matmul_flops(attend, queries, keys, keys, jnp.ones((count, 50), bool))
        # Many queries have a column of ones, which sums the weights: one of head_dim + 1.
        ones = 2.0 * config.num_heads * count * 50 if count == 80 else 0.0
        assert counted - ones == per_key * count * 50


def test_counting_runs_nothing_and_knows_batches_loops_and_calls():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 2, 3), (4, 3, 5)))
    assert count_matmul_flops(lambda a, b: a @ b, a, b) == 2 * 4 * 2 * 3 * 5
    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    scan = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=7)[0]  # noqa: E731
    assert count_matmul_flops(scan, square) == 7 * 54
    loop = lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ x, x)  # noqa: E731
    assert count_matmul_flops(loop, square) == 5 * 54
    assert count_matmul_flops(jax.jit(lambda x: x @ x), square) == 54
    assert count_matmul_flops(jax.checkpoint(lambda x: x @ x), square) == 54
    assert count_matmul_flops(lambda x: x + 1, square) == 0


def test_a_pass_costs_what_it_executed():
    work = dataclasses.replace(
        Work.of_rows(2),
        queries=np.full(2, 2**30, np.int32),  # Their sum outgrows int32.
        keys_values=np.array([20, 30]),
        key_slots=np.array([160.0, 32.0]),
        heads=np.array([0, 10]),
        exit_maps=np.array([3, 0]),
        kv_maps=np.array([0, 5]),
    )
    cost = dataclasses.replace(COST, exit_map=11.0, kv_map=13.0, full_depth=6)
    flops = cost.flops(work, gates=7.0)
    assert flops == 2**31 * 1000 + 50 * 100 + 192 * 2 + 10 * 50 + 3 * 11 + 5 * 13 + 7


@pytest.mark.parametrize(("projected", "mapped"), [(6, 0), (0, 0), (0, 6), (0, 8)])
def test_the_ideal_is_a_sum_over_tokens_and_their_own_layers(projected, mapped):
    cost = dataclasses.replace(COST, kv_map=13.0, full_depth=6)
    depths = np.array([[2, 6, 3, 2, 6, 2], [6, 2, 0, 0, 0, 0]])
    flops = 0.0
    for _, token in zip(*np.nonzero(depths), strict=True):
        flops += COST.head
        for layer in range(8):
            runs = layer < depths[_, token]
            if runs:
                flops += COST.query + COST.attention_per_key * (4 if token < 4 else 6)
            if runs or layer < projected:
                flops += COST.keys_values
            elif layer < mapped:
                flops += cost.kv_map
    work = decided_work(cost, depths, key_widths=(4, 6), projected=projected, mapped=mapped)
    assert cost.flops(work) == flops


def test_what_to_expect_of_a_staircase_is_a_sum_over_its_segments():
    flops = expected_flops(
        COST,
        batch=3,
        width=100,
        min_bucket=16,
        depths=(2, 3, 5),
        fractions=(0.5, 0.25, 0.25),
        gates=(7.0, 11.0),
        reads=(True, True),
    )
    # One head per token, and at both boundaries a look at those that go on.
    expected = 300 * (5 * COST.keys_values + (1 + 0.5 + 0.25) * COST.head)
    # All 300 tokens are live: they fill 19 blocks of 16 up, each row's 100 take 7.
    expected += 2 * (304 * COST.query + 3 * 112 * COST.attention_per_key * 50) + 304 * 7
    # Then 150 and 75, and half a block of padding: one for projections, one per row for attention.
    expected += 1 * (158 * COST.query + 174 * COST.attention_per_key * 50) + 158 * 11
    expected += 2 * (83 * COST.query + 99 * COST.attention_per_key * 50)
    assert flops == expected


def test_a_token_costs_at_a_depth_what_the_ideal_pass_costs_per_token():
    result = depth_flops(COST, (2, 3, 5), width=6, key_widths=(4, 6))
    for flops, depth in zip(result, (2, 3, 5), strict=True):
        row = decided_work(COST, np.full((1, 6), depth), key_widths=(4, 6), projected=5)
        assert flops == pytest.approx(COST.flops(row) / 6)
