# SPDX-License-Identifier: Apache-2.0
"""Attention against a softmax in float64, query by query and head by head."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from utio_jax.attention import mixing
from utio_jax.attention.mixing import (
    NOWHERE,
    Mixer,
    attend,
    mix_apart,
    mix_whole_rows,
    visible_keys,
)
from utio_jax.core.platform import compiling_for

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def slow_attend(queries, keys, values, visible, softcap: float | None = None) -> np.ndarray:
    """Returns attention of one sequence, `[query, head, head_dim]`."""
    queries, keys, values = (np.asarray(leaf, np.float64) for leaf in (queries, keys, values))
    group = queries.shape[1] // keys.shape[1]
    out = np.zeros(queries.shape)
    for query, head in np.ndindex(queries.shape[:2]):
        seen = np.flatnonzero(visible[query])
        if seen.size == 0:
            continue
        scores = np.array([queries[query, head] @ keys[key, head // group] for key in seen])
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        mixed = sum(w * values[key, head // group] for w, key in zip(weights, seen, strict=True))
        out[query, head] = mixed / weights.sum()
    return out


def example(heads: int, kv_heads: int, *, queries: int = 5, keys: int = 7, scale: float = 2.0):
    """Returns queries, keys, values and a random mask in which every query sees something."""
    rng = np.random.default_rng(heads * 10 + kv_heads)
    visible = rng.uniform(size=(queries, keys)) < 0.6
    visible[:, 0] = True
    return (
        jnp.asarray(scale * rng.normal(size=(queries, heads, 8)), jnp.float32),
        jnp.asarray(rng.normal(size=(keys, kv_heads, 8)), jnp.float32),
        jnp.asarray(rng.normal(size=(keys, kv_heads, 8)), jnp.float32),
        jnp.asarray(visible),
    )


def attended(*inputs: jax.Array, **options: Any) -> jax.Array:
    """Returns what `attend` does, by a program of this call's own."""
    return jax.jit(lambda *inputs: attend(*inputs, **options))(*inputs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "platform"),
    [
        # Few and many are computed in two ways, products have another form on each platform.
        *((4, 2, queries, platform) for queries in (5, 70) for platform in ("cpu", "tpu")),
        (4, 4, 70, "cpu"),
        (4, 1, 5, "cpu"),
    ],
)
def test_equals_softmax_also_where_heads_share_keys(heads, kv_heads, queries, platform):
    q, k, v, visible = example(heads, kv_heads, queries=queries)
    inputs = q, k, v, visible.at[2].set(False)  # One query sees nothing: zeros.
    with compiling_for(platform):
        result = attended(*inputs)
    np.testing.assert_allclose(result, slow_attend(*inputs), rtol=1e-5, atol=1e-6)


def test_heads_of_several_layers_are_those_side_by_side():
    """Two layers of two K/V heads, which eight heads read in this order."""
    queries, _, _, visible = example(8, 4)
    layers = [example(8, 2)[1:3], example(4, 2)[1:3]]
    keys, values = (jnp.concatenate(parts, axis=-2) for parts in zip(*layers, strict=True))
    result = mix_apart(Mixer(window=None, causal=True), queries, layers, visible)
    expected = slow_attend(queries, keys, values, visible)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA:CPU made")
def test_a_step_copies_no_keys():
    """Scores of one query are turned; XLA:CPU would transpose every key for the other product."""
    shapes = [(8, 1, 4, 32), (8, 256, 1, 32), (8, 256, 1, 32)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs.append(jax.ShapeDtypeStruct((8, 1, 256), jnp.bool_))

    def copied(**choices: Any) -> int:
        with compiling_for("cpu", **choices):
            program = (
                jax.jit(lambda *inputs: attend(*inputs)).lower(*inputs).compile().as_text() or ""
            )
        moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", program)
        return sum(math.prod(map(int, dims.split(","))) >= 8 * 256 * 32 for dims in moved)

    assert copied() == 0
    assert copied(scores_turned=False) > 0


@pytest.mark.parametrize("queries", [5, 70])
def test_capped_scores_are_the_cap_times_a_tanh(queries):
    inputs = example(4, 2, queries=queries)
    result, capped = attended(*inputs, softcap=3.0), slow_attend(*inputs, softcap=3.0)
    np.testing.assert_allclose(result, capped, rtol=1e-5, atol=1e-6)
    assert np.abs(result - slow_attend(*inputs)).max() > 0.1, "a cap that matters"


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_sees_a_window_that_ends_with_itself_or_lies_around_it(causal, window):
    queries, keys = np.array([0, 2, 5, 6]), np.array([0, 1, 2, 3, 4, 5, 6, 7, NOWHERE])
    expected = np.zeros((4, 9), bool)
    for i, j in np.ndindex(4, 9):
        back = queries[i] - keys[j]
        near = window is None or (back if causal else abs(back)) < window
        expected[i, j] = keys[j] != NOWHERE and near and (not causal or back >= 0)
    at = jnp.asarray(queries, jnp.int32), jnp.asarray(keys, jnp.int32)
    limit = None if window is None else jnp.int32(window)
    np.testing.assert_array_equal(visible_keys(*at, limit, causal=causal), expected)


def test_large_scores_do_not_overflow():
    inputs = example(4, 2, scale=200.0)
    np.testing.assert_allclose(attended(*inputs), slow_attend(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [5, 70])
def test_a_query_that_sees_nothing_has_finite_gradients(count):
    queries, keys, values, visible = example(4, 2, queries=count)
    visible = visible.at[2].set(False)
    slopes = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, visible).sum(), argnums=(0, 1, 2)))
    gradients = [np.asarray(gradient) for gradient in slopes(queries, keys, values)]
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[0][2].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_inputs_are_summed_in_float32(dtype):
    queries, keys, values, visible = example(4, 2, keys=600)
    q, k, v = queries.astype(dtype), keys.astype(dtype), values.astype(dtype)
    out = attended(q, k, v, visible)
    assert out.dtype == dtype
    wide = q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32)
    # Rounding of each weight and of the result.
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        out.astype(jnp.float32), slow_attend(*wide, visible), rtol=2 * tolerance, atol=tolerance
    )
    # CPUs sum in float32 anyway; accelerators do as configured.
    program = str(jax.make_jaxpr(attend)(q, k, v, visible))
    assert program.count("preferred_element_type=float32") == program.count("dot_general") == 2


def test_gradients_equal_those_of_a_plain_softmax():
    queries, keys, values, visible = example(4, 4)

    def plain(queries, keys, values):
        scores = jnp.einsum("qhd,khd->hqk", queries, keys)
        weights = jax.nn.softmax(jnp.where(visible[None], scores, -jnp.inf), axis=-1)
        return jnp.sum(jnp.sin(jnp.einsum("hqk,khd->qhd", weights, values)))

    def ours(queries, keys, values):
        return jnp.sum(jnp.sin(attend(queries, keys, values, visible)))

    for result, expected in zip(
        *(
            jax.jit(jax.grad(function, argnums=(0, 1, 2)))(queries, keys, values)
            for function in (ours, plain)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "window"), [(1, None), (7, None), (20, 3)])
def test_whole_rows_in_blocks_of_queries_attend_to_what_they_see(
    width: int, window: int | None
) -> None:
    """Few blocks at once, or many in turns."""
    queries, keys, values, _ = example(4, 2, queries=width, keys=width)
    mix = Mixer(window=None if window is None else jnp.int32(window), causal=True, softcap=9.0)
    visible = mix.visible(jnp.arange(width), jnp.arange(width))
    expected = slow_attend(queries, keys, values, np.asarray(visible), softcap=9.0)
    for block in (3, 2**30):
        with compiling_for("cpu", query_block=block):
            mixed = jax.jit(lambda *inputs: mix_whole_rows(mix, *inputs))
            result = mixed(queries, keys, values, visible)
        np.testing.assert_allclose(result, expected, atol=2e-6)


def test_gradients_of_blocks_in_turns_are_those_of_one_block() -> None:
    queries, keys, values, _ = example(4, 2, queries=20, keys=20)
    mix = Mixer(window=None, causal=True)
    visible = mix.visible(jnp.arange(20), jnp.arange(20))
    gradients = []
    for block in (3, 2**30):
        with compiling_for("cpu", query_block=block):
            loss = lambda q, k, v: jnp.sum(jnp.sin(mix_whole_rows(mix, q, k, v, visible)))  # noqa: E731
            gradients.append(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(queries, keys, values))
    for turns, whole in zip(*gradients, strict=True):
        np.testing.assert_allclose(turns, whole, atol=1e-5)


def test_blocks_in_turns_run_where_axes_are_checked() -> None:
    """In `jax.shard_map` both results of a branch vary over the same axes."""
    mesh, rows = Mesh(np.asarray(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    queries, keys, values, _ = example(4, 2, queries=20, keys=20)
    mix = Mixer(window=None, causal=True)
    visible = mix.visible(jnp.arange(20), jnp.arange(20))
    mixed = lambda q, k, v: mix_whole_rows(mix, q, k, v, visible)  # noqa: E731
    inputs = [leaf[None] for leaf in (queries, keys, values)]
    with compiling_for("cpu", query_block=3):
        over = jax.jit(jax.shard_map(mixed, mesh=mesh, in_specs=rows, out_specs=rows))(*inputs)
    np.testing.assert_allclose(over[0], mixed(queries, keys, values), atol=2e-6)


def test_blocks_in_turns_hold_the_scores_of_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where XLA:CPU runs blocks in turns by itself: the branch of each can go then."""
    held, mix = [], Mixer(window=None, causal=True)
    shapes = [jax.ShapeDtypeStruct((1024, 4, 8), jnp.float32)] * 3
    visible = jax.ShapeDtypeStruct((1024, 1024), jnp.bool_)
    for few in (mixing._FEW_BLOCKS, 8):
        monkeypatch.setattr(mixing, "_FEW_BLOCKS", few)
        with compiling_for("cpu", query_block=128):
            program = jax.jit(lambda *inputs: mix_whole_rows(mix, *inputs))
            memory = program.lower(*shapes, visible).compile().memory_analysis()
        assert memory is not None
        held.append(memory.temp_size_in_bytes)
    turns, at_once = held
    assert turns < 0.5 * at_once
