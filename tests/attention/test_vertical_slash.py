# SPDX-License-Identifier: Apache-2.0
"""Vertical-Slash attention equals attention under the mask that defines it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax import History, SparseQueries, attend_vertical_slash
from utio_jax.attention.fused_slash import attend_history_in_two
from utio_jax.attention.history import visible_history
from utio_jax.attention.products import attend
from utio_jax.attention.vertical_slash import slice_start, slice_width
from utio_jax.core.flops import count_matmul_flops

# tokens, chunk, recent, sinks, heavy, heads, K/V heads, softcap, layer window
CASES = (
    (64, 16, 8, 2, 5, 4, 2, None, None),
    (64, 16, 8, 0, 0, 4, 1, None, None),  # No vertical at all.
    (61, 16, 5, 4, 0, 2, 2, None, None),  # Ragged last chunk.
    (40, 8, 1, 0, 6, 4, 4, None, None),  # The slash is the query's own key.
    (33, 16, 100, 3, 4, 4, 2, None, None),  # A band longer than the row.
    (33, 64, 7, 2, 3, 4, 2, None, None),  # A chunk longer than the row.
    (48, 16, 12, 2, 6, 4, 2, 5.0, None),
    (48, 16, 12, 2, 6, 4, 2, None, 20),  # The layer's window is wider than the band,
    (48, 16, 12, 2, 6, 4, 2, 3.0, 6),  # or narrower.
    (3, 4, 2, 8, 2, 2, 1, None, None),  # More sinks than tokens.
    (1, 1, 1, 0, 1, 1, 1, None, None),
)


def draw(case: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """Returns two rows of tensors, with random verticals, lengths and holes among the keys."""
    tokens, chunk, recent, sinks, heavy, heads, kv_heads, softcap, window = case
    rng = np.random.default_rng(seed)
    chunks = -(-tokens // chunk)
    verticals = np.full((2, chunks, sinks + heavy), tokens, np.int32)
    verticals[..., :sinks] = np.arange(sinks)
    for row, index in itertools.product(range(2), range(chunks)):
        behind = np.arange(sinks, max(sinks, index * chunk - recent // 2))
        chosen = rng.permutation(behind)[: rng.integers(0, heavy + 1)]
        verticals[row, index, sinks : sinks + len(chosen)] = chosen
    lengths = rng.integers(0, tokens + 1, 2) if seed % 2 else np.full(2, tokens)
    shown = (np.arange(tokens) < lengths[:, None]) & (rng.random((2, tokens)) < 0.9)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "queries": normal(2, tokens, heads, 8),
        "keys": normal(2, tokens, kv_heads, 8),
        "values": normal(2, tokens, kv_heads, 8),
        "verticals": jnp.asarray(verticals),
        "shown": jnp.asarray(shown),
        "history": History(recent=recent, sinks=sinks, heavy=heavy),
        "chunk": chunk,
        "window": None if window is None else jnp.int32(window),
        "softcap": softcap,
    }


def take_static(inputs: dict[str, Any]) -> dict[str, Any]:
    """Removes from the inputs what is not an array, and returns it."""
    return {name: inputs.pop(name) for name in ("history", "chunk", "softcap", "window")}


def masked(inputs: dict[str, Any]) -> jax.Array:
    """Returns attention under `visible_history`, over all keys."""
    verticals, chunk = np.asarray(inputs["verticals"]), inputs["chunk"]
    tokens = inputs["keys"].shape[1]
    heavy = np.zeros((2, tokens, tokens), bool)
    for row, query in itertools.product(range(2), range(tokens)):
        mine = verticals[row, query // chunk]
        heavy[row, query, mine[mine < tokens]] = True
    tensors = {name: inputs[name] for name in ("queries", "keys", "values", "shown", "window")}
    return run_masked(tensors, jnp.asarray(heavy), inputs["history"], inputs["softcap"])


def _masked(
    tensors: dict[str, Any], heavy: jax.Array, history: History, softcap: float | None
) -> jax.Array:
    shown = tensors["shown"]
    positions = jnp.broadcast_to(jnp.arange(shown.shape[1]), shown.shape)
    hidden = jnp.where(shown, positions, 10**9)
    visible = visible_history(history, positions, hidden, heavy, tensors["window"])
    queries, keys, values = (tensors[name] for name in ("queries", "keys", "values"))
    return attend(queries, keys, values, visible, softcap=softcap)


run_masked = jax.jit(_masked, static_argnums=(2, 3))


@pytest.mark.parametrize("case", CASES)
def test_equals_attention_under_the_mask_that_defines_it(case: tuple[Any, ...]) -> None:
    static = {name: draw(case, 0)[name] for name in ("history", "chunk", "softcap")}
    run = jax.jit(lambda tensors: attend_vertical_slash(**tensors, **static))
    for seed in range(12):
        inputs = draw(case, seed)
        found = run({name: y for name, y in inputs.items() if name not in static})
        np.testing.assert_allclose(found, masked(inputs), atol=1e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[7]])
def test_two_calls_merged_by_log_sum_exp_are_the_same(case: tuple[Any, ...]) -> None:
    """What `implementation="cudnn"` does, with XLA in cuDNN's place."""
    inputs = draw(case, 3)
    history, chunk, tokens = inputs["history"], inputs["chunk"], inputs["keys"].shape[1]
    width, first = slice_width(history, chunk, tokens), tokens // chunk * chunk - chunk

    @jax.jit
    def in_two(tensors: dict[str, Any]) -> jax.Array:
        return attend_history_in_two(
            tensors["queries"][1, first : first + chunk],
            jnp.arange(first, first + chunk, dtype=jnp.int32),
            tensors["keys"],
            tensors["values"],
            tensors["shown"],
            row=jnp.int32(1),
            verticals=tensors["verticals"][1, first // chunk],
            start=slice_start(history, jnp.int32(first), width=width, tokens=tokens),
            width=width,
            history=history,
            window=inputs["window"],
            implementation="xla",
        )

    tensors = {name: y for name, y in inputs.items() if name not in ("history", "chunk")}
    wanted = masked(inputs)[1, first : first + chunk]
    np.testing.assert_allclose(in_two(tensors), wanted, atol=1e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[1]])
def test_the_kernel_for_tpus_is_the_same_where_it_is_interpreted(case: tuple[Any, ...]) -> None:
    inputs = draw(case, 3)
    wanted = masked(inputs)
    static = take_static(inputs)
    assert static["window"] is static["softcap"] is None
    run = jax.jit(
        lambda tensors: attend_vertical_slash(**tensors, **static, implementation="splash")
    )
    np.testing.assert_allclose(run(inputs), wanted, atol=1e-5)
    hidden = inputs | {"shown": jnp.zeros_like(inputs["shown"])}
    assert not run(hidden).any()


def test_queries_that_see_nothing_get_zeros() -> None:
    inputs = draw(CASES[0], 0) | {"shown": jnp.zeros((2, 64), bool)}
    static: dict[str, Any] = {
        name: inputs.pop(name) for name in ("history", "chunk", "softcap", "window")
    }
    assert not jax.jit(lambda tensors: attend_vertical_slash(**tensors, **static))(inputs).any()


def test_costs_verticals_and_a_slice_per_query_whatever_the_row() -> None:
    """Neither more nor fewer products than `chunk + recent - 1 + vertical` keys per query."""
    per_key = 2 * 4 * 8 + 2 * 4 * 9  # Scores, and the mix of values with their count.
    for tokens in (64, 256):
        inputs = draw((tokens, *CASES[0][1:]), 0)
        static: dict[str, Any] = {
            name: inputs.pop(name) for name in ("history", "chunk", "softcap", "window")
        }
        found = count_matmul_flops(lambda t, s=static: attend_vertical_slash(**t, **s), inputs)
        assert found == 2 * tokens * (16 + 8 - 1 + 7) * per_key


def test_the_mask_of_sparse_queries_shows_each_chunk_its_own_verticals() -> None:
    verticals = jnp.asarray([[[0, 9], [2, 9], [0, 4]]])
    queries = SparseQueries(
        sparse=jnp.ones((1, 9), bool), verticals=verticals, history=History(recent=1, sinks=0),
        chunk=3,
    )  # fmt: skip
    positions = jnp.arange(9)[None, :]
    (seen,) = np.asarray(queries.visible(positions, positions, None))
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        [0], [0, 1], [0, 2], [2, 3], [2, 4], [2, 5], [0, 4, 6], [0, 4, 7], [0, 4, 8],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"implementation": "flash"},
            "'xla', 'cudnn', 'splash'.*Got implementation='flash'",
        ),
        ({"implementation": "cudnn", "softcap": 5.0}, "no softcap.*softcap=5.0.*'xla'"),
        ({"implementation": "splash", "window": jnp.int32(9)}, "no window.*masks are static"),
        ({"chunk": 8}, "2 rows of 8 chunks of 8 tokens. Got shape \\(2, 4, 7\\)"),
    ],
)
def test_impossible_calls_are_refused(
    changes: dict[str, Any], match: str, unchecked_shapes: None
) -> None:
    with pytest.raises(ValueError, match=match):
        attend_vertical_slash(**(draw(CASES[0], 0) | changes))


@pytest.mark.parametrize(
    "sizes", [{"recent": 0}, {"recent": 4, "sinks": -1}, {"recent": 4, "heavy": -2}]
)
def test_impossible_histories_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 recent token, and no negative number"):
        History(**sizes)
