# SPDX-License-Identifier: Apache-2.0
"""Facts that are moved back: rows, which tokens stop, and what of an answer is lost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model, plain_nll

from utio_jax.contrib.recall import (
    RECALL_TASKS,
    Recall,
    RecallCase,
    RecallRows,
    recall,
    recall_cases,
    recall_lost,
    recall_rows,
    shallow_contexts,
)
from utio_jax.models.transformer import Transformer
from utio_jax.policies.depth import uniform
from utio_jax.staircase.reference import reference_states

PROMPT, DISTANCES = 160, (0, 7, 40)
END, QUESTION = PROMPT + 8, 13  # Of rows of the task "line".
reference = jax.jit(reference_states, static_argnums=0, static_argnames="kv")


def encode(text: str) -> list[int]:
    """One id per character."""
    return [ord(character) % 64 for character in text]


@pytest.fixture(scope="module")
def long(tiny: Model) -> Model:
    config = dataclasses.replace(tiny.decoder.config, context_length=256)
    return dataclasses.replace(tiny, decoder=Transformer(config))


@pytest.fixture(scope="module")
def filler() -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 64, 400) for seed in range(3)]


def cases_of(task: str, filler: list[np.ndarray], count: int = 3) -> tuple[RecallCase, ...]:
    return recall_cases(task, filler, encode, prompt_tokens=PROMPT, count=count)


@pytest.fixture(scope="module")
def rows(long: Model, filler: list[np.ndarray]) -> RecallRows:
    first, second = cases_of("line", filler, count=2)
    text = np.concatenate([second.passage, second.question[:3]])  # A later question.
    second = dataclasses.replace(second, passage=text, question=second.question[3:])
    return recall_rows(
        [first, second], DISTANCES[1:], decoder=long.decoder, batch=4
    )  # 6 rows, 2 fill.


def ids_of(rows: RecallRows) -> np.ndarray:
    """The rows without padding, and without those that only fill a batch."""
    return np.concatenate([ids for ids, _ in rows.rows.batches])[:6, :END]


def states(long: Model, ids: np.ndarray, depths: np.ndarray, kv: Any = "propagate") -> jax.Array:
    lengths = jnp.full(len(ids), ids.shape[1])
    decided = jnp.asarray(depths)[:, : ids.shape[1]]
    return reference(long.decoder, long.params, jnp.asarray(ids), lengths, decided, kv=kv)


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_only_the_place_of_the_fact_changes(filler: list[np.ndarray], task: str) -> None:
    cases = cases_of(task, filler)
    for case in cases:
        fact, answer = case.fact.tolist(), case.answer.tolist()
        end, texts = PROMPT - len(case.question), []
        for distance in (*DISTANCES, case.farthest):
            row, (start, stop) = case.row(distance).tolist(), case.span(distance)
            assert row[start:stop] == fact
            assert stop == end - distance
            assert row[end:] == case.question.tolist() + answer
            texts.append(row[:start] + row[stop:end])
        assert all(text == texts[0] for text in texts)
        never = case.row(None).tolist()
        assert len(never) == PROMPT + len(answer)
        assert never[len(fact) :] == texts[0] + never[end:]
        assert case.span(None) == (0, 0)
        # The fact spells the answer in the same tokens, behind what the question repeats of it.
        known = case.question.tolist()
        assert any(
            fact[at : at + len(answer)] == answer and fact[at - 1] in known
            for at in range(1, len(fact))
        )
    again, other = (
        recall_cases(task, filler, encode, prompt_tokens=PROMPT, count=3, seed=seed)
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(again[2].row(7), cases[2].row(7))
    assert other[2].row(7).tolist() != cases[2].row(7).tolist()


@pytest.mark.parametrize("kv", ["propagate", "drop"])
def test_bits_are_the_references(long: Model, rows: RecallRows, kv: Any) -> None:
    policies = shallow_contexts(rows, (2, 4))
    result = recall(long.decoder, long.params, rows, policies, kv=kv)
    starts = np.repeat([PROMPT - QUESTION, PROMPT - QUESTION + 3], 3)
    table = np.asarray([[2] * start + [4] * (END - start) for start in starts])
    ids = ids_of(rows)
    nll = plain_nll(long, ids, states(long, ids, table, kv))[:, PROMPT - 1 :]
    expected = nll.mean(axis=1).reshape(2, 3) / math.log(2)
    np.testing.assert_allclose(result.bits, expected, atol=1e-4)
    np.testing.assert_array_equal(result.depths[:, :END], table)
    assert not result.depths[:, END:].any()


def test_an_answer_is_exact_if_each_of_its_tokens_is_the_most_probable(
    long: Model, rows: RecallRows
) -> None:
    batches = [(ids.copy(), ends) for ids, ends in rows.rows.batches]
    row = batches[0][0][:1, :END]
    for at in range(PROMPT, END):  # Greedy decoding, the slow way.
        x = states(long, row, np.full((1, END), 4))
        row[0, at] = int(np.argmax(long.decoder.unembed(long.params, x[0, at - 1 : at])))
    greedy = dataclasses.replace(rows, rows=dataclasses.replace(rows.rows, batches=tuple(batches)))
    result = recall(long.decoder, long.params, greedy, uniform(4))
    assert result.exact[0, 0]
    assert not result.exact.ravel()[1:].any()


def made(bits: list[list[float]], exact: list[list[bool]] | None = None) -> Recall:
    result = np.asarray(bits)
    return Recall(
        bits=result,
        exact=np.zeros(result.shape, bool) if exact is None else np.asarray(exact),
        depths=np.ones((result.size, 1), np.int32),
    )


def test_what_is_lost_is_paired_and_beside_rows_without_the_fact() -> None:
    yes, no = [True, True, False], [True, False, False]
    full = made([[1.0, 2.0, 5.0], [3.0, 4.0, 7.0]] * 3, [yes, no] * 3)
    never = [False] * 3
    result = made([[1.5, 3.5, 5.0], [3.5, 5.5, 7.0]] * 3, [no, never] * 3)
    near, far = recall_lost((16, 64), result, full)
    assert near["distance"] == 16
    assert near["lost"] == [0.5, 0.5, 0.5], "each case loses as much: whatever is drawn"
    assert near["recalled"] == [4.0, 4.0, 4.0]
    assert near["recall_lost_pct"] == [12.5, 12.5, 12.5]
    assert (near["exact"], near["exact_full"]) == (0.5, 1.0)
    assert far["recall_lost_pct"] == [50.0, 50.0, 50.0]
    # What is lost without the fact as well is no loss of recall.
    worse = made([[1.5, 3.5, 5.5], [3.5, 5.5, 7.5]] * 3)
    assert recall_lost((16, 64), worse, full)[0]["recall_lost_pct"] == [0.0, 0.0, 0.0]
    assert recall_lost((16, 64), worse, full)[0]["lost"] == [0.5, 0.5, 0.5]


def test_intervals_are_over_cases_and_nothing_recalled_has_no_share() -> None:
    full = made([[1.0, 3.0]] * 8)
    result = made([[1.0, 3.0], [2.0, 3.0], [3.0, 3.0], [4.0, 3.0]] * 2)
    (row,) = recall_lost((16,), result, full)
    low, mean, high = row["lost"]
    assert mean == 1.5
    assert 0 < low < 0.8 < 2.2 < high < 3
    assert row["recall_lost_pct"][1] == 75.0
    assert row["exact_interval"] == [0.0, 0.3694]  # 1 - 0.025 ** (1 / 8)
    (nothing,) = recall_lost((16,), result, made([[1.0, 3.0]] * 7 + [[9.0, 3.0]]))
    assert nothing["recall_lost_pct"] is None
    few = [made([[1.0, 3.0]] * 4)] * 2
    (row,) = recall_lost((16,), *few)
    assert row["lost"] is row["recalled"] is row["recall_lost_pct"] is row["exact_interval"] is None
