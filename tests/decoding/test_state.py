# SPDX-License-Identifier: Apache-2.0
"""What comes out of a step, and where rows end, against a loop over rows and tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.attention.cache import init_cache
from utio_jax.core.decoder import DecoderConfig
from utio_jax.core.work import Work
from utio_jax.decoding.state import REASONS, Columns, DecodeState, emit, eos_array

SIZES = DecoderConfig(
    vocab_size=3,
    num_layers=4,
    embed_dim=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    context_length=16,
)
BATCH, SLOTS, NEW = 64, 16, 4


def slow_emit(known: list[int], limit: int, new: list[int], eos: int) -> str:
    """Adds new tokens to a row, one by one, and says why it ended."""
    for token in new:
        known.append(token)
        if token == eos:
            return "eos"
        if len(known) >= limit:
            return "length"
    return "running"


@pytest.mark.parametrize("seed", range(4))
def test_rows_end_where_a_loop_over_their_tokens_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 8, BATCH)
    lengths = prompts + rng.integers(0, 3, BATCH)
    limits = lengths + rng.integers(1, 6, BATCH)
    known = rng.choice(3, (BATCH, SLOTS), p=[0.45, 0.45, 0.1]).astype(np.int32)
    reason = rng.choice([0, 0, 0, 1, 3], BATCH).astype(np.int32)
    new = rng.choice(3, (BATCH, NEW), p=[0.45, 0.45, 0.1]).astype(np.int32)
    counts, depths = rng.integers(1, NEW + 1, BATCH), rng.integers(1, 5, (BATCH, NEW))
    logits = rng.normal(size=(BATCH, NEW, 3)).astype(np.float32)
    state = DecodeState(
        columns=dataclasses.replace(Columns.empty(BATCH, SLOTS), token_ids=known),
        lengths=jnp.asarray(lengths, jnp.int32),
        prompt_lengths=jnp.asarray(prompts, jnp.int32),
        limits=jnp.asarray(limits, jnp.int32),
        reason=jnp.asarray(reason),
        seeds=jnp.arange(BATCH, dtype=jnp.uint32),
        cache=init_cache(SIZES, batch=BATCH, slots=SLOTS),
        work=Work.of_rows(BATCH),
        memory=None,
    )
    result = emit(
        jax.tree.map(jnp.asarray, state),
        eos_array([[2]]),
        jnp.asarray(new),
        jnp.asarray(counts, jnp.int32),
        logits=jnp.asarray(logits),
        decided=jnp.asarray(depths, jnp.int32),
        executed=jnp.full((BATCH, NEW), 4, jnp.int32),
    )
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    ends = set[str]()
    for row in range(BATCH):
        expected, why = known[row, : lengths[row]].tolist(), REASONS[reason[row]]
        if why == "running":
            why = slow_emit(expected, limits[row], new[row, : counts[row]].tolist(), 2)
            ends.add(why)
        assert result.lengths[row] == len(expected)
        assert REASONS[int(result.reason[row])] == why
        assert result.token_ids[row, : len(expected)].tolist() == expected
        added = len(expected) - lengths[row]
        here = slice(lengths[row], len(expected))
        for name, values in (("decided", depths), ("executed", np.full_like(depths, 4))):
            noted = np.asarray(getattr(result.columns, name)[row])
            np.testing.assert_array_equal(noted[here], values[row, :added])
            assert np.count_nonzero(noted) == added, "nothing is noted of what was cut"
        chosen = log_p[row, np.arange(added), new[row, :added]]
        np.testing.assert_allclose(result.columns.log_probabilities[row, here], chosen, atol=1e-5)
    assert ends == {"running", "eos", "length"}, "each of them occurs"
