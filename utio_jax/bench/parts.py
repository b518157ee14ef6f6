# SPDX-License-Identifier: Apache-2.0
"""Parts "score", "decode" and "lossless": passes over rows, and new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from utio_jax.bench import decoding, scoring
from utio_jax.bench.results import QUALITY, Group, Row
from utio_jax.bench.subjects import Method, Subject, controls_of, methods_of
from utio_jax.bench.timing import Timed
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.flops import check_worthwhile

PLAIN = "plain"
"""The model's own decoding: the baseline of both decoding parts, and the only full-depth one."""


def score_group(
    subject: Subject, shape: tuple[int, int], names: Sequence[str], rounds: int
) -> Group:
    """Returns rows of scoring: full depth by the staircase, then each policy and its controls.

    Policies are asked about as `score_documents` asks: where the cost model says that routing
    cannot pay, full depth would run instead, and the row says so.
    """
    batch, width = shape
    full = controls_of(subject.decoder)[0]
    methods = [full, *methods_of(subject, names, width=width)]
    rows = [_planned(subject, "score", each, batch=batch, prompt=width) for each in methods]

    def measure() -> list[Row]:
        refused = {
            each.label: check_worthwhile(
                subject.decoder,
                subject.params,
                each.policy,
                batch=batch,
                width=width,
                fractions=each.fractions,
            )
            for each in methods
            if each is not full and each.policy is not None
        }
        found = scoring.measure_policies(
            subject.decoder,
            subject.params,
            [subject.batch(*shape)],
            [each for each in methods if each.policy is not None and not refused.get(each.label)],
            rounds=rounds,
        )
        done = []
        for row, method in zip(rows, methods, strict=True):
            if method.missing:
                done.append(row.failed(method.missing))
            elif reason := refused.get(method.label):
                failed = row.failed(f"full depth ran instead: {reason}")
                done.append(dataclasses.replace(failed, fallbacks={"full depth": 1}))
            else:
                done.append(_timed(row, found[method.label]))
        return done

    return Group(title=f"score {subject.name} {batch} x {width}", rows=tuple(rows), measure=measure)


def decode_group(
    subject: Subject, shape: tuple[int, int, int], names: Sequence[str], rounds: int
) -> Group:
    """Returns rows of decoding with a depth per token, of each policy and its controls."""
    methods = methods_of(subject, names, width=shape[1] + shape[2])
    modes: dict[str, Mode] = {
        each.label: Adaptive(policy=each.policy) for each in methods if each.policy is not None
    }
    return _decoding_group(subject, "decode", shape, methods, modes, rounds)


def lossless_group(subject: Subject, shape: tuple[int, int, int], rounds: int) -> Group:
    """Returns rows of lossless decoding, drafted at the first two exits that are worth it.

    Beside them stands their control, drafts that are n-grams of the text itself. Random weights
    accept drafts at random, so there is nothing to measure.
    """
    known = subject.decoder.config.exits[:-1]
    modes: dict[str, Mode] = {
        f"lossless:{depth}": Lossless(exit=depth) for depth in known[1:3] or known
    }
    why = "" if modes else f"{subject.name} has no exit before its last layer"
    methods = [Method(label="lossless", missing=why)] if why else []
    modes["lossless:ngram"] = Lossless(drafter="ngram")
    why = "random weights accept drafts at random" if subject.speed_only else ""
    methods += [Method(label=label, missing=why) for label in modes]
    return _decoding_group(subject, "lossless", shape, methods, {} if why else modes, rounds)


def _decoding_group(
    subject: Subject,
    part: str,
    shape: tuple[int, int, int],
    methods: Sequence[Method],
    modes: Mapping[str, Mode],
    rounds: int,
) -> Group:
    batch, prompt, output = shape
    sizes = {"batch": batch, "prompt": prompt, "output": output}
    rows = [
        dataclasses.replace(_planned(subject, part, each, **sizes), baseline=PLAIN)
        for each in (Method(label=PLAIN), *methods)
    ]

    def measure() -> list[Row]:
        of_model = (subject.decoder, subject.params)
        found = decoding.measure_modes(
            *of_model,
            [subject.prompts(batch, prompt)],
            {PLAIN: Plain(), **modes},
            run=partial(generate, *of_model, max_new_tokens=output, eos_ids=()),
            budgets={each.label: each.budget for each in methods if each.budget is not None},
            rounds=rounds,
        )
        missing = {each.label: each.missing for each in methods if each.missing}
        return [
            row.failed(missing[row.method]) if row.method in missing else _written(row, found)
            for row in rows
        ]

    title = f"{part} {subject.name} {batch} x {prompt} + {output}"
    return Group(title=title, rows=tuple(rows), measure=measure)


def _written(row: Row, found: Mapping[str, Timed]) -> Row:
    one = found[row.method]
    done = _timed(row, one)
    if one.acceptance is None:
        return done
    (result,), (full,) = one.results, found[PLAIN].results
    same = sum(map(np.array_equal, result.token_ids, full.token_ids))
    return done.noting(
        f"{same} of {len(full.token_ids)} rows like plain decoding's; acceptance "
        f"{one.acceptance:.2f}"
    )


def _planned(subject: Subject, part: str, method: Method, **sizes: int) -> Row:
    """Returns a row that is not measured yet."""
    budget = {} if method.budget is None else {"budget": method.budget}
    return Row(
        part=part,
        model=subject.name,
        method=method.label,
        speed_only=subject.speed_only,
        setting={**sizes, **budget, "layers": subject.decoder.config.num_layers},
        note=subject.note,
    )


def _timed(row: Row, one: Timed) -> Row:
    """Returns a measured row; random weights have losses too, which mean nothing."""
    assert one.timing is not None
    assert one.ratios is not None
    record = one.ledger.to_dict()
    return dataclasses.replace(row, baseline=one.baseline).timed(
        one.timing,
        ratios=one.ratios,
        tokens=one.ledger.tokens,
        speedup_ideal=one.ledger.speedup_ideal,
        flops_ratio=one.ledger.flops_ratio,
        quality=None if row.speed_only else {name: record[name] for name in QUALITY},
    )
