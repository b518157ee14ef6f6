# SPDX-License-Identifier: Apache-2.0
"""What an admission moves and a release stops; what rows then get: tests/engine/test_laws.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers.generation import SMALL, context_of, lively_model, run

from utio_jax.core.rows import row_axes
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.admission import _admit, admit, empty_state, release
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import collect
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.state import REASONS, RELEASED
from utio_jax.policies.depth import random_depths

POLICY = random_depths([0.5, 0.2, 0.3], key=jax.random.key(1), depths=(1, 2, 4))
DROP = Adaptive(policy=POLICY, kv="drop")
BATCH, SLOTS = 4, 64
REQUESTS = [([0, 5, 7], 30), ([0, 61], 9), ([4], 20), ([0, 9, 3, 2, 8, 8, 1, 6], 17)]
"""Prompts, and how many new tokens each wants."""


class Server:
    """A running batch of one mode."""

    def __init__(self, mode: Any, *, slots: int = SLOTS) -> None:
        self.mode, self.slots = mode, slots
        self.context = context_of(lively_model(), mode)
        self.state = empty_state(self.context, batch=BATCH, slots=slots)

    def begin(self, requests: list[Any], prefill: Prefill | None = None) -> Any:
        """Returns two fresh rows."""
        ids, lengths = np.zeros((2, 8), np.int32), np.ones(2, np.int32)
        limits, seeds = np.ones(2, np.int32), np.arange(2, dtype=np.uint32)
        for row, (prompt, new) in enumerate(requests):
            ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            limits[row] = len(prompt) + new
        rows = ids, lengths, limits, seeds
        return begin(self.context, *rows, slots=self.slots, prefill=prefill)

    def admit(self, requests: list[Any], rows: list[int], **how: Any) -> Any:
        """Returns the fresh rows."""
        fresh, where = self.begin(requests, **how), np.asarray(rows, np.int32)
        self.state = admit(self.state, fresh, where)
        return fresh

    def advance(self, until: int) -> None:
        self.state = advance(self.context, self.state, np.int32(until), widths=(32, SLOTS))

    def decoded(self, row: int, name: str = "token_ids") -> np.ndarray:
        """Returns what a row has decoded so far."""
        result = collect(self.state, self.mode, SMALL, rows=BATCH, devices=1, num_layers=4)
        return getattr(result, name)[row]


def leaves_of(tree: Any) -> list[np.ndarray]:
    """Returns every leaf that has rows, these in front."""
    pairs = zip(jax.tree.leaves(tree), row_axes(tree), strict=True)
    return [np.moveaxis(np.array(leaf), axis, 0) for leaf, axis in pairs if axis is not None]


def test_an_admission_moves_the_fresh_rows_and_nothing_else():
    server = Server(DROP)
    server.admit(REQUESTS[:2], [2, 0])
    server.advance(5)
    before = leaves_of(server.state)
    fresh = server.admit(REQUESTS[2:4], [3, 2])
    after = leaves_of(server.state)
    assert len(after) == len(before) == len(leaves_of(fresh)) > 20
    for old, come, new in zip(before, leaves_of(fresh), after, strict=True):
        np.testing.assert_array_equal(new[:2], old[:2])
        np.testing.assert_array_equal(new[2], come[1])
        np.testing.assert_array_equal(new[3], come[0])
    # A mode's memory is among them.
    assert None not in row_axes(server.state)
    assert jax.tree.leaves(server.state.memory)


def test_released_rows_take_part_in_nothing():
    server = Server(Plain())
    server.admit(REQUESTS[:2], [1, 3])
    server.advance(4)
    before = leaves_of(server.state)
    server.state = release(server.state, [1, 0])
    assert [REASONS[i] for i in server.state.reason] == ["released"] * 3 + ["running"]
    server.advance(6)
    for old, new, leaf in zip(before, leaves_of(server.state), range(99), strict=False):
        assert leaf == 3 or np.array_equal(old[[0, 1, 2]], new[[0, 1, 2]])  # 3: the reason.
    assert server.decoded(3).size == 6
    # Nothing runs where nothing is admitted.
    server = Server(Plain())
    server.advance(SLOTS)
    assert not np.any(server.state.tally.steps)
    assert np.all(np.asarray(server.state.reason) == RELEASED)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_admission_copies_no_cache():
    server = Server(DROP, slots=4096)
    fresh = server.begin(REQUESTS[:2])
    held, come = (
        sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.memory)))
        for state in (server.state, fresh)
    )
    program = _admit.lower(server.state, fresh, np.array([3, 1], np.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 1.05 * come  # No more is moved than comes in.


@pytest.mark.check
def test_a_prompt_may_be_read_by_importance():
    """What the pass over the prompt did stays with the fresh rows; what it shows comes along."""
    server, how = Server(DROP), Prefill(policy=POLICY)
    fresh = server.admit(REQUESTS[:2], [1, 2], prefill=how)
    assert fresh.prompt is not None
    assert server.state.prompt is None
    server.advance(SLOTS)
    for (prompt, new), row in zip(REQUESTS, (1, 2), strict=False):
        expected = run(lively_model(), [prompt], mode=DROP, max_new_tokens=new, prefill=how)
        for name in ("token_ids", "decided"):
            np.testing.assert_array_equal(server.decoded(row, name), getattr(expected, name)[0])
