# SPDX-License-Identifier: Apache-2.0
"""Documents to windows to batches: no token is lost, none is predicted twice."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from utio_jax.core import check_tokens
from utio_jax.core.documents import (
    Batch,
    batches_of,
    check_batches,
    check_ids,
    choose_widths,
    row_counts,
    sample_batches,
    windows_of,
)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 16), st.integers(1, 5))
def test_every_token_but_the_first_is_predicted_exactly_once(
    lengths: list[int], width: int, rows: int
) -> None:
    ends = np.cumsum(lengths)
    documents = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    windows = windows_of(documents, width=width)
    predicted: collections.Counter[int] = collections.Counter()
    seen = set()
    for batch in batches_of(windows, rows=rows, widths=[4, width], vocab_size=int(ends[-1])):
        assert batch.token_ids.shape[0] <= rows
        for row, window in enumerate(batch.window):
            length = int(batch.lengths[row])
            if window < 0:
                assert length == 0
                continue
            seen.add(int(window))
            np.testing.assert_array_equal(batch.token_ids[row, :length], windows[window])
            predicted.update(batch.token_ids[row, 1:length].tolist())
    assert seen == set(range(len(windows)))
    assert predicted == collections.Counter(t for d in documents for t in d[1:].tolist())


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 16, 17, 29, 33, 100])
def test_batches_have_few_empty_rows_and_few_shapes(rows: int, count: int) -> None:
    windows = [np.zeros(12, np.int32)] * count
    results = list(batches_of(windows, rows=rows, widths=[4, 16], vocab_size=2))
    assert len(results) == -(-count // rows), "no pass more than full ones would take"
    assert len({batch.token_ids.shape for batch in results}) == 1
    held = len(results[0].lengths)
    assert held in row_counts(rows)
    assert held <= rows
    empty = len(results) * held - count
    assert empty <= len(results) * held / 3
    if count <= rows:
        assert held == min(
            count_of_rows for count_of_rows in row_counts(rows) if count_of_rows >= count
        )


def test_windows_share_a_batch_with_those_of_their_width() -> None:
    windows = [np.zeros(n, np.int32) for n in (3, 16, 4, 9, 2, 16, 1)]
    results = list(batches_of(windows, rows=4, widths=[16, 4, 8], vocab_size=2))
    assert [batch.token_ids.shape for batch in results] == [(3, 16), (4, 4)]
    assert [batch.window.tolist() for batch in results] == [[1, 5, 3], [2, 0, 4, 6]]
    assert row_counts(40) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    assert list(batches_of([], rows=4, widths=[4], vocab_size=2)) == []


@given(
    st.lists(st.integers(1, 32), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 60),
    st.booleans(),
)
def test_widths_are_those_whose_padding_and_programs_cost_least(
    sizes: list[int], rows: int, spare: int, same_rows: bool
) -> None:
    windows, widths = [np.zeros(size, np.int32) for size in sizes], [4, 8, 16, 32]

    def cost(chosen: tuple[int, ...] | list[int]) -> int:
        shapes: Any = {"rows": rows, "same_rows": same_rows, "vocab_size": 2}
        made = list(batches_of(windows, widths=chosen, **shapes))
        programs = len({batch.token_ids.shape for batch in made})
        return sum(batch.token_ids.size for batch in made) + spare * programs

    some = [c for n in range(1, 5) for c in itertools.combinations(widths, n)]
    least = min(cost(chosen) for chosen in some if chosen[-1] >= max(sizes))
    chosen = choose_widths(sizes, rows=rows, widths=widths, spare=spare, same_rows=same_rows)
    assert cost(chosen) == least


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 2**32 + 1], "from 0 to 8, the model's vocabulary. Got 1 to 4294967297 in window 1"),
        ([1, 2**64], "window 1 as a list of integer token ids below 9. Got shape .*dtype"),
        ([1.0, 2.0], "integer token ids below 9. Got shape \\(2,\\), dtype float64. Convert them"),
    ],
)
def test_what_is_no_id_is_refused_before_it_is_cast(ids: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        list(batches_of([np.arange(3), np.asarray(ids)], rows=2, widths=[4], vocab_size=9))
    with pytest.raises(ValueError, match="Wanted"):
        sample_batches([np.arange(3), np.asarray(ids)], rows=2, width=4, vocab_size=9)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (["a"], "Got .*dtype <U1. Encode texts first: model.encode"),
        (1, "Got shape .*dtype int64. Put the ids into a list of lists: .*0, 17"),
        ([[1]], "Got shape .*dtype int64. For example: .*0, 17, 4"),
    ],
)
def test_what_to_do_with_other_than_a_list_of_ids(ids: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"the prompt as a list of integer.*{match}"):
        check_ids(ids, vocab_size=9, what="the prompt")


def test_padding_may_hold_anything() -> None:
    ids, lengths = check_tokens(np.asarray([[1, 2, 99]]), np.asarray([2]), vocab_size=9)
    assert ids.dtype == lengths.dtype == np.int32


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (lambda batch: batch, r"Got Batch\. For one batch: \[batch\]. For texts: fit\(texts\)"),
        (lambda batch: iter([batch]), r"Got list_iterator\. "),
        (lambda batch: "text", r"Got str\. "),
        (lambda batch: [batch, "text"], r"Got list of str\. "),
    ],
)
def test_what_is_no_list_of_batches_is_refused(wrap: Callable[[Batch], Any], match: str) -> None:
    (batch,) = batches_of([np.arange(4)], rows=1, widths=[4], vocab_size=9)
    check_batches([batch], instead="fit(texts)")
    with pytest.raises(TypeError, match=match):
        check_batches(wrap(batch), instead="fit(texts)")
