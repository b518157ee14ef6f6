# SPDX-License-Identifier: Apache-2.0
"""Quality and cost of policies on text: teacher-forced, against full depth, every token counted."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch, batches_of, row_widths, windows_of
from utio_jax.core.flops import TokenCost, ideal_flops, pass_flops, token_cost
from utio_jax.core.pytrees import digest
from utio_jax.core.rows import Rows, check_mesh, place
from utio_jax.core.shards import Arrays, Shards, run_all
from utio_jax.core.work import Work
from utio_jax.evaluation.flops import attention_flops, check_worthwhile, gate_flops
from utio_jax.evaluation.quality import Quality, pack, pack_quality, unpack, unpack_quality
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import shared_program
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.reference import FrozenKV, positions_of
from utio_jax.staircase.score import (
    Comparison,
    Scores,
    compare_states,
    full_depth,
    full_work,
    run_score,
)
from utio_jax.staircase.sparse import SparseAttention

_compare = jax.jit(compare_states, static_argnums=0, static_argnames="mesh")


def evaluate(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    policies: Mapping[str, Policy | Sequence[Policy]],
    *,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    attention: Mapping[str, SparseAttention | Sequence[SparseAttention | None]] | None = None,
    mesh: Mesh | None = None,
    shards: Shards | None = None,
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
      policies: by a name of the caller's choice; one, or one for each batch.
      kv: K/V of frozen tokens, see `score`.
      executor: of live slots, and of the full pass. `"auto"`: see `score`.
      attention: by the same names, which tokens attend sparsely, or which do in each batch; none
        under the others, nor in the full pass.
      mesh: splits the rows of a batch over its axis "data". Empty rows that fill up a batch count
        as cost; what the comparison with full depth takes, a head per predicted token and pass, is
        not the policy's, and does not.
      shards: folder of each batch's results, from which an interrupted run continues.
      observe: called with name, batch, per-token comparison and decided depths `[batch, token]`.
      full_passes: by the number of the batch, what an earlier call on the same batches has kept
        here; what is missing is run and added. None: nothing is kept.
      progress: called after every policy and batch.

    Raises:
      ValueError: no batches, or a policy does not fit the model.
    """
    if not batches:
        raise ValueError("Wanted at least one batch of text. Got none.")
    for policy in policies.values():
        for single_policy in policy if isinstance(policy, Sequence) else (policy,):
            check_policy(single_policy, decoder, kv=kv)
    layers = decoder.config.num_layers
    totals = dict.fromkeys(policies, Quality())
    params = place(params, mesh)
    choices: list[tuple[Any, Any]] = [
        (policies[name], (attention or {}).get(name)) for name in policies
    ]
    kept = {} if full_passes is None else full_passes

    def read(number: int) -> Arrays:
        batch, results = batches[number], {}
        rows = len(batch.lengths)
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        run = partial(run_score, decoder, params, ids, lengths, kv=kv, executor=executor, mesh=mesh)
        full = kept[number] if number in kept else run(policy=full_depth(decoder))
        if full_passes is not None:
            full_passes[number] = full
        positions, _ = positions_of(jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths))
        for index, pair in enumerate(choices):
            policy, choice = (x[number] if isinstance(x, Sequence) else x for x in pair)
            choice = place(choice, mesh)
            program = place(shared_program(policy, jnp.asarray(batch.token_ids), positions), mesh)
            # Full depth in question is the pass that was just made.
            same = policy.depths == (layers,) and choice is None
            scores = full if same else run(policy=program, attention=choice)
            other = None if same else full.x
            comparison = _compare(decoder, params, ids, lengths, scores.x, other, mesh=mesh)
            comparison, depths = jax.tree.map(  # Without the rows that fill up a mesh.
                lambda leaf: np.asarray(leaf)[:rows], (comparison, scores.depths)
            )
            costs = _costs(
                decoder,
                params,
                policy,
                scores,
                full.work,
                depths,
                executor=executor,
                attention=choice,
                kv=kv,
            )
            quality = dataclasses.replace(_sums(comparison, depths, batch.lengths), **costs)
            results |= pack(index, quality, comparison, depths)
            if progress is not None:
                progress()
        return results

    def same() -> str:
        static = repr((decoder.config, kv, executor))
        return digest([vars(batch) for batch in batches], choices, static)

    results_of_batch = run_all(len(batches), read, what="batches", same=same, shards=shards)
    for batch, results in zip(batches, results_of_batch, strict=True):
        for index, name in enumerate(policies):
            quality, comparison, depths = unpack(index, results)
            totals[name] += quality
            if observe is not None:
                observe(name, batch, comparison, depths)
    return totals


def _costs(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    policy: Policy,
    scores: Scores,
    full: Work,
    depths: np.ndarray,
    *,
    executor: Executor | Literal["auto"],
    attention: SparseAttention | None,
    kv: FrozenKV,
) -> dict[str, Any]:
    """Returns the costs of a pass, by the fields of `Quality`, from its work and full depth's.

    `depths` are the decided ones, `[batch, token]`, without the rows that fill up a mesh.
    """
    cost, work, (rows, width) = token_cost(decoder, params), scores.work, depths.shape
    gates = gate_flops(decoder, params, policy, work)
    if attention is not None:
        segments = len(policy.depths)
        gates += attention_flops(attention, decoder, params, work, segments=segments)
    # Gates, heads beyond one per token, and what maps an exit's states for the head.
    extra_heads = float(np.sum(work.heads)) - float(np.sum(full.heads))
    return {
        "query_layers": float(np.sum(work.queries)),
        "overflows": int(np.sum(work.overflows)),
        "flops": pass_flops(cost, work, gates=gates),
        "flops_full": pass_flops(cost, full),
        "flops_ideal": ideal_flops(
            cost,
            depths,
            key_widths=choose_executor(executor, policy, width).key_widths(width),
            deepest=int(depths.max(initial=0)),
            keep_frozen=kv == "propagate",
            sparse_layers=_sparse_layers(scores, policy, rows),
            history=0 if attention is None else attention.history.size,
        ),
        "flops_gates": gates
        + cost.head * extra_heads
        + cost.exit_map * float(np.sum(work.exit_maps)),
    }


def _run_alone(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    policies: Sequence[Policy],
    *,
    kv: FrozenKV,
    executor: Executor | Literal["auto"],
    attention: Sequence[SparseAttention | None],
    mesh: Mesh | None,
    shards: Shards | None,
    observe: Callable[[Batch, np.ndarray, np.ndarray], None],
    progress: Callable[[], None] | None,
) -> Quality:
    """Returns the sums of one pass over each batch under its policy, without a full-depth pass.

    `observe` gets each batch with its tokens' losses and decided depths, `[batch, token]`.
    """
    params = place(params, mesh)

    def read(number: int) -> Arrays:
        batch, policy = batches[number], policies[number]
        rows, width = batch.token_ids.shape
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        choice = place(attention[number], mesh)
        positions, _ = positions_of(jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths))
        program = place(shared_program(policy, jnp.asarray(batch.token_ids), positions), mesh)
        options: Any = {"kv": kv, "executor": executor, "mesh": mesh}
        scores = run_score(
            decoder, params, ids, lengths, policy=program, attention=choice, **options
        )
        full = full_work(decoder, lengths, width=width, **options)
        nll, depths = -np.asarray(scores.log_likelihood)[:rows], np.asarray(scores.depths)[:rows]
        costs = _costs(
            decoder,
            params,
            policy,
            scores,
            full,
            depths,
            executor=executor,
            attention=choice,
            kv=kv,
        )
        quality = dataclasses.replace(_sums_alone(nll, depths, batch.lengths), **costs)
        if progress is not None:
            progress()
        return {"nll": nll, "depths": depths, "quality": pack_quality(quality)}

    def same() -> str:
        static = repr((decoder.config, kv, executor, "alone"))
        return digest([vars(batch) for batch in batches], [policies, attention], static)

    total = Quality()
    results = run_all(len(batches), read, what="scores", same=same, shards=shards)
    for batch, result in zip(batches, results, strict=True):
        total += unpack_quality(result["quality"])
        observe(batch, result["nll"], result["depths"])
    return total


def _sparse_layers(scores: Scores, policy: Policy, rows: int) -> np.ndarray | int:
    """Returns the number of layers in which each token attended to its history alone."""
    if scores.sparse is None:
        return 0
    layers = np.diff(policy.depths, prepend=0)
    return np.tensordot(layers, np.asarray(scores.sparse.sparse), axes=1)[:rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """One document's result, in token order.

    Attributes:
      log_likelihood: `[token - 1]`, of every token but the first, in nats.
      depths: `[token - 1]`, layers that the token before it ran to predict it.
      quality: its own sums. Their FLOPs are those of its own decided depths: layers, frozen K/V,
        heads and gates, without padding; `flops_full` the same at full depth.
      flops_share: of the FLOPs that all passes of the call executed, padding included, its share
        by tokens.
    """

    log_likelihood: np.ndarray
    depths: np.ndarray
    quality: Quality = dataclasses.field(default_factory=Quality)
    flops_share: float = 0.0


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
    attention: SparseAttention | None = None,
    mesh: Mesh | None = None,
    shards: Shards | None = None,
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
      policy: decides each token's depth.
      rows: per pass at most, over all devices.
      kv: K/V of frozen tokens, see `score`.
      executor: of live slots; `"auto"`: see `check_worthwhile`.
      attention: choice of sparse tokens, in batches that do not fall back; None: none.
      mesh: splits rows over its axis "data".
      shards: folder of each batch's results, from which an interrupted run continues.
      fractions: expected share of tokens at each of the policy's depths, see `check_worthwhile`.
      min_tokens: smallest pass that is routed.
      same_rows: every pass has `rows` rows, so that calls on other documents compile nothing new.
      compare: run a full-depth pass besides, and compare with it. False: what the policy costs is
        all that is run, and `nll_full`, `kl` and `agree` are None.
      progress: called after every batch that runs, with their number and that of all batches.

    Raises:
      ValueError: no documents, ids are outside the vocabulary, or rows < 1.
    """
    if rows < 1:
        raise ValueError(f"Wanted at least 1 row per pass. Got rows={rows}.")
    if not len(documents):
        raise ValueError("Wanted documents to score, at least one. Got none.")
    check_policy(policy, decoder)
    parts = check_mesh(mesh)
    context = decoder.config.context_length
    cut = [windows_of([ids], width=context) if len(ids) else [] for ids in documents]
    windows = [window for of_one in cut for window in of_one]
    likelihood: list[np.ndarray] = [np.zeros(0, np.float32)] * len(windows)
    depths: list[np.ndarray] = [np.zeros(0, np.int32)] * len(windows)
    qualities = [Quality()] * len(windows)

    batches = list(
        batches_of(
            windows,
            rows=rows,
            widths=row_widths(context),
            vocab_size=decoder.config.vocab_size,
            same_rows=same_rows,
        )
    )
    reasons = [
        check_worthwhile(
            decoder,
            params,
            policy,
            batch=-(-len(batch.lengths) // parts),
            width=batch.token_ids.shape[1],
            executor=executor,
            fractions=fractions,
            min_tokens=min_tokens,
        )
        for batch in batches
    ]
    full = full_depth(decoder)
    chosen = [policy if reason is None else full for reason in reasons]
    choices = [attention if reason is None else None for reason in reasons]
    used = {
        int(batch.window[0]): chosen_policy
        for batch, chosen_policy in zip(batches, chosen, strict=True)
    }

    cost = token_cost(decoder, params)
    of_policy = {
        chosen_policy.depths: [
            chosen_policy.flops(at, decoder, params) for at in range(len(chosen_policy.depths) - 1)
        ]
        for chosen_policy in (full, policy)
    }

    def note(
        batch: Batch, decided: np.ndarray, nll: np.ndarray, compared: Comparison | None
    ) -> None:
        by = used[int(batch.window[0])]
        for row, window in enumerate(batch.window):
            if window < 0:
                continue
            length, own = batch.lengths[row : row + 1], decided[row : row + 1]
            predicted = int(length[0]) - 1
            likelihood[window] = -nll[row, :predicted]
            depths[window] = own[0, :predicted]
            if compared is None:
                sums = _sums_alone(nll[row], own, length)
            else:
                sums = _sums(jax.tree.map(lambda leaf, row=row: leaf[row], compared), own, length)
            costs = _decided_costs(cost, by, of_policy[by.depths], own, executor=executor, kv=kv)
            qualities[window] = dataclasses.replace(sums, **costs)

    done = itertools.count(1)
    step = None if progress is None else lambda: progress(next(done), len(batches))
    total, options = Quality(), {"kv": kv, "executor": executor, "mesh": mesh, "shards": shards}
    if batches and compare:
        (total,) = evaluate(
            decoder,
            params,
            batches,
            {"": chosen},
            attention={"": choices},
            observe=lambda _, batch, comparison, decided: note(
                batch, decided, np.asarray(comparison.nll), comparison
            ),
            progress=step,
            **options,
        ).values()
    elif batches:
        total = _run_alone(
            decoder,
            params,
            batches,
            chosen,
            attention=choices,
            observe=lambda batch, nll, decided: note(batch, decided, nll, None),
            progress=step,
            **options,
        )
    ends = np.cumsum([len(of_one) for of_one in cut])
    spans = [slice(end - len(of_one), end) for end, of_one in zip(ends, cut, strict=True)]
    return TextScore(
        documents=tuple(
            DocumentScore(
                log_likelihood=np.concatenate([np.zeros(0, np.float32), *likelihood[span]]),
                depths=np.concatenate([np.zeros(0, np.int32), *depths[span]]),
                quality=sum(qualities[span], start=Quality()),
                flops_share=total.flops * sum(map(len, windows[span])) / max(1, total.tokens),
            )
            for span in spans
        ),
        quality=total,
        fallbacks=Counter(reason for reason in reasons if reason is not None),
    )


def _sums(comparison: Comparison, depths: np.ndarray, lengths: np.ndarray) -> Quality:
    """Returns the sums of a batch or of one row, without costs."""
    values, counts = np.unique(depths[depths > 0], return_counts=True)
    nll, nll_full, kl = (
        float(np.sum(losses, dtype=np.float64))
        for losses in (comparison.nll, comparison.nll_full, comparison.kl)
    )
    return Quality(
        tokens=int(np.sum(lengths)),
        predicted=int(np.maximum(lengths - 1, 0).sum()),
        nll=nll,
        nll_full=nll_full,
        kl=kl,
        agree=int(np.sum(comparison.agree)),
        histogram=dict(zip(values.tolist(), counts.tolist(), strict=True)),
    )


def _sums_alone(nll: np.ndarray, depths: np.ndarray, lengths: np.ndarray) -> Quality:
    """Returns the same sums without a comparison with full depth."""
    compared = Comparison(nll=nll, nll_full=nll, kl=nll, agree=nll > 0, greedy=nll > 0)
    sums = _sums(compared, depths, lengths)
    return dataclasses.replace(sums, nll_full=None, kl=None, agree=None)


def _decided_costs(
    cost: TokenCost,
    policy: Policy,
    decisions: Sequence[float],
    depths: np.ndarray,
    *,
    executor: Executor | Literal["auto"],
    kv: FrozenKV,
) -> dict[str, float]:
    """Returns the costs of decided depths `[row, token]`, by the fields of `Quality`.

    `decisions` are the FLOPs of one at each of the policy's boundaries.
    """
    width, layers = depths.shape[1], cost.full_depth
    key_widths = choose_executor(executor, policy, width).key_widths(width)
    ideal = partial(ideal_flops, cost, key_widths=key_widths, keep_frozen=kv == "propagate")
    own = ideal(depths, deepest=int(depths.max(initial=0)))
    gates = float(np.sum(cost.read(depths[depths > 0]) - cost.head))  # What maps states at exits.
    for index, (depth, flops) in enumerate(zip(policy.depths, decisions, strict=False)):
        asked, further = int((depths >= depth).sum()), int((depths > depth).sum())
        gates += asked * flops
        gates += further * float(cost.read(depth)) * bool(policy.reads_logits(index))
    return {
        "query_layers": float(depths.sum()),
        "flops": own + gates,
        "flops_full": ideal(np.where(depths > 0, layers, 0), deepest=layers),
        "flops_ideal": own,
        "flops_gates": gates,
    }
