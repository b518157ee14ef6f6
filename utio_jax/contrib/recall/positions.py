# SPDX-License-Identifier: Apache-2.0
"""Thresholds against positions: what policies lose and spend early and late in the context.

Thresholds are fitted to whole windows, all positions of them together. If scores drift with the
position, one threshold spends more here and less there, and rows shorter than the fitted ones get
another budget than was promised.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.flops import TokenCost, ideal_flops, token_cost
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.intervals import DocumentSums, HullBootstrap
from utio_jax.evaluation.quality import Quality
from utio_jax.policies.base import Policy
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import Comparison, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionSums:
    """What a policy did to tokens of each range of positions.

    Attributes:
      quality: over all positions, with the FLOPs that were executed, padding included.
      tokens: that predict something, `[range]`.
      sums: of each range, by document; FLOPs of decided layers, frozen keys and values, heads and
        gates, without padding, which belongs to no position.
    """

    quality: Quality
    tokens: Int[np.ndarray, " range"]
    sums: tuple[DocumentSums, ...]


def sums_by_position(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    document: Int[np.ndarray, " window"],
    policies: Mapping[str, Policy],
    *,
    edges: Sequence[int],
    executor: Executor = MicroBatches(),
    full_passes: dict[int, Scores] | None = None,
) -> dict[str, PositionSums]:
    """Returns each policy's losses and FLOPs by range of positions and by document.

    A token's loss is that of what it predicts, and belongs to its own position.

    Args:
      decoder: the model.
      params: its parameters.
      batches: rows; their windows' documents are `document`.
      document: of each window, see `utio_jax.core.documents.sample_batches`.
      policies: by names of the caller's choice, controls among them.
      edges: positions at which ranges begin and end, ascending from 0.
      executor: how live slots are run.
      full_passes: see `utio_jax.evaluation.evaluate.evaluate`.

    Raises:
      ValueError: edges that do not ascend from 0, or that leave positions out.
    """
    width = max(batch.token_ids.shape[1] for batch in batches)
    if edges[0] != 0 or edges[-1] < width or list(edges) != sorted({*edges}):
        raise ValueError(
            f"Wanted edges that ascend from 0 to at least {width}, the width of the rows. Got "
            f"{tuple(edges)}."
        )
    cost, ranges = token_cost(decoder, params), list(itertools.pairwise(edges))
    shape = (len(ranges), int(document.max()) + 1)
    nll, flops = ({name: np.zeros(shape) for name in policies} for _ in range(2))
    tokens = {name: np.zeros(len(ranges), np.int64) for name in policies}

    def observe(name: str, batch: Batch, found: Comparison, decided: np.ndarray) -> None:
        gates = _gate_flops(decoder, params, policies[name], decided, cost)
        keys, deepest = executor.key_widths(decided.shape[1]), int(decided.max(initial=0))
        at = np.arange(decided.shape[1])
        predicts = at < batch.lengths[:, None] - 1
        for number, (start, stop) in enumerate(ranges):
            inside = (at >= start) & (at < stop)
            tokens[name][number] += int(predicts[:, inside].sum())
            for row in np.flatnonzero(batch.window >= 0):
                of = document[batch.window[row]]
                nll[name][number, of] += np.asarray(found.nll, np.float64)[row, inside].sum()
                flops[name][number, of] += gates[row, inside].sum() + ideal_flops(
                    cost,
                    np.where(inside, decided[row], 0)[None],
                    key_widths=keys,
                    deepest=deepest,
                    keep_frozen=True,
                )

    quality = evaluate(
        decoder,
        params,
        batches,
        policies,
        executor=executor,
        observe=observe,
        full_passes=full_passes,
    )
    return {
        name: PositionSums(
            quality=quality[name],
            tokens=tokens[name],
            sums=tuple(
                DocumentSums(nll=x, flops=y) for x, y in zip(nll[name], flops[name], strict=True)
            ),
        )
        for name in policies
    }


def _gate_flops(
    decoder: Decoder, params: Params, policy: Policy, decided: np.ndarray, cost: TokenCost
) -> Float[np.ndarray, "row token"]:
    """Returns what decisions about each token cost, heads beyond one and a lens' map included."""
    spent = np.zeros(decided.shape)
    for index, depth in enumerate(policy.depths[:-1]):
        if bool(policy.asks(index)):
            spent += policy.flops(index, decoder, params) * (decided >= depth)
            spent += float(cost.read(depth)) * policy.reads_logits(index) * (decided > depth)
    return spent + cost.exit_map * ((decided > 0) & (decided < cost.full_depth))


def margins_by_position(
    exits: Sequence[PositionSums], policy: PositionSums, *, edges: Sequence[int], draws: int = 2000
) -> list[dict[str, Any]]:
    """Returns a policy's cost and loss by range of positions, beside exits', as JSON can hold them.

    Each range has its own full depth and its own hull of exits.

    Args:
      exits: of all tokens at each exit, shallowest first, full depth last.
      policy: in question.
      edges: positions at which ranges begin and end.
      draws: of documents.

    Raises:
      ValueError: fewer than five documents.
    """
    table = []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        mine, full = policy.sums[number], exits[-1].sums[number]
        known = full.nll > 0  # Documents that reach so far.
        hull = HullBootstrap([_some(each.sums[number], known) for each in exits], draws=draws)
        margin = hull.interval(_some(mine, known))
        table.append(
            {
                "from": start,
                "to": stop - 1,
                "tokens": int(policy.tokens[number]),
                "flops_ratio": round(hull.ratio(_some(mine, known)), 4),
                "nll_full": round(float(full.nll.sum()) / int(policy.tokens[number]), 4),
                "nll_increase_pct": round(100 * float(mine.nll.sum() / full.nll.sum() - 1), 3),
                "hull_margin_pct": None if margin is None else [round(x, 3) for x in margin],
            }
        )
    return table


def _some(sums: DocumentSums, known: np.ndarray) -> DocumentSums:
    return DocumentSums(nll=sums.nll[known], flops=sums.flops[known])
