# SPDX-License-Identifier: Apache-2.0
"""Bucketing against loops over single tokens; outputs spell out how deep each item really ran."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from utio_jax.utio import surrogate_importance
from utio_jax.utio.buckets import Buckets, assign_buckets, bucket_tokens, run_buckets

pytestmark = pytest.mark.usefixtures("strict_dtypes")

DEPTHS = (2, 3, 6)
NAN, INF = math.nan, math.inf
# Few distinct values, so that ties and scores on a threshold are common.
SCORES = st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0, 2.0, 7.0, INF, NAN])
# Few shapes too: each compiles.
ROWS = st.sampled_from([0, 1, 7]).flatmap(
    lambda width: st.lists(
        st.lists(SCORES, min_size=width, max_size=width), min_size=2, max_size=2
    ).map(lambda rows: np.asarray(rows, np.float32).reshape(len(rows), width))
)


def slow_bucket(score: float, thresholds) -> int:
    """Returns one token's bucket."""
    return len(thresholds) if math.isnan(score) else sum(score > edge for edge in thresholds)


def slow_slots(bucket_of_token) -> list[int]:
    """Returns one row's tokens, deepest bucket first, in token order within a bucket."""
    return sorted(range(len(bucket_of_token)), key=lambda token: -bucket_of_token[token])


def check_frames(buckets: Buckets) -> None:
    """Checks that slots, tokens and counts of all rows say the same."""
    width = buckets.bucket_of_token.shape[-1]
    rows = [
        np.asarray(leaf).reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1])
        for leaf in (
            buckets.bucket_of_token,
            buckets.token_of_slot,
            buckets.slot_of_token,
            buckets.counts,
        )
    ]
    for bucket_of_token, token_of_slot, slot_of_token, counts in zip(*rows, strict=True):
        assert token_of_slot.tolist() == slow_slots(bucket_of_token)
        assert [token_of_slot[slot_of_token[token]] for token in range(width)] == list(range(width))
        assert counts.tolist() == [
            sum(bucket_of_token == bucket) for bucket in range(len(buckets.depths))
        ]


@given(ROWS, st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 3.0, INF]), min_size=2, max_size=2))
def test_a_bucket_is_the_number_of_thresholds_exceeded(scores, edges):
    thresholds = sorted(edges)
    buckets = bucket_tokens(jnp.asarray(scores), depths=DEPTHS, thresholds=thresholds)
    for row, token in np.ndindex(scores.shape):
        bucket = slow_bucket(scores[row, token], thresholds)
        assert buckets.bucket_of_token[row, token] == bucket
        assert buckets.depth_of_token[row, token] == DEPTHS[bucket]
    check_frames(buckets)


@given(
    ROWS, st.sampled_from([(0.5, 0.25, 0.25), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.1, 0.2, 0.7)])
)
def test_fractions_rank_within_the_row_and_ties_are_stable(scores, fractions):
    buckets = bucket_tokens(jnp.asarray(scores), depths=DEPTHS, fractions=fractions)
    width = scores.shape[-1]
    edges = [round(sum(fractions[: stop + 1]) * width) for stop in range(3)]
    for row, buckets_of in zip(scores, buckets.bucket_of_token, strict=True):
        # NaN ranks above everything, infinity included; among equals the earlier token ranks lower.
        ranked = sorted(
            range(width), key=lambda token: (np.isnan(row[token]), np.nan_to_num(row[token]), token)
        )
        for rank, token in enumerate(ranked):
            bucket = 2 if np.isnan(row[token]) else sum(rank >= edge for edge in edges[:2])
            assert buckets_of[token] == bucket, (row, token)
    check_frames(buckets)


@pytest.mark.parametrize("lead", [(0,), (2, 3)])
@pytest.mark.parametrize("kind", [{"thresholds": (0.5, 1.0)}, {"fractions": (0.5, 0.25, 0.25)}])
@pytest.mark.parametrize("width", [0, 5])
def test_any_leading_axes_and_empty_rows(lead, kind, width):
    scores = np.random.default_rng(1).normal(size=(*lead, width)).astype(np.float32)
    buckets = bucket_tokens(jnp.asarray(scores), depths=DEPTHS, **kind)
    assert buckets.token_of_slot.shape == (*lead, width)
    assert buckets.counts.shape == (*lead, 3)
    check_frames(buckets)
    for index in itertools.product(*map(range, lead)):
        alone = bucket_tokens(jnp.asarray(scores[index]), depths=DEPTHS, **kind)
        np.testing.assert_array_equal(buckets.bucket_of_token[index], alone.bucket_of_token)


def test_low_precision_scores_meet_thresholds_in_float32():
    scores = jnp.asarray([1.0, 1.0078125], jnp.bfloat16)  # Neighbours in bfloat16.
    assert assign_buckets(scores, (1.003,)).tolist() == [0, 1]


def test_thresholds_may_be_traced_and_new_ones_compile_nothing(no_compiles):
    bucket = jax.jit(lambda scores, edges: bucket_tokens(scores, depths=DEPTHS, thresholds=edges))
    scores, edges = jnp.asarray([0.0, 1.5, 3.0]), jnp.asarray([[1.0, 2.0], [2.0, 4.0]])
    first, second = edges
    assert bucket(scores, first).depth_of_token.tolist() == [2, 3, 6]
    with no_compiles():
        shallower = bucket(scores, second)
    assert shallower.bucket_of_token.tolist() == [0, 0, 1]


def add_layers(block, depth: int):
    """Every layer adds one: an output's units say how deep its item ran."""
    return jax.lax.fori_loop(0, depth, lambda _, x: x + 1, block)


@pytest.mark.parametrize(
    ("lead", "min_bucket"), [((9,), 2), ((9,), 64), ((2, 4), 1), ((2, 4), 5), ((0,), 2)]
)
def test_every_item_runs_at_its_own_depth(lead, min_bucket):
    scores = np.random.default_rng(2).uniform(0, 3, lead).astype(np.float32)
    buckets = bucket_tokens(
        jnp.asarray(scores), depths=DEPTHS, thresholds=(1.0, 2.0), min_bucket=min_bucket
    )
    # Its hundreds say which item it was.
    items = 100 * jnp.arange(math.prod(lead), dtype=jnp.float32).reshape(*lead, 1)
    results = run_buckets(add_layers, np.tile(items, 3), buckets)  # NumPy's, as scores may be.
    decided = [DEPTHS[slow_bucket(score, (1.0, 2.0))] for score in scores.ravel()]
    for item, depth in enumerate(decided):
        np.testing.assert_array_equal(results.outputs.reshape(-1, 3)[item], 100 * item + depth)
    assert results.depth_of_token.ravel().tolist() == decided
    assert results.involuntary_stays == 0
    # Items of all rows share blocks: each bucket pads once.
    assert results.slots_used.tolist() == [
        min_bucket * math.ceil(decided.count(depth) / min_bucket) for depth in DEPTHS
    ]


def test_the_forward_function_really_runs_on_no_more_slots_than_reported():
    slots_run = []

    def forward(block, depth):
        jax.debug.callback(lambda: slots_run.append((depth, block.shape[0])))
        return block

    scores = jnp.asarray([0.0] * 5 + [1.5] * 4 + [2.5] * 1)
    buckets = bucket_tokens(scores, depths=DEPTHS, thresholds=(1.0, 2.0), min_bucket=4)
    results = run_buckets(forward, jnp.zeros((10, 1)), buckets)
    jax.effects_barrier()
    assert sorted(slots_run) == [(2, 4), (2, 4), (3, 4), (6, 4)]
    assert results.slots_used.tolist() == [8, 4, 4]


def test_inputs_and_outputs_are_pytrees_and_outputs_may_differ_in_shape():
    def forward(block, depth):
        return {"sum": block["x"].sum(axis=-1) + depth, "id": block["id"]}

    items = {"x": jnp.arange(12.0).reshape(2, 3, 2), "id": jnp.arange(6).reshape(2, 3)}
    scores = jnp.asarray([[0.0, 9.0, 0.0], [9.0, 9.0, 0.0]])
    results = run_buckets(
        forward, items, bucket_tokens(scores, depths=(1, 5), thresholds=(1.0,), min_bucket=2)
    )
    np.testing.assert_array_equal(results.outputs["id"], items["id"])
    np.testing.assert_array_equal(results.outputs["sum"], [[2, 10, 10], [18, 22, 22]])


@jax.jit
def run_merged(items, buckets: Buckets):
    """Returns `run_buckets` of `add_layers`; buckets pass through jit as a pytree."""
    return run_buckets(add_layers, items, buckets, merge_small=True)


@given(
    st.sampled_from([3, 10]).flatmap(
        lambda size: st.lists(st.sampled_from([0.0, 1.5, 2.5]), min_size=size, max_size=size)
    ),
    st.sampled_from([1, 4]),
)
def test_small_buckets_merge_into_the_next_deeper_one(scores, min_bucket):
    buckets = bucket_tokens(
        jnp.asarray(scores, jnp.float32),
        depths=DEPTHS,
        thresholds=(1.0, 2.0),
        min_bucket=min_bucket,
    )
    groups = [
        [i for i, score in enumerate(scores) if slow_bucket(score, (1.0, 2.0)) == b]
        for b in range(3)
    ]
    for bucket in range(2):
        if len(groups[bucket]) < min_bucket:
            groups[bucket + 1] += groups[bucket]
            groups[bucket] = []
    executed = {item: DEPTHS[bucket] for bucket in range(3) for item in groups[bucket]}
    decided = buckets.depth_of_token.tolist()
    stays = sum(executed[item] > decided[item] for item in executed)
    results = run_merged(jnp.zeros((len(scores), 1)), buckets)
    assert results.depth_of_token.tolist() == [executed[item] for item in range(len(scores))]
    assert results.outputs[:, 0].tolist() == results.depth_of_token.tolist()
    assert results.involuntary_stays == stays
    assert results.slots_used.tolist() == [
        min_bucket * math.ceil(len(group) / min_bucket) for group in groups
    ]


def test_one_program_holds_one_body_per_depth(count_compiles):
    traced = []

    @jax.jit
    def run(scores):
        def forward(block, depth):
            traced.append(depth)
            return add_layers(block, depth)

        buckets = bucket_tokens(scores, depths=DEPTHS, thresholds=(1.0, 2.0), min_bucket=2)
        return run_buckets(forward, jnp.zeros((4, 1)), buckets).outputs

    with count_compiles() as compiles:
        for scores in ([0.0, 0.0, 0.0, 0.0], [9.0, 1.5, 0.0, 2.5]):
            run(np.asarray(scores, np.float32))
    assert compiles.count == 1
    # Twice each: once for its shapes, once for the loop's body.
    assert sorted(traced) == sorted(DEPTHS * 2)


SOME = jnp.zeros((2, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": (3, 2)}, r"strictly increasing depths of at least 1. Got depths=\(3, 2\)"),
        ({"bucket_cutoffs": (6, 16)}, r"each bucket once, for example depths=.*cutoffs=\(6, 16\)"),
        ({"depths": None}, "each bucket once, .*Got depths=None, bucket_cutoffs=None"),
        ({"min_bucket": 0}, "min_bucket of at least 1, in items. Got min_bucket=0"),
        ({"scores": jnp.zeros((), jnp.float32)}, r"scores of shape \[..., token\].*shape \(\)"),
        ({"fractions": (0.5, 0.3, 0.2)}, "thresholds or fractions. Got both"),
        (
            {"scores": [0.1, 0.9]},
            r"an array of floating-point scores.*Got list.*jnp.asarray\(scores",
        ),
        ({"thresholds": (0.5,)}, r"Wanted 2 thresholds.*Got shape \(1,\)"),
        ({"thresholds": (1.0, 0.5)}, r"ascending thresholds without NaN. Got \[1.0, 0.5\]"),
        ({"thresholds": None, "fractions": (0.5, 0.6, 0.1)}, "sum to 1.*sum 1.2"),
        ({"thresholds": None, "fractions": (-0.5, 1.0, 0.5)}, "fractions of at least 0"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named(arguments, message):
    expected = {"scores": SOME, "depths": DEPTHS, "thresholds": (0.5, 1.0)} | arguments
    with pytest.raises(ValueError, match=message):
        bucket_tokens(expected.pop("scores"), **expected)


def test_inputs_functions_and_arguments_that_do_not_fit_are_named():
    buckets = bucket_tokens(SOME, depths=DEPTHS, thresholds=(0.5, 1.0))
    with pytest.raises(ValueError, match=r"axes \(2, 4\). Got a leaf of shape \(8, 3\)"):
        run_buckets(add_layers, jnp.zeros((8, 3)), buckets)
    with pytest.raises(ValueError, match="order and inverse of these buckets.* Got others"):
        run_buckets(add_layers, SOME[..., None], buckets, buckets.token_of_slot + 1)
    with pytest.raises(ValueError, match=r"same shapes at every depth, .* Got depth 2:"):
        run_buckets(lambda block, depth: jnp.tile(block, depth), SOME[..., None], buckets)
    with pytest.raises(ValueError, match="lead with the 64 slots of a block"):
        run_buckets(lambda block, depth: block.sum(axis=0), SOME[..., None], buckets)


def test_quick_start_of_the_paper_runs_as_it_is_written():
    """Scores, buckets by cut-offs, outputs in the inputs' order; a cut-off is a depth."""
    rng = np.random.default_rng(3)
    logits, heat, embeddings = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((9, 5), (9,), (9, 4))
    )
    items = 100 * jnp.arange(9, dtype=jnp.float32)

    tis = surrogate_importance(logits, heat, embeddings)
    buckets, order, inv = bucket_tokens(tis, bucket_cutoffs=(6, 16, 32), min_bucket=8)
    outputs = run_buckets(add_layers, items, buckets, order, inv)

    ranked = np.argsort(np.asarray(tis), kind="stable")  # Equal shares: three tokens a bucket.
    expected = np.zeros(9)
    for rank, token in enumerate(ranked):
        expected[token] = 100 * token + (6, 16, 32)[rank // 3]
    np.testing.assert_array_equal(outputs, expected)
    total = jnp.add(outputs, 1.0)  # pyright: ignore[reportArgumentType] (An array to JAX, too.)
    np.testing.assert_array_equal(total, expected + 1)
    np.testing.assert_array_equal(order[inv], np.arange(9))
    assert [int(depth) for depth in outputs.depth_of_token[order]] == [32] * 3 + [16] * 3 + [6] * 3
