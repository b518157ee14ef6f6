# SPDX-License-Identifier: Apache-2.0
"""Layers that read keys and values made below (`DecoderConfig.kv_source`): values and cost."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.counting import Counting, read_counts
from helpers.generation import PROMPTS, DepthAt, assert_greedy, depth_table, lively_model, run
from helpers.marks import checked, quick_where, slow
from helpers.models import Model, assert_close, live_model, live_params
from helpers.shared_kv import KINDS

from utio_jax import Adaptive, Lossless, Plain, uniform
from utio_jax.attention.cache import init_cache
from utio_jax.contrib.edge.parts import Row
from utio_jax.models import TINY, Transformer
from utio_jax.policies import given_depths
from utio_jax.prompts.fit import fit_kv_maps
from utio_jax.staircase import CapacityPrefix, dense_states
from utio_jax.staircase.score import full_work, run_score, score_dense

FIRST = next(iter(KINDS))
"""Heads of two layers: the kind that stands for all where they do not differ."""

KIND_CASES = quick_where(lambda kind: kind == FIRST, KINDS)


@pytest.fixture(scope="module", params=KIND_CASES)
def model(request: Any) -> Model:
    return live_model(**KINDS[request.param])


PREFIX = CapacityPrefix(capacities=(16, 8), min_bucket=8)


def by_hand(model: Model, ids: jax.Array) -> np.ndarray:
    """Returns full-depth states, from the layers' own pieces and a plain softmax."""
    return np.asarray(_by_hand(model.decoder, model.params, ids))


@partial(jax.jit, static_argnums=0)
def _by_hand(decoder: Any, params: Any, ids: jax.Array) -> jax.Array:
    config = decoder.config
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    places, x = decoder.encode_positions(positions), decoder.embed(params, ids, positions)
    made: dict[int, Any] = {}
    # K/V of layer r: of the states before it, or of those before the first layer that shares.
    first = next(i for i, rows in enumerate(config.kv_source) if rows != (i,))
    for index, rows in enumerate(config.kv_source):
        for row in range(4):
            if min(row, first) == index and row not in made:
                kernels = params["layers"]["k_proj"]["kernel"]
                if row < kernels.shape[0]:
                    layer = jax.tree.map(lambda leaf, row=row: leaf[row], params["layers"])
                    made[row] = decoder.keys_values(layer, x, places)
        keys, values = (
            jnp.concatenate([made[row][kind] for row in rows], axis=-2) for kind in (0, 1)
        )
        layer = {
            name: jax.tree.map(lambda leaf: leaf[index], leaf)  # noqa: B023
            for name, leaf in params["layers"].items()
            if name not in ("k_proj", "v_proj")
        }
        queries = decoder.queries(layer, x, places)
        group = config.num_heads // keys.shape[-2]
        keys, values = (jnp.repeat(array, group, axis=-2) for array in (keys, values))
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys)
        ahead = positions[0][:, None] - positions[0][None, :]
        window = config.windows[index] if config.windows else 0
        seen = (ahead >= 0) & ((ahead < window) | (window == 0))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        x = decoder.finish_layer(layer, x, jnp.einsum("bhqk,bkhd->bqhd", weights, values))
    return x


def test_the_dense_program_and_the_reference_are_what_is_meant(model: Model) -> None:
    ids, lengths = model.tokens(2, 17), jnp.asarray([17, 17])
    expected = by_hand(model, ids)
    (dense,) = cases.run_dense(model.decoder, model.params, ids, lengths, depths=(4,))
    assert_close(dense, expected)
    for kv in ("propagate", "drop", "full"):
        full = jnp.full(ids.shape, 4)
        result = cases.run_oracle(model.decoder, model.params, ids, lengths, full, kv=kv)
        assert_close(result, expected)


IN_TURN = [
    pytest.param(kind, ("propagate", "drop")[number % 2], marks=[pytest.mark.check] * (number > 0))
    for number, kind in enumerate(KINDS)
]
"""Each kind with one way of keys: neither knows of the other."""

ONE_KIND = quick_where(lambda kind: kind == FIRST, KINDS, lambda _: False)


@pytest.mark.parametrize("model", ONE_KIND[:2], indirect=True)
def test_a_token_that_has_made_all_its_keys_and_values_changes_no_other(model: Model) -> None:
    config = model.decoder.config
    complete = config.kv_complete
    assert complete == (2 if config.kv_layers == 4 else 1)
    ids, lengths = model.tokens(2, 17, seed=3), jnp.asarray([17, 12])
    rng = np.random.default_rng(0)
    depths = jnp.asarray(rng.choice([complete, 4], (2, 17)))
    result = cases.run_staircase(
        model.decoder, model.params, ids, lengths,
        given_depths(depths, depths=(complete, 4)), kv="propagate", executor=cases.EXECUTOR,
    )  # fmt: skip
    real = np.arange(17)[None, :] < np.asarray(lengths)[:, None]
    deep, expected = (np.asarray(depths) == 4) & real, by_hand(model, ids)
    assert_close(np.asarray(result.x)[deep], expected[deep])
    if complete > 1:  # One layer less, and it does change them: the law is not vacuous.
        early = jnp.where(depths == 4, 4, complete - 1)
        other = cases.run_oracle(model.decoder, model.params, ids, lengths, early, kv="propagate")
        assert np.abs(np.asarray(other)[deep] - expected[deep]).max() > 1e-2


DEPTHS = (1, 2, 4)


@pytest.fixture(scope="module", params=KIND_CASES)
def lively(request: Any) -> Model:
    return lively_model(**KINDS[request.param])


@pytest.mark.parametrize(("lively", "kv"), IN_TURN[:2], indirect=["lively"])
def test_decoding_is_the_oracle_at_the_decided_depths(lively: Model, kv: Any) -> None:
    mode = Adaptive(policy=DepthAt(table=depth_table(DEPTHS, shape=(3, 64)), depths=DEPTHS), kv=kv)
    assert_greedy(lively, run(lively, mode=mode), kv=kv)


EXACT_CASES = [
    (FIRST, Plain()),
    *checked(("of the last of a kind", Plain())),
    (FIRST, Lossless(exit=2, max_draft=3)),
]


@pytest.mark.parametrize(("lively", "mode"), EXACT_CASES, indirect=["lively"], ids=str)
def test_exact_modes_are_the_full_model(lively: Model, mode: Any) -> None:
    result, config = run(lively, mode=mode), lively.decoder.config
    assert_greedy(lively, result, kv="full")
    sources = [len(rows) for rows in config.kv_source]
    rounds = 4 if isinstance(mode, Lossless) else 1  # Three drafts, and the token before.
    reads = rounds * sum(sources[:2]) + sum(sources[2:])
    np.testing.assert_array_equal(result.work.kv_reads, 64 * reads * result.work.steps)


@pytest.mark.parametrize("lively", ONE_KIND, indirect=True)
def test_packed_rows_run_what_each_decided(lively: Model) -> None:
    policy = DepthAt(table=depth_table(DEPTHS, shape=(3, 64)), depths=DEPTHS)
    free = run(lively, mode=Adaptive(policy=policy))
    assert len(PROMPTS) == 3
    # A batch packs what makes no keys and values, and that alone: of three rows
    # one, two or all, so that each runs what it decided. Prefill's tokens come first.
    decided, config = np.stack(free.decided)[:, 1:], lively.decoder.config
    expected, reads = np.zeros_like(decided), np.zeros_like(decided)
    for start, stop in itertools.pairwise((0, *DEPTHS)):
        needs = decided > start
        needs = needs.any(axis=0) if config.kv_made(start, stop) else needs
        expected += (stop - start) * needs
        reads += sum(len(rows) for rows in config.kv_source[start:stop]) * needs
    np.testing.assert_array_equal(np.stack(free.executed)[:, 1:], expected)
    np.testing.assert_array_equal(free.work.queries, expected.sum(axis=1))
    np.testing.assert_array_equal(free.work.kv_reads, 64 * reads.sum(axis=1))


def test_a_config_is_made_again_of_its_own_fields() -> None:
    config = dataclasses.replace(TINY, kv_source=((0,), (1,), (2,), (0,)))
    assert config.kv_depth == (0, 1, 2)  # Layer 0 alone is read, and three make keys and values.
    assert dataclasses.replace(config, context_length=32).kv_depth == (0, 1, 2)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_source": ((0,), (1,), (0,))}, "a tuple for each of its 4 layers"),
        ({"kv_source": ((0,), (1,), (0,), (0,)), "kv_depth": (0, 0)}, "made of the states before"),
        ({"kv_source": ((0,), (1,), (0, 1), (0, 1))}, "as divide num_heads=4. Got 2 x 2"),
        ({"kv_source": ((0,), (1,), (0,), (0, 1))}, "as many layers' each"),
        ({"kv_source": ((0,), (1,), (4,), (4,))}, "names layers below 4"),
    ],
)
def test_sources_that_cannot_be_are_refused(changes: Any, expected: str) -> None:
    if "2 x 2" in expected:
        changes = changes | {"num_kv_heads": 4}
        expected = expected.replace("2 x 2", "2 x 4")
    with pytest.raises(ValueError, match=expected):
        dataclasses.replace(TINY, **changes)


@pytest.mark.check
def test_what_knows_layers_with_their_own_alone_refuses_others(model: Model) -> None:
    decoder, params = model.decoder, model.params
    ids, lengths = model.tokens(2, 16), jnp.asarray([16, 16])
    later = 2, jnp.zeros((*ids.shape, decoder.config.embed_dim))
    for call in (
        lambda: dense_states(decoder, params, ids, lengths, depths=(4,), start=later),
        lambda: fit_kv_maps(decoder, params, [], stops=(2,)),
        lambda: Row(decoder, params, start=0, stop=2),
    ):
        with pytest.raises(ValueError, match=r"keys and values of their own.*\(kv_source\)"):
            call()


def test_dense_work_counts_the_keys_and_values_that_are_made() -> None:
    decoder = Transformer(dataclasses.replace(TINY, **KINDS["heads of two layers"]))
    ids, lengths = jnp.ones((2, 16), jnp.int32), jnp.array([16, 16])
    run = jax.jit(score_dense, static_argnums=0)
    work = run(decoder, live_params(decoder), ids, lengths).work
    assert int(work.keys_values.sum()) == 32 * decoder.config.kv_layers
    cache = init_cache(decoder.config, batch=2, slots=16)
    assert cache.keys.shape[0] == decoder.config.kv_layers


@pytest.mark.parametrize(
    ("executor", "kv"),
    [
        (cases.EXECUTOR, "drop"),
        *slow((cases.EXECUTOR, "propagate"), (PREFIX, "drop")),
        *checked((PREFIX, "propagate")),
    ],
)
def test_keys_and_values_made_once_are_made_of_every_token(executor: Any, kv: Any) -> None:
    config = dataclasses.replace(TINY, **KINDS["made once"])
    decoder, params = Counting(config), live_params(Transformer(config))
    ids, lengths, depths = jnp.ones((2, 16), jnp.int32), jnp.array([16, 16]), np.ones((2, 16), int)
    depths[:, :2] = 4
    policy = given_depths(jnp.asarray(depths), depths=(1, 4))
    for given in (policy, uniform(4)):
        read_counts()
        result = run_score(decoder, params, ids, lengths, given, kv=kv, executor=executor)
        assert int(result.work.keys_values.sum()) == read_counts()["keys_values"]
    full = full_work(decoder, lengths, width=16, kv=kv, executor=executor)
    assert int(full.keys_values.sum()) == int(result.work.keys_values.sum())


def test_dense_states_come_in_the_order_of_the_depths(tiny: Any) -> None:
    ids, lengths = tiny.tokens(2, 16), jnp.asarray([16, 9])
    run = partial(cases.run_dense, tiny.decoder, tiny.params, ids, lengths)
    low, high = run(depths=(1, 4))
    for expected, states in zip((high, low, high), run(depths=(4, 1, 4)), strict=True):
        np.testing.assert_array_equal(states, expected)
    with pytest.raises(ValueError, match=r"depths from 0 to 4 layers. Got \[5\]"):
        run(depths=(2, 5))
