# SPDX-License-Identifier: Apache-2.0
"""Attention over sinks and recent keys equals attention under the mask that defines it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.attention.mixing import NOWHERE, Mixer, attend
from utio_jax.core.flops import count_matmul_flops
from utio_jax.utio import History
from utio_jax.utio.attention.vertical_slash import BandBlocks

# tokens, block, recent, sinks, heads, K/V heads, softcap, layer window
CASES = (
    (64, 16, 8, 2, 4, 2, None, None),
    (64, 16, 8, 0, 4, 1, None, None),  # No sink at all.
    (61, 16, 5, 4, 2, 2, None, None),  # Ragged last block.
    (40, 8, 1, 0, 4, 4, None, None),  # The band is the query's own key.
    (33, 16, 100, 3, 4, 2, None, None),  # A band longer than the row.
    (33, 64, 7, 2, 4, 2, None, None),  # A block longer than the row.
    (48, 16, 12, 2, 4, 2, 5.0, None),
    (48, 16, 12, 2, 4, 2, None, 20),  # The layer's window is wider than the band,
    (48, 16, 12, 2, 4, 2, 3.0, 6),  # or narrower.
    (3, 4, 2, 8, 2, 1, None, None),  # More sinks than tokens.
    (1, 1, 1, 0, 1, 1, None, None),
)


def draw(case: tuple[Any, ...], seed: int) -> dict[str, jax.Array]:
    """Returns two rows of tensors, with lengths and holes among the keys."""
    tokens, _, _, _, heads, kv_heads, _, _ = case
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, tokens + 1, 2) if seed % 2 else np.full(2, tokens)
    shown = (np.arange(tokens) < lengths[:, None]) & (rng.random((2, tokens)) < 0.9)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "queries": normal(2, tokens, heads, 8),
        "keys": normal(2, tokens, kv_heads, 8),
        "values": normal(2, tokens, kv_heads, 8),
        "shown": jnp.asarray(shown),
    }


def parts(case: tuple[Any, ...]) -> tuple[History, Mixer]:
    _, _, recent, sinks, _, _, softcap, window = case
    mix = Mixer(window=None if window is None else jnp.int32(window), causal=True, softcap=softcap)
    return History(recent=recent, sinks=sinks), mix


def by_blocks(case: tuple[Any, ...], tensors: dict[str, jax.Array]) -> jax.Array:
    """Returns what `BandBlocks` make of all queries, a block of each row at a time."""
    tokens, block = case[:2]
    history, mix = parts(case)
    prepared, some = mix.prepare(tensors["values"]), jnp.zeros(1, jnp.int32)
    fields = dict.fromkeys(("row", "start", "end", "reach"), some)
    blocks = BandBlocks(history=history, count=jnp.int32(1), size=block, widths=(), **fields)
    rows = []
    for row in range(2):
        results = []
        for begin in range(0, tokens, block):
            end = min(begin + block, tokens)
            results.append(
                blocks.attend(
                    mix,
                    tensors["queries"][row, begin:end],
                    jnp.arange(begin, end, dtype=jnp.int32),
                    tensors["keys"],
                    prepared,
                    tensors["shown"],
                    row=jnp.int32(row),
                    width=min(history.recent + end - begin - 1, tokens),
                )
            )
        rows.append(jnp.concatenate(results))
    return jnp.stack(rows)


def masked(case: tuple[Any, ...], tensors: dict[str, jax.Array]) -> jax.Array:
    """Returns attention over all keys under the mask of sinks and recent ones."""
    history, mix = parts(case)
    shown = tensors["shown"]
    positions = jnp.broadcast_to(jnp.arange(shown.shape[1]), shown.shape)
    hidden = jnp.where(shown, positions, NOWHERE)
    keys = hidden[..., None, :]
    near = positions[..., None] - keys < history.recent
    visible = mix.visible(positions, hidden) & (near | (keys < history.sinks))
    return attend(
        tensors["queries"], tensors["keys"], tensors["values"], visible, softcap=mix.softcap
    )


@pytest.mark.parametrize("case", CASES)
def test_equals_attention_under_the_mask_that_defines_it(case: tuple[Any, ...]) -> None:
    run = jax.jit(lambda tensors: (by_blocks(case, tensors), masked(case, tensors)))
    for seed in range(12):
        result, expected = run(draw(case, seed))
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_costs_sinks_and_a_slice_per_query_whatever_the_row() -> None:
    """Neither more nor fewer products than `block + recent - 1 + sinks` keys per query."""
    per_key = 2 * 4 * 8 + 2 * 4 * 9  # Scores, and the mix of values with their count.
    for tokens in (64, 256):
        case = (tokens, *CASES[0][1:])
        result = count_matmul_flops(lambda t, case=case: by_blocks(case, t), draw(case, 0))
        assert result == 2 * tokens * (16 + 8 - 1 + 2) * per_key
