# SPDX-License-Identifier: Apache-2.0
"""Part "engine": many requests of different lengths, by continuous batching and by batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.bench.rows import Group, Row, plan, timed
from utio_jax.bench.subjects import Subject, methods_of
from utio_jax.bench.timing import time_programs
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate
from utio_jax.engine import Engine, Shapes

_TURNS = 12
"""Requests for each slot: at the end slots stay empty, which counts, too."""

_GROUPS = (1, 4, 16)
"""Prompts that are read together; those that are there at once, before any row runs, by sixteen."""

_STATIC, _EVEN, _PROMPTS = "batches", "batches, even", "prompts"
"""Baselines: `generate` on as many requests as there are slots, each batch until its last row ends;
the same where all requests are of one length; and of one new token, which reads the prompts."""


def engine_group(
    subject: Subject, shape: tuple[int, int, int], names: Sequence[str], rounds: int
) -> Group:
    """Returns rows of an engine: plain, and adaptive with rows together and packed by depth.

    Requests want from an eighth of the new tokens to all of them. The plain engine is compared with
    batches, ideally as fast as lengths allow: no step of a row that has ended, while reading the
    prompts takes its own time, measured in turns with the rest. Adaptive ones are compared with the
    plain engine.

    Args:
      subject: the model.
      shape: slots, prompt and most new tokens.
      names: of policies, see `utio_jax.bench.subjects.methods_of`.
      rounds: timed turns of each program.
    """
    slots, prompt, output = shape
    rng = np.random.default_rng(0)
    wanted = rng.integers(max(1, output // 8), output + 1, _TURNS * slots).tolist()
    methods = [m for m in methods_of(subject, names, width=prompt + output) if m.label in names]
    modes, missing = dict[str, Mode](), {m.label: m.missing for m in methods if m.missing}
    widths = tuple(sorted({max(1, slots // 4), max(1, slots // 2)}))
    for method in methods:
        if method.policy is not None:
            modes[f"{method.label}, together"] = Adaptive(policy=method.policy)
            modes[f"{method.label}, packed"] = Adaptive(policy=method.policy, pack=widths)
    baselines = {_STATIC: _STATIC, _EVEN: _EVEN, "engine": _STATIC, "engine, even": _EVEN}
    baselines |= dict.fromkeys((*modes, *missing), "engine")
    setting = {"batch": slots, "prompt": prompt, "output": output, "context": prompt + output}
    rows = {
        label: plan(subject, "engine", label, setting, baseline=baseline)
        for label, baseline in baselines.items()
    }

    def measure() -> list[Row]:
        prompts = subject.prompts(len(wanted), prompt)
        even = [output] * slots * 2
        longest = [max(wanted[i : i + slots]) for i in range(0, len(wanted), slots)]
        programs: dict[str, Callable[[], Any]] = {
            _STATIC: partial(_batches, subject, prompts, longest, slots),
            _EVEN: partial(_batches, subject, prompts, [output] * 2, slots),
            _PROMPTS: partial(_batches, subject, prompts, [1] * len(longest), slots),
        }
        for label, mode in {"engine": Plain(), **modes}.items():
            engine = Engine(
                subject.decoder,
                subject.params,
                slots=slots,
                capacity=prompt + output + mode.block,
                mode=mode,
                shapes=Shapes(prompt_widths=(prompt,), groups=_GROUPS),
            )
            engine.warmup()
            programs[label] = partial(_serve, engine, prompts, wanted)
            if label == "engine":
                programs["engine, even"] = partial(_serve, engine, prompts, even)
        times = time_programs(programs, rounds=rounds)
        needed = sum(wanted) / (slots * sum(longest))
        reading = min(1.0, times[_PROMPTS].median / times[_STATIC].median)
        allowed = 1.0 / (reading + (1.0 - reading) * needed)
        return [
            row.failed(missing[label])
            if label in missing
            else timed(
                row,
                times[label],
                against=times[baselines[label]],
                tokens=sum(even if label.endswith("even") else wanted),
                speedup_ideal=allowed if label == "engine" else None,
            )
            for label, row in rows.items()
        ]

    title = f"engine {subject.name} {slots} slots, {len(wanted)} x {prompt} + {output}"
    return Group(title=title, rows=tuple(rows.values()), measure=measure)


def _batches(
    subject: Subject, prompts: Sequence[Sequence[int]], longest: Sequence[int], slots: int
) -> None:
    """Decodes requests in batches, each until its longest row ends."""
    for number, new in enumerate(longest):
        batch = prompts[number * slots : (number + 1) * slots]
        generate(subject.decoder, subject.params, batch, max_new_tokens=new, eos_ids=())


def _serve(engine: Engine, prompts: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
    """Decodes requests as an engine does, all of which come at once."""
    for prompt, new in zip(prompts, wanted, strict=False):
        engine.submit(prompt, max_new_tokens=new, eos_ids=())
    engine.drain()
