# SPDX-License-Identifier: Apache-2.0
"""Rows that come and go: each gets what `generate` gives its prompt alone, and disturbs none."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import SMALL, lively_model, run, setting_of
from helpers.models import with_random_maps

from utio_jax.core.rows import row_axes
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.admission import _admit, admit, empty_state, release
from utio_jax.decoding.base import Plain
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.generate import collect
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.decoding.state import REASONS, RELEASED, stop_rules
from utio_jax.policies.depth import random_depths

DEPTHS = (1, 2, 4)
POLICY = random_depths(jnp.asarray([0.5, 0.2, 0.3]), key=jax.random.key(1), depths=DEPTHS)

MODES: dict[str, Any] = {
    "plain": Plain(),
    "propagate": Adaptive(policy=POLICY),
    "drop": Adaptive(policy=POLICY, kv="drop"),
    "mapped": Adaptive(policy=POLICY, kv="mapped"),
    "lossless": Lossless(exit=2, max_draft=3),
    "copies": Lossless(drafter="ngram", max_draft=3, ngram=NGram(longest=2)),
}
LONG = ("mapped", "copies")

BATCH, SLOTS = 4, 64
WHAT = (
    *("token_ids", "decided", "log_probabilities"),
    *("steps", "accepted", "token_layers", "heads"),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, its seed, and how many new tokens it wants."""

    prompt: list[int]
    seed: int
    new: int


REQUESTS = [
    Request([0, 5, 7], 3, 30),
    Request([0, 61], 4, 9),
    Request([4], 5, 20),
    Request([0, 9, 3, 2, 8, 8, 1, 6], 6, 17),  # Where the second was, a shorter prompt.
    Request([9, 9], 7, 25),
]
OTHERS = [Request([63 - i for i in each.prompt], each.seed + 9, each.new) for each in REQUESTS]


def model_of(name: str) -> Any:
    return with_random_maps(lively_model(), (1, 2)) if name == "mapped" else lively_model()


SAMPLING = SamplingParams(temperature=0.9)


def _rules(rows: int) -> dict[str, Any]:
    return {"sampling": rows_of([SAMPLING] * rows), "stops": stop_rules()}


class Server:
    """A running batch of one mode, and the programs' arguments."""

    def __init__(self, name: str, *, slots: int = SLOTS, mode: Any = None) -> None:
        model, self.mode, self.slots = model_of(name), mode or MODES[name], slots
        self.setting = setting_of(model, self.mode, **_rules(BATCH))
        self.state = empty_state(self.setting, batch=BATCH, slots=slots)

    def begin(self, requests: list[Request], prefill: Prefill | None = None) -> Any:
        """Returns two fresh rows; a missing request's is empty, and only fills up."""
        ids, lengths = np.zeros((2, 8), np.int32), np.ones(2, np.int32)
        limits, seeds = np.ones(2, np.int32), np.zeros(2, np.uint32)
        for row, each in enumerate(requests):
            ids[row, : len(each.prompt)], lengths[row] = each.prompt, len(each.prompt)
            limits[row], seeds[row] = len(each.prompt) + each.new, each.seed
        rows = ids, lengths, limits, seeds
        setting = dataclasses.replace(self.setting, **_rules(2))
        return begin(setting, *rows, slots=self.slots, prefill=prefill)

    def admit(self, requests: list[Request], rows: list[int], **how: Any) -> Any:
        """Returns the fresh rows."""
        fresh, where = self.begin(requests, **how), np.asarray(rows, np.int32)
        self.state = admit(self.state, fresh, where)
        return fresh

    def advance(self, until: int) -> None:
        self.state = advance(self.setting, self.state, np.int32(until), widths=(32, SLOTS))

    def found(self, row: int) -> dict[str, np.ndarray]:
        """Returns what a row has decoded so far."""
        found = collect(self.state, self.mode, SMALL, rows=BATCH, devices=1, num_layers=4)
        return {name: np.array(getattr(found, name)[row]) for name in WHAT}


def serve(name: str, requests: list[Request], rows: list[int]) -> list[dict[str, np.ndarray]]:
    """Returns what comes of five requests that arrive at different times, three rows at once."""
    server = Server(name)
    server.admit(requests[:2], rows[:2])
    server.advance(6)
    server.admit(requests[2:3], [rows[2], BATCH])  # The last row runs: fillers leave it alone.
    server.advance(10)  # The second request has ended by now.
    assert REASONS[int(server.state.reason[rows[1]])] == "length"
    second = server.found(rows[1])
    server.state = release(server.state, rows[1:2])
    server.advance(12)
    server.admit(requests[3:], [rows[1], rows[3]])
    server.advance(SLOTS)
    assert not np.any(server.state.active)
    first, _, third, fifth = (server.found(row) for row in rows)
    return [first, second, third, server.found(rows[1]), fifth]


def _when(name):
    """`make test` has the two simplest, `make check` most others."""
    if name in LONG:
        return pytest.mark.slow
    return () if name in ("plain", "propagate") else pytest.mark.check


@pytest.mark.parametrize("name", [pytest.param(name, marks=_when(name)) for name in MODES])
def test_rows_admitted_later_get_what_they_get_alone(name, count_compiles):
    model, mode = model_of(name), MODES[name]
    together = serve(name, REQUESTS, [3, 0, 1, 2])
    same = ["token_ids", "decided", "steps", "accepted"]
    if name == "plain":  # In other modes rows go along with deeper ones.
        same += ["token_layers", "heads"]
    for request, found in zip(REQUESTS, together, strict=True):
        assert found["token_ids"].size == request.new
        wanted = run(
            model,
            [request.prompt],
            mode=mode,
            sampling=SAMPLING,
            seeds=[request.seed],
            max_new_tokens=request.new,
        )
        for what in same:
            np.testing.assert_array_equal(found[what], getattr(wanted, what)[0])
        likelihood = wanted.log_probabilities[0]
        np.testing.assert_allclose(found["log_probabilities"], likelihood, atol=1e-5)
    # Other prompts in other rows, and a new batch of them, compile nothing.
    with count_compiles() as compiles:
        serve(name, OTHERS, [1, 3, 0, 2])
    assert compiles.count == 0


def leaves_of(tree: Any) -> list[np.ndarray]:
    """Returns every leaf that has rows, these in front."""
    pairs = zip(jax.tree.leaves(tree), row_axes(tree), strict=True)
    return [np.moveaxis(np.array(leaf), axis, 0) for leaf, axis in pairs if axis is not None]


def test_an_admission_moves_the_fresh_rows_and_nothing_else():
    server = Server("drop")
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
    server = Server("plain")
    server.admit(REQUESTS[:2], [1, 3])
    server.advance(4)
    before = leaves_of(server.state)
    server.state = release(server.state, [1, 0])
    assert [REASONS[i] for i in server.state.reason] == ["released"] * 3 + ["running"]
    server.advance(6)
    for old, new, leaf in zip(before, leaves_of(server.state), range(99), strict=False):
        assert leaf == 3 or np.array_equal(old[[0, 1, 2]], new[[0, 1, 2]])  # 3: the reason.
    assert server.found(3)["token_ids"].size == 6
    # Nothing runs where nothing is admitted.
    server = Server("plain")
    server.advance(SLOTS)
    assert not np.any(server.state.tally.steps)
    assert np.all(np.asarray(server.state.reason) == RELEASED)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_admission_copies_no_cache():
    server = Server("drop", slots=4096)
    fresh = server.begin(REQUESTS[:2])
    held, come = (
        sum(leaf.nbytes for leaf in jax.tree.leaves((each.cache, each.memory)))
        for each in (server.state, fresh)
    )
    program = _admit.lower(server.state, fresh, np.array([3, 1], np.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 1.05 * come  # No more is moved than comes in.


@pytest.mark.check
def test_a_prompt_may_be_read_by_importance():
    """What the pass over the prompt did stays with the fresh rows; what it shows comes along."""
    server, how = Server("drop"), Prefill(policy=POLICY)
    fresh = server.admit(REQUESTS[:2], [1, 2], prefill=how)
    assert fresh.prompt is not None
    assert server.state.prompt is None
    server.advance(SLOTS)
    for request, row in zip(REQUESTS, (1, 2), strict=False):
        wanted = run(
            lively_model(),
            [request.prompt],
            mode=server.mode,
            sampling=SAMPLING,
            seeds=[request.seed],
            max_new_tokens=request.new,
            prefill=how,
        )
        np.testing.assert_array_equal(server.found(row)["token_ids"], wanted.token_ids[0])
        np.testing.assert_array_equal(server.found(row)["decided"], wanted.decided[0])
