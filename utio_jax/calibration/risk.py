# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents by shared 8-grams: one group in splits and in tests.

What `utio_jax.calibration.guarantee` needs where a unit is a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from utio_jax.calibration.guarantee import half_of

if TYPE_CHECKING:
    from scipy import sparse

# Tokens per shingle, and an odd number with well-mixed bits (2^64 over the golden ratio).
_SHINGLE = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)

_SIMILARITY = 1 / 3
_BLOCK = 256  # Documents that are compared with all others at once.


def group_near_duplicates(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Returns `[document]`: the group of each, numbered by first appearance.

    Documents are joined, also through others, where the Jaccard similarity of their sets of
    8-grams (all of a shorter document) reaches a third. That is what two documents of one length
    have that share half their 8-grams: copies with up to 8 % of the tokens changed.

    Raises:
      ValueError: a document is empty.
    """
    from scipy import sparse  # Half a second to import, which `import utio_jax` has no use for.
    from scipy.sparse import csgraph

    for index, document in enumerate(documents):
        if len(document) == 0:
            raise ValueError(
                f"Wanted documents of at least one token. Document {index} is empty. Leave it out."
            )
    if not documents:
        return np.zeros(0, np.int64)
    sets = [_shingles(document) for document in documents]
    owners, weight = owners_of(sets)
    sizes, pairs = np.asarray([len(shingles) for shingles in sets]), []
    for start in range(0, len(sets), _BLOCK):
        shared = ((owners[start : start + _BLOCK] * weight) @ owners.T).tocoo()
        one, other = shared.row + start, shared.col
        alike = shared.data >= _SIMILARITY * (sizes[one] + sizes[other] - shared.data)
        pairs.append(np.stack([one[alike], other[alike]]))
    joined = np.concatenate(pairs, axis=1)
    graph = sparse.coo_array((np.ones(joined.shape[1]), joined), shape=(len(sets), len(sets)))
    return csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def owners_of(sets: Sequence[np.ndarray]) -> tuple[sparse.csr_array, np.ndarray]:
    """Returns `[document, column]`, the shingles of each document, and each column's weight.

    Shingles that the same documents have are one column, weighted by their number: so a header
    that many documents share costs one product of each pair, however long it is.
    """
    from scipy import sparse

    names, column = np.unique(np.concatenate(sets), return_inverse=True)
    row = np.repeat(np.arange(len(sets)), [len(shingles) for shingles in sets])
    marks = np.random.default_rng(0).integers(0, 2**64, len(sets), dtype=np.uint64)
    owned = np.zeros(len(names), np.uint64)
    np.add.at(owned, column, marks[row])  # A hash of the documents that have it.
    _, first, weight = np.unique(owned, return_index=True, return_counts=True)
    every = sparse.csr_array((np.ones(len(row), np.int64), (row, column)))
    return every[:, first], weight


def split_documents(
    documents: Sequence[np.ndarray], *, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns two halves of the documents, drawn at random; copies stay on one side.

    Near-duplicates of what policies were fitted to pass any test with ease, and say nothing of
    other text.

    Args:
      documents: token ids, none empty.
      seed: of the draw.
    """
    groups = group_near_duplicates(documents)
    drawn = np.random.default_rng(seed).permutation(int(groups.max(initial=-1)) + 1)
    fits = half_of(groups, seed)
    place = np.argsort(drawn)[groups].tolist()
    first = sorted(np.flatnonzero(fits).tolist(), key=place.__getitem__)
    second = np.flatnonzero(~fits).tolist()
    return [documents[index] for index in first], [documents[index] for index in second]


def _shingles(document: np.ndarray) -> np.ndarray:
    """Returns the sorted hashes of a document's 8-grams, each once."""
    ids = np.asarray(document).astype(np.uint64)
    length = min(_SHINGLE, len(ids))
    hashes = np.full(len(ids) - length + 1, length, np.uint64)
    for offset in range(length):
        hashes = (hashes ^ ids[offset : offset + len(hashes)]) * _MIX
    return np.unique(hashes)


def risks_of_groups(
    risks: Float[np.ndarray, "candidate document"],
    tokens: Int[np.ndarray, " document"],
    groups: Int[np.ndarray, " document"],
) -> Float[np.ndarray, "candidate group"]:
    """Returns the mean risk of each group's predicted tokens, as of one document."""
    weights = (groups[:, None] == np.unique(groups)) * tokens[:, None]
    return risks @ weights / weights.sum(axis=0)
