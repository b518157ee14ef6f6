# SPDX-License-Identifier: Apache-2.0
"""Scores of whole rows against plain sums over log-softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense, run_oracle
from helpers.counting import Counting, read_counts
from helpers.marks import checked, slow
from helpers.models import Model, gated, plain_nll
from helpers.policies import SurePasses, surrogate

from utio_jax import score
from utio_jax.core.arrays import map_head
from utio_jax.staircase import exit_nll, full_depth
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import compare_logits, run_score, score_dense


@pytest.mark.parametrize(
    ("ids", "lengths", "match"),
    [
        ([[1, 64]], [2], "from 0 to 63, the model's vocabulary. Got 1 to 64"),
        ([[-1, 3]], [2], "from 0 to 63"),
        ([[1, 2]], [3], "lengths between 0 and 2. Got 3 to 3"),
        (np.zeros((0, 4), int), np.zeros(0, int), r"rows of tokens, at least.*Got \(0, 4\)"),
        (np.zeros((2, 0), int), [0, 0], r"rows of tokens, at least one of each. Got \(2, 0\)"),
        ([[1] * 129], [2], "rows of at most 128 tokens, the model's context. Got \\(1, 129\\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_that_are_no_text_are_refused_where_they_are_known(
    tiny: Any, ids: Any, lengths: Any, match: str
) -> None:
    for make in (np.asarray, jnp.asarray):
        rows: Any = make(np.asarray(ids, np.int32)), make(np.asarray(lengths, np.int32))
        with pytest.raises(ValueError, match=match):
            score(tiny.decoder, tiny.params, rows[0], rows[1], full_depth(tiny.decoder))
        programs: Any = (score_dense, exit_nll)
        for plain in programs:
            with pytest.raises(ValueError, match=match):
                plain(tiny.decoder, tiny.params, *rows)


def test_both_full_depth_programs_agree(tiny: Any) -> None:
    ids, lengths = tiny.tokens(2, 33), jnp.asarray([33, 12])
    blocks = run_score(tiny.decoder, tiny.params, ids, lengths, full_depth(tiny.decoder))
    dense = jax.jit(score_dense, static_argnums=0)(tiny.decoder, tiny.params, ids, lengths)
    np.testing.assert_allclose(blocks.log_likelihood, dense.log_likelihood, atol=1e-5)
    np.testing.assert_array_equal(blocks.depths, dense.depths)
    assert int(dense.work.queries.sum()) == 2 * 33 * 4
    assert int(dense.work.keys_values.sum()) == 2 * 33 * 4
    assert float(dense.work.key_slots.sum()) == 2 * 33 * 33 * 4


def test_comparison_of_predictions_with_themselves_and_with_others(tiny: Any) -> None:
    ids, lengths = tiny.tokens(2, 12), jnp.asarray([12, 12])
    states = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=(1, 4))
    shallow, full = (tiny.decoder.unembed(tiny.params, x).reshape(24, -1) for x in states)
    labels = tiny.tokens(24, seed=1)
    same, other = (compare_logits(logits, full, labels) for logits in (full, shallow))
    np.testing.assert_allclose(same["kl"], 0, atol=1e-6)
    assert np.asarray(same["agree"]).all()
    p, q = (np.asarray(jax.nn.log_softmax(logits), np.float64) for logits in (full, shallow))
    np.testing.assert_allclose(other["kl"], (np.exp(p) * (p - q)).sum(-1), atol=1e-5)
    np.testing.assert_allclose(other["nll"], -q[np.arange(24), labels], atol=1e-5)
    np.testing.assert_allclose(other["nll_full"], same["nll"], atol=1e-6)
    np.testing.assert_array_equal(other["agree"], p.argmax(-1) == q.argmax(-1))


def test_classes_that_a_decoder_masks_add_nothing_to_a_comparison(tiny: Any) -> None:
    shallow, full = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    masked = [np.pad(x, ((0, 0), (0, 3)), constant_values=-np.inf) for x in (shallow, full)]
    labels = jnp.arange(6)
    result = compare_logits(jnp.asarray(masked[0]), jnp.asarray(masked[1]), labels)
    expected = compare_logits(jnp.asarray(shallow), jnp.asarray(full), labels)
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], atol=1e-6)


# A pass reads the logits of each token once, at its own depth, whichever policy looked before.

SMALL = MicroBatches(min_bucket=4, block=8, query_block=8, key_step=8)
RAGGED = np.asarray([21, 8, 1], np.int32)


POLICIES: dict[str, Callable[[Any], Any]] = {
    "surrogate": surrogate,
    "every boundary": lambda model: SurePasses(threshold=0.06),
    "all stop at once": lambda model: SurePasses(threshold=0.0),
    "none stop": lambda model: SurePasses(threshold=1.1),
    "never looks": gated,
}


def padded(count: int) -> int:
    return -(-count // SMALL.unit) * SMALL.unit


@pytest.mark.parametrize(
    "name",
    [
        "every boundary",
        *checked("all stop at once", "none stop", "never looks"),
        *slow("surrogate"),
    ],
)
def test_reads_each_token_at_its_depth_and_looks_at_stopped_ones_once(tiny: Any, name: str) -> None:
    policy, ids = POLICIES[name](tiny), tiny.tokens(3, 21)
    decoder = Counting(tiny.decoder.config)
    read_counts()
    result = run_score(decoder, tiny.params, ids, jnp.asarray(RAGGED), policy, executor=SMALL)
    jax.block_until_ready(result)
    heads_run = read_counts()["unembed"]
    x = run_oracle(tiny.decoder, tiny.params, ids, RAGGED, result.depths, kv="propagate")
    predicted = np.asarray(result.predicted)[:, :-1]
    np.testing.assert_allclose(
        np.asarray(result.log_likelihood)[:, :-1][predicted],
        -plain_nll(tiny, ids, x)[predicted],
        atol=1e-4,
    )
    depths = np.asarray(result.depths)
    looked = np.zeros(depths.shape, bool)
    expected = []
    for index, depth in enumerate(policy.depths[:-1]):
        looks = policy.reads_logits(index)
        expected.append(padded(int((depths >= depth).sum())) if looks else 0)
        looked |= (depths == depth) & looks
    expected += [0, padded(int(((depths > 0) & ~looked).sum()))]
    np.testing.assert_array_equal(result.work.heads, expected)
    assert heads_run == sum(expected)
    lengths = RAGGED[:, None]
    np.testing.assert_array_equal(result.predicted, np.arange(21) < lengths - 1)
    assert not np.asarray(result.log_likelihood)[~np.asarray(result.predicted)].any()
    assert (depths[np.arange(21) >= lengths] == 0).all()
    if name in ("surrogate", "every boundary"):
        assert len(np.unique(depths[depths > 0])) > 1, "the case must mix depths"


@pytest.mark.check
def test_gradients_flow_through_logits_that_a_policy_looked_at(tiny: Any) -> None:
    policy, ids = SurePasses(threshold=0.06), tiny.tokens(3, 21)
    whole = CapacityPrefix(capacities=(24, 24, 24), min_bucket=8)
    real = run_score(tiny.decoder, tiny.params, ids, jnp.asarray(RAGGED), policy, executor=whole)
    live = [int((real.depths > start).sum(axis=1).max()) for start in (0, *policy.depths[:-1])]
    capacities = tuple(-(-count // 4) * 4 for count in live)
    assert capacities[-1] < 21, "some of it is left out"
    executor = CapacityPrefix(capacities=capacities, min_bucket=4)

    def fast(params: Any) -> jax.Array:
        result = score(tiny.decoder, params, ids, jnp.asarray(RAGGED), policy, executor=executor)
        return result.log_likelihood.sum()

    def slow(params: Any) -> jax.Array:
        x = run_oracle(tiny.decoder, params, ids, RAGGED, real.depths, kv="propagate")
        logp = jax.nn.log_softmax(tiny.decoder.unembed(params, x))[:, :-1]
        chosen = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(real.predicted[:, :-1], chosen, 0.0).sum()

    assert len(np.unique(real.depths)) == 4  # Padding, and every exit.
    for actual, expected in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(f))(tiny.params)) for f in (fast, slow)), strict=True
    ):
        np.testing.assert_allclose(
            actual, expected, atol=1e-4 * float(np.abs(expected).max()) + 1e-5
        )


@pytest.mark.parametrize("slots", [1, 127, 128, 129, 300])
def test_map_head_covers_every_slot_once(tiny: Model, slots: int) -> None:
    x = jax.random.normal(jax.random.key(0), (slots, tiny.decoder.config.embed_dim))
    number = jnp.arange(slots, dtype=jnp.float32)
    top, doubled = map_head(
        tiny.decoder, tiny.params, lambda logits, n: (logits.max(-1), 2 * n), x, number
    )
    np.testing.assert_allclose(top, tiny.decoder.unembed(tiny.params, x).max(-1), rtol=1e-5)
    np.testing.assert_array_equal(doubled, 2 * number)
