# SPDX-License-Identifier: Apache-2.0
"""Parts "decode" and "lossless": new tokens after prompts, per batch, prompt and output length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from utio_jax.benchmark.decoding import Measured, measure_modes
from utio_jax.benchmark.rows import Bench, Group, plan, quality_of, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject, methods_of
from utio_jax.core.flops import token_cost
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.generation import spent_on

PLAIN = "plain"
"""The model's own decoding: the baseline of both parts, and the only full-depth one."""


def decode_group(
    bench: Bench, subject: Subject, shape: tuple[int, int, int], names: Sequence[str]
) -> Group:
    """Returns rows of decoding with a depth per token, of each policy and its controls."""
    methods = methods_of(subject, names, width=shape[1] + shape[2])
    modes: dict[str, Mode] = {
        m.label: Adaptive(policy=m.policy) for m in methods if m.policy is not None
    }
    return _group(
        bench,
        subject,
        "decode",
        shape,
        modes,
        missing={m.label: m.missing for m in methods if m.missing},
        budgets={m.label: m.budget for m in methods if m.budget is not None},
    )


def lossless_group(
    bench: Bench, subject: Subject, shape: tuple[int, int, int], exits: Sequence[int] = ()
) -> Group:
    """Returns rows of lossless decoding, drafted at each of some exits: by default the first two.

    Beside them stands their control, drafts that are n-grams of the text itself. Random weights
    accept drafts at random, so there is nothing to measure.
    """
    known = subject.decoder.config.exits[:-1]
    of_exits = {f"lossless:{exit_}": Lossless(exit=exit_) for exit_ in exits or known[1:3] or known}
    modes: dict[str, Mode] = {**of_exits, "lossless:ngram": Lossless(drafter="ngram")}
    missing = dict[str, str]()
    if not of_exits:
        missing["lossless"] = f"{subject.name} has no exit before its last layer"
    if subject.speed_only:
        missing |= dict.fromkeys(modes, "random weights accept drafts at random")
        modes = {}
    return _group(bench, subject, "lossless", shape, modes, missing=missing, budgets={})


def _group(
    bench: Bench,
    subject: Subject,
    part: str,
    shape: tuple[int, int, int],
    modes: Mapping[str, Mode],
    *,
    missing: Mapping[str, str],
    budgets: Mapping[str, float],
) -> Group:
    batch, prompt, output = shape
    setting = {"batch": batch, "prompt": prompt, "output": output, "context": prompt + output}

    def planned(label: str) -> Row:
        row = plan(subject, part, label, setting, baseline=PLAIN)
        more: dict[str, Any] = {"layers": subject.decoder.config.num_layers}
        if label in budgets:
            more["budget"] = budgets[label]
        return dataclasses.replace(row, setting={**setting, **more})

    rows = {label: planned(label) for label in (PLAIN, *modes, *missing)}

    def run(prompts: Prompts, mode: Mode) -> Generated:
        return generate(
            subject.decoder, subject.params, prompts, mode=mode, max_new_tokens=output, eos_ids=()
        )

    def measure() -> list[Row]:
        done = {label: rows[label].failed(reason) for label, reason in missing.items()}
        prompts = subject.prompts(batch, prompt)
        found = measure_modes(
            subject.decoder,
            subject.params,
            [prompts],
            {PLAIN: Plain(), **modes},
            run=run,
            budgets=budgets,
            rounds=bench.rounds,
        )
        for label, mode in {PLAIN: Plain(), **modes}.items():
            done[label] = _written(bench, subject, rows[label], mode, prompts, found)
        return [done[label] for label in rows]

    return Group(
        title=f"{part} {subject.name} {batch} x {prompt} + {output}",
        rows=tuple(rows.values()),
        measure=measure,
    )


def _written(
    bench: Bench,
    subject: Subject,
    row: Row,
    mode: Mode,
    prompts: Prompts,
    found: Mapping[str, Measured],
) -> Row:
    one = found[row.method]
    (result,) = one.results
    spent = spent_on(subject.decoder, subject.params, mode, prompts, result)
    done = timed(
        row,
        one.timing,
        bench,
        against=found[PLAIN].timing,
        ratios=one.ratios,
        speedup_ideal=one.ledger.speedup_ideal,
        flops_ratio=one.ledger.flops_ratio,
        flops=spent.flops + _prefill_flops(subject, prompts),
        bytes=_bytes(subject, result) if one.acceptance is None else None,
        tokens=spent.tokens,
        **quality_of(row, one.ledger),
    )
    if one.acceptance is None:
        return done
    (plain,) = found[PLAIN].results
    same = sum(np.array_equal(a, b) for a, b in zip(result.token_ids, plain.token_ids, strict=True))
    return done.noting(
        f"{same} of {len(prompts)} rows like plain decoding's; acceptance {one.acceptance:.2f}; "
        f"{one.repetition:.0%} of 4-grams repeated"
    )


def _prefill_flops(subject: Subject, prompts: Prompts) -> float:
    """Returns the FLOPs of the prompts' pass but for its last tokens, which `spent_on` charges."""
    cost, layers = token_cost(subject.decoder, subject.params), subject.decoder.config.num_layers
    return float(sum((len(p) - 1) * layers * cost.layer(len(p)) for p in prompts))


def _bytes(subject: Subject, result: Generated) -> float:
    """Returns bytes that decoding reads at least: weights of the layers run, head, K/V.

    A round of one token per row reads the weights of a layer once for all rows; prefill reads all
    of them once.
    """
    layers = subject.decoder.layers(subject.params)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    run = float(np.max(result.token_layers)) / subject.decoder.config.num_layers
    # An untied table of embeddings is read by rows, and counts here as if it were not.
    head = float(np.max(result.heads)) * (size(subject.params) - size(layers))
    return (run + 1.0) * size(layers) + head + float(np.sum(result.kv_bytes_read))
