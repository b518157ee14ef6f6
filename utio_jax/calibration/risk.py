# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents: found by shared 8-grams, kept on one side of a split, tested as one.

What `utio_jax.calibration.guarantee` needs where a unit is a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Tokens per shingle, and an odd number with well-mixed bits (2^64 over the golden ratio).
_SHINGLE = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)


def group_near_duplicates(
    documents: Sequence[np.ndarray], *, similarity: float = 1 / 3
) -> np.ndarray:
    """Returns `[document]`: which group each belongs to, numbered by first appearance.

    Documents are joined, also through others, where the Jaccard similarity of their sets of
    8-grams (all of a shorter document) reaches `similarity`. A third is what two documents of one
    length have that share half their 8-grams: copies with up to 8 % of the tokens changed. The time
    is nearly in proportion to the text: of members of a group that share a shingle, the first eight
    are looked at.

    Args:
      documents: token ids.
      similarity: in (0, 1].

    Raises:
      ValueError: the similarity is out of range, or a document is empty.
    """
    if not 0 < similarity <= 1:
        raise ValueError(
            f"Wanted a similarity above 0, at most 1. Got {similarity}. 1 joins equal sets only."
        )
    for index, document in enumerate(documents):
        if len(document) == 0:
            raise ValueError(
                f"Wanted documents of at least one token. Document {index} is empty. Leave it out."
            )
    sets = [_shingles(document) for document in documents]
    ordered, alone = _rarest_first(sets)
    groups = _Groups(len(sets))
    # Two sets of that similarity share a shingle among the rarest of each (prefix filtering,
    # Chaudhuri et al. 2006): what all have, as a header, is common and comes last. Small sets
    # first, so that a shorter prefix of each will do where it is looked for by larger ones.
    owners: dict[int, set[int]] = {}
    for number in sorted(range(len(sets)), key=lambda index: len(sets[index])):
        mine, size = ordered[number], len(sets[number])
        # Those that no other set has, the first of all, need not be looked for.
        first = int(np.searchsorted(mine, alone))
        looked_for = mine[first : size - _least(similarity * size) + 1].tolist()
        known = set[int]().union(*(owners[each] for each in looked_for if each in owners))
        for other in sorted(known):
            apart = groups.of(other) != groups.of(number)
            if apart and _alike(sets[other], sets[number], similarity):
                groups.join(other, number)
        mine_now = groups.of(number)
        mates = {other for other in known if groups.of(other) == mine_now}
        kept = size - _least(2 * similarity / (1 + similarity) * size) + 1
        for shingle in mine[first:kept].tolist():
            listed = owners.setdefault(shingle, set())
            # Of a group a few stand for all that own a shingle: else a header that is most of many
            # documents would make as many pairs as there are.
            if len(listed & mates) < _STAND_INS:
                listed.add(number)
    found = np.asarray([groups.of(index) for index in range(len(sets))], np.int64)
    return np.unique(found, return_inverse=True)[1]


_STAND_INS = 8


class _Groups:
    """Which of numbered things are joined: union-find, a group named by its lowest member."""

    def __init__(self, count: int):
        self._parent = list(range(count))

    def of(self, index: int) -> int:
        """Returns the group's name."""
        parent = self._parent
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    def join(self, a: int, b: int) -> None:
        """Makes two groups one."""
        low, high = sorted((self.of(a), self.of(b)))
        self._parent[high] = low


def _least(overlap: float) -> int:
    """Returns the least whole number that is at least `overlap`, rounding errors apart."""
    return max(1, math.ceil(overlap - 1e-9))


def _alike(first: np.ndarray, second: np.ndarray, similarity: float) -> bool:
    """Returns whether two sorted sets have that Jaccard similarity."""
    if min(len(first), len(second)) < similarity * max(len(first), len(second)) - 1e-9:
        return False
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared >= similarity * (len(first) + len(second) - shared)


def _rarest_first(sets: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Returns each set by its shingles' ranks, those that few sets have first, in order.

    And how many of the ranks are of shingles that one set alone has.
    """
    if not sets:
        return [], 0
    names, where, counts = np.unique(np.concatenate(sets), return_inverse=True, return_counts=True)
    place = np.empty(len(names), np.int64)
    place[np.lexsort((names, counts))] = np.arange(len(names))
    ends = np.cumsum([len(each) for each in sets])
    ranks = [np.sort(part) for part in np.split(place[where], ends[:-1])]
    return ranks, int((counts == 1).sum())


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
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_near_duplicates(documents).tolist()):
        members.setdefault(group, []).append(index)
    order = np.random.default_rng(seed).permutation(len(members)).tolist()
    first: list[int] = []
    for group in order:  # As near to one half as whole groups come.
        wider = len(first) + len(members[group])
        if abs(2 * wider - len(documents)) < abs(2 * len(first) - len(documents)):
            first += members[group]
    chosen = set(first)
    rest = [document for index, document in enumerate(documents) if index not in chosen]
    return [documents[index] for index in first], rest


def _shingles(document: np.ndarray) -> np.ndarray:
    """Returns the sorted hashes of a document's 8-grams, each once."""
    ids = np.asarray(document).astype(np.uint64)
    length = min(_SHINGLE, len(ids))
    hashes = np.full(len(ids) - length + 1, length, np.uint64)
    for offset in range(length):
        hashes = (hashes ^ ids[offset : offset + len(hashes)]) * _MIX
    return np.unique(hashes)


def risks_of_groups(risks: np.ndarray, tokens: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns `[candidate, group]`: the mean risk of each group's tokens.

    So a group counts as if its documents were one, laid end to end.

    Args:
      risks: `[candidate, document]`.
      tokens: `[document]`, how many each predicts.
      groups: `[document]`, of `group_near_duplicates`.

    Raises:
      ValueError: shapes that do not fit, or a document that predicts nothing.
    """
    if risks.ndim != 2 or not risks.shape[1:] == tokens.shape == groups.shape:
        raise ValueError(
            f"Wanted risks [candidate, document], tokens and groups [document]. Got shapes "
            f"{risks.shape}, {tokens.shape}, {groups.shape}. Give all of the same documents."
        )
    if (tokens < 1).any():
        raise ValueError(
            f"Wanted documents that predict at least one token. Document {np.argmin(tokens)} "
            f"predicts {tokens.min()}. Leave it out."
        )
    weights = (groups[:, None] == np.unique(groups)) * tokens[:, None]
    return risks @ weights / weights.sum(axis=0)
