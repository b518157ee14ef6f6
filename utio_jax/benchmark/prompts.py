# SPDX-License-Identifier: Apache-2.0
"""Part "prompt": time to the first token, and in all, where most of a prompt stops early."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.timing import time_programs
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.prompts import prompt_choice
from utio_jax.evaluation.prompt_cost import PromptCost, prompt_cost
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
    bench: Bench, subject: Subject, shape: tuple[int, int, int], *, budgets: Sequence[float] = ()
) -> Group:
    """Returns rows of the first new token and of all, per budget, all programs taking turns.

    Losses are those of the tokens that follow prompts of this length in the subject's own text,
    read in full after prompts that were not.

    Args:
      bench: what it is measured with.
      subject: the model.
      shape: batch, prompt and new tokens.
      budgets: of the prompts' FLOPs; by default `BUDGETS`.
    """
    batch, prompt, output = shape
    asked = {f"prompt@{budget:g}": budget for budget in (budgets or BUDGETS)}
    outputs = tuple(dict.fromkeys((1, output)))
    layers = subject.decoder.config.num_layers

    def planned(method: str, new: int) -> Row:
        setting = {"batch": batch, "prompt": prompt, "output": new}
        row = plan(subject, "prompt", method, setting, baseline="full")
        more: dict[str, Any] = {"context": prompt + new, "layers": layers}
        if method in asked:
            more["budget"] = asked[method]
        return dataclasses.replace(row, setting={**setting, **more})

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
        times = time_programs(programs, rounds=bench.rounds)
        losses = _losses(subject, choices, prompt=prompt, output=output)
        done = []
        for (method, new), row in rows.items():
            if method in missing:
                done.append(row.failed(missing[method]))
                continue
            base = min(_FULL, key=lambda name, new=new: times[f"{name} {new}"].median)
            cost = _cost(subject, how[method], prompts, programs[f"{method} 1"])
            found = timed(
                dataclasses.replace(row, baseline=base),
                times[f"{method} {new}"],
                bench,
                against=times[f"{base} {new}"],
                flops_ratio=None if cost is None else cost.flops_ratio,
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

    return Group(
        title=f"prompt {subject.name} {batch} x {prompt} + {output}",
        rows=tuple(rows.values()),
        measure=measure,
    )


def _cost(
    subject: Subject, prefill: Prefill | None, prompts: Prompts, program: Any
) -> PromptCost | None:
    if prefill is None:
        return None
    return prompt_cost(subject.decoder, subject.params, prefill, prompts, program())


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
