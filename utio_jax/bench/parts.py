# SPDX-License-Identifier: Apache-2.0
"""Parts "score", "decode" and "lossless": passes over rows, and new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from utio_jax.bench import decoding, scoring
from utio_jax.bench.rows import Group, Row, plan, quality_of, timed
from utio_jax.bench.subjects import Method, Subject, controls_of, methods_of
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Prompts
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
    methods = [controls_of(subject.decoder)[0], *methods_of(subject, names, width=width)]
    rows = [
        plan(
            subject,
            "score",
            method.label,
            {
                "batch": batch,
                "prompt": width,
                "context": width,
                "buckets": len(method.fractions or ()),
                **({} if method.budget is None else {"budget": method.budget}),
            },
        )
        for method in methods
    ]

    def measure() -> list[Row]:
        refused = {method.label: _refusal(subject, method, shape) for method in methods}
        found = scoring.measure_policies(
            subject.decoder,
            subject.params,
            [subject.batch(*shape)],
            [each for each in methods if each.policy is not None and not refused[each.label]],
            rounds=rounds,
        )
        done = []
        for row, method in zip(rows, methods, strict=True):
            if method.missing:
                done.append(row.failed(method.missing))
            elif reason := refused[method.label]:
                failed = row.failed(f"full depth ran instead: {reason}")
                done.append(dataclasses.replace(failed, fallbacks={"full depth": 1}))
            else:
                done.append(_scored(row, found[method.label]))
        return done

    return Group(title=f"score {subject.name} {batch} x {width}", rows=tuple(rows), measure=measure)


def _refusal(subject: Subject, method: Method, shape: tuple[int, int]) -> str | None:
    """Returns why the library would run full depth instead, or None."""
    if method.policy is None or method.label == "full":
        return None
    return check_worthwhile(
        subject.decoder,
        subject.params,
        method.policy,
        batch=shape[0],
        width=shape[1],
        fractions=method.fractions,
    )


def _scored(row: Row, found: scoring.Scored) -> Row:
    return timed(
        dataclasses.replace(row, baseline=found.baseline),
        found.timing,
        against=found.fastest,
        speedup_ideal=found.ledger.speedup_ideal,
        flops_ratio=found.ledger.flops_ratio,
        tokens=found.ledger.tokens,
        **quality_of(row, found.ledger),
    )


def decode_group(
    subject: Subject, shape: tuple[int, int, int], names: Sequence[str], rounds: int
) -> Group:
    """Returns rows of decoding with a depth per token, of each policy and its controls."""
    methods = methods_of(subject, names, width=shape[1] + shape[2])
    modes: dict[str, Mode] = {
        m.label: Adaptive(policy=m.policy) for m in methods if m.policy is not None
    }
    return _decoding_group(
        subject,
        "decode",
        shape,
        modes,
        missing={m.label: m.missing for m in methods if m.missing},
        budgets={m.label: m.budget for m in methods if m.budget is not None},
        rounds=rounds,
    )


def lossless_group(subject: Subject, shape: tuple[int, int, int], rounds: int) -> Group:
    """Returns rows of lossless decoding, drafted at the first two exits that are worth it.

    Beside them stands their control, drafts that are n-grams of the text itself. Random weights
    accept drafts at random, so there is nothing to measure.
    """
    known = subject.decoder.config.exits[:-1]
    drafts = {f"lossless:{exit_}": Lossless(exit=exit_) for exit_ in known[1:3] or known}
    modes: dict[str, Mode] = {**drafts, "lossless:ngram": Lossless(drafter="ngram")}
    missing = dict[str, str]()
    if not drafts:
        missing["lossless"] = f"{subject.name} has no exit before its last layer"
    if subject.speed_only:
        missing |= dict.fromkeys(modes, "random weights accept drafts at random")
        modes = {}
    return _decoding_group(
        subject, "lossless", shape, modes, missing=missing, budgets={}, rounds=rounds
    )


def _decoding_group(
    subject: Subject,
    part: str,
    shape: tuple[int, int, int],
    modes: Mapping[str, Mode],
    *,
    missing: Mapping[str, str],
    budgets: Mapping[str, float],
    rounds: int,
) -> Group:
    batch, prompt, output = shape
    setting = {"batch": batch, "prompt": prompt, "output": output, "context": prompt + output}
    rows = {
        label: plan(
            subject,
            part,
            label,
            {**setting, **({"budget": budgets[label]} if label in budgets else {})},
            baseline=PLAIN,
        )
        for label in (PLAIN, *modes, *missing)
    }

    def run(prompts: Prompts, mode: Mode) -> Generated:
        return generate(
            subject.decoder, subject.params, prompts, mode=mode, max_new_tokens=output, eos_ids=()
        )

    def measure() -> list[Row]:
        every, prompts = {PLAIN: Plain(), **modes}, subject.prompts(batch, prompt)
        found = decoding.measure_modes(
            subject.decoder,
            subject.params,
            [prompts],
            every,
            run=run,
            budgets=budgets,
            rounds=rounds,
        )
        done = {label: rows[label].failed(reason) for label, reason in missing.items()}
        for label in every:
            done[label] = _written(rows[label], found)
        return [done[label] for label in rows]

    title = f"{part} {subject.name} {batch} x {prompt} + {output}"
    return Group(title=title, rows=tuple(rows.values()), measure=measure)


def _written(row: Row, found: Mapping[str, decoding.Written]) -> Row:
    one, plain = found[row.method], found[PLAIN]
    (result,), (full,) = one.results, plain.results
    assert one.timing is not None
    done = timed(
        row,
        one.timing,
        against=plain.timing,
        ratios=one.ratios,
        speedup_ideal=one.ledger.speedup_ideal,
        flops_ratio=one.ledger.flops_ratio,
        tokens=one.ledger.tokens,
        **quality_of(row, one.ledger),
    )
    if one.acceptance is None:
        return done
    same = sum(map(np.array_equal, result.token_ids, full.token_ids))
    return done.noting(
        f"{same} of {len(full.token_ids)} rows like plain decoding's; acceptance "
        f"{one.acceptance:.2f}; {one.repetition:.0%} of 4-grams repeated"
    )
