# SPDX-License-Identifier: Apache-2.0
"""The K/V cache and `run_segment`: what lies where, what sees it, and what padding may not do."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts

from utio_jax.attention.cache import KVCache, bytes_per_slot, init_cache, key_widths, read
from utio_jax.core.platform import compiling_for
from utio_jax.decoding.cached import block_at, decode_step, run_segment
from utio_jax.decoding.loop import read_prompts

LENGTHS = np.array([3, 7, 1], np.int32)


@pytest.fixture(scope="module")
def cache(tiny):
    with compiling_for(heads_first=True):  # Which axis is what, on any machine.
        return init_cache(tiny.decoder.config, batch=3, slots=16)


@pytest.fixture(scope="module")
def filled(tiny, cache):
    """Three ragged prompts of up to 8 tokens, prefilled."""
    return jax.jit(read_prompts, static_argnums=0)(
        tiny.decoder, tiny.params, tiny.tokens(3, 8), LENGTHS, cache
    )


def test_tokens_lie_at_their_positions(tiny, cache):
    # A token's units say its position, its tens its row, its hundreds the layer.
    positions = np.array([[2, 5], [0, 1], [15, 3]], np.int32)
    valid = np.array([[True, True], [True, False], [True, True]])
    rows = np.arange(3)[:, None]
    written = jax.jit(KVCache.write)
    for layer in (1, 3):
        marks = (100.0 * layer + 10 * rows + positions)[:, :, None, None]
        marks = np.broadcast_to(marks, (3, 2, 2, 8)).astype(np.float32)
        cache = written(cache, jnp.int32(layer), marks, -marks, positions=positions, valid=valid)
    expected = np.zeros((4, 3, 16))
    for layer in (1, 3):
        for row, position in ((0, 2), (0, 5), (1, 0), (2, 15), (2, 3)):
            expected[layer, row, position] = 100 * layer + 10 * row + position
    np.testing.assert_array_equal(cache.keys[:, :, 0, :, 0], expected)
    np.testing.assert_array_equal(cache.values[:, :, 1, :, 7], -expected)
    keys, values = read(cache, (3,), width=6)
    by_slot = lambda leaf: np.moveaxis(leaf, 2, 3)  # noqa: E731 (heads within slots)
    np.testing.assert_array_equal(keys, by_slot(cache.keys)[3, :, :6])
    np.testing.assert_array_equal(values, by_slot(cache.values)[3, :, :6])
    both, _ = read(cache, (1, jnp.int32(3)), width=6)  # Heads of two layers side by side.
    np.testing.assert_array_equal(both[:, :, :2], by_slot(cache.keys)[1, :, :6])
    np.testing.assert_array_equal(both[:, :, 2:], by_slot(cache.keys)[3, :, :6])
    assert cache.num_slots == 16
    assert bytes_per_slot(cache) == 2 * 2 * 8 * 4


def test_padding_never_leaks(tiny, cache, filled):
    ids = tiny.tokens(3, 8)
    other = jnp.where(jnp.arange(8)[None] < LENGTHS[:, None], ids, 63 - ids)
    logits, after = jax.jit(read_prompts, static_argnums=0)(
        tiny.decoder, tiny.params, other, LENGTHS, cache
    )
    np.testing.assert_array_equal(logits, filled[0])
    np.testing.assert_array_equal(after.keys, filled[1].keys)
    # Nor does what lies behind the last token: rubbish there, far beyond any real key's size.
    behind = jnp.arange(16)[None, None, None, :, None] > LENGTHS[None, :, None, None, None]
    dirty = dataclasses.replace(
        filled[1],
        keys=jnp.where(behind, 1e4, filled[1].keys),
        values=jnp.where(behind, 1e4, filled[1].values),
    )
    step = jax.jit(decode_step, static_argnums=0)
    new = jnp.array([1, 2, 3], jnp.int32)
    clean, _ = step(tiny.decoder, tiny.params, new, filled[1], LENGTHS)
    np.testing.assert_array_equal(step(tiny.decoder, tiny.params, new, dirty, LENGTHS)[0], clean)


@pytest.mark.parametrize("shown", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_rows_run_as_they_do_among_all(tiny, filled, shown):
    """Rows 2 and 0 of three, and a place that only fills up: states, cache, and what they cost."""
    _, cache = filled
    decoder = Counting(tiny.decoder.config)
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
    valid = jnp.array([[True, True], [True, True], [True, False]])
    x = decoder.embed(tiny.params, tiny.tokens(3, 2, seed=3), positions)
    seen = None
    if shown:  # Of each row something else is hidden.
        seen = jnp.full((3, 16), 4, jnp.int32).at[jnp.arange(3), jnp.arange(3) % 2].set(2)
    segment = jax.jit(run_segment, static_argnums=0, static_argnames="width")

    def run(rows):
        every = jnp.arange(3) if rows is None else rows
        exists = valid[every] & (jnp.arange(every.size) < 2)[:, None] if rows is not None else valid
        block = block_at(decoder, positions[every], exists, rows=rows)
        where = {"start": 1, "stop": 3}
        states, after = segment(
            decoder, tiny.params, cache, x[every], block, **where, width=12, shown=seen
        )
        return states, after, read_counts()

    read_counts()
    states, after, counts = run(None)
    rows = jnp.array([2, 0, 1], jnp.int32)
    packed, packed_after, packed_counts = run(rows)
    np.testing.assert_allclose(packed[:2], states[rows[:2]], atol=1e-5)
    for name in ("keys", "values"):
        result, expected, before = (
            getattr(source, name) for source in (packed_after, after, cache)
        )
        np.testing.assert_allclose(result[:, rows[:2]], expected[:, rows[:2]], atol=1e-5)
        np.testing.assert_array_equal(result[:, 1], before[:, 1])
        assert np.any(expected[:, 1] != before[:, 1])
    assert counts == packed_counts == {"queries": 2 * 6, "finish_layer": 2 * 6, "keys_values": 12}
    two, _, counts = run(rows[:2])
    np.testing.assert_allclose(two, packed[:2], atol=1e-6)
    assert counts == {"queries": 2 * 4, "finish_layer": 2 * 4, "keys_values": 2 * 4}


def test_widths_are_few_and_reach_the_end():
    assert key_widths(16, key_step=16) == (16,)
    assert key_widths(10, key_step=16) == (10,)
    assert key_widths(4096, key_step=128) == (1024, 2048, 3072, 4096)


def test_both_orders_of_slots_and_heads_hold_the_same(tiny):
    """Slots first is what XLA:TPU wants: the same logits and keys, on other axes."""

    decoder, token_ids = tiny.decoder, tiny.tokens(3, 8)

    def run(*, heads_first: bool):
        @jax.jit  # A function of its own for each order: jit traces one once.
        def all_of_it(params):
            cache = init_cache(decoder.config, batch=3, slots=16)
            logits, cache = read_prompts(decoder, params, token_ids, jnp.asarray(LENGTHS), cache)
            ends = jnp.asarray(LENGTHS)
            new, cache = decode_step(
                decoder, params, jnp.zeros(3, jnp.int32), cache, ends, width=12
            )
            ends = jnp.asarray(LENGTHS[:2, None] + 1)
            block = block_at(decoder, ends, jnp.ones((2, 1), bool), rows=jnp.array([2, 0]))
            x = jnp.ones((2, 1, decoder.config.embed_dim))
            x, cache = run_segment(decoder, params, cache, x, block, start=0, stop=4, width=16)
            return logits, new, x, cache

        with compiling_for("cpu", heads_first=heads_first):
            return all_of_it(tiny.params)

    *result, one = run(heads_first=True)
    *expected, other = run(heads_first=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, expected)
    assert (one.heads_first, other.heads_first) == (True, False)
    assert (one.num_slots, bytes_per_slot(one)) == (other.num_slots, bytes_per_slot(other))
    np.testing.assert_allclose(one.keys, jnp.moveaxis(other.keys, 2, 3), atol=1e-5)
    np.testing.assert_allclose(one.values, jnp.moveaxis(other.values, 2, 3), atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_step_turns_no_keys_and_values(tiny):
    """XLA:CPU would turn all of both for the products, in each layer of every step."""
    of_keys = set(itertools.permutations((3, 16, 2, 8)))

    def turned(*, heads_first: bool) -> int:
        with compiling_for("cpu", heads_first=heads_first):
            cache = init_cache(tiny.decoder.config, batch=3, slots=16)
            step = jax.jit(lambda at, c: decode_step(tiny.decoder, tiny.params, at, c, at)[0])
            text = step.lower(jnp.zeros(3, jnp.int32), cache).compile().as_text() or ""
        made = re.findall(r"^ *%?\S*(?:transpose|copy)\S* = f32\[([\d,]+)\]", text, re.MULTILINE)
        return sum(tuple(map(int, dims.split(","))) in of_keys for dims in made)

    assert turned(heads_first=True) == 0
    if jax.__version__.startswith("0.10"):  # Or nothing would be tested.
        assert turned(heads_first=False) >= 2
