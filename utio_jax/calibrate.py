# SPDX-License-Identifier: Apache-2.0
"""Fits policies to a model and a text: gates, thresholds, and which exits to use at which budget.

The label is KL to full depth: dense, and free of any annotation. A budget is a target
`flops_ratio`, everything executed included, so thresholds are fitted to the cost model first, and
again after the real pass has shown what padding and decisions add to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.artifacts import versions
from utio_jax.calibration import Calibration
from utio_jax.cost import count_matmul_flops, depth_flops, token_cost
from utio_jax.decoder import Decoder, Params
from utio_jax.documents import Batch
from utio_jax.evaluate import evaluate
from utio_jax.executors import Executor
from utio_jax.gates import collect_signals, fit_gates, rank_correlation
from utio_jax.microbatches import MicroBatches
from utio_jax.thresholds import Thresholds, fit_thresholds

BUDGETS = (0.5, 0.6, 0.75, 0.9)
"""The `flops_ratio`s that policies are fitted for by default."""

_THRESHOLD_TOKENS = 120_000  # Plenty for a handful of thresholds, and seconds to sort.


def calibrate(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    model_sha256: str,
    text: Mapping[str, Any],
    budgets: Sequence[float] = BUDGETS,
    executor: Executor = MicroBatches(),
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fits `learned` and `utio_surrogate` at every budget; deterministic for a seed.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the calibration text, all of one width; none of it may be reported on later.
      model_sha256: identifies the weights; a calibration refuses others.
      text: identifies the text, for the record.
      budgets: target `flops_ratio`s. A policy that cannot get as cheap as one of them has no entry
        there, and `info["unreachable"]` says so.
      executor: how passes will run; padding is part of the budget.
      seed: of the gates.
      progress: called with what happens next.

    Raises:
      ValueError: the model has no early exit, or no budget can be reached by `learned`.
    """
    say = progress if progress is not None else lambda _: None
    exits = decoder.config.exits
    say("signals of the full pass")
    signals = collect_signals(decoder, params, batches)
    say("gates")
    gates = fit_gates(signals.states, signals.kl[:-1], seed=seed)
    apply = jax.jit(lambda gate, x: gate(x))
    predicted = np.stack(
        [
            np.asarray(apply(g, x.astype(np.float32)))
            for g, x in zip(gates, signals.states, strict=True)
        ]
    )
    cost, width = token_cost(decoder, params), batches[0].token_ids.shape[1]
    flops = partial(depth_flops, cost, width=width, key_widths=executor.key_widths(width))
    full = float(flops(exits)[-1])
    gate = count_matmul_flops(gates[0], jnp.zeros((1, decoder.config.embed_dim))) / full
    some = np.random.default_rng(seed).permutation(signals.kl.shape[1])[:_THRESHOLD_TOKENS]
    kl, surrogate = signals.kl[:, some], signals.surrogate[:, some]
    share = lambda depths: flops(depths) / full  # noqa: E731
    fits: dict[str, Callable[[float], Thresholds]] = {
        "learned": partial(_fit_learned, exits, predicted[:, some], kl, share, gate),
        "utio_surrogate": partial(_fit_surrogate, exits, surrogate, kl, share, cost.head / full),
    }
    entries: dict[str, dict[float, Thresholds]] = {name: {} for name in fits}
    fitted = Calibration(
        entries=entries,
        gates=dict(zip(exits, gates, strict=False)),
        mean_states=dict(zip(exits, map(jnp.asarray, signals.mean_state), strict=False)),
        info={},
    )
    sample, unreachable = batches[: max(1, len(batches) // 4)], []
    for budget in budgets:
        say(f"thresholds at {budget:g}")
        for name, fit in fits.items():
            try:
                target = budget
                entries[name][budget] = fit(target)
                for _ in range(2):
                    policy = fitted.policy(name, budget)
                    real = evaluate(decoder, params, sample, {name: policy}, executor=executor)[
                        name
                    ]
                    target += budget - real.flops / real.flops_full
                    entries[name][budget] = fit(target)
            except ValueError as error:
                entries[name].pop(budget, None)
                unreachable.append(f"{name} at {budget:g}: {error}")
    if not entries["learned"]:
        raise ValueError("Wanted budgets that learned can reach. " + " ".join(unreachable))
    root = np.sqrt(signals.kl[:-1])
    correlations = {
        name: {
            str(depth): round(rank_correlation(scores[index], root[index]), 4)
            for index, depth in enumerate(exits[:-1])
        }
        for name, scores in (("learned", predicted), ("utio_surrogate", signals.surrogate))
    }
    info = {
        "model_sha256": model_sha256,
        "text": dict(text),
        "versions": versions(),
        "seed": seed,
        "width": width,
        "tokens": int(signals.kl.shape[1]),
        "rank_correlation_kl": correlations,
        "unreachable": unreachable,
    }
    return dataclasses.replace(fitted, info=info)


def _fit_learned(
    exits: Sequence[int],
    predicted: np.ndarray,
    kl: np.ndarray,
    share: Callable[[Sequence[int]], np.ndarray],
    gate: float,
    budget: float,
) -> Thresholds:
    """Tries each of the last exits as the deepest: nobody then pays for K/V beyond it."""
    found = []
    for last in range(max(2, len(exits) // 2), len(exits) + 1):
        depths = exits[:last]
        costs = share(depths)
        if costs[0] + gate > budget:
            continue
        fit = fit_thresholds(
            predicted[: last - 1],
            kl[:last],
            depths=depths,
            cost_of_depth=costs,
            cost_of_gate=np.full(last - 1, gate),
            budget=budget,
        )
        scores = dict(zip(exits, predicted, strict=False))
        found.append((_harm(fit, scores, dict(zip(exits, kl, strict=True))), fit))
    return _best(found, "learned", share(exits[:2])[0] + gate, budget)


def _fit_surrogate(
    exits: Sequence[int],
    surrogate: np.ndarray,
    kl: np.ndarray,
    share: Callable[[Sequence[int]], np.ndarray],
    head: float,
    budget: float,
) -> Thresholds:
    """Tries the first three exits as the floor, where the score is taken once and costs a head."""
    found = []
    kl_at = dict(zip(exits, kl, strict=True))
    for first, last in itertools.product(range(min(3, len(exits) - 1)), range(2, len(exits) + 1)):
        depths, costs = exits[first:last], share(exits[:last])[first:]
        if len(depths) < 2 or costs[0] + head > budget:
            continue
        fit = fit_thresholds(
            np.broadcast_to(surrogate[first], (len(depths) - 1, kl.shape[1])),
            kl[first:last],
            depths=depths,
            cost_of_depth=costs,
            cost_of_gate=np.zeros(len(depths) - 1),
            budget=budget - head,  # Spent at the floor, whoever leaves there.
        )
        if fit.depths[0] != exits[first]:  # Nobody leaves at the floor; the score is still taken.
            fit = Thresholds(
                depths=(exits[first], *fit.depths),
                thresholds=(-1e30, *fit.thresholds),  # JSON has no infinity.
                fractions=(0.0, *fit.fractions),
            )
        scores = dict.fromkeys(exits, surrogate[first])
        found.append((_harm(fit, scores, kl_at), fit))
    return _best(found, "utio_surrogate", share(exits)[0] + head, budget)


def _harm(fit: Thresholds, scores: Mapping[int, np.ndarray], kl: Mapping[int, np.ndarray]) -> float:
    """Returns the mean KL of stopping where `fit` says."""
    harm = kl[fit.depths[-1]]
    for depth, threshold in reversed(list(zip(fit.depths, fit.thresholds, strict=False))):
        harm = np.where(scores[depth] <= threshold, kl[depth], harm)
    return float(harm.mean())


def _best(
    found: Sequence[tuple[float, Thresholds]], name: str, cheapest: float, budget: float
) -> Thresholds:
    if not found:
        raise ValueError(
            f"Wanted a budget that {name} can reach: at least {cheapest:.3f} here. "
            f"Got {budget:.3f}."
        )
    return min(found, key=lambda pair: pair[0])[1]
