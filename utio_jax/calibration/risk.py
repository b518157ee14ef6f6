# SPDX-License-Identifier: Apache-2.0
"""How far depth may be cut at a promised risk: Learn-then-Test over whole documents.

The risk of a document is the share of its predicted tokens whose most probable token differs from
full depth's, in [0, 1]. The promise is about its mean over documents like those tested, each drawn
on its own: so near-duplicates are one unit, and no token counts as independent of its neighbours.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

# Tokens per shingle, and an odd number with well-mixed bits (2^64 over the golden ratio).
_SHINGLE = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)

# Bets are sized to reach a p-value of 1/20. Others stay valid, and at 0.1 or 0.01 lose little.
_AIM = 2 * math.log(20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `control` found.

    Attributes:
      chosen: index of the cheapest candidate that may be used; None leaves only full depth.
      p_values: `[candidate]`, of its mean risk being above the bound. Those beyond the first that
        was not rejected decide nothing.
      means: `[candidate]`, its mean risk over the units.
      units: how many were tested.
      needed: fewest with which anything could have been chosen.
    """

    chosen: int | None
    p_values: tuple[float, ...]
    means: tuple[float, ...]
    units: int
    needed: int


def control(
    risks: np.ndarray,
    *,
    max_risk: float,
    confidence: float,
    looks: int = 1,
    seed: int = 0,
    binary: bool = False,
) -> Result:
    """Returns the cheapest candidate whose mean risk is at most `max_risk`, at a confidence.

    Learn-then-Test (Angelopoulos et al. 2021, arXiv 2110.01052) by fixed-sequence testing: the
    candidates are tested in order, each at the level 1 - confidence, up to the first whose mean
    risk may still be above the bound. Whatever the risks, a candidate above the bound is chosen
    with a probability of at most 1 - confidence, over the draw of the units.

    Args:
      risks: `[candidate, unit]` in [0, 1], safest candidate first. The order must not come from
        these units, nor may the candidates.
      max_risk: the bound, in (0, 1).
      confidence: in (0, 1).
      looks: how many times these units are asked, each for candidates of its own, of which one may
        be picked by what comes out: each is tested at the level (1 - confidence) / looks, so that
        all promises hold at once with that confidence.
      seed: of the order in which units are bet on. Trying several voids the promise.
      binary: all risks are 0 or 1, and known to be so beforehand: the exact binomial test, which no
        order enters.

    Raises:
      ValueError: risks of another form or range, or fewer units than `units_needed`.
    """
    if risks.ndim != 2 or not len(risks):
        raise ValueError(
            f"Wanted risks [candidate, unit] of at least one candidate. Got shape {risks.shape}. "
            f"Give one row per candidate, safest first."
        )
    units = risks.shape[1]
    needed = check_units(
        units, max_risk=max_risk, confidence=confidence, looks=looks, binary=binary
    )
    if not ((risks >= 0) & (risks <= 1)).all():
        raise ValueError(
            f"Wanted risks from 0 to 1. Got {risks.min()} to {risks.max()}. Give shares of "
            f"tokens, and leave out documents that predict none."
        )
    if binary and not np.isin(risks, (0, 1)).all():
        raise ValueError(
            f"Wanted risks of 0 or 1 with binary=True. Got {risks[~np.isin(risks, (0, 1))][0]}. "
            "Leave it out for shares."
        )
    order = np.random.default_rng(seed).permutation(units)
    test = _binomial if binary else _p_values
    p_values = test(risks[:, order], max_risk)
    kept = [*(p_values <= (1 - confidence) / looks), False].index(False)
    return Result(
        chosen=kept - 1 if kept else None,
        p_values=tuple(p_values.tolist()),
        means=tuple(risks.mean(axis=1).tolist()),
        units=units,
        needed=needed,
    )


def check_units(
    units: int, *, max_risk: float, confidence: float, looks: int = 1, binary: bool = False
) -> int:
    """Returns `units_needed`, once it is known that there are as many.

    Raises:
      ValueError: there are fewer.
    """
    needed = units_needed(max_risk, confidence, looks, binary=binary)
    if units < needed:
        several = f" for each of {looks} policies" if looks > 1 else ""
        raise ValueError(
            f"Wanted at least {needed} documents for max_disagreement={max_risk} at confidence "
            f"{confidence}{several}, near-duplicates counted once. Got {units}. Give more text "
            f"with --text, or ask for less{' or for fewer policies' if several else ''}."
        )
    return needed


def units_needed(
    max_risk: float, confidence: float, looks: int = 1, *, binary: bool = False
) -> int:
    """Returns the fewest units with which a candidate can be chosen, even if its risks are all 0.

    Raises:
      ValueError: an argument is not between 0 and 1.
    """
    for name, value in (("max_disagreement", max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(
                f"Wanted {name} between 0 and 1, both excluded. Got {value}. Use for example "
                f"max_disagreement=0.05 at confidence=0.95."
            )
    # No bet gains more than a factor of 1 + max_risk per unit.
    level = (1 - confidence) / looks
    if binary:
        return math.ceil(math.log(level) / math.log1p(-max_risk))
    least = math.ceil(-math.log(level) / math.log1p(max_risk))
    counts = range(least, 2 * least + 10)
    return counts[
        bisect.bisect_left(
            counts,
            True,
            key=lambda units: bool(_p_values(np.zeros((1, units)), max_risk)[0] <= level),
        )
    ]


def _p_values(risks: np.ndarray, max_risk: float) -> np.ndarray:
    """Returns `[candidate]`: p-values of a mean risk above `max_risk`, for `[candidate, unit]`.

    One over the most wealth that bets on low risks ever reach (Waudby-Smith & Ramdas 2024,
    "Estimating means of bounded random variables by betting"; bets of Bates et al. 2021, arXiv
    2101.02703). If the mean is above the bound no bet gains on average, and wealth reaches 1 / p
    with a probability of at most p (Ville). A bet knows only earlier units, and is larger the less
    they varied: documents' risks vary little, where Hoeffding-Bentkus expects the most.
    """
    units = risks.shape[1]
    seen = np.arange(2, units + 2)  # With the prior's mean of 1/2 and variance of 1/4 as one unit.
    means = (0.5 + np.cumsum(risks, axis=1)) / seen
    variances = (0.25 + np.cumsum((risks - means) ** 2, axis=1)) / seen
    before = np.concatenate([np.full((len(risks), 1), 0.25), variances[:, :-1]], axis=1)
    bets = np.minimum(1.0, np.sqrt(_AIM / (units * before)))
    wealth = np.cumsum(np.log1p(bets * (max_risk - risks)), axis=1)
    return np.exp(-np.maximum(wealth.max(axis=1), 0.0))


def _binomial(risks: np.ndarray, max_risk: float) -> np.ndarray:
    """Returns `[candidate]`: the chance of as few errors, if each unit had `max_risk` of one."""
    return np.asarray(stats.binom.cdf(risks.sum(axis=1), risks.shape[1], max_risk))


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


def half_of(groups: np.ndarray, seed: int) -> np.ndarray:
    """Returns which units a ladder is made of: about half, whole groups, drawn at random."""
    names, member = np.unique(groups, return_inverse=True)
    sizes = np.bincount(member)
    order = np.random.default_rng(seed).permutation(len(names))
    fits = np.zeros(len(names), np.bool_)
    held = 0
    for group in order.tolist():  # As near to one half as whole groups come.
        if abs(2 * (held + sizes[group]) - len(groups)) < abs(2 * held - len(groups)):
            fits[group] = True
            held += sizes[group]
    return fits[member]
