# SPDX-License-Identifier: Apache-2.0
"""Scores of whole rows against plain sums over log-softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense, run_oracle
from helpers.models import gated, plain_nll

from utio_jax import exit_nll, full_depth, score
from utio_jax.staircase.score import compare_logits, score_dense

run_score = jax.jit(score, static_argnums=0)


def test_score_is_the_log_likelihood_of_each_next_token_at_its_depth(tiny: Any) -> None:
    ids, lengths = tiny.tokens(3, 21), jnp.asarray([21, 8, 1])
    found = run_score(tiny.decoder, tiny.params, ids, lengths, gated(tiny))
    x = run_oracle(tiny.decoder, tiny.params, ids, lengths, found.depths, kv="propagate")
    wanted = plain_nll(tiny, ids, x)
    predicted = np.arange(20) < np.asarray(lengths)[:, None] - 1
    np.testing.assert_allclose(
        np.asarray(found.log_likelihood)[:, :-1][predicted], -wanted[predicted], atol=1e-4
    )
    np.testing.assert_array_equal(np.asarray(found.predicted)[:, :-1], predicted)
    assert not np.asarray(found.log_likelihood)[~np.asarray(found.predicted)].any()
    assert np.asarray(found.predicted).sum() == 20 + 7 + 0
    assert (np.asarray(found.depths)[2, 1:] == 0).all()


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


def test_rows_wider_than_the_context_are_refused_when_traced(tiny: Any) -> None:
    wide = jax.ShapeDtypeStruct((1, 129), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    policy = (full_depth(tiny.decoder),)
    programs: Any = ((score_dense, ()), (exit_nll, ()), (score, policy))
    for program, rest in programs:
        run = partial(program, tiny.decoder, tiny.params)
        with pytest.raises(ValueError, match="rows of at most 128 tokens"):
            jax.eval_shape(run, *wide, *rest)


def test_both_full_depth_programs_agree(tiny: Any) -> None:
    ids, lengths = tiny.tokens(2, 33), jnp.asarray([33, 12])
    blocks = run_score(tiny.decoder, tiny.params, ids, lengths, full_depth(tiny.decoder))
    dense = jax.jit(score_dense, static_argnums=0)(tiny.decoder, tiny.params, ids, lengths)
    np.testing.assert_allclose(blocks.log_likelihood, dense.log_likelihood, atol=1e-5)
    np.testing.assert_array_equal(blocks.depths, dense.depths)
    assert int(dense.work.queries.sum()) == 2 * 33 * 4
    assert int(dense.work.keys_values.sum()) == 2 * 33 * 4
    assert float(dense.work.key_slots.sum()) == 2 * 33 * 33 * 4


def test_exit_nll_is_the_loss_of_truncating_at_each_exit(tiny: Any) -> None:
    ids, lengths = tiny.tokens(2, 12), jnp.asarray([12, 12])
    found = jax.jit(exit_nll, static_argnums=0)(tiny.decoder, tiny.params, ids, lengths)
    states = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=tiny.decoder.config.exits)
    for nll, x in zip(found, states, strict=True):
        np.testing.assert_allclose(nll[:, :-1], plain_nll(tiny, ids, x), atol=1e-4)


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
