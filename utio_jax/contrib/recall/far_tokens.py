# SPDX-License-Identifier: Apache-2.0
"""Long-range retrieval tasks: facts stated once in a prompt, and asked for at its end.

    ... running text ... FACT ... running text ... | question | answer
    first three quarters of the prompt                          what is scored

Loss on running text rewards what is near. A model that read its prompt shallowly can keep that loss
and lose every fact that was stated once, far back: these tasks tell. Needle-in-a-haystack tests
(Kamradt 2023) and RULER (Hsieh et al. 2024, arXiv 2404.06654) are their kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from utio_jax.contrib.recall.intervals import paired_interval, rate_interval
from utio_jax.core.decoder import Decoder, Params
from utio_jax.policies.base import Signal
from utio_jax.prompts.evaluate import PromptRows, continuations, prompt_rows
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.prompts import PromptChoice

TASKS = ("lookup", "name", "copy")
"""A five-digit code of one of three things; a name mentioned once; words repeated from far back."""

_THINGS = (
    "red house", "old bridge", "north gate", "silver car", "green door", "stone tower",
    "blue boat", "small garden", "west wing", "white tent", "iron box", "corner shop",
)  # fmt: skip
_FIRST = ("Martha", "Oliver", "Daniel", "Sophie", "Victor", "Helena", "Arthur", "Nina")
_LAST = ("Brown", "Fisher", "Miller", "Carter", "Stone", "Walker", "Turner", "Baker")
_ROLES = ("captain of the ship", "owner of the mill", "head of the school", "mayor of the town")
SEED_TOKENS, COPIED_TOKENS = 12, 8
"""Of copied text: tokens that the question repeats, and those that the answer does."""
SHORTEST_TEXT = 8 * SEED_TOKENS
"""Tokens of running text around facts, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarRows:
    """Prompts that end with a question, and their answers.

    Attributes:
      task: one of `TASKS`.
      rows: prompts of one length, each followed by its answer.
      distances: tokens from the fact to the end of its prompt.
    """

    task: str
    rows: PromptRows
    distances: Int[np.ndarray, " row"]


def far_rows(
    task: str,
    filler: Sequence[np.ndarray],
    encode: Callable[[str], Sequence[int]],
    *,
    decoder: Decoder,
    prompt_tokens: int,
    count: int,
    batch: int = 8,
    seed: int = 0,
) -> FarRows:
    """Returns rows of a retrieval task, all of them drawn from the seed.

    Args:
      task: one of `TASKS`.
      filler: running text as token ids, in which facts are hidden.
      encode: a text's token ids, without special tokens.
      decoder: whose vocabulary and context the rows must fit.
      prompt_tokens: of each prompt, facts and question included.
      count: rows.
      batch: rows per pass.
      seed: of facts, places and passages.

    Raises:
      ValueError: an unknown task, too little text, or prompts too short for a question.
    """
    if task not in TASKS:
        raise ValueError(f"Wanted a task of {', '.join(TASKS)}. Got {task!r}.")
    if count < 1:
        raise ValueError(f"Wanted at least one row. Got {count}.")
    rng = np.random.default_rng([seed, TASKS.index(task)])
    made = [_row(task, filler, encode, rng, prompt_tokens) for _ in range(count)]
    return FarRows(
        task=task,
        rows=prompt_rows(
            [row for row, _ in made], prompt_tokens=prompt_tokens, batch=batch, decoder=decoder
        ),
        distances=np.asarray([distance for _, distance in made]),
    )


def _row(
    task: str,
    filler: Sequence[np.ndarray],
    encode: Callable[[str], Sequence[int]],
    rng: np.random.Generator,
    prompt_tokens: int,
) -> tuple[np.ndarray, int]:
    """Returns one row, and how far its fact is from the end of the prompt."""
    if task == "copy":
        passage = running_text(filler, prompt_tokens - SEED_TOKENS, rng)
        known = SEED_TOKENS + COPIED_TOKENS
        start = int(rng.integers(0, max(1, len(passage) * 3 // 4 - known)))
        again = passage[start : start + known]
        return np.concatenate([passage, again]), prompt_tokens - start - known
    facts, question, answer = _facts(task, rng)
    told = [np.asarray(encode(f"\n{fact}\n")) for fact in facts]
    asked, answered = np.asarray(encode(f"\n{question}")), np.asarray(encode(answer))
    room = prompt_tokens - len(asked) - sum(map(len, told))
    passage = running_text(filler, room, rng)
    places = np.sort(rng.integers(0, max(1, room * 3 // 4), len(told)))
    order = rng.permutation(len(told))  # Which of them stands where; number 0 is asked for.
    pieces, distance, done = [], 0, 0
    for place, which in zip(places, order, strict=True):
        pieces += [passage[done:place], told[which]]
        done = place
        if which == 0:
            distance = prompt_tokens - sum(map(len, pieces))
    return np.concatenate([*pieces, passage[done:], asked, answered]), distance


def _facts(task: str, rng: np.random.Generator) -> tuple[list[str], str, str]:
    """Returns facts, of which the first is asked for, the question and the answer."""
    if task == "lookup":
        things = rng.choice(_THINGS, 3, replace=False)
        codes = [f"{code:05d}" for code in rng.integers(0, 100_000, 3)]
        facts = [
            f"The code of the {thing} is {code}." for thing, code in zip(things, codes, strict=True)
        ]
        return facts, f"The code of the {things[0]} is", f" {codes[0]}"
    role, name = rng.choice(_ROLES), f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    return [f"The {role} was called {name}."], f"The {role} was called", f" {name}"


def running_text(filler: Sequence[np.ndarray], size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns so many tokens of running text from one document.

    Args:
      filler: documents as token ids; longer ones are drawn more often.
      size: tokens.
      rng: draws the document, and the place in it.

    Raises:
      ValueError: fewer than 96 tokens are asked for, or no document has so many.
    """
    if size < SHORTEST_TEXT:
        raise ValueError(
            "Wanted prompts with at least 96 tokens of running text around facts and question. "
            f"Got room for {size}. Ask for a longer --prompt-tokens."
        )
    long = [document for document in filler if len(document) >= size]
    if not long:
        longest = max(map(len, filler), default=0)
        raise ValueError(
            f"Wanted documents of at least {size} tokens to hide facts in. Got at most {longest}. "
            "Add longer text, or ask for a shorter --prompt-tokens."
        )
    room = np.asarray([len(document) - size + 1 for document in long], float)
    document = long[rng.choice(len(long), p=room / room.sum())]
    start = int(rng.integers(0, len(document) - size + 1))
    return np.asarray(document[start : start + size])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarAnswers:
    """How far a model gave the answers.

    Attributes:
      exact: whether every token of a row's answer was the most probable one, given those before it:
        what greedy decoding would have said.
      tokens: share of such tokens in each row's answer.
      nll: loss of each answer's tokens in nats, their mean.
    """

    exact: Bool[np.ndarray, " row"]
    tokens: Float[np.ndarray, " row"]
    nll: Float[np.ndarray, " row"]


def far_answers(
    decoder: Decoder,
    params: Params,
    far: FarRows,
    choice: PromptChoice | None,
    *,
    gate: Signal | None = None,
    executor: Executor = MicroBatches(),
    progress: Callable[[], None] | None = None,
) -> FarAnswers:
    """Returns which answers a model gives after prompts that were read in one way.

    Args:
      decoder: the model.
      params: its parameters.
      far: the questions.
      choice: how prompts are read; None: in full. Answers always run in full.
      gate: for `by="gate"`.
      executor: how live slots are run.
      progress: called after each batch.

    Raises:
      ValueError: a choice that does not fit the model.
    """
    found = continuations(
        decoder, params, far.rows, choice, gate=gate, executor=executor, progress=progress
    )
    ends = np.concatenate([ends for _, ends in far.rows.batches])[: far.rows.rows]
    sizes = ends - far.rows.prompt_tokens
    return FarAnswers(
        exact=found.right == sizes, tokens=found.right / sizes, nll=found.losses / sizes
    )


def far_summary(far: FarRows, found: FarAnswers, full: FarAnswers) -> dict[str, Any]:
    """Returns accuracies beside full depth's, by distance, as JSON can hold them.

    `difference` is in points of exact answers; `interval` is its exact paired one over rows at 95 %
    and `exact_interval` that of `exact`, see `utio_jax.contrib.recall.intervals`. None: fewer than
    five rows.
    """
    gain = 100.0 * (found.exact.astype(float) - full.exact)
    interval, alone = paired_interval(found.exact, full.exact), rate_interval(found.exact)
    prompt = far.rows.prompt_tokens
    edges = [round(prompt * share) for share in (0, 0.5, 0.75)] + [prompt + 1]
    by_distance = []
    for start, stop in itertools.pairwise(edges):
        here = (far.distances >= start) & (far.distances < stop)
        if here.any():
            by_distance.append(
                {
                    "from": start,
                    "to": stop - 1,
                    "rows": int(here.sum()),
                    "exact": round(float(found.exact[here].mean()), 4),
                    "exact_full": round(float(full.exact[here].mean()), 4),
                }
            )
    return {
        "task": far.task,
        "rows": far.rows.rows,
        "exact": round(float(found.exact.mean()), 4),
        "exact_interval": None if alone is None else [round(each, 4) for each in alone],
        "exact_full": round(float(full.exact.mean()), 4),
        "difference": round(float(gain.mean()), 2),
        "interval": None if interval is None else [round(100 * each, 2) for each in interval],
        "tokens_right": round(float(found.tokens.mean()), 4),
        "tokens_right_full": round(float(full.tokens.mean()), 4),
        "nll": round(float(found.nll.mean()), 4),
        "nll_full": round(float(full.nll.mean()), 4),
        "by_distance": by_distance,
    }
