# SPDX-License-Identifier: Apache-2.0
"""Prompts of which most tokens stop early: time to the first token, and in all; part "prompt"."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.bench.rows import Group, Row, plan, timed
from utio_jax.bench.subjects import Subject
from utio_jax.bench.timing import time_programs
from utio_jax.calibration.prompt_choice import rows_of
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.generate import generate
from utio_jax.decoding.prefill import Prefill, exact_prefill
from utio_jax.decoding.prompts import prompt_choice
from utio_jax.evaluation.prompt_cost import prompt_cost
from utio_jax.evaluation.prompts import continuation_losses, prompt_rows
from utio_jax.staircase.prompts import PromptChoice

BUDGETS = (0.5, 0.6)
"""Of a prompt's FLOPs."""

_FULL = ("full", "staircase")
"""Prompts in full, by the program that `generate` takes by itself, and by the staircase. The faster
one is the baseline."""

_ROWS = 48
"""On which losses are measured, in passes of eight."""


def prompt_group(
    subject: Subject,
    shape: tuple[int, int, int],
    rounds: int,
    *,
    budgets: Sequence[float] = BUDGETS,
) -> Group:
    """Returns rows of the first new token and of all, per budget, all programs taking turns.

    Losses are those of the tokens that follow prompts of this length in the subject's own text,
    read in full after prompts that were not.

    Args:
      subject: the model.
      shape: batch, prompt and new tokens.
      rounds: timed turns of each program.
      budgets: of the prompts' FLOPs.
    """
    batch, prompt, output = shape
    asked = {f"prompt@{budget:g}": budget for budget in budgets}

    def planned(method: str, new: int) -> Row:
        setting: dict[str, Any] = {"batch": batch, "prompt": prompt, "output": new}
        if method in asked:
            setting["budget"] = asked[method]
        return plan(subject, "prompt", method, setting, baseline="full")

    outputs = tuple(dict.fromkeys((1, output)))
    rows = {(method, new): planned(method, new) for new in outputs for method in (*_FULL, *asked)}

    def measure() -> list[Row]:
        choices, missing = dict[str, PromptChoice](), dict[str, str]()
        for method, budget in asked.items():
            try:
                choices[method] = prompt_choice(subject.decoder, subject.params, budget)
            except ValueError as error:
                missing[method] = str(error)
        prompts = subject.prompts(batch, prompt)
        how: dict[str, Prefill | None] = {"full": None, "staircase": Prefill()}
        for method, choice in choices.items():
            how[method] = Prefill(policy=choice.policy(subject.decoder), kv=choice.kv)
        run = partial(generate, subject.decoder, subject.params, prompts, eos_ids=())
        programs: dict[str, Any] = {
            f"{method} {new}": partial(run, max_new_tokens=new, prefill=prefill)
            for method, prefill in how.items()
            for new in outputs
        }
        times = time_programs(programs, rounds=rounds)
        losses = _losses(subject, choices, prompt=prompt, output=output)
        done = []
        for (method, new), row in rows.items():
            if method in missing:
                done.append(row.failed(missing[method]))
                continue
            base = min(_FULL, key=lambda name, new=new: times[f"{name} {new}"].median)
            prefill, ratio = how[method], None
            if prefill is not None:
                first = programs[f"{method} 1"]()
                cost = prompt_cost(subject.decoder, subject.params, prefill, prompts, first)
                ratio = cost.flops_ratio
            found = timed(
                dataclasses.replace(row, baseline=base),
                times[f"{method} {new}"],
                against=times[f"{base} {new}"],
                flops_ratio=ratio,
                tokens=batch * new,
                quality=losses.get(method),
            )
            if method in choices:
                found = found.noting(
                    f"{choices[method].label}; the last token, the first four and prompts of up to "
                    "16 run in full; flops of the prompt alone"
                )
            done.append(found)
        return done

    title = f"prompt {subject.name} {batch} x {prompt} + {output}"
    return Group(title=title, rows=tuple(rows.values()), measure=measure)


def shallow_prompts(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    documents: Sequence[np.ndarray],
    *,
    choices: Sequence[PromptChoice] = (),
    budget: float = 0.5,
    tokens: int = 448,
    follow: int = 64,
    rows: int = 12,
    rounds: int = 3,
) -> dict[str, Any]:
    """Returns time to the first token behind a shallow prompt, its cost, and the loss behind it.

    A model whose upper layers read keys and values made below stops there, which loses nothing; any
    other one as `utio_jax.decoding.prompts.prompt_choice` says.

    Args:
      decoder: the model.
      params: its parameters.
      documents: token ids.
      choices: ways of reading that were measured.
      budget: of the prompts' FLOPs.
      tokens: of a prompt.
      follow: tokens behind it, whose loss counts.
      rows: of prompt and what follows, for losses; the first one is timed.
      rounds: timed turns.

    Raises:
      ValueError: no way of reading prompts is known of the model, or no document is long enough.
    """
    cut, _ = rows_of(documents, prompt_tokens=tokens, continuation=follow, count=rows)
    exact = exact_prefill(decoder)
    if exact is None:
        choice = prompt_choice(decoder, params, budget, choices=choices)
        shallow = Prefill(policy=choice.policy(decoder), kv=choice.kv)
    else:
        stop = decoder.config.kv_complete
        choice, shallow = PromptChoice(stop=stop, deep=0.0, by="none", kv="propagate"), exact
    first = partial(generate, decoder, params, [cut[0][:tokens]], max_new_tokens=1, eos_ids=())
    ways = {"staircase": Prefill(), "shallow": shallow}
    programs = {name: partial(first, prefill=how) for name, how in ways.items()}
    if exact is None:  # Else the program that is taken by itself is the exact one.
        programs["dense"] = first
    times = time_programs(programs, rounds=rounds)
    full = min({*programs} - {"shallow"}, key=lambda name: times[name].median)
    cost = prompt_cost(decoder, params, shallow, [cut[0][:tokens]], programs["shallow"]())
    read = prompt_rows(cut, prompt_tokens=tokens, batch=min(4, rows), decoder=decoder)
    # The same program with every token deep; where the way is exact, what all layers say.
    everything = None if exact is not None else dataclasses.replace(choice, deep=1.0)
    lost, kept = (
        float(continuation_losses(decoder, params, read, each).sum())
        for each in (choice, everything)
    )
    return {
        "prompt_tokens": tokens,
        "continuation": follow,
        "prompt": choice.label,
        "exact": exact is not None,
        "stop": choice.stop,
        "flops_ratio": round(cost.flops_ratio, 4),
        "seconds_to_first_token": round(times["shallow"].median, 5),
        "seconds_to_first_token_full": round(times[full].median, 5),
        "speedup": round(times["shallow"].speedup_over(times[full]), 3),
        "nll_increase_pct": round(100 * (lost / kept - 1), 4),
    }


def _losses(
    subject: Subject, choices: dict[str, PromptChoice], *, prompt: int, output: int
) -> dict[str, dict[str, float | None]]:
    """Returns the quality of each method; nothing with random weights or too little text."""
    config, width = subject.decoder.config, prompt + output
    if subject.documents is None or width > config.context_length:
        return {}
    windows = [
        np.asarray(document[start : start + width])
        for document in subject.documents
        for start in range(0, len(document) - width + 1, width)
    ]
    if not windows:
        return {}
    chosen = np.linspace(0, len(windows) - 1, min(_ROWS, len(windows))).round().astype(int)
    rows = prompt_rows(
        [windows[index] for index in chosen],
        prompt_tokens=prompt,
        batch=8,
        decoder=subject.decoder,
    )
    full = float(continuation_losses(subject.decoder, subject.params, rows, None).sum())
    found = {}
    for method, choice in choices.items():
        mine = float(continuation_losses(subject.decoder, subject.params, rows, choice).sum())
        found[method] = {
            "nll_full": full / rows.tokens,
            "nll": mine / rows.tokens,
            "nll_increase_pct": 100 * (mine / full - 1),
            "agreement": None,
        }
    return found
