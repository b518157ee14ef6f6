# SPDX-License-Identifier: Apache-2.0
"""Sampling methods by hand, and speculative sampling by its distribution."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import count, read_counts
from helpers.generation import begun, context_of, lively_model

from utio_jax.core.arrays import most_probable
from utio_jax.decoding import sampling
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.sampling import (
    ACCEPT,
    DRAW,
    REPLACE,
    SamplingParams,
    check_sampling,
    draw,
    rows_of,
    token_keys,
    verify_sampling,
    verify_tokens,
)
from utio_jax.decoding.state import REASONS

PROBABILITIES = np.array([0.05, 0.4, 0.2, 0.1, 0.25])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None] + 3.0


P = SamplingParams


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (P(), [1]),
        (P(temperature=0.5), [0, 1, 2, 3, 4]),
        (P(temperature=1, top_k=1), [1]),
        (P(temperature=1, top_k=3), [1, 2, 4]),
        (P(temperature=1, top_k=99), [0, 1, 2, 3, 4]),
        (P(temperature=1, top_p=0.3), [1]),
        (P(temperature=1, top_p=0.5), [1, 4]),
        (P(temperature=1, top_p=0.66), [1, 2, 4]),
        (P(temperature=1), [0, 1, 2, 3, 4]),
        (P(temperature=1, min_p=0.5), [1, 2, 4]),
        (P(temperature=1, min_p=1.0), [1]),
        (P(temperature=1, top_k=3, top_p=0.7), [1, 4]),  # .47 and .29 of what top-k left.
        (P(temperature=0.25, min_p=0.1), [1, 4]),  # (.25 / .4) ** 4 = .15, (.2 / .4) ** 4 = .06.
    ],
)
def test_params_keep_the_right_tokens(params, kept):
    logits = np.asarray(rows_of([params])(LOGITS))[0]
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(logits)), kept)
    power = 1 / (params.temperature or 1.0)
    expected = np.where(np.isin(np.arange(5), kept), PROBABILITIES**power, 0)
    result = np.asarray(jax.nn.softmax(jnp.asarray(logits)))
    np.testing.assert_allclose(result, expected / expected.sum(), atol=1e-6)


ROWS = [
    P(),
    P(temperature=0.7),
    P(temperature=1.0),
    P(temperature=1e-9),
    P(temperature=1, top_k=3),
    P(temperature=1, top_k=99),
    P(temperature=1, top_p=0.6),
    P(temperature=1, min_p=0.2),
    P(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    P(temperature=1, top_k=5, min_p=0.5),
]


def test_rows_draw_as_their_own_params_do_alone():
    rows, tokens = len(ROWS), 40
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, tokens, 50))
    logits = logits.at[0, 0, :2].set(20.0)  # Ties of the greedy row go to the lowest id.
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (rows, tokens))
    keys = token_keys(jnp.arange(rows, dtype=jnp.uint32), positions, DRAW)
    both = jax.jit(lambda method, logits, keys: (draw(method, logits, keys), method(logits)))
    drawn, kept = both(rows_of(ROWS), logits, keys)
    for row, method in enumerate(ROWS):
        one = slice(row, row + 1)
        expected, _ = both(rows_of([method]), logits[one], keys[one])
        np.testing.assert_array_equal(drawn[one], expected)
        # Bit by bit, in sums of the same shape.
        alike = both(rows_of([method] * rows), logits, keys)
        np.testing.assert_array_equal(kept[row], alike[1][row])
        assert row or np.array_equal(draw(None, logits, keys), alike[0])
    assert drawn[0, 0] == 0
    # A method looks at one token per row as well.
    np.testing.assert_array_equal(rows_of(ROWS)(logits[:, 3]), kept[:, 3])


METHODS = ("_divided", "_most_likely", "_nucleus", "_likely")


def count_methods(monkeypatch):
    for name in METHODS:

        def counted(*args, name=name, method=getattr(sampling, name)):
            count(name, 1)
            return method(*args)

        monkeypatch.setattr(sampling, name, counted)


def test_what_no_row_uses_is_not_computed(monkeypatch):
    count_methods(monkeypatch)
    run = jax.jit(lambda method, logits, keys: draw(method, logits, keys))
    logits = jnp.zeros((2, 1, 9))
    keys = token_keys(jnp.zeros(2, jnp.uint32), jnp.zeros((2, 1), jnp.int32), DRAW)
    read_counts()
    for methods, names in (
        ([P(), P(top_k=2)], ()),
        ([P(), P(temperature=1)], ()),
        ([P(top_k=2, top_p=0.5, min_p=0.1), P(temperature=1)], ()),
        ([P(temperature=1, top_k=2), P(temperature=0.5)], ("_divided", "_most_likely")),
        ([P(temperature=1, top_p=0.5, min_p=0.1), P(temperature=1)], ("_nucleus", "_likely")),
    ):
        run(rows_of(methods), logits, keys)
        assert read_counts() == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("mode", "draws"), [(Plain(), 1), (Lossless(exit=1, max_draft=1), 2)], ids=["plain", "exit"]
)
def test_what_no_running_row_uses_is_not_computed(monkeypatch, mode, draws):
    """A row that has ended, or waits for its prompt, steps along; a draft is drawn as well."""
    used = P(temperature=0.5, top_k=9, top_p=0.5, min_p=0.1)
    context = context_of(lively_model(), mode, rows_of([P(temperature=1), used, P()]))
    context = dataclasses.replace(context, width=64)
    state = begun(context)
    count_methods(monkeypatch)
    step = jax.jit(lambda context, state: mode.step(context, state))
    read_counts()
    for reason in (*REASONS,):
        reasons = jnp.asarray([0, REASONS.index(reason), 0], jnp.int32)
        step(context, dataclasses.replace(state, reason=reasons))
        assert read_counts() == (dict.fromkeys(METHODS, draws) if reason == "running" else {})


def test_each_row_has_params_of_its_own():
    drawn = P(temperature=1, top_p=0.5)
    for given in (drawn, [drawn] * 2):
        assert check_sampling(given, rows=2) == [drawn] * 2


def test_ties_stay_together():
    tied = jnp.log(jnp.array([[0.3, 0.3, 0.3, 0.1]]))
    for method in (P(temperature=1, top_k=2), P(temperature=1, top_p=0.5)):
        kept = rows_of([method])(tied)
        np.testing.assert_array_equal(np.isfinite(kept)[0], [True, True, True, False])


def test_keys_depend_on_seed_position_stream_and_round_alone():
    seeds = jnp.array([7, 8], jnp.uint32)
    positions = jnp.array([[1, 2], [1, 2]])
    every = [
        token_keys(seeds, positions, stream, rounds=jnp.array([number, number]))
        for stream in (DRAW, ACCEPT, REPLACE)
        for number in (0, 1)
    ]
    data = np.stack([np.asarray(jax.random.key_data(keys)) for keys in every]).reshape(-1, 2)
    assert len({tuple(row) for row in data}) == len(data) == 24
    alone = token_keys(seeds[1:], positions[1:], DRAW)
    np.testing.assert_array_equal(jax.random.key_data(alone[0]), jax.random.key_data(every[0][1]))


def test_draws_follow_the_distribution():
    keys = token_keys(jnp.arange(20_000, dtype=jnp.uint32), jnp.zeros((20_000, 1), jnp.int32), DRAW)
    logits = jnp.broadcast_to(LOGITS[:, None], (20_000, 1, 5))
    seen = draw(rows_of([P(temperature=1, top_k=4)] * 20_000), logits, keys)
    expected = np.where(PROBABILITIES > 0.07, PROBABILITIES, 0)
    assert_follows(np.asarray(seen)[:, 0], expected / expected.sum())


def test_greedy_verification():
    best = np.array([[4, 2, 7, 1], [4, 2, 7, 1], [4, 2, 7, 1], [4, 2, 7, 1]])
    drafts = jnp.array([[4, 2, 7], [4, 3, 7], [0, 2, 7], [4, 2, 7]])
    result = verify_tokens(jnp.asarray(best), drafts, jnp.array([3, 3, 3, 1]))
    # All, up to the first wrong one, none, and no more than were drawn.
    np.testing.assert_array_equal(result.accepted, [3, 1, 0, 1])
    np.testing.assert_array_equal(result.token_ids, best)


@pytest.mark.parametrize("stops", [False, True])
def test_speculative_sampling_has_the_distribution_of_p(stops):
    """Two drafts from q, verified against p, where both depend on the token before."""
    rows, vocab = 40_000, 4
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(vocab), size=(3, vocab))  # [place, token before, token]
    q = rng.dirichlet(np.ones(vocab), size=(3, vocab))
    q[0, 0] = [0.0, 0.7, 0.3, 0.0]  # Tokens that only p has.
    p[1, 2] = [0.5, 0.5, 0.0, 0.0]  # Tokens that only q has.
    log_p, log_q = (jnp.log(jnp.asarray(table, jnp.float32)) for table in (p, q))
    seeds = jnp.arange(rows, dtype=jnp.uint32)
    keys = [token_keys(seeds, jnp.tile(jnp.arange(3)[None], (rows, 1)), s) for s in range(3)]

    @jax.jit
    def speculate():
        first = jax.vmap(jax.random.categorical)(
            keys[DRAW][:, 0], jnp.tile(log_q[:1, 0], (rows, 1))
        )
        second = jax.vmap(jax.random.categorical)(keys[DRAW][:, 1], log_q[1][first])
        drafts = jnp.stack([first, second], axis=1).astype(jnp.int32)
        # Where the row stops may depend on what was drawn *before*: no second draft after token 1.
        counts = jnp.where(stops & (first == 1), 1, 2).astype(jnp.int32)
        return verify_sampling(
            jnp.stack(
                [jnp.tile(log_p[:1, 0], (rows, 1)), log_p[1][first], log_p[2][second]], axis=1
            ),
            jnp.stack([jnp.tile(log_q[:1, 0], (rows, 1)), log_q[1][first]], axis=1),
            drafts,
            counts,
            accept_keys=keys[ACCEPT][:, :2],
            replace_keys=keys[REPLACE],
        )

    result = speculate()
    tokens, accepted = np.asarray(result.token_ids), np.asarray(result.accepted)
    assert_follows(tokens[:, 0], p[0, 0])
    for first in range(vocab):  # The second token is out where the first draft was accepted.
        out = (accepted >= 1) & (tokens[:, 0] == first)
        if out.any():
            assert_follows(tokens[out, 1], p[1, first])
    for second in range(vocab):
        out = (accepted == 2) & (tokens[:, 1] == second)
        if out.any():
            assert_follows(tokens[out, 2], p[2, second])
    assert 0 < np.mean(accepted == 2) < 1
    if stops:
        assert np.max(accepted[tokens[:, 0] == 1]) == 1


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Checks counts against probabilities: chi-square below its 1e-4 quantile."""
    seen = np.bincount(tokens, minlength=probabilities.size)
    expected = probabilities * tokens.size
    assert not np.any(seen[expected == 0])
    possible = expected > 0
    statistic = np.sum((seen - expected)[possible] ** 2 / expected[possible])
    assert statistic < {2: 15.1, 3: 18.4, 4: 21.1}[int(possible.sum())]


numbers: Any = np  # The types of arguments say Python's numbers; others come all the same.
UNTYPED: Any = SimpleNamespace(**{**vars(P()), "top_k": None})  # `P` checks types before.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: P(temperature=1e-39),
            r"0, which is greedy, or a positive number of float32. Got .*1e-39",
        ),
        (lambda: P(temperature=numbers.float16(np.nan)), "Got temperature=nan"),
        (lambda: P(top_p=numbers.float32(0)), "above 0 and at most 1. Got top_p=0"),
        (lambda: P(top_k=numbers.int64(-1)), r"below 2\*\*31; 0: all. Got top_k=-1"),
        (lambda: P(top_k=2**32 + 5), "Got top_k=4294967301"),
        (lambda: P(min_p=-0.1), "from 0 to 1. Got min_p=-0.1"),
        (lambda: P.__post_init__(UNTYPED), "Wanted a top_k"),
        (lambda: check_sampling(numbers.float64(0.7), rows=2), r"Got .*0.7.*temperature=0.7"),
        (lambda: check_sampling([P(), P()], rows=3), r"one per prompt \(3\). Got 2"),
        (
            lambda: check_sampling([P(temperature=np.array([0.5]))], rows=1),
            "numbers in each entry of a list",
        ),
        (lambda: check_sampling(P(temperature=jnp.float32(jnp.nan)), rows=2), "temperature=nan"),
        (lambda: check_sampling([P(temperature=jnp.bfloat16(-1))], rows=1), "temperature=-1"),
        (lambda: check_sampling(P(top_k=jnp.int32(-3)), rows=1), "Got top_k=-3"),
        (lambda: check_sampling(P(top_p=jnp.float32(3)), rows=1), "Got top_p=3"),
        (lambda: check_sampling(P(temperature=numbers.str_("1")), rows=1), "numbers in each entry"),
        (lambda: check_sampling(rows_of([P()] * 3), rows=3), "Give each row an entry of its own"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [1e-6, 2e-38])
def test_at_the_lowest_temperatures_only_the_most_probable_token_is_left(value):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 50)).astype(np.float32) * 10
    logits[:, 7] = -np.inf
    logits[0, :2] = 40.0  # Ties share.
    method = rows_of([P(temperature=value)] * 64)
    result = jax.jit(lambda method, x: jax.nn.log_softmax(method(x)))(method, logits)
    expected = logits == logits.max(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        np.exp(result), expected / expected.sum(axis=-1, keepdims=True), atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (P(temperature=1, top_p=1e-38), [1]),
        (P(temperature=1, top_p=1e-320), [1]),
        (P(temperature=1, min_p=1e-320), [0, 1, 2, 3, 4]),
        (P(temperature=3e38, top_k=5), [0, 1, 2, 3, 4]),
        (P(temperature=np.inf), [0, 1, 2, 3, 4]),
    ],
)
def test_numbers_that_float32_rounds_keep_the_right_tokens(method, kept):
    # Alone, as an argument of jit, and as one row of several.
    alone = rows_of([method])
    several = rows_of([method, P(temperature=1.0)])(jnp.repeat(LOGITS, 2, axis=0))
    for result in (jax.jit(lambda method: method(LOGITS))(alone), alone(LOGITS), several):
        probabilities = np.asarray(jax.nn.softmax(result[0]))
        np.testing.assert_array_equal(np.flatnonzero(probabilities), kept)


def test_most_probable_is_the_first_of_the_largest_and_always_a_token():
    logits = np.random.default_rng(0).integers(0, 5, (50, 7)).astype(np.float32)
    np.testing.assert_array_equal(most_probable(jnp.asarray(logits)), logits.argmax(-1))
    logits[:, 3] = np.nan
    np.testing.assert_array_equal(most_probable(jnp.asarray(logits)), 0)
    assert most_probable(jnp.full((4,), -jnp.inf)) == 0
