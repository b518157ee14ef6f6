# SPDX-License-Identifier: Apache-2.0
"""Documents of any length as rows of a few static shapes; checks of token ids on the host."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np


def check_ids(ids: Any, *, vocab_size: int, what: str) -> np.ndarray:
    """Returns a list or array of token ids `[token]` as int32; `what` they are is for errors.

    Raises ValueError for ids that are no integers (floats, booleans), or outside the vocabulary.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # Lists of several lengths.
        array = np.asarray(ids, object)
    if array.shape == (0,):  # NumPy takes an empty list for floats.
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        # Integers beyond 64 bits are objects to NumPy, as a mixture with others is.
        raise ValueError(
            f"Wanted {what} as a list of integer token ids below {vocab_size}. Got shape "
            f"{array.shape}, dtype {array.dtype}. {_remedy(array)}"
        )
    _check_range(array, vocab_size=vocab_size, what=what)
    return array.astype(np.int32)


def _remedy(array: np.ndarray) -> str:
    if array.dtype.kind in "US":
        return "Encode texts first: model.encode(texts)."
    if array.ndim == 0:
        return "Put the ids into a list of lists: [[0, 17, 4]]."
    if array.ndim == 1 and array.dtype.kind == "f":
        return "Convert them: np.asarray(ids, np.int32)."
    return "For example: [0, 17, 4]."


def check_text(text: str, what: str) -> str:
    """Returns a text. Raises ValueError, with `what` it is, for half a surrogate pair in it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Wanted {what} of whole characters. Got half a surrogate pair, "
            f"{text[error.start]!a}, at character {error.start}. Read its source as UTF-8, or "
            "replace it."
        ) from None
    return text


def _check_range(ids: np.ndarray, *, vocab_size: int, what: str) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        known = "" if vocab_size == 2**31 else ", the model's vocabulary"  # End tokens: any int32.
        raise ValueError(
            f"Wanted token ids from 0 to {vocab_size - 1}{known}. "
            f"Got {ids.min()} to {ids.max()} in {what}. Is this another model's tokenizer?"
        )


def check_tokens(token_ids: Any, lengths: Any, *, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `token_ids` `[batch, token]` and `lengths` `[batch]` as int32, checked on the host.

    Raises:
      ValueError: wrong ranks or types, lengths beyond the rows, or ids outside the vocabulary.
    """
    ids, ends = np.asarray(token_ids), np.asarray(lengths)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"Wanted integer token_ids [batch, token]. Got shape {ids.shape}, dtype {ids.dtype}."
        )
    if ends.shape != ids.shape[:1] or not np.issubdtype(ends.dtype, np.integer):
        raise ValueError(
            f"Wanted one integer length per row, shape {ids.shape[:1]}. "
            f"Got shape {ends.shape}, dtype {ends.dtype}."
        )
    if ends.size and (ends.min() < 0 or ends.max() > ids.shape[1]):
        raise ValueError(
            f"Wanted lengths between 0 and {ids.shape[1]}. Got {ends.min()} to {ends.max()}."
        )
    real = ids[np.arange(ids.shape[1]) < ends[:, None]]
    _check_range(real, vocab_size=vocab_size, what="token_ids")
    return ids.astype(np.int32), ends.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows: `token_ids` `[batch, token]`, `lengths` and `window` `[batch]`.

    `window` is which one of `windows_of` a row is. A filler has length 0, and -1.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    window: np.ndarray


def check_batches(batches: Any, *, instead: str, one_shape: bool = False) -> None:
    """Raises TypeError if something is no sequence of batches; `instead` is the call for texts.

    With `one_shape`, raises ValueError for batches of several.
    """
    several = isinstance(batches, Sequence) and not isinstance(batches, str)
    kinds = {type(batch).__name__ for batch in batches} - {Batch.__name__} if several else set()
    if not several or kinds:
        given = " of ".join([type(batches).__name__, *filter(None, [", ".join(sorted(kinds))])])
        raise TypeError(
            "Wanted a list of batches of token ids, as utio_jax.core.sample_batches returns. Got "
            f"{given}. For one batch: [batch]. For texts: {instead}."
        )
    shapes = sorted({batch.token_ids.shape for batch in cast(Sequence[Batch], batches)})
    if one_shape and len(shapes) > 1:
        raise ValueError(
            "Wanted batches of one shape, as utio_jax.core.sample_batches returns. Got "
            f"{', '.join(map(str, shapes))}. Cut all texts in one call."
        )


def windows_of(documents: Sequence[np.ndarray], *, width: int) -> list[np.ndarray]:
    """Returns documents cut into windows of at most `width` tokens that overlap by one.

    So every token but a document's first is predicted exactly once.

    Raises:
      ValueError: width < 2, or a document is empty.
    """
    if width < 2:
        raise ValueError(f"Wanted windows of at least 2 tokens. Got width={width}.")
    windows = []
    for index, document in enumerate(documents):
        if len(document) == 0:
            raise ValueError(f"Wanted documents of at least one token. Document {index} is empty.")
        starts = range(0, max(1, len(document) - 1), width - 1)
        windows.extend(np.asarray(document[start : start + width]) for start in starts)
    return windows


def row_widths(context: int) -> list[int]:
    """Returns the widths that rows are padded to: 64, 128, 256, ... and at most the context."""
    widths = []
    width = 64
    while width < context:
        widths.append(width)
        width *= 2
    return [*widths, context]


def row_counts(most: int) -> list[int]:
    """Returns the row counts that batches may have: 1, 2, 3, 4, 6, 8, 12, ... and `most`."""
    counts = {1, most}
    for power in range(most.bit_length()):
        counts |= {2**power, 3 * 2**power // 2}
    return sorted(count for count in counts if 1 <= count <= most)


def choose_widths(
    sizes: Sequence[int], *, rows: int, widths: Sequence[int], spare: float, same_rows: bool = False
) -> list[int]:
    """Returns those of `widths` that are worth a program each for windows of these sizes.

    One more width pays if the batches of `batches_of` then have `spare` fewer tokens of padding.
    The widths returned hold all windows that `widths` hold.

    >>> choose_widths([60, 60, 500], rows=2, widths=[64, 512], spare=2000)
    [512]
    >>> choose_widths([60, 60, 500], rows=2, widths=[64, 512], spare=400)
    [64, 512]
    """
    known = sorted(widths)
    of_width = [0] * len(known)
    for size in sizes:
        of_width[min(bisect.bisect_left(known, size), len(known) - 1)] += 1

    def slots(first: int, last: int) -> int:
        """Returns the padded tokens of all windows of widths [first, last], in one shape."""
        count, passes = _rows_of(sum(of_width[first : last + 1]), rows, same_rows=same_rows)
        return count * passes * known[last]

    best: list[tuple[float, list[int]]] = [(0.0, [])]  # Of the first widths, by their number.
    for last in range(len(known)):
        options = []
        for first in range(last + 1):
            cost, chosen = best[first]
            used = any(of_width[first : last + 1])
            more = (slots(first, last) + spare, [*chosen, known[last]]) if used else (0.0, chosen)
            options.append((cost + more[0], more[1]))
        best.append(min(options))
    return best[-1][1] or known[-1:]


def _rows_of(windows: int, rows: int, *, same_rows: bool) -> tuple[int, int]:
    """Returns the rows of each batch of some windows, at most `rows`, and the number of batches."""
    passes = -(-windows // rows)
    needed = -(-windows // max(1, passes))
    return rows if same_rows else next(n for n in row_counts(rows) if n >= needed), passes


def batches_of(
    windows: Sequence[np.ndarray],
    *,
    rows: int,
    widths: Sequence[int],
    vocab_size: int,
    same_rows: bool = False,
) -> Iterator[Batch]:
    """Yields all windows in batches of at most `rows`, longest first, with little padding.

    Windows are padded to the smallest of `widths` that holds them. Windows of one width share
    batches with the same number of rows, rounded up to a few counts (`row_counts`). So few shapes
    compile.

    Args:
      windows: token ids `[token]` each.
      rows: of a batch at most; with `same_rows` of every batch.
      widths: that windows are padded to.
      vocab_size: of the model.
      same_rows: fill every batch up with empty rows, so that each width is one shape.

    Raises:
      ValueError: a window is longer than the largest width, or holds something else than ids of
        the vocabulary.
    """
    order = sorted(range(len(windows)), key=lambda index: -len(windows[index]))
    if order and len(windows[order[0]]) > max(widths):
        raise ValueError(
            f"Wanted windows of at most {max(widths)} tokens. Got one of {len(windows[order[0]])}."
        )
    known = sorted(widths)
    of_width = {width: list[int]() for width in reversed(known)}
    for index in order:
        of_width[known[bisect.bisect_left(known, len(windows[index]))]].append(index)
    for width, members in of_width.items():
        count, _ = _rows_of(len(members), rows, same_rows=same_rows)
        for start in range(0, len(members), count):
            ids = np.zeros((count, width), np.int32)
            lengths, names = np.zeros(count, np.int32), np.full(count, -1)
            for row, index in enumerate(members[start : start + count]):
                checked = check_ids(windows[index], vocab_size=vocab_size, what=f"window {index}")
                ids[row, : checked.size] = checked
                lengths[row], names[row] = checked.size, index
            yield Batch(token_ids=ids, lengths=lengths, window=names)


def sample_batches(
    documents: Sequence[np.ndarray],
    *,
    rows: int,
    width: int,
    vocab_size: int,
    batches: int | None = None,
    seed: int = 0,
) -> tuple[list[Batch], np.ndarray]:
    """Returns batches of windows drawn over all documents, and the document of each window.

    Every document has a window as long as there are as many; longer ones have more.

    Args:
      documents: token ids; those of fewer than two tokens predict nothing, and have no window.
      rows: windows per batch, at most.
      width: tokens per window.
      vocab_size: of the model.
      batches: at most so many; None takes all windows.
      seed: of the drawn windows.

    Raises:
      ValueError: no document of two tokens, ids outside the vocabulary, or batches < 1.
    """
    if batches is not None and batches < 1:
        raise ValueError(f"Wanted at least 1 batch. Got batches={batches}.")
    cut = [windows_of([ids], width=width) if len(ids) > 1 else [] for ids in documents]
    if not any(cut):
        raise ValueError("Wanted documents of at least two tokens. Got none. Add text.")
    rng = np.random.default_rng(seed)
    # Each document's windows in a random order; all first ones, then all second ones, ...
    ranked = [
        (turn, rng.random(), document, int(index))
        for document, windows in enumerate(cut)
        for turn, index in enumerate(rng.permutation(len(windows)))
    ]
    if batches is not None and len(ranked) > batches * rows:
        firsts = sorted(item for item in ranked if item[0] == 0)[: batches * rows]
        others = sorted((item for item in ranked if item[0] > 0), key=lambda item: item[1])
        ranked = firsts + others[: batches * rows - len(firsts)]
    chosen = [(document, cut[document][index]) for _, _, document, index in sorted(ranked)]
    sampled = batches_of(
        [window for _, window in chosen], rows=rows, widths=[width], vocab_size=vocab_size
    )
    return list(sampled), np.asarray([document for document, _ in chosen])
