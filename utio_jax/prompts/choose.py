# SPDX-License-Identifier: Apache-2.0
"""Chooses the prefill (stop, share and signal) within a limit on the loss after the prompt.

A text is split by documents into three parts. K/V maps are fitted to the first. The second chooses
the cheapest prefill within the limit. Figures come from the third, with controls that a choice by
importance has to beat. Controls are: as many tokens by chance, none, and the same tokens with the
others hidden or their last states copied.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.calibration.risk import group_near_duplicates
from utio_jax.core.decoder import Decoder, Params
from utio_jax.evaluation.intervals import FEWEST
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.evaluate import (
    Continuations,
    PromptRows,
    PromptSizes,
    continuations,
    cut_rows,
    increase_interval,
    prompt_flops_ratio,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptText:
    """A text in three parts: to fit maps, to choose a prefill, and to report.

    `parts` is "documents", or "parts of documents" where there are too few of them.
    """

    fit: tuple[np.ndarray, ...]
    calibrate: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    parts: str


def split_text(documents: Sequence[np.ndarray], *, seed: int = 0) -> PromptText:
    """Returns documents in three parts: of five, three, one and one.

    Whole documents, in an order drawn from the seed; copies stay in one part (`split_documents`).
    Fewer than five, copies counted once, are cut into tenths: the first six, the next two and the
    last two make the parts: neighbours meet at two borders.
    """
    groups = group_near_duplicates(documents)
    if (count := len(set(groups.tolist()))) < FEWEST:
        tenths = [np.array_split(np.asarray(document), 10) for document in documents]
        fit, calibrate, test = (
            tuple(piece for pieces in tenths for piece in pieces[some])
            for some in (slice(0, 6), slice(6, 8), slice(8, 10))
        )
        return PromptText(fit=fit, calibrate=calibrate, test=test, parts="parts of documents")
    order, fifth = np.random.default_rng(seed).permutation(count), count // 5
    test, calibrate, fit = (
        tuple(
            np.asarray(documents[index])
            for group in part
            for index in np.flatnonzero(groups == group).tolist()
        )
        for part in np.split(order, [fifth, 2 * fifth])
    )
    return PromptText(fit=fit, calibrate=calibrate, test=test, parts="documents")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """One prefill choice, measured on the test part.

    Attributes:
      choice: with its figures.
      interval: of the loss increase in %, 95 %, over documents; None: the test part, a fifth of
        all, has fewer than five.
      role: "chosen", "best" where none was within the limit, or "control".
    """

    choice: PromptChoice
    interval: tuple[float, float] | None
    role: str

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        interval = None if self.interval is None else [round(x, 4) for x in self.interval]
        return {"role": self.role, **self.choice.to_json(), "interval": interval}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptStudy:
    """Result of `choose_prompt`.

    Attributes:
      candidates: as measured on the calibrate part.
      chosen: the cheapest of them within the limit; None: there is none.
      test: it, or the best one, and controls, on the test part.
      nll_full: of full depth there, nats per token.
      limit: of the loss increase, %.
    """

    candidates: tuple[PromptChoice, ...]
    chosen: PromptChoice | None
    test: tuple[Reading, ...]
    nll_full: float
    limit: float

    @property
    def verdict(self) -> str:
        """The result, in one or two sentences."""
        first = self.test[0]
        interval = f"no interval: fewer than {FEWEST} documents to test"
        if first.interval is not None:
            interval = ", ".join(f"{end:+.2f}" for end in first.interval)
        measured = (
            f"{first.choice.label}: {first.choice.nll_increase_pct:+.2f} % loss [{interval}] at "
            f"{first.choice.flops_ratio:.3f} of the prompt's FLOPs, on the test part"
        )
        if self.chosen is None:
            return (
                f"Nothing pays within +{self.limit:g} % on the calibrate part; the best was "
                f"{measured}. Read prompts in full, stop deeper, or let more tokens go deep."
            )
        lost, caveat = first.choice.nll_increase_pct or 0.0, ""
        if lost > self.limit:
            caveat = f" That is beyond the limit of +{self.limit:g} %: more rows needed."
        random = [reading.choice for reading in self.test if reading.choice.by == "random"]
        if any((choice.nll_increase_pct or 0.0) <= lost for choice in random):
            caveat += " As many tokens by chance do no worse."
        return f"Chosen: {measured}.{caveat}"


def choose_prompt(
    decoder: Decoder,
    params: Params,
    text: PromptText,
    candidates: Sequence[PromptChoice],
    *,
    limit: float,
    sizes: PromptSizes = PromptSizes(),
    progress: Callable[[str], None] | None = None,
) -> PromptStudy:
    """Returns the cheapest prefill within a loss limit, with figures on other text.

    Args:
      decoder: the model; with KV maps where a candidate asks for them.
      params: its parameters.
      text: its calibrate and test parts are read.
      candidates: at least one.
      limit: of the loss increase, %.
      sizes: of the rows of each of these two parts.
      progress: called with what happens next; None: nothing is.

    Raises:
      ValueError: no candidates, too little text, or a candidate that does not fit the model.
    """
    if not candidates:
        raise ValueError("Wanted at least one prefill choice. Got none.")
    say = progress or (lambda _: None)

    def measure(
        rows: PromptRows, choice: PromptChoice, full: Continuations, *, batches: int | None
    ) -> tuple[PromptChoice, Continuations]:
        shallow = continuations(decoder, params, rows, choice)
        ratio = prompt_flops_ratio(decoder, params, rows, choice, batches=batches)
        increase = 100 * (shallow.loss / full.loss - 1)
        measured = dataclasses.replace(choice, flops_ratio=ratio, nll_increase_pct=increase)
        say(f"{measured.label}: {increase:+.2f} %, {ratio:.3f} of the FLOPs")
        return measured, shallow

    calibrate, test = (
        cut_rows(part, sizes, decoder=decoder) for part in (text.calibrate, text.test)
    )
    say(f"calibrate: {calibrate.rows} rows of {sizes.prompt_tokens} + {sizes.continuation} tokens")
    full = continuations(decoder, params, calibrate, None)
    measured = [measure(calibrate, choice, full, batches=1)[0] for choice in candidates]
    cost: Callable[[Any], float] = operator.attrgetter("flops_ratio")
    loss: Callable[[Any], float] = operator.attrgetter("nll_increase_pct")
    good = [choice for choice in measured if loss(choice) <= limit and cost(choice) < 1]
    # To the second digit: which tokens go deep moves the padding a little.
    chosen = min(good, key=lambda choice: (round(cost(choice), 2), loss(choice)), default=None)
    first = chosen or min(measured, key=loss)
    say(f"test: {test.rows} rows")
    full = continuations(decoder, params, test, None)
    documents = 0 * test.documents  # Pieces of a few documents count as one, as do copies.
    if text.parts == "documents":
        documents = group_near_duplicates(text.test)[test.documents]
    readings = []
    for role, choice in [
        ("best" if chosen is None else "chosen", first),
        *(("control", control) for control in controls_of(first)),
    ]:
        tested, shallow = measure(test, choice, full, batches=None)
        interval = increase_interval(shallow, full, documents)
        readings.append(Reading(choice=tested, interval=interval, role=role))
    return PromptStudy(
        candidates=tuple(measured),
        chosen=chosen,
        test=tuple(readings),
        nll_full=full.loss / test.tokens,
        limit=limit,
    )


def controls_of(choice: PromptChoice) -> tuple[PromptChoice, ...]:
    """Returns the controls of a choice; each but the first differs from it in one option.

    As many tokens by chance; no token deep but the last; the others hidden; and their last states
    copied, or mapped where the choice copies them. Without deep tokens chance has none to deal out.
    """
    bare = dataclasses.replace(choice, flops_ratio=None, nll_increase_pct=None)
    other = [kv for kv in ("drop", "propagate") if kv != choice.kv]
    frozen = [dataclasses.replace(bare, kv=kv) for kv in other]
    by = [
        dataclasses.replace(bare, by=by)
        for by in ("random", "none")
        if choice.by not in (by, "none")
    ]
    return (*by, *frozen)
