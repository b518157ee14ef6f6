# SPDX-License-Identifier: Apache-2.0
"""Parts "routing", "score" and "memory": one pass over rows of tokens, per batch and length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.benchmark.rows import Bench, Group, plan, quality_of, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.scoring import Entry, Measured, measure_entries
from utio_jax.benchmark.subjects import Method, Subject, full_method, methods_of
from utio_jax.evaluation.guardrail import check_worthwhile
from utio_jax.staircase.score import run_score, score_dense

run_dense = jax.jit(score_dense, static_argnums=0)
"""The plain full-depth program."""


def score_group(
    bench: Bench, subject: Subject, batch: int, width: int, names: Sequence[str]
) -> Group:
    """Returns rows of scoring: full depth by the staircase, then each policy and its controls.

    Policies are asked about as `score_documents` asks: where the cost model says that routing
    cannot pay, full depth would run instead, and the row says so. Parts "routing" and "score" come
    from the same run.
    """
    setting = {"batch": batch, "prompt": width, "context": width}
    methods = [full_method(subject), *methods_of(subject, names, width=width)]
    layers = subject.decoder.config.num_layers

    def planned(part: str, method: Method) -> Row:
        more: dict[str, Any] = {"layers": layers, "buckets": len(method.fractions or ())}
        if method.budget is not None:
            more["budget"] = method.budget
        # Layers and buckets would only lengthen the key.
        return dataclasses.replace(
            plan(subject, part, method.label, setting), setting={**setting, **more}
        )

    routed = [m for m in methods if m.policy is not None and len(m.policy.depths) > 1]
    rows = [planned("score", method) for method in methods]
    rows += [planned("routing", method) for method in routed]

    def measure() -> list[Row]:
        read = subject.batch(batch, width)
        runs, refused = [], dict[str, str]()
        for method in methods:
            refused[method.label] = method.missing or _refusal(subject, method, batch, width) or ""
            if not refused[method.label]:
                runs.append(Entry(policy=_policy(method), budget=method.budget))
        found = {
            each.entry.label: each
            for each in measure_entries(
                subject.decoder, subject.params, [read], runs, rounds=bench.rounds
            )
        }
        done = []
        for row, method in zip(rows, [*methods, *routed], strict=True):
            if reason := refused[method.label]:
                failed = row.failed(f"full depth ran instead: {reason}")
                count = {} if method.missing else {"full depth": 1}
                done.append(
                    row.failed(reason)
                    if method.missing
                    else dataclasses.replace(failed, fallbacks=count)
                )
            elif row.part == "score":
                done.append(_scored(bench, row, found[method.label]))
            else:
                done.append(_routed(bench, row, found[method.label]))
        return done

    return Group(title=f"score {subject.name} {batch} x {width}", rows=tuple(rows), measure=measure)


def _policy(method: Method) -> Any:
    return method.policy


def _refusal(subject: Subject, method: Method, batch: int, width: int) -> str | None:
    """Returns why the library would run full depth instead, or None."""
    if method.label == "full":
        return None
    return check_worthwhile(
        subject.decoder,
        subject.params,
        _policy(method),
        batch=batch,
        width=width,
        fractions=method.fractions,
    )


def _scored(bench: Bench, row: Row, found: Measured) -> Row:
    return timed(
        dataclasses.replace(row, baseline=found.baseline),
        found.timing,
        bench,
        against=found.fastest,
        speedup_ideal=found.ledger.speedup_ideal,
        flops_ratio=found.ledger.flops_ratio,
        flops=found.quality.flops,
        tokens=found.quality.tokens,
        **quality_of(row, found.ledger),
    )


def _routed(bench: Bench, row: Row, found: Measured) -> Row:
    if found.routing is None:
        return row.failed("nothing is routed")
    share = 100 * found.routing.median / found.timing.median
    return timed(row, found.routing, bench, tokens=found.quality.tokens).noting(
        f"packing and unpacking alone: {share:.2g} % of the pass' {found.timing.median:.3g} s"
    )


def memory_group(subject: Subject, batch: int, width: int, names: Sequence[str]) -> Group:
    """Returns what the compiled programs of scoring hold, in bytes; nothing is run."""
    setting = {"batch": batch, "prompt": width, "context": width}
    methods = [
        Method(label="full dense"),
        full_method(subject),
        *(
            method
            for method in methods_of(subject, names, width=width)
            if method.policy is not None and method.label in names
        ),
    ]
    rows = tuple(plan(subject, "memory", method.label, setting) for method in methods)

    def measure() -> list[Row]:
        read = subject.batch(batch, width)
        ids, lengths = jnp.asarray(read.token_ids), jnp.asarray(read.lengths)
        arguments = (subject.decoder, subject.params, ids, lengths)
        done = []
        for row, method in zip(rows, methods, strict=True):
            if method.policy is None:
                compiled = run_dense.lower(*arguments).compile()
            else:
                compiled = run_score.lower(*arguments, policy=method.policy).compile()
            done.append(dataclasses.replace(row, memory_bytes=memory_of(compiled)))
        return done

    return Group(title=f"memory {subject.name} {batch} x {width}", rows=rows, measure=measure)


def memory_of(compiled: Any) -> dict[str, float | None]:
    """Returns a compiled program's bytes, as far as the backend says.

    Arguments, results and temporaries together bound the peak from above, if not from below.
    """
    known = compiled.memory_analysis()
    if known is None:
        return {"peak": None, "arguments": None, "temporaries": None}
    arguments, temporaries = known.argument_size_in_bytes, known.temp_size_in_bytes
    together = arguments + temporaries + known.output_size_in_bytes - known.alias_size_in_bytes
    # A CPU's own peak leaves temporaries out.
    peak = max(getattr(known, "peak_memory_in_bytes", 0), together)
    return {"peak": peak, "arguments": arguments, "temporaries": temporaries}


def pass_programs(
    subject: Subject, batch: int, width: int, methods: Sequence[Method]
) -> dict[str, Any]:
    """Returns scoring programs by label, `"full"` and `"full dense"` among them."""
    read = subject.batch(batch, width)
    ids, lengths = jnp.asarray(read.token_ids), jnp.asarray(read.lengths)
    arguments = (subject.decoder, subject.params, ids, lengths)
    programs: dict[str, Any] = {"full dense": partial(run_dense, *arguments)}
    for method in (full_method(subject), *methods):
        programs[method.label] = partial(run_score, *arguments, policy=_policy(method))
    return programs


def dealt_depths(
    histogram: dict[int, float], shape: tuple[int, int], *, seed: int = 0
) -> np.ndarray:
    """Returns depths `[batch, token]` with exactly these shares, shuffled over all rows."""
    total = shape[0] * shape[1]
    ends = np.round(np.cumsum([*histogram.values()]) * total).astype(int)
    counts = np.diff(ends, prepend=0)
    depths = np.repeat([*histogram], counts).astype(np.int32)
    return np.random.default_rng(seed).permutation(depths).reshape(shape)
