# SPDX-License-Identifier: Apache-2.0
"""Rows packed by depth: the tokens of rows that step together, for the work of those that run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, count, read_counts
from helpers.generation import (
    SMALL,
    DepthAt,
    assert_greedy,
    depth_table,
    lively_model,
    run,
    setting_of,
)
from helpers.marks import quick_where
from helpers.models import Model, with_random_maps

from utio_jax.attention import mixing
from utio_jax.attention.history import History
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.throttle import Throttle
from utio_jax.policies.signals import Chance

DEPTHS = (1, 2, 4)
ROWS = 6
PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [7, 7, 1], [9, 30, 4, 6, 2], [61, 2]]
TABLE = depth_table(DEPTHS, seed=3, shape=(ROWS, 64))
POLICY = DepthAt(table=TABLE, depths=DEPTHS)
PACK = (1, 3)


def model_of(kv: Any) -> Model:
    return with_random_maps(lively_model(), (1, 2)) if kv == "mapped" else lively_model()


def needed(table: Any, position: int, active: Any) -> list[int]:
    """Returns how many rows need each segment, at one position."""
    return [int(np.sum(active & (table[:, position] > start))) for start in (0, *DEPTHS[:-1])]


@pytest.mark.parametrize(
    "kv",
    [
        "propagate",
        pytest.param("drop", marks=pytest.mark.check),
        pytest.param("mapped", marks=pytest.mark.slow),
    ],
)
def test_packed_rows_are_those_of_the_reference(kv: Any) -> None:
    model, options = model_of(kv), {"max_new_tokens": 20}
    packed = run(model, PROMPTS, mode=Adaptive(policy=POLICY, kv=kv, pack=PACK), **options)
    together = run(model, PROMPTS, mode=Adaptive(policy=POLICY, kv=kv), **options)
    assert_greedy(model, packed, PROMPTS, kv=kv)
    for row in range(ROWS):
        np.testing.assert_array_equal(packed.token_ids[row], together.token_ids[row])
        np.testing.assert_array_equal(packed.decided[row], together.decided[row])
        assert np.all(packed.executed[row] >= packed.decided[row])
        assert np.all(packed.executed[row] <= together.executed[row])
        # Layers that ran for a row's tokens are those that ran in its slot.
        assert packed.executed[row][1:].sum() == packed.token_layers[row]
    assert packed.token_layers.sum() < 0.85 * together.token_layers.sum()
    np.testing.assert_array_equal(packed.mapped_layers, together.mapped_layers)


@pytest.mark.parametrize("kv", quick_where(lambda kv: kv == "propagate", ["propagate", "drop"]))
def test_the_work_is_that_of_the_widths(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one length keep rows at one position: what a step runs is in the table."""

    def counted(queries: Any, keys: Any, *rest: Any, plain: Any = mixing.attend, **options: Any):
        count("rows_attended", math.prod(queries.shape[:-3]) if queries.ndim > 3 else 1)
        return plain(queries, keys, *rest, **options)

    monkeypatch.setattr(mixing, "attend", counted)
    model, new, prompt = lively_model(), 12, 3
    decoder = Counting(model.decoder.config)
    mode = Adaptive(policy=POLICY, kv=kv, pack=PACK)
    ids = np.asarray([[5 + row, 9, row] for row in range(ROWS)], np.int32)
    limits = np.asarray([prompt + new - 2 * row for row in range(ROWS)], np.int32)
    lengths = np.full(ROWS, prompt, np.int32)
    setting = setting_of(dataclasses.replace(model, decoder=decoder), mode)
    state = begin(setting, ids, lengths, limits, np.zeros(ROWS, np.uint32), slots=64)
    jax.block_until_ready(state)
    read_counts()
    state = advance(setting, state, np.int32(new), widths=(64,))
    counts, slots, shown, frozen, together, attended = read_counts(), 0, 0, 0, 0, 0
    for position in range(prompt, prompt + new - 1):
        active = limits > position + 1
        for live, start, stop in zip(
            needed(np.asarray(TABLE), position, active), (0, *DEPTHS), DEPTHS, strict=False
        ):
            width = next(size for size in (*PACK, ROWS) if live <= size)
            slots += (stop - start) * width * (live > 0)
            shown += (stop - start) * (width if live else 0)
            # Of a packed block only the rows that run are read.
            attended += (stop - start) * (live if width < ROWS else ROWS)
            # Stopped rows show their last state in all layers; those of a packed segment apart.
            if kv == "propagate" and (width < ROWS or not live):
                shown += (stop - start) * ROWS
                frozen += stop - start
            together += (stop - start) * ROWS * (live > 0)
    assert counts["queries"] == counts["finish_layer"] == slots < 0.7 * together
    assert counts["keys_values"] == shown
    assert counts["rows_attended"] == attended
    # The tally says the same, but for slots of rows that have ended.
    layers = np.asarray(state.tally.token_layers).sum()
    assert layers <= slots
    assert state.tally.frozen_layers[0] == frozen  # The row that runs longest.
    assert (frozen > 0) == (kv == "propagate")


def test_no_key_of_a_row_that_does_not_run_is_read() -> None:
    """Keys and values of rows that stopped early are spoilt in deep layers: no token is changed."""
    model = lively_model()
    mode = Adaptive(policy=POLICY, kv="drop", pack=PACK)
    table = jnp.where(jnp.arange(ROWS)[:, None] == 2, 4, 1) * jnp.ones((1, 64), jnp.int32)
    mode = dataclasses.replace(mode, policy=DepthAt(table=table, depths=DEPTHS))
    ids = np.asarray([[5 + row, 9, row] for row in range(ROWS)], np.int32)
    rows = ids, np.full(ROWS, 3, np.int32), np.full(ROWS, 20, np.int32), np.zeros(ROWS, np.uint32)
    setting = setting_of(model, mode)
    others = (jnp.arange(ROWS) != 2)[None, :, None, None, None]

    def spoil(leaf: jax.Array) -> jax.Array:
        return leaf.at[1:].set(jnp.where(others, jnp.nan, leaf[1:]))

    found = []
    for spoilt in (False, True):
        state = begin(setting, *rows, slots=64)
        if spoilt:
            cache = state.cache
            cache = dataclasses.replace(cache, keys=spoil(cache.keys), values=spoil(cache.values))
            state = dataclasses.replace(state, cache=cache)
        state = advance(setting, state, np.int32(10), widths=(64,))
        found.append(np.asarray(state.token_ids))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.usefixtures("unchecked_shapes")
def test_no_cache_is_copied() -> None:
    model = lively_model()
    rows = (
        np.ones((ROWS, 3), np.int32),
        *[np.full(ROWS, 3, np.int32)] * 2,
        np.zeros(ROWS, np.uint32),
    )
    extra = []
    for pack in ((), PACK):
        mode = Adaptive(policy=POLICY, pack=pack)
        setting = setting_of(model, mode)
        state = begin(setting, *rows, slots=4096)
        program = advance.lower(setting, state, np.int32(9), widths=(4096,)).compile()
        memory, held = program.memory_analysis(), state.cache.keys.nbytes
        assert memory is not None
        extra.append(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes >= 2 * held
    assert extra[1] < extra[0] + 0.1 * held


def test_what_does_not_fit_is_refused() -> None:
    wrong: list[Any] = [(3, 1), (0,), (2, 2), 2, [1, 2], (1.5,), (True,), "4"]
    for pack in wrong:
        with pytest.raises(ValueError, match=r"at least 1, ascending, such as .*Got pack="):
            Adaptive(policy=POLICY, pack=pack)
    easy = Throttle(
        signal=Chance(key=jax.random.key(4)),
        thresholds=jnp.full(3, 0.5),
        history=History(recent=5, sinks=2),
    )
    with pytest.raises(ValueError, match="no pack with a throttle.*Got pack=.1,. and"):
        Adaptive(policy=POLICY, pack=(1,), throttle=easy)


def test_widths_of_the_batch_and_beyond_change_nothing() -> None:
    model, policy = lively_model(), POLICY
    options = {"max_new_tokens": 12, "lengths": SMALL}
    one, other = (
        run(model, PROMPTS, mode=Adaptive(policy=policy, pack=pack), **options)
        for pack in ((), (ROWS, 99))
    )
    np.testing.assert_array_equal(one.token_layers, other.token_layers)
    np.testing.assert_array_equal(one.frozen_layers, other.frozen_layers)
    np.testing.assert_array_equal(one.attended, other.attended)
