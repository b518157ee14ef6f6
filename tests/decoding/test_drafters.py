# SPDX-License-Identifier: Apache-2.0
"""Drafts from the row's own text: the same output, the right cost; and a head of few tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import EagerNGram, assert_greedy, begun, context_of, run

from utio_jax.core.platform import compiling_for
from utio_jax.decoding.base import Plain
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.loop import Lengths, advance
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.models.transformer import Transformer

REPEATING = [[7, 1, 2, 3, 4, 7, 1, 2], [5, 5, 5], [9, 8, 7, 9, 8, 7, 9]]


def slow_copy(known, *, longest, shortest, drafts):
    """Returns what followed the latest of the longest matches, and the match's length."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == known[len(known) - size :]:
                text = list(known)
                for offset in range(drafts):
                    text.append(text[start + size + offset])
                return text[len(known) :], size
    return [], 0


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (2, 2), (4, 1), (1, 1)])
# Of forty kinds of tokens the latest pair that is the same lies a thousand tokens before.
@pytest.mark.parametrize(("rows", "width", "kinds"), [(200, 24, 3), (20, 2048, 40)])
def test_copies_follow_the_latest_of_the_longest_matches(longest, shortest, rows, width, kinds):
    rng = np.random.default_rng(0)
    ids = rng.integers(kinds, size=(rows, width)).astype(np.int32)  # Beyond its length, too.
    lengths = rng.integers(1, width + 1, size=rows).astype(np.int32)
    drafts, counts = NGram(longest=longest, shortest=shortest)(
        jnp.asarray(ids), jnp.asarray(lengths), drafts=5
    )
    sizes = []
    for row in range(rows):
        known = ids[row, : lengths[row]].tolist()
        copied, size = slow_copy(known, longest=longest, shortest=shortest, drafts=5)
        assert int(counts[row]) == len(copied)
        assert drafts[row, : len(copied)].tolist() == copied
        sizes.append(size)
    assert rows < 200 or {0, longest} <= set(sizes)


@pytest.fixture(scope="module")
def plain(model):
    return run(model, REPEATING, max_new_tokens=48)


def rounds_of(prompt, truth, *, block, longest=3):
    """Yields each round's drafts and how many were accepted."""
    known, end, hits = [*prompt, int(truth[0])], len(prompt) + 40, 0.25
    while len(known) < end:
        drafts, _ = slow_copy(known, longest=longest, shortest=1, drafts=block - 1)
        right = truth[len(known) - len(prompt) :]
        rests, hits = hits < 0.25, hits + 0.25 * ((drafts[:1] == [right[0]]) - hits) * bool(drafts)
        drafts, accepted = [] if rests else drafts, 0
        while accepted < len(drafts) and drafts[accepted] == right[accepted]:
            accepted += 1
        yield len(drafts), accepted
        known += [int(token) for token in right[: accepted + 1]]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_drafts_cost_what_a_slow_matcher_says(model, plain, row):
    mode = Lossless(drafter="ngram", max_draft=3)
    result = run(model, REPEATING[row : row + 1], mode=mode)
    truth = plain.token_ids[row]
    np.testing.assert_array_equal(result.token_ids[0], truth[:40])
    rounds = [*rounds_of(REPEATING[row], truth, block=4)]
    drafts, accepted = (np.asarray(column) for column in zip(*rounds, strict=True))
    slots = np.where(drafts > 0, 4, 1)  # Of the one pass.
    assert result.work.steps[0] == len(rounds)
    assert result.work.drafts[0] == drafts.sum()
    assert result.work.accepted[0] == accepted.sum()
    assert result.work.heads[0] == slots.sum()
    assert result.work.queries[0] == (4 * slots).sum()
    assert result.work.key_slots[0] == 64 * (4 * slots).sum()
    assert result.work.exit_maps[0] == 0
    decided = [4]
    for right in accepted:
        decided += [0] * right + [4]
    assert result.decided[0].tolist() == decided[:40]
    np.testing.assert_array_equal(result.executed[0], 4)


MODE = Lossless(drafter="ngram", max_draft=5, ngram=EagerNGram())


def test_greedy_is_the_full_model_in_ragged_batches_and_needs_no_exit(model, plain):
    stock = Transformer(dataclasses.replace(model.decoder.config, exits=(4,)))
    result = run(dataclasses.replace(model, decoder=stock), REPEATING, mode=MODE)
    assert_greedy(model, result, REPEATING, kv="full")
    for row in range(3):
        np.testing.assert_array_equal(result.token_ids[row], plain.token_ids[row][:40])
    assert result.acceptance is not None
    assert 0 < result.acceptance < 1


@pytest.mark.check
def test_drawn_tokens_are_plain_decodings_and_rows_rest_where_nothing_repeats(model):
    """Drafts that fail cost no more than a round or two, whatever the number of tokens."""
    options = {"max_new_tokens": 80, "sampling": SamplingParams(temperature=1.5), "seeds": 3}
    options["lengths"] = Lengths(prompt_step=8, key_step=128)
    mode = Lossless(drafter="ngram", max_draft=3)
    for row in range(3):
        prompt = REPEATING[row : row + 1]
        plain = run(model, prompt, **options)
        result = run(model, prompt, mode=mode, **options)
        np.testing.assert_array_equal(result.token_ids[0], plain.token_ids[0])
        assert 0 < result.work.drafts[0] <= 2 * 3
        assert result.work.queries[0] <= 1.1 * plain.work.queries[0]


def test_a_step_without_drafts_is_a_plain_one(model):
    """The program has two steps: the verification of all drafts, and that of plain decoding."""

    def products(mode):
        context = context_of(model, mode)
        traced = jax.make_jaxpr(functools.partial(advance, widths=(64,)))
        return str(traced(context, begun(context), np.int32(20))).count("dot_general[")

    assert products(MODE) == 2 * products(Plain())


def test_a_row_that_rests_drafts_again_once_its_drafts_would_be_right():
    ngram, matched, drafting = NGram(), jnp.asarray([True, False]), []
    hits = ngram.start(2)
    for right in [False] * 6 + [True] * 3 + [False]:
        drafting.append((hits >= ngram.LEAST_HITS).tolist())
        hits = ngram.follow(hits, matched=matched, right=jnp.full((2,), right))
    # One miss is paid for; without a match nothing is learned.
    assert [row for row, _ in drafting] == [True] + [False] * 6 + [True] * 3
    assert all(row for _, row in drafting)


@pytest.mark.parametrize(("name", "fixed"), [("cpu", 16), ("cuda", 256)])
def test_rows_draft_where_what_they_accept_pays_for_the_pass(model, name, fixed):
    """The pass runs every row's drafts, so the rows that repeat nothing pay for those that do."""
    context, most = context_of(model, Lossless(drafter="ngram")), 4
    every = list(range(64))  # Whatever comes next is a repetition.
    state = begun(context, [every, every[::-1], [5], every], slots=128)
    ended = dataclasses.replace(state, reason=state.reason.at[3].set(state.reason[0] + 1))
    drafted = []
    for begun_state in (state, ended):
        for rates in itertools.product([0.2, 0.25, 0.4, 0.6, 0.8, 1.0], repeat=2):
            hits = jnp.asarray([*rates, 1.0, 1.0])
            with compiling_for(name):
                proposal = NGram().propose(
                    context, dataclasses.replace(begun_state, memory=hits), most=most
                )
            accepted, rows = 0.0, int(begun_state.active.sum())
            for row in np.flatnonzero(proposal.matched):
                rate = float(hits[row])
                accepted += sum(rate**n for n in range(1, most + 1)) if rate >= 0.25 else 0
            longer = (fixed + 4 * (most + 1)) / (fixed + 4)  # The pass, in plain steps.
            pays = (rows + accepted) / rows >= longer
            drafting = proposal.matched & (hits >= 0.25) & pays
            np.testing.assert_array_equal(proposal.counts, np.where(drafting, most, 0))
            drafted.append(bool(drafting.any()))
    assert 0 < sum(drafted) < len(drafted)
