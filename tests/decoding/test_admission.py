# SPDX-License-Identifier: Apache-2.0
"""What an admission moves; what rows then get, and what a release stops: tests/engine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers.generation import SMALL, context_of, lively_model, run

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.admission import _admit, admit, empty_state
from utio_jax.decoding.generate import collect
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.prefill import Prefill
from utio_jax.policies.depth import random_depths

POLICY = random_depths([0.5, 0.2, 0.3], key=jax.random.key(1), depths=(1, 2, 4))
DROP = Adaptive(policy=POLICY, kv="drop")
REQUESTS = [([0, 5, 7], 30), ([0, 61], 9)]
"""Prompts, and how many new tokens each wants."""


def batch_and_rows(slots: int, prefill: Prefill | None = None) -> tuple[Any, Any, Any]:
    """Returns a context, four rows without requests, and two fresh rows."""
    context = context_of(lively_model(), DROP)
    ids, lengths = np.zeros((2, 8), np.int32), np.ones(2, np.int32)
    limits, seeds = np.ones(2, np.int32), np.arange(2, dtype=np.uint32)
    for row, (prompt, new) in enumerate(REQUESTS):
        ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        limits[row] = len(prompt) + new
    fresh = begin(context, ids, lengths, limits, seeds, slots=slots, prefill=prefill)
    return context, empty_state(context, batch=4, slots=slots), fresh


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_admission_copies_no_cache() -> None:
    _, state, fresh = batch_and_rows(4096)
    held, come = (
        sum(leaf.nbytes for leaf in jax.tree.leaves((rows.cache, rows.memory)))
        for rows in (state, fresh)
    )
    program = _admit.lower(state, fresh, np.array([3, 1], np.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 1.05 * come  # No more is moved than comes in.


@pytest.mark.check
def test_a_prompt_may_be_read_by_importance() -> None:
    """What the pass over the prompt did stays with the fresh rows; what it shows comes along."""
    how = Prefill(policy=POLICY)
    context, state, fresh = batch_and_rows(64, how)
    state = admit(state, fresh, np.asarray([1, 2], np.int32))
    assert fresh.prompt is not None
    assert state.prompt is None
    state = advance(context, state, np.int32(64), widths=(64,))
    result = collect(state, DROP, SMALL, rows=4, devices=1, num_layers=4)
    prompts, counts = zip(*REQUESTS, strict=True)
    longest = max(counts)
    expected = run(lively_model(), [*prompts], mode=DROP, max_new_tokens=longest, prefill=how)
    for name in ("token_ids", "decided"):
        for row, theirs, new in zip((1, 2), getattr(expected, name), counts, strict=True):
            np.testing.assert_array_equal(getattr(result, name)[row], theirs[:new])
