# SPDX-License-Identifier: Apache-2.0
"""Quality and cost of policies on text: teacher-forced, against full depth, every token counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.cost import ideal_flops, pass_flops, token_cost
from utio_jax.decoder import Decoder, Params
from utio_jax.documents import Batch, batches_of, windows_of
from utio_jax.executors import Executor, Work
from utio_jax.forward import Comparison, compare_states, full_depth, score
from utio_jax.guardrails import check_worthwhile
from utio_jax.layers import FrozenKV, check_policy
from utio_jax.ledger import Ledger
from utio_jax.microbatches import MicroBatches
from utio_jax.parallel import Rows, check_mesh, place
from utio_jax.plan import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Sums over a text, from which a ledger's quality and cost follow.

    Attributes:
      tokens: real tokens.
      predicted: tokens that were predicted.
      nll: summed negative log-likelihood, nats.
      nll_full: the same at full depth.
      kl: summed KL(full || policy), nats.
      agree: predicted tokens with the full model's most probable token.
      histogram: tokens by decided depth.
      query_layers: query slots computed, times layers.
      flops: executed.
      flops_full: executed by the full-depth pass.
      flops_ideal: of decided layers, frozen K/V and one head per token.
      flops_gates: of all decisions, and of heads beyond one per token.
    """

    tokens: int = 0
    predicted: int = 0
    nll: float = 0.0
    nll_full: float = 0.0
    kl: float = 0.0
    agree: int = 0
    histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)
    query_layers: float = 0.0
    flops: float = 0.0
    flops_full: float = 0.0
    flops_ideal: float = 0.0
    flops_gates: float = 0.0

    def __add__(self, other: Quality) -> Quality:
        added: dict[str, Any] = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name != "histogram"
        }
        depths = sorted({*self.histogram, *other.histogram})
        added["histogram"] = {
            d: self.histogram.get(d, 0) + other.histogram.get(d, 0) for d in depths
        }
        return Quality(**added)

    def ledger(self, policy: str, *, budget: float | None, num_layers: int) -> Ledger:
        """Returns the record's quality and cost; times are left None."""
        decided = sum(depth * count for depth, count in self.histogram.items())
        return Ledger(
            policy=policy,
            budget=budget,
            tokens=self.tokens,
            num_layers=num_layers,
            depth_decided_mean=decided / self.tokens,
            depth_executed_mean=self.query_layers / self.tokens,
            depth_histogram={
                str(d): round(n / self.tokens, 6) for d, n in self.histogram.items() if n
            },
            involuntary_stays=0,
            involuntary_exits=0,
            nll_full=self.nll_full / self.predicted,
            nll=self.nll / self.predicted,
            nll_increase_pct=100 * (self.nll / self.nll_full - 1),
            kl_full=self.kl / self.predicted,
            agreement=self.agree / self.predicted,
            flops_ratio=self.flops / self.flops_full,
            gate_pct=100 * self.flops_gates / self.flops_full,
            padding_ratio=self.query_layers / decided,
            speedup_ideal=self.flops_full / self.flops_ideal,
        )


# Timing runs the same program, and must not compile it again.
run_score = jax.jit(score, static_argnums=0, static_argnames=("kv", "executor", "mesh"))
_compare = jax.jit(compare_states, static_argnums=0, static_argnames="mesh")


def evaluate(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    policies: Mapping[str, Policy],
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    mesh: Mesh | None = None,
    observe: Callable[[str, Batch, Comparison, np.ndarray], None] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Quality]:
    """Returns each policy's quality and cost on the same batches, against one full-depth pass.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text.
      policies: by a name of the caller's choice.
      kv: what others see of frozen tokens.
      executor: how live slots are run; the full pass uses it too.
      mesh: splits the rows of a batch over its axis "data". Empty rows that fill them up count as
        cost.
      observe: called with name, batch, per-token comparison and decided depths `[batch, token]`.
      progress: called after every policy and batch.

    Raises:
      ValueError: no batches, or a policy does not fit the model.
    """
    if not batches:
        raise ValueError("Wanted at least one batch of text. Got none.")
    cost = token_cost(decoder, params)
    totals = dict.fromkeys(policies, Quality())
    params, policies = place((params, dict(policies)), mesh)
    for batch in batches:
        rows = len(batch.lengths)
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        run = partial(run_score, decoder, params, ids, lengths, kv=kv, executor=executor, mesh=mesh)
        full = run(policy=full_depth(decoder))
        flops_full = pass_flops(cost, full.work)
        for name, policy in policies.items():
            found = run(policy=policy)
            comparison = _compare(decoder, params, ids, lengths, found.x, full.x, mesh=mesh)
            comparison, depths = _first(rows, (comparison, found.depths))
            work = found.work
            gates = gate_flops(decoder, params, policy, work)
            extra_heads = float(np.sum(work.heads)) - float(np.sum(full.work.heads))
            values, counts = np.unique(depths[depths > 0], return_counts=True)
            totals[name] += Quality(
                tokens=int(batch.lengths.sum()),
                predicted=int(np.maximum(batch.lengths - 1, 0).sum()),
                nll=float(comparison.nll.sum(dtype=np.float64)),
                nll_full=float(comparison.nll_full.sum(dtype=np.float64)),
                kl=float(comparison.kl.sum(dtype=np.float64)),
                agree=int(comparison.agree.sum()),
                histogram=dict(zip(values.tolist(), counts.tolist(), strict=True)),
                query_layers=float(np.sum(work.queries)),
                flops=pass_flops(cost, work, gates=gates),
                flops_full=flops_full,
                flops_ideal=ideal_flops(
                    cost,
                    depths,
                    key_widths=executor.key_widths(ids.shape[1]),
                    deepest=int(depths.max(initial=0)),
                    keep_frozen=kv == "propagate",
                ),
                flops_gates=gates + cost.head * extra_heads,
            )
            if observe is not None:
                observe(name, batch, comparison, depths)
            if progress is not None:
                progress()
    return totals


def _first(rows: int, tree: Any) -> Any:
    """Returns the arrays on the host, without the rows that fill up a mesh."""
    return jax.tree.map(lambda each: np.asarray(each)[:rows], tree)


def gate_flops(decoder: Decoder, params: Params, policy: Policy, work: Work) -> float:
    """Returns the FLOPs of a pass's decisions, without the heads that they looked at."""
    per_slot = [policy.flops(index, decoder, params) for index in range(len(policy.depths) - 1)]
    decisions = np.atleast_2d(work.decisions).sum(axis=0)  # Of all devices.
    return float(sum(f * float(n) for f, n in zip(per_slot, decisions, strict=False)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """One document's result, in token order.

    Attributes:
      log_likelihood: `[token - 1]`, of every token but the first, in nats.
      depths: `[token - 1]`, layers that the token before it ran to predict it.
    """

    log_likelihood: np.ndarray
    depths: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScore:
    """What `score_documents` returns.

    Attributes:
      documents: one result per document.
      quality: the sums over all of them, compared with full depth.
      fallbacks: why batches ran at full depth instead, and how many did.
    """

    documents: tuple[DocumentScore, ...]
    quality: Quality
    fallbacks: Mapping[str, int]


def score_documents(
    decoder: Decoder,
    params: Params,
    documents: Sequence[np.ndarray],
    policy: Policy,
    *,
    rows: int = 16,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    mesh: Mesh | None = None,
    fractions: Sequence[float] | None = None,
    min_tokens: int = 0,
    progress: Callable[[], None] | None = None,
) -> TextScore:
    """Scores documents of any length in batches of a few static shapes, with the guardrails on.

    Args:
      decoder: the model.
      params: its parameters.
      documents: token ids `[token]` each, at least two; longer than the context: in windows.
      policy: who runs how deep.
      rows: per pass, over all devices.
      kv: what others see of frozen tokens.
      executor: how live slots are run.
      mesh: splits the rows over its axis "data".
      fractions: expected share of tokens at each of the policy's depths, see `check_worthwhile`.
      min_tokens: smallest pass that is routed.
      progress: called after every batch.

    Raises:
      ValueError: a document has fewer than two tokens, ids are outside the vocabulary, or rows < 1.
    """
    if rows < 1:
        raise ValueError(f"Wanted at least 1 row per pass. Got rows={rows}.")
    short = [index for index, ids in enumerate(documents) if len(ids) < 2]
    if short or not len(documents):
        raise ValueError(
            "Wanted documents of at least two tokens, so that something is predicted. Got "
            + (f"fewer in documents {short[:8]}." if short else "no documents.")
        )
    check_policy(policy, decoder)
    parts, params = check_mesh(mesh), place(params, mesh)
    context = decoder.config.context_length
    cut = [windows_of([ids], width=context) for ids in documents]
    windows = [window for of_one in cut for window in of_one]
    widths = [width for width in (64 * 2**power for power in range(12)) if width < context]
    likelihood: list[np.ndarray] = [np.zeros(0)] * len(windows)
    depths: list[np.ndarray] = [np.zeros(0, np.int32)] * len(windows)

    def observe(_: str, batch: Batch, comparison: Comparison, decided: np.ndarray) -> None:
        for row, window in enumerate(batch.window):
            if window >= 0:
                predicted = int(batch.lengths[row]) - 1
                likelihood[window] = -np.asarray(comparison.nll)[row, :predicted]
                depths[window] = decided[row, :predicted]

    total, fallbacks = Quality(), {}
    for batch in batches_of(
        windows, rows=rows, widths=[*widths, context], vocab_size=decoder.config.vocab_size
    ):
        reason = check_worthwhile(
            decoder,
            params,
            policy,
            batch=-(-rows // parts),
            width=batch.token_ids.shape[1],
            executor=executor,
            fractions=fractions,
            min_tokens=min_tokens,
        )
        if reason is not None:
            fallbacks[reason] = fallbacks.get(reason, 0) + 1
        used = policy if reason is None else full_depth(decoder)
        found = evaluate(
            decoder,
            params,
            [batch],
            {"": used},
            kv=kv,
            executor=executor,
            mesh=mesh,
            observe=observe,
            progress=progress,
        )
        total += found[""]
    ends = np.cumsum([len(of_one) for of_one in cut])
    spans = [slice(end - len(of_one), end) for end, of_one in zip(ends, cut, strict=True)]
    return TextScore(
        documents=tuple(
            DocumentScore(
                log_likelihood=np.concatenate(likelihood[span]), depths=np.concatenate(depths[span])
            )
            for span in spans
        ),
        quality=total,
        fallbacks=fallbacks,
    )
