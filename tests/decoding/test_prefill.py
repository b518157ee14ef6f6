# SPDX-License-Identifier: Apache-2.0
"""Prompts read by the staircase: what new tokens then see is what the oracle defines."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import (
    LONG,
    SMALL_BLOCKS,
    DepthAt,
    assert_read_as,
    depth_table,
    lively_model,
    plain_run,
    run,
)
from helpers.marks import checked, slow
from helpers.models import assert_equal, with_random_lens, with_random_maps
from helpers.policies import TableSignal

from utio_jax.attention.cache import init_cache
from utio_jax.core.flops import token_cost
from utio_jax.decoding import prefill
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.policies.depth import uniform
from utio_jax.prompts.evaluate import prompt_cost
from utio_jax.staircase import DENSE, CapacityPrefix, staircase
from utio_jax.utio import History, SparseQueries, VerticalSlash

DEPTHS = (1, 2, 4)
HISTORY = History(recent=3, sinks=1)


def half_sparse(*, segments: int) -> VerticalSlash:
    table = np.random.default_rng(3).random((3, 24)).astype(np.float32)
    return VerticalSlash(
        signal=TableSignal(table=jnp.broadcast_to(table, (segments, *table.shape))),
        thresholds=jnp.full(segments, 0.5, jnp.float32),
        history=HISTORY,
    )


def sparse_by_layer(attention: VerticalSlash, row: int, prompt: int) -> SparseQueries:
    """Returns one row's choice in each of the four layers, up to 72 tokens."""
    sparse = np.zeros((4, 1, 72), bool)
    assert isinstance(attention.signal, TableSignal)
    table = np.asarray(attention.signal.table)[0, row, :prompt]
    dense_layers = 0 if attention.thresholds.shape[0] == len(DEPTHS) else DEPTHS[0]
    sparse[dense_layers:, 0, :prompt] = table <= 0.5
    return SparseQueries(sparse=jnp.asarray(sparse), history=HISTORY)


@pytest.mark.parametrize(
    ("kv", "segments"),
    [*checked(("propagate", 3)), ("drop", 0), *slow(("drop", 2)), *checked(("mapped", 0))],
    ids=["propagate, sparse", "drop, dense", "drop, dense floor", "mapped, through a lens"],
)
def test_new_tokens_see_the_prompts_that_the_oracle_shows(kv: Any, segments: int) -> None:
    """States that maps start from are the tokens' own, not those of a lens."""
    model, table = lively_model(), depth_table(DEPTHS, shape=(3, 96))
    if kv == "mapped":
        model = with_random_maps(with_random_lens(model), (1, 2))
    policy = DepthAt(table=table, depths=DEPTHS)
    attention = half_sparse(segments=segments) if segments else DENSE
    if kv == "drop" and not segments:  # No prompt token gets as far as new ones do.
        table = jnp.minimum(table, 2)
    reading = DepthAt(table=table, depths=DEPTHS)
    how = Prefill(policy=reading, attention=attention, executor=SMALL_BLOCKS)
    result = run(model, LONG, mode=Adaptive(policy=policy, kv=kv), prefill=how)
    sparse = None
    if isinstance(attention, VerticalSlash):
        sparse = partial(sparse_by_layer, attention)
    assert_read_as(model, result, table, kv=kv, sparse=sparse)
    if kv == "mapped":  # One map for each skipped layer of every row, where any row stops there.
        assert (result.work.kv_maps > 0).all()
        np.testing.assert_array_equal(result.work.keys_values, result.work.queries)


@pytest.mark.parametrize(("read", "write"), [((1, 2), DEPTHS), (DEPTHS, (1, 2))])
def test_maps_reach_as_deep_as_new_tokens_read(read: Any, write: Any) -> None:
    model = with_random_maps(lively_model(), (1, 2))
    table = jnp.minimum(depth_table(DEPTHS, shape=(3, 96)), read[-1])
    how = Prefill(policy=DepthAt(table=table, depths=read), executor=SMALL_BLOCKS)
    mode = Adaptive(
        policy=DepthAt(table=depth_table(write, shape=(3, 96)), depths=write), kv="mapped"
    )
    result = run(model, LONG, mode=mode, prefill=how)
    assert_read_as(model, result, table, kv="mapped")
    assert {depth for row in result.decided for depth in row[1:]} == {*write}
    # All rows of a step are mapped where any of them stops.
    decided = np.stack([row[1:] for row in result.decided])
    maps = sum(write[-1] - depth for step in decided.T for depth in {*step.tolist()})
    assert result.work.kv_maps.tolist() == [maps] * 3


def test_without_a_policy_it_is_the_full_model_in_every_mode(no_compiles: Any) -> None:
    model, how = lively_model(), Prefill(executor=SMALL_BLOCKS)
    result = run(model, prefill=how)
    assert_equal(result.token_ids, plain_run().token_ids)
    assert all((depths == 4).all() for depths in result.prompt_depths)
    # 11 tokens in blocks of 2, one layer after the other.
    assert result.prompt_work is not None
    np.testing.assert_array_equal(result.prompt_work.queries, [[4 * 12]] * 3)
    lossless = run(model, mode=Lossless(exit=2), prefill=how)
    assert_equal(lossless.token_ids, plain_run().token_ids)
    with no_compiles():
        run(model, [[9, 9], [1], [2, 3]], prefill=how)


def test_the_faster_full_depth_program_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively_model().decoder
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert fastest_prefill(decoder, 1, 128, kv="propagate") is None
    executor = CapacityPrefix(capacities=(448,), min_bucket=8, certain=True)
    assert fastest_prefill(decoder, 1, 448, kv="propagate") == Prefill(executor=executor)
    assert fastest_prefill(decoder, 8, 448, kv="propagate") == Prefill()
    # An engine pads a prompt of 257 tokens to 1,024, and does not know when it compiles.
    assert fastest_prefill(decoder, 1, 1024, kv="propagate") == Prefill()
    full = fastest_prefill(decoder, 8, 448, kv="propagate", filled=0.9)
    assert full == Prefill(executor=executor)
    # All scores of long prompts would be in memory at once.
    for batch, width in ((1, 4104), (32, 4096)):
        assert fastest_prefill(decoder, batch, width, kv="propagate", filled=1.0) == Prefill()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fastest_prefill(decoder, 8, 448, kv="propagate") is None
    monkeypatch.undo()
    assert plain_run().prompt_work is None
    assert all((depths == 4).all() for depths in plain_run().prompt_depths)
    monkeypatch.setattr(prefill, "_CPU_SCORES", 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    result = run(lively_model())
    assert result.prompt_work is not None
    assert_equal(result.token_ids, plain_run().token_ids)


@pytest.mark.check
def test_what_it_cost(no_compiles: Any) -> None:
    model = lively_model()
    cost = token_cost(model.decoder, model.params)

    def cost_of(how: Prefill, mode: Any = Plain()) -> Any:
        result = run(model, LONG, prefill=how, mode=mode, max_new_tokens=1)
        return prompt_cost(model.decoder, model.params, result), result.prompt_work

    full, work = cost_of(Prefill(executor=SMALL_BLOCKS))
    assert full.tokens == 39
    assert full.depth_mean == 4
    assert full.flops_ratio == 1
    # 39 tokens in blocks of 2 and a rest; K/V of all 3 x 24 slots. Attention as the blocks say.
    keys = cost.attention_per_key * float(work.key_slots[0].sum())
    assert full.flops == 4 * (40 * cost.query + 72 * cost.keys_values) + keys

    half, work = cost_of(Prefill(policy=uniform(2), executor=SMALL_BLOCKS))
    assert half.depth_mean == 2
    # New tokens may go deeper than any prompt token did: K/V of the frozen ones, two layers more.
    assert half.flops == full.flops - 2 * 40 * cost.query - keys / 2

    attention = half_sparse(segments=3)
    sparse, work = cost_of(
        Prefill(policy=uniform(4, exits=DEPTHS), attention=attention, executor=SMALL_BLOCKS)
    )
    assert sparse.depth_mean == 4
    keys = cost.attention_per_key * float(work.key_slots[0].sum())
    decisions = 40 * (1000.0 + 1001.0 + 1002.0)  # A score at each segment's start, of all slots.
    layers = 4 * (40 * cost.query + 72 * cost.keys_values)
    assert sparse.flops == pytest.approx(layers + keys + decisions, rel=1e-6)
    assert sparse.flops < full.flops + decisions

    none = dataclasses.replace(attention, thresholds=-jnp.inf * attention.thresholds)
    how = Prefill(policy=uniform(4, exits=DEPTHS), attention=none, executor=SMALL_BLOCKS)
    with no_compiles("new thresholds"):
        dense = run(model, LONG, prefill=how, max_new_tokens=1)
    assert dense.prompt_work is not None
    assert np.sum(dense.prompt_work.key_slots) > np.sum(work.key_slots)

    with pytest.raises(ValueError, match="Got prompts that the dense program read"):
        prompt_cost(model.decoder, model.params, plain_run())


def test_what_cannot_be_is_refused() -> None:
    model, policy = lively_model(), uniform(2)
    for full, is_exact in ((uniform(4), True), (uniform(4, exits=DEPTHS), False), (policy, False)):
        assert Prefill(policy=full).is_exact(model.decoder) == is_exact
    Prefill(policy=uniform(4)).check(model.decoder, kv="full")
    with pytest.raises(ValueError, match="a mode whose keys and values are the full"):
        run(model, mode=Lossless(exit=2), prefill=Prefill(policy=policy))
    with pytest.raises(ValueError, match='the same kv for prompts and new tokens.*"drop"'):
        run(model, prefill=Prefill(policy=policy, kv="drop"))
    with pytest.raises(ValueError, match="depths within the model's 4 layers"):
        run(model, prefill=Prefill(policy=uniform(9)))
    unfit = Prefill(policy=uniform(4), attention=half_sparse(segments=3))
    with pytest.raises(ValueError, match="a threshold of attention for each segment"):
        run(model, prefill=unfit)
    cache = init_cache(model.decoder.config, batch=1, slots=8)
    ids, ends = jnp.zeros((1, 8), jnp.int32), jnp.asarray([8])
    executor = CapacityPrefix(capacities=(8,), min_bucket=2)
    with pytest.raises(ValueError, match="an executor that keeps keys and values"):
        staircase(
            model.decoder, model.params, ids, ends, uniform(4), executor=executor, cache=cache
        )
