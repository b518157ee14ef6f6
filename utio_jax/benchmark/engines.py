# SPDX-License-Identifier: Apache-2.0
"""Part "engine": many requests of different lengths, by continuous batching and by batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject, methods_of
from utio_jax.benchmark.timing import time_programs
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate
from utio_jax.engine import Engine, Shapes

_TURNS = 12
"""Requests for each slot: at the end slots stay empty, which counts, too."""

_GROUPS = (1, 4, 16)
"""Prompts that are read together; those that are there at once, before anybody runs, by sixteen."""

_STATIC, _EVEN, _PROMPTS = "batches", "batches, even", "prompts"
"""Baselines: `generate` on as many requests as there are slots, each batch until its last row ends;
the same where all requests are of one length; and of one new token, which reads the prompts."""


def engine_group(
    bench: Bench, subject: Subject, shape: tuple[int, int, int], names: Sequence[str]
) -> Group:
    """Returns rows of an engine: plain, and adaptive with rows together and packed by depth.

    Requests want from an eighth of the new tokens to all of them. The plain engine is compared with
    batches, ideally as fast as lengths allow: no step of a row that has ended, while reading the
    prompts takes its own time, measured in turns with the rest. Adaptive ones are compared with the
    plain engine.

    Args:
      bench: what it is measured with.
      subject: the model.
      shape: slots, prompt and most new tokens.
      names: of policies, see `utio_jax.benchmark.subjects.methods_of`.
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

    setting = {"batch": slots, "prompt": prompt, "output": output, "context": prompt + output}

    def planned(label: str, baseline: str) -> Row:
        row = plan(subject, "engine", label, setting, baseline=baseline)
        return dataclasses.replace(
            row, setting={**setting, "layers": subject.decoder.config.num_layers}
        )

    rows = {name: planned(name, name) for name in (_STATIC, _EVEN)}
    rows |= {"engine": planned("engine", _STATIC), "engine, even": planned("engine, even", _EVEN)}
    rows |= {label: planned(label, "engine") for label in (*modes, *missing)}

    def measure() -> list[Row]:
        prompts = subject.prompts(len(wanted), prompt)
        even, longest = [output] * slots * 2, [max(wanted[i : i + slots]) for i in _starts(wanted)]
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
        times = time_programs(programs, rounds=bench.rounds)
        needed = sum(wanted) / (slots * sum(longest))
        reading = min(1.0, times[_PROMPTS].median / times[_STATIC].median)
        allowed = 1.0 / (reading + (1.0 - reading) * needed)
        done = []
        for label, row in rows.items():
            if label in missing:
                done.append(row.failed(missing[label]))
                continue
            done.append(
                timed(
                    row,
                    times[label],
                    bench,
                    against=times[str(row.baseline)],
                    tokens=sum(even if label.endswith("even") else wanted),
                    speedup_ideal=allowed if label == "engine" else None,
                )
            )
        return done

    return Group(
        title=f"engine {subject.name} {slots} slots, {len(wanted)} x {prompt} + {output}",
        rows=tuple(rows.values()),
        measure=measure,
    )


def _starts(wanted: Sequence[int]) -> range:
    return range(0, len(wanted), len(wanted) // _TURNS)


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
