# SPDX-License-Identifier: Apache-2.0
"""Quality and cost of policies on text: teacher-forced, against full depth, every token counted."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.arrays import check_computed
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import (
    Batch,
    batches_of,
    check_batches,
    choose_widths,
    row_widths,
    windows_of,
)
from utio_jax.core.flops import decided_work, token_cost
from utio_jax.core.platform import here
from utio_jax.core.rows import Rows, check_mesh, place
from utio_jax.core.terminal import compiling
from utio_jax.evaluation.flops import check_worthwhile, gate_flops
from utio_jax.evaluation.quality import Quality, costs_of
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import (
    check_any_rows,
    check_documents,
    check_shares,
    full_by_program,
    rows_of_documents,
    shared_program,
)
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.frozen import frozen_kv
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE, AttentionPattern
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.score import (
    Comparison,
    Scores,
    compare_states,
    full_depth,
    run_score,
)

_compare = jax.jit(compare_states, static_argnums=0, static_argnames="mesh")


def evaluate(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    policies: Mapping[str, Policy | Sequence[Policy]],
    *,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    attention: Mapping[str, AttentionPattern | Sequence[AttentionPattern]] | None = None,
    mesh: Mesh | None = None,
    observe: Callable[[str, Batch, Comparison, np.ndarray], None] | None = None,
    full_passes: dict[int, Scores] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Quality]:
    """Returns each policy's quality and cost on the same batches, against one full-depth pass.

    Policies that differ in names and numbers alone share a compiled program.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text.
      policies: by a name of the caller's choice; one, or one for each batch. Policies that hold
        numbers of given rows (`given_depths`): one for each batch.
      kv: K/V of frozen tokens, see `score`.
      executor: of live slots, and of the full pass. `"auto"`: see `score`.
      attention: by the same names, which keys each token sees, or which in each batch; the others
        and the full pass attend densely.
      mesh: splits the rows of a batch over its axis "data". Empty rows that fill up a batch count
        as cost; what the comparison with full depth takes, a head per predicted token and pass, is
        not the policy's, and does not.
      observe: called with name, batch, per-token comparison and decided depths `[batch, token]`.
      full_passes: by the number of the batch, what an earlier call on the same batches has kept
        here; what is missing is run and added. None: nothing is kept.
      progress: called after every policy and batch.

    Raises:
      TypeError: something else than a list of batches, or policies without names.
      ValueError: no batches, a policy does not fit the model, or `attention` names none of them. Or
        a list has more or fewer entries than there are batches.
    """
    check_batches(batches, instead="score_documents(decoder, params, documents, policy)")
    if not isinstance(policies, Mapping):
        raise TypeError(
            "Wanted policies by a name each, such as {'mine': policy}. Got a "
            f"{type(policies).__name__}."
        )
    if not batches:
        raise ValueError("Wanted at least one batch of text. Got none.")
    if unknown := [name for name in attention or {} if name not in policies]:
        raise ValueError(
            f"Wanted attention patterns by the names of policies, {', '.join(policies)}. Got "
            f"{', '.join(unknown)}. Name each as its policy."
        )
    for chosen in (*policies.values(), *(attention or {}).values()):
        if isinstance(chosen, Sequence) and len(chosen) != len(batches):
            raise ValueError(
                "Wanted one policy or attention pattern, or one for each of "
                f"{len(batches)} batches. Got a list of {len(chosen)}."
            )
    for policy in policies.values():
        several = isinstance(policy, Sequence)
        for single_policy in policy if several else (policy,):
            check_policy(single_policy, decoder, kv=kv)
            if not several and len(batches) > 1:
                check_any_rows(
                    single_policy, instead="Give a list of policies, one for each batch."
                )
    totals = dict.fromkeys(policies, Quality())
    for number, name, quality, tokens in run_passes(
        decoder,
        params,
        batches,
        {name: (policy, (attention or {}).get(name, DENSE)) for name, policy in policies.items()},
        compare=True,
        full_passes=full_passes,
        progress=progress,
        kv=kv,
        executor=executor,
        mesh=mesh,
    ):
        totals[name] += quality
        if observe is not None:
            depths = tokens.pop("depths")
            observe(name, batches[number], Comparison(**tokens), depths)
    return totals


def run_passes(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    choices: Mapping[str, tuple[Any, Any]],
    *,
    compare: bool,
    full_passes: dict[int, Scores] | None = None,
    progress: Callable[[], None] | None = None,
    mesh: Mesh | None,
    kv: FrozenKV,
    executor: Executor | Literal["auto"],
) -> Iterator[tuple[int, str, Quality, dict[str, np.ndarray]]]:
    """Yields number of the batch, name of the choice, sums, and results `[batch, token]` by name.

    These are the decided depths and the fields of `Comparison`, without a comparison `nll` alone.
    `choices` are policy and attention pattern by name, each one for all batches or one for each.
    With `compare` full depth runs, too, and is compared with; else its work is only counted.
    Other arguments are those of `evaluate`.
    """
    params, layers = place(params, mesh), decoder.config.num_layers
    cost, projects = token_cost(decoder, params), frozen_kv(kv, decoder).projects
    kept = {} if full_passes is None else full_passes

    def costs_of_pass(policy: Policy, choice: Any, scores: Scores, depths: np.ndarray) -> Any:
        work, full = jax.device_get((scores.work, scores.full_work))
        chosen = choice.choose_executor(executor, policy, depths.shape[1])
        ideal = decided_work(
            cost,
            depths,
            key_widths=chosen.key_widths(depths.shape[1]),
            projected=int(depths.max(initial=0)) * projects,
            mapped=policy.depths[-1] * (kv == "mapped"),
            spared=partial(choice.spared_keys, scores.chosen, policy.depths),
        )
        gates = gate_flops(decoder, params, policy, work, attention=choice)
        return costs_of(cost, work, full=full, ideal=ideal, gates=gates)

    def packs(policy: Policy, choice: Any, width: int) -> bool:
        return choice == DENSE and isinstance(
            choose_executor(executor, policy, width), MicroBatches
        )

    for number, batch in enumerate(batches):
        full, (rows, width) = None, batch.token_ids.shape
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        how: Any = {"mesh": mesh, "attention": DENSE, "kv": kv, "executor": executor}
        run = partial(run_score, decoder, params, ids, lengths, **how)
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
        read_rows = jax.device_put((batch.token_ids, positions))
        pairs = [
            tuple(x[number] if isinstance(x, Sequence) else x for x in pair)
            for pair in choices.values()
        ]
        if compare:
            packed = [policy for policy, choice in pairs if packs(policy, choice, width)]
            policy = full_by_program(packed, layers) or full_depth(decoder)
            policy = place(shared_program(policy, *read_rows), mesh)
            full = kept[number] if number in kept else run(policy=policy)
            if full_passes is not None:
                full_passes[number] = full
        for name, (policy, choice) in zip(choices, pairs, strict=True):
            choice = place(choice, mesh)
            if full and policy.depths == (layers,) and choice == DENSE:
                # Full depth in question is the pass that was just made.
                scores, other = full, full.x if len(pairs) > 1 else None
            else:
                program = shared_program(policy, *read_rows)
                scores = run(policy=place(program, mesh), attention=choice)
                other = full and full.x
            tokens = {"nll": -np.asarray(scores.log_likelihood)}
            if full:
                tokens = vars(_compare(decoder, params, ids, lengths, scores.x, other, mesh=mesh))
            tokens = {  # Without the rows that fill up a mesh.
                field: np.asarray(leaf)[:rows]
                for field, leaf in {**tokens, "depths": scores.depths}.items()
            }
            for part in ("nll", "nll_full") if full else ("nll",):
                check_computed(tokens[part], what=f"losses [row, token] of batch {number}")
            costs = costs_of_pass(policy, choice, scores, tokens["depths"])
            if progress is not None:
                progress()
            yield number, name, dataclasses.replace(_sums(tokens, batch.lengths), **costs), tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """One document's result, in token order.

    Attributes:
      log_likelihood: `[token - 1]`, of every token but the first, in nats.
      depths: `[token - 1]`, layers that the token before it ran to predict it.
      quality: its own sums of tokens and losses. Work is counted by batch: `query_layers` and all
        FLOPs are NaN.
    """

    log_likelihood: np.ndarray
    depths: np.ndarray
    quality: Quality = dataclasses.field(default_factory=Quality)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScore:
    """Result of `score_documents`.

    Attributes:
      documents: one result per document.
      quality: the sums over all of them; what compares with full depth is None unless asked for.
      fallbacks: number of batches that ran at full depth instead, by reason.
    """

    documents: tuple[DocumentScore, ...]
    quality: Quality
    fallbacks: Mapping[str, int]


def score_documents(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    documents: Sequence[np.ndarray],
    policy: Policy,
    *,
    rows: int = 16,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    attention: AttentionPattern = DENSE,
    mesh: Mesh | None = None,
    fractions: Sequence[float] | None = None,
    min_tokens: int = 0,
    same_rows: bool = False,
    compare: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> TextScore:
    """Scores documents of any length in batches of few static shapes, under the guardrail.

    Args:
      decoder: the model.
      params: its parameters.
      documents: token ids `[token]` each; longer than the context: in windows. One of fewer than
        two tokens predicts nothing: its arrays are empty and its sums 0, tokens and cost apart.
      policy: decides each token's depth. One that holds numbers of given rows (`given_depths`)
        has a row for each document.
      rows: per pass at most, over all devices.
      kv: K/V of frozen tokens, see `score`.
      executor: of live slots; `"auto"`: see `check_worthwhile`.
      attention: which keys each token sees, in batches that do not fall back; by default all.
      mesh: splits rows over its axis "data".
      fractions: expected share of tokens at each of the policy's depths, see `check_worthwhile`.
      min_tokens: smallest pass that is routed.
      same_rows: every pass has `rows` rows, so that calls on other documents compile nothing new.
      compare: run a full-depth pass besides, and compare with it. False: what the policy costs is
        all that is run, and `nll_full`, `kl` and `agree` are None.
      progress: called after every batch that runs, with their number and that of all batches.

    Raises:
      ValueError: no documents, ids are outside the vocabulary, rows < 1, or a policy for other
        rows than these documents.
    """
    if rows < 1:
        raise ValueError(f"Wanted at least 1 row per pass. Got rows={rows}.")
    if not len(documents):
        raise ValueError("Wanted documents to score, at least one. Got none.")
    check_policy(policy, decoder, kv=kv)
    check_documents(policy, [len(ids) for ids in documents])
    if fractions is not None:
        check_shares(fractions, policy.depths)
    parts = check_mesh(mesh)
    context = decoder.config.context_length
    cut = [windows_of([ids], width=context) if len(ids) else [] for ids in documents]
    windows = [window for of_one in cut for window in of_one]
    likelihood: list[np.ndarray] = [np.zeros(0, np.float32)] * len(windows)
    depths: list[np.ndarray] = [np.zeros(0, np.int32)] * len(windows)
    qualities = [Quality()] * len(windows)

    cost, shapes = token_cost(decoder, params), {"rows": rows, "same_rows": same_rows}
    packs = isinstance(choose_executor(executor, policy, context), MicroBatches)
    layers = decoder.config.num_layers
    padded = cost.made(layers) * cost.keys_values if packs else cost.layers(layers, context)
    widths = choose_widths(
        [len(window) for window in windows],
        widths=row_widths(context),
        spare=(1 + 2 * compare) * here().program_flops / float(padded),
        **shapes,
    )
    vocab_size = decoder.config.vocab_size
    batches = list(batches_of(windows, widths=widths, vocab_size=vocab_size, **shapes))
    reasons = [
        check_worthwhile(
            decoder,
            params,
            policy,
            batch=-(-len(batch.lengths) // parts),
            width=batch.token_ids.shape[1],
            executor=executor,
            attention=attention,
            fractions=fractions,
            min_tokens=min_tokens,
        )
        for batch in batches
    ]
    full = full_depth(decoder)
    of_window = np.repeat(np.arange(len(cut)), [len(of_one) for of_one in cut])
    starts = np.concatenate([np.arange(len(of_one)) * (context - 1) for of_one in cut])
    chosen = [
        rows_of_documents(
            policy, of_window[batch.window], starts[batch.window], width=batch.token_ids.shape[1]
        )
        if reason is None
        else full
        for reason, batch in zip(reasons, batches, strict=True)
    ]
    choices = [attention if reason is None else DENSE for reason in reasons]

    compiling.expect((1 + 2 * compare) * len({batch.token_ids.shape for batch in batches}))
    done, total = itertools.count(1), Quality()
    step = None if progress is None else lambda: progress(next(done), len(batches))
    for number, _, sums, tokens in run_passes(
        decoder,
        params,
        batches,
        {"": (chosen, choices)},
        compare=compare,
        progress=step,
        kv=kv,
        executor=executor,
        mesh=mesh,
    ):
        total += sums
        batch = batches[number]
        for row in np.flatnonzero(batch.window >= 0):
            window, length = batch.window[row], batch.lengths[row : row + 1]
            own = {name: array[row : row + 1] for name, array in tokens.items()}
            predicted = int(length[0]) - 1
            likelihood[window] = -own["nll"][0, :predicted]
            depths[window] = own["depths"][0, :predicted]
            qualities[window] = dataclasses.replace(_sums(own, length), **_UNCOUNTED)
    ends = np.cumsum([len(of_one) for of_one in cut])
    spans = [slice(end - len(of_one), end) for end, of_one in zip(ends, cut, strict=True)]
    return TextScore(
        documents=tuple(
            DocumentScore(
                log_likelihood=np.concatenate([np.zeros(0, np.float32), *likelihood[span]]),
                depths=np.concatenate([np.zeros(0, np.int32), *depths[span]]),
                quality=sum(qualities[span], start=Quality()),
            )
            for span in spans
        ),
        quality=total,
        fallbacks=Counter(reason for reason in reasons if reason is not None),
    )


_UNCOUNTED = dict.fromkeys(
    ("query_layers", "flops", "flops_full", "flops_ideal", "flops_gates"), math.nan
)
"""Work of a document: it has no share of its batch's padding."""


def _sums(tokens: Mapping[str, np.ndarray], lengths: np.ndarray) -> Quality:
    """Returns the sums of a batch's results or of one row's, see `run_passes`, without costs."""
    depths = tokens["depths"]
    values, counts = np.unique(depths[depths > 0], return_counts=True)
    total = lambda name: float(np.sum(tokens[name], dtype=np.float64))  # noqa: E731
    compared = "kl" in tokens
    return Quality(
        tokens=int(np.sum(lengths)),
        predicted=int(np.maximum(lengths - 1, 0).sum()),
        nll=total("nll"),
        nll_full=total("nll_full") if compared else None,
        kl=total("kl") if compared else None,
        agree=int(np.sum(tokens["agree"])) if compared else None,
        histogram=dict(zip(values.tolist(), counts.tolist(), strict=True)),
    )
