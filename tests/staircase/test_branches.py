# SPDX-License-Identifier: Apache-2.0
"""Exit branches: tokens of a depth run upper layers of their own (`DecoderConfig.branches`)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.generation import DepthAt, assert_greedy, depth_table, lively_model, run
from helpers.marks import slow
from helpers.models import Model, assert_close, live_params
from helpers.shared_kv import BRANCHED

from utio_jax import Adaptive, Lossless, Plain, Thresholded, uniform
from utio_jax.calibration.compare import compare
from utio_jax.calibration.studies import study_exits
from utio_jax.contrib.rows import Select
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.core.pytrees import pytree, static
from utio_jax.models import TINY, Transformer
from utio_jax.policies import Position, SignalBase, given_depths
from utio_jax.staircase import CapacityPrefix, staircase
from utio_jax.staircase.loop import check_policy
from utio_jax.utio import History, Throttled, VerticalSlash

SPLIT, BRANCHES, LAYERS = 3, (1, 2), 6
DEPTHS = (4, 5, 6)
CONFIG = dataclasses.replace(TINY, **BRANCHED | {"branches": BRANCHES, "exits": ()})


@pytest.fixture(scope="module")
def model() -> Model:
    decoder = Transformer(CONFIG)
    return Model(decoder, live_params(decoder))


def plain_model(model: Model, depth: int) -> Model:
    """Returns the model without branches that tokens of a depth see: lower layers, then theirs."""
    start, stop = model.decoder.config.upper_layers(depth)
    picked = np.asarray([*range(SPLIT), *range(start, stop)])
    config = dataclasses.replace(
        CONFIG, num_layers=depth, kv_source=CONFIG.kv_source[:depth], branches=(), exits=()
    )
    layers = {
        name: jax.tree.map(lambda leaf: leaf if len(leaf) == SPLIT else leaf[picked], leaf)
        for name, leaf in model.params["layers"].items()
    }
    return Model(Transformer(config), {**model.params, "layers": layers})


@pytest.mark.check
def test_each_branch_is_a_plain_model_on_the_lower_layers(model: Model) -> None:
    ids, lengths = model.tokens(2, 17), jnp.asarray([17, 11])
    states = cases.run_dense(model.decoder, model.params, ids, lengths, depths=DEPTHS)
    for depth, state in zip(DEPTHS, states, strict=True):
        plain = plain_model(model, depth)
        (expected,) = cases.run_dense(plain.decoder, plain.params, ids, lengths, depths=(depth,))
        assert_close(state[0], expected[0])
        assert_close(state[1, :11], expected[1, :11])


def test_a_token_does_not_notice_which_branches_others_took(model: Model) -> None:
    ids, lengths = model.tokens(2, 17), jnp.asarray([17, 17])
    depths = np.random.default_rng(0).choice(DEPTHS, (2, 17)).astype(np.int32)
    mixed = cases.run_oracle(model.decoder, model.params, ids, lengths, depths, kv="propagate")
    for depth in DEPTHS:
        plain = plain_model(model, depth)
        (alone,) = cases.run_dense(plain.decoder, plain.params, ids, lengths, depths=(depth,))
        assert_close(np.asarray(mixed)[depths == depth], np.asarray(alone)[depths == depth])


@pytest.mark.check
def test_a_missing_capacity_is_counted_by_segments(model: Model) -> None:
    few, tokens = CapacityPrefix(capacities=(24, 24), min_bucket=8), model.tokens(1, 17)
    policy = given_depths(jnp.full((1, 17), 6), depths=(2, 4, 6))
    with pytest.raises(ValueError, match="branch. Got 2 capacities, and segment 3. Add"):
        staircase(model.decoder, model.params, tokens, jnp.asarray([17]), policy, executor=few)


def test_runs_each_branch_for_its_own_tokens_alone(model: Model) -> None:
    ids, lengths = model.tokens(2, 17), jnp.asarray([17, 17])
    depths = np.full((2, 17), 4, np.int32)
    depths[0, :3], depths[1, 5] = 5, 6
    executor = dataclasses.replace(cases.EXECUTOR, min_bucket=1, query_block=1, block=1)
    result = cases.run_staircase(
        model.decoder,
        model.params,
        ids,
        lengths,
        given_depths(jnp.asarray(depths), depths=DEPTHS),
        kv="propagate",
        executor=executor,
    )
    # Lower layers for all, then 30 tokens in the branch of 1, 3 in that of 2, one in full.
    assert result.work.queries.tolist() == [34 * 3, 30 * 1, 3 * 2, 1 * 3]
    assert result.work.keys_values.tolist() == [34 * 3, 0, 0, 0]
    assert result.work.decisions.tolist() == [34, 34, 0, 0]


ASKED: list[Any] = []


@pytree
class Recorder(SignalBase):
    """A signal that records what it is asked about: depth in question, and states."""

    name: str = static(default="recorder")

    def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
        ASKED.append((index, boundary.depth, boundary.x))
        return jnp.zeros(boundary.live.shape), memory


def test_all_questions_are_asked_before_any_branch_runs(model: Model) -> None:
    ASKED.clear()
    policy = Thresholded(signal=Recorder(), thresholds=jnp.asarray([-1.0, 1.0]), depths=DEPTHS)
    ids, lengths = model.tokens(1, 9), jnp.asarray([9])
    result = staircase(model.decoder, model.params, ids, lengths, policy)
    (split,) = cases.run_dense(model.decoder, model.params, ids, lengths, depths=(SPLIT,))
    assert [entry[:2] for entry in ASKED] == [(0, 4), (1, 5)]
    for _, _, x in ASKED:
        assert_close(x, split)
    np.testing.assert_array_equal(result.depths, 5)  # Above -1, not above 1.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branches": (2, 1)}, "strictly increasing"),
        ({"branches": (1, 3)}, "below the 3 layers above layer 3"),
        ({"kv_source": ()}, "upper layers that all read the same"),
        ({"windows": (0, 0, 0, 0, 0, 4)}, "no windows"),
        ({"kv_source": ((0,), (1,), (2,), *(((3, 4),) * 3))}, "made by the layers below"),
    ],
)
def test_branches_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{"kv_depth": (), **changes})


def test_depths_between_branches_are_refused() -> None:
    longer = dataclasses.replace(
        CONFIG, num_layers=7, kv_source=(*CONFIG.kv_source, (1, 2)), exits=()
    )
    with pytest.raises(ValueError, match=r"Wanted depths up to layer 3.*\[4, 5, 7\]"):
        check_policy(uniform(4, exits=(4, 6, 7)), Transformer(longer))


@pytest.fixture(scope="module")
def lively() -> Model:
    changes = {
        field.name: getattr(CONFIG, field.name)
        for field in dataclasses.fields(CONFIG)
        if getattr(CONFIG, field.name) != getattr(TINY, field.name)
    }
    return lively_model(**changes)


@pytest.mark.parametrize("kv", ["propagate", *slow("drop")])
def test_decoding_is_the_reference_at_the_decided_depths(lively: Model, kv: Any) -> None:
    policy = DepthAt(table=depth_table(DEPTHS, shape=(3, 64)), depths=DEPTHS)
    result = run(lively, mode=Adaptive(policy=policy, kv=kv))
    assert_greedy(lively, result, kv=kv)
    # Each row runs its own branch; no other row goes along above the split.
    np.testing.assert_array_equal(np.stack(result.executed)[:, 1:], np.stack(result.decided)[:, 1:])


def test_full_depth_is_the_model_without_branches(lively: Model) -> None:
    config = dataclasses.replace(lively.decoder.config, branches=(), exits=(LAYERS,))
    expected = run(Model(Transformer(config), lively.params))
    result = run(lively, mode=Plain())
    np.testing.assert_array_equal(np.stack(result.token_ids), np.stack(expected.token_ids))


@pytest.fixture(scope="module")
def text() -> list[Any]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, 24).astype(np.int32) for _ in range(40)]
    windows = windows_of(documents, width=24)
    return list(batches_of(windows, rows=8, widths=[24], vocab_size=64))


def test_gates_are_fitted_to_what_they_are_asked_about(model: Model, text: list[Any]) -> None:
    """Of every branch that is the state before it."""
    (study,) = study_exits(model.decoder, model.params, text[:1])
    ids, lengths = (jnp.asarray(array) for array in (study.batch.token_ids, study.batch.lengths))
    (split,) = cases.run_dense(model.decoder, model.params, ids, lengths, depths=(SPLIT,))
    for states in study.states:
        np.testing.assert_allclose(states, split, rtol=2e-3, atol=2e-2)


@pytest.mark.slow
def test_calibrates_and_compares_like_exits(model: Model, text: list[Any]) -> None:
    calibration = cases.calibrated(model, text, policies=("learned",), budgets=(0.8,))
    rows = compare(
        model.decoder, model.params, text, np.arange(40), calibration, executor=cases.EXECUTOR
    )
    names = [(row.ledger.policy, row.ledger.budget) for row in rows]
    assert names[:3] == [("uniform", None), ("uniform", None), ("full", None)]
    assert ("learned", 0.8) in names
    assert ("random", 0.8) in names


def test_techniques_of_nested_segments_refuse_branches(model: Model) -> None:
    decoder, ids = model.decoder, model.tokens(1, 9)
    signal, history = Position(), History(recent=4, sinks=1)
    sparse = VerticalSlash(signal=signal, thresholds=jnp.zeros(3), history=history)
    refused = (
        partial(Select(depths=(4,), margins=np.zeros(1)).check, decoder),
        partial(Throttled(policy=uniform(5), attention=sparse).check, decoder),
        partial(
            staircase, decoder, model.params, ids, jnp.asarray([9]), uniform(5), attention=sparse
        ),
    )
    for call in refused:
        with pytest.raises(ValueError, match="Wanted a model without exit branches"):
            call()


@pytest.mark.check
def test_lossless_drafts_of_a_branch_keep_the_lower_layers(lively: Model) -> None:
    most = 3
    result = run(lively, mode=Lossless(exit=5, max_draft=most))
    assert_greedy(lively, result, kv="full")
    assert sum(result.work.accepted) > 0
    # Each round: lower layers and branch for the drafts, the upper half alone to verify.
    per_round = (most + 1) * SPLIT + most * 2 + (most + 1) * (LAYERS - SPLIT)
    np.testing.assert_array_equal(result.work.queries, np.asarray(result.work.steps) * per_round)
