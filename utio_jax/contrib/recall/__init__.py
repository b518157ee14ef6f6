# SPDX-License-Identifier: Apache-2.0
"""Recall over distance: a fact at several distances before a question.

    passage ... FACT ... passage ... | question | answer
                    |<- distance ->|            what is scored

All rows of a case are alike but for the place of the fact, and the question always stands at the
same position: so what changes with the distance is the distance. In a case's last row the fact is
not stated at all. What that costs at full depth is what the model *recalls*; what an early exit
costs there is harm to guessing, and no loss of recall.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import binomtest

from utio_jax.core.decoder import Decoder, Params
from utio_jax.evaluation.intervals import ratio_interval
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import Thresholded, given_depths
from utio_jax.prompts.evaluate import PromptRows, continuations, prompt_rows
from utio_jax.staircase.reference import FrozenKV

__all__ = [
    "Recall",
    "RecallCase",
    "RecallRows",
    "recall",
    "recall_cases",
    "recall_lost",
    "recall_rows",
    "shallow_contexts",
]

RECALL_TASKS = ("constant", "name", "line")
"""A number of five digits by its name; the second half of a class's name; a line of other text."""

_KNOWN_TOKENS, _COPIED_TOKENS = 12, 8  # Of a line: those of the question, those of the answer.
_SHORTEST_TEXT = 8 * _KNOWN_TOKENS
_UNIT = 16  # Widths of rows are multiples of it.
_FIRST = (
    "Harbor", "Copper", "Meadow", "Falcon", "Velvet", "Orchid", "Timber", "Saddle",
    "Canyon", "Walnut", "Marble", "Pepper", "Anchor", "Cotton", "Lantern", "Rocket",
)  # fmt: skip
_SECOND = (
    "Ledger", "Pirate", "Guitar", "Window", "Doctor", "Candle", "Basket", "Mirror",
    "Garden", "Planet", "Bridge", "Turtle", "Hammer", "Violin", "Carpet", "Castle",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallCase:
    """One fact, a question about it and the answer, as token ids.

    The passage is running text, as long as fact and all other text before the question; the fact
    states the answer's own tokens once; the question comes right before the answer.
    """

    passage: Int[np.ndarray, " passage"]
    fact: Int[np.ndarray, " fact"]
    question: Int[np.ndarray, " question"]
    answer: Int[np.ndarray, " answer"]

    @property
    def farthest(self) -> int:
        """The greatest distance: the fact opens the row."""
        return len(self.passage) - len(self.fact)

    def row(self, distance: int | None) -> Int[np.ndarray, " token"]:
        """Returns the row with so many tokens between fact and question; None: without the fact."""
        start, stop = self.span(distance)
        # The text's end is the same whether or not the fact stands before it.
        text, fact = self.passage[stop - start :], self.fact[: stop - start]
        return np.concatenate([text[:start], fact, text[start:], self.question, self.answer])

    def span(self, distance: int | None) -> tuple[int, int]:
        """Returns where the fact begins and ends in `row(distance)`; (0, 0) without one.

        Raises:
          ValueError: a distance that the passage has no room for.
        """
        if distance is None:
            return 0, 0
        if not 0 <= distance <= self.farthest:
            raise ValueError(
                f"Wanted distances from 0 to {self.farthest}, tokens of text around the fact. Got "
                f"{distance}. Ask for longer prompts."
            )
        return self.farthest - distance, self.farthest - distance + len(self.fact)


def recall_cases(
    task: str,
    filler: Sequence[np.ndarray],
    encode: Callable[[str], Sequence[int]],
    *,
    prompt_tokens: int,
    count: int,
    seed: int = 0,
) -> tuple[RecallCase, ...]:
    """Returns cases of a task, one of `RECALL_TASKS`, all of them drawn from the seed.

    Facts are hidden in running text, `filler`, as token ids; `encode` gives a text's, without
    special ones; there are `prompt_tokens` before the answer, in all.

    Raises:
      ValueError: an unknown task, no cases, too little text, or prompts too short for a question.
    """
    if task not in RECALL_TASKS:
        raise ValueError(f"Wanted a task of {', '.join(RECALL_TASKS)}. Got {task!r}.")
    if count < 1:
        raise ValueError(f"Wanted at least one case. Got {count}.")
    rng = np.random.default_rng([seed, 100 + RECALL_TASKS.index(task)])
    cases = []
    for _ in range(count):
        fact, question, answer = _tokens(task, filler, encode, rng)
        passage = running_text(filler, prompt_tokens - len(question), rng)
        cases.append(RecallCase(passage=passage, fact=fact, question=question, answer=answer))
    return tuple(cases)


def running_text(filler: Sequence[np.ndarray], size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns so many tokens of running text from one document; longer ones are drawn more often.

    Raises:
      ValueError: fewer than 96 tokens are asked for, or no document has so many.
    """
    if size < _SHORTEST_TEXT:
        raise ValueError(
            f"Wanted prompts with at least {_SHORTEST_TEXT} tokens of running text around fact and "
            f"question. Got {size}. Ask for longer prompts."
        )
    long = [document for document in filler if len(document) >= size]
    if not long:
        longest = max(map(len, filler), default=0)
        raise ValueError(
            f"Wanted documents of at least {size} tokens to hide facts in. Got at most {longest}. "
            "Add longer text, or ask for shorter prompts."
        )
    places = np.asarray([len(document) - size + 1 for document in long], float)
    document = long[rng.choice(len(long), p=places / places.sum())]
    start = int(rng.integers(0, len(document) - size + 1))
    return np.asarray(document[start : start + size])


def _tokens(
    task: str,
    filler: Sequence[np.ndarray],
    encode: Callable[[str], Sequence[int]],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns fact, question and answer, encoded in pieces, so that they share their tokens."""

    def joined(*pieces: Any) -> np.ndarray:
        return np.concatenate(
            [np.asarray(encode(x)) if isinstance(x, str) else x for x in pieces]
        ).astype(np.int64)

    if task == "line":
        line = running_text(filler, _SHORTEST_TEXT, rng)[: _KNOWN_TOKENS + _COPIED_TOKENS]
        known, answer = line[:_KNOWN_TOKENS], line[_KNOWN_TOKENS:]
        return joined("\n", line, "\n"), joined("\n", known), answer
    first, second = str(rng.choice(_FIRST)), str(rng.choice(_SECOND))
    if task == "constant":
        key, answer = f"_{first}_{second}".upper(), joined(f" {rng.integers(10_000, 100_000)}")
        return joined("\n", key, " =", answer, "\n"), joined("\nassert(", key, " =="), answer
    key, answer = f" {first}", joined(second)
    return joined("\nclass", key, answer, "(object):\n"), joined("\nvalue =", key), answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallRows:
    """Cases with their facts at each distance and, last, without them: `rows[case, which]`, flat.

    Attributes:
      rows: in batches.
      distances: tokens between fact and question.
      questions: start of questions.
      answers: tokens of each case's answer.
    """

    rows: PromptRows
    distances: tuple[int, ...]
    questions: Int[np.ndarray, " row"]
    answers: Int[np.ndarray, " case"]


def recall_rows(
    cases: Sequence[RecallCase], distances: Sequence[int], *, decoder: Decoder, batch: int = 16
) -> RecallRows:
    """Returns all rows of some cases of one length before the answer, in batches.

    Raises:
      ValueError: no cases, cases of several lengths, a distance that is too great, or rows that do
        not fit the model.
    """
    sizes = sorted({len(case.passage) + len(case.question) for case in cases})
    if len(sizes) != 1:
        raise ValueError(
            "Wanted cases of one length before the answer, passage and question together. Got "
            f"{sizes} tokens. Make them with one prompt_tokens."
        )
    every = [(case, distance) for case in cases for distance in (*distances, None)]
    (prompt_tokens,) = sizes
    rows = prompt_rows(
        [case.row(distance) for case, distance in every],
        prompt_tokens=prompt_tokens,
        batch=batch,
        decoder=decoder,
    )
    # Answers of a few tokens more or less shall not recompile.
    width = rows.batches[0][0].shape[1]
    wide = min(-(-width // _UNIT) * _UNIT, decoder.config.context_length) - width
    batches = tuple((np.pad(ids, ((0, 0), (0, wide))), ends) for ids, ends in rows.batches)
    return RecallRows(
        rows=dataclasses.replace(rows, batches=batches),
        distances=tuple(distances),
        questions=np.asarray([prompt_tokens - len(case.question) for case, _ in every]),
        answers=np.asarray([len(case.answer) for case in cases]),
    )


def shallow_contexts(rows: RecallRows, depths: tuple[int, int]) -> list[Thresholded]:
    """Returns one policy per batch, under which all text before the question stops early.

    It runs the first of `depths`, in layers; question and answer run the second.
    """
    size, width = rows.rows.batches[0][0].shape
    missing = len(rows.rows.batches) * size - len(rows.questions)  # They only fill the last batch.
    starts = np.pad(rows.questions, (0, missing)).reshape(-1, size, 1)
    tables = [np.where(np.arange(width) < start, *depths) for start in starts]
    return [given_depths(jnp.asarray(table), depths=depths) for table in tables]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Results of a policy on the answers.

    Attributes:
      bits: per token of the answer; the last column is without the fact.
      exact: whether every token of the answer was the most probable one.
      depths: decided ones, in layers; 0 for padding.
    """

    bits: Float[np.ndarray, "case which"]
    exact: Bool[np.ndarray, "case which"]
    depths: Int[np.ndarray, "row token"]


def recall(
    decoder: Decoder,
    params: Params,
    rows: RecallRows,
    policy: Policy | Sequence[Policy],
    *,
    kv: FrozenKV = "propagate",
) -> Recall:
    """Returns the loss of answers, and which are exact, under a policy, or one per batch.

    Raises:
      ValueError: a policy that does not fit the model, or another number of them than batches.
    """
    result = continuations(decoder, params, rows.rows, policy, kv=kv)
    shape, sizes = (len(rows.answers), -1), rows.answers[:, None]
    return Recall(
        bits=result.losses.reshape(shape) / (sizes * math.log(2)),
        exact=result.right.reshape(shape) == sizes,
        depths=result.depths,
    )


def recall_lost(distances: Sequence[int], result: Recall, full: Recall) -> list[dict[str, Any]]:
    """Returns the loss over full depth at each distance, as JSON-ready rows.

    Bits are per token of the answer, means over cases, between the ends of their 95 % interval: the
    studentised bootstrap over cases, all of a case's rows together
    (`utio_jax.evaluation.intervals.ratio_interval`). None: fewer than five cases.

    - `lost`: bits over full depth.
    - `recalled`: bits that stating the fact saves at full depth.
    - `recall_lost_pct`: how much less it saves here, in % of that; None, too, where it saves
      nothing there, in some draw.
    - `exact`, `exact_full`: share of cases whose whole answer is the most probable one.
    - `exact_interval`: of `exact`, by Clopper and Pearson.
    """
    cases = np.arange(len(full.bits))
    ones, table = np.ones(len(cases)), []
    for which, distance in enumerate(distances):
        lost = result.bits[:, which] - full.bits[:, which]
        saved, saved_full = (x.bits[:, -1] - x.bits[:, which] for x in (result, full))
        exact = rate_interval(result.exact[:, which])
        table.append(
            {
                "distance": distance,
                "lost": _rounded(ratio_interval(lost, ones, cases)),
                "recalled": _rounded(ratio_interval(saved_full, ones, cases)),
                "recall_lost_pct": _rounded(
                    ratio_interval(100 * (saved_full - saved), saved_full, cases)
                ),
                "exact": round(float(result.exact[:, which].mean()), 4),
                "exact_interval": _rounded(exact),
                "exact_full": round(float(full.exact[:, which].mean()), 4),
            }
        )
    return table


def rate_interval(right: Bool[np.ndarray, " row"]) -> tuple[float, float] | None:
    """Returns the exact 95 % interval of a rate (Clopper & Pearson 1934); None: below five rows."""
    if len(right) < 5:
        return None
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _rounded(interval: Sequence[float] | None) -> list[float] | None:
    return None if interval is None else [round(bound, 4) for bound in interval]
