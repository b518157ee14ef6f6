# SPDX-License-Identifier: Apache-2.0
"""Fits policies to a model and a text: gates, thresholds, and which exits to use at which budget.

The label is KL to full depth: dense, and free of any annotation. A budget is a target
`flops_ratio`, everything executed included, so thresholds are fitted to the cost model first, and
again after the real pass has shown what padding and decisions add to it.
"""

from __future__ import annotations

import dataclasses
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
from utio_jax.ledger import Ledger, uniform_hull
from utio_jax.microbatches import MicroBatches
from utio_jax.plan import Policy
from utio_jax.policies import Uniform
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
    study = _Study(
        exits=exits,
        predicted=predicted[:, some],
        surrogate=signals.surrogate[:, some],
        harm=signals.harm[:, some],
        share=lambda depths: flops(depths) / full,
        gate=gate,
        head=cost.head / full,
    )
    entries: dict[str, dict[float, Thresholds]] = {"learned": {}, "utio_surrogate": {}}
    fitted = Calibration(
        entries=entries,
        gates=dict(zip(exits, gates, strict=False)),
        mean_states=dict(zip(exits, map(jnp.asarray, signals.mean_state), strict=False)),
        info={},
    )
    sample, unreachable = batches[::4], []  # Longest first: a stride meets every length.
    run = partial(_really, decoder, params, sample, executor)
    hull = uniform_hull([run(Uniform(depth=depth)) for depth in exits])

    def really(name: str, budget: float, entry: Thresholds) -> Ledger:
        entries[name][budget] = entry
        return run(fitted.policy(name, budget))

    for budget in budgets:
        for name in entries:
            say(f"{name} at {budget:g}")
            fits = {
                first: study.fit(name, first, budget) for first in range(min(3, len(exits) - 1))
            }
            rows = {
                first: really(name, budget, fit) for first, fit in fits.items() if fit is not None
            }
            if not rows:
                unreachable.append(f"{name} at {budget:g}")
                continue
            # Frozen K/V harm others, which only a real pass shows: so it chooses the floor.
            floor = max(rows, key=lambda first: _margin(rows[first], hull))
            target, spent = budget, rows[floor].flops_ratio or 0.0
            tried = {spent: fits[floor]}
            for _ in range(2):
                target += budget - spent
                again = study.fit(name, floor, target)
                if again is None:
                    break
                spent = really(name, budget, again).flops_ratio or 0.0
                tried[spent] = again
            # The nearest, but none that costs noticeably more than was asked for if one does not.
            nearest = tried[min(tried, key=lambda cost: (cost > budget + 0.01, abs(cost - budget)))]
            if nearest is not None:
                entries[name][budget] = nearest
    if not entries["learned"]:
        cheapest = study.share(exits[:2])[0] + gate
        raise ValueError(
            f"Wanted budgets that learned can reach: at least {cheapest:.3f} here. Got {budgets}."
        )
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


def _really(
    decoder: Decoder, params: Params, batches: Sequence[Batch], executor: Executor, policy: Policy
) -> Ledger:
    """Returns what a policy costs and loses in real passes."""
    found = evaluate(decoder, params, batches, {"": policy}, executor=executor)[""]
    return found.ledger(policy.name, budget=None, num_layers=decoder.config.num_layers)


def _margin(row: Ledger, hull: Callable[[float], float | None]) -> float:
    """Returns by how much (% of loss) a row lies below the hull; the more, the better."""
    at_hull = hull(row.flops_ratio or 0.0)
    return (np.inf if at_hull is None else at_hull) - (row.nll_increase_pct or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Study:
    """Scores and harm of the calibration tokens at the model's exits.

    Attributes:
      exits: depths.
      predicted: `[exit, token]`, the gates' predictions.
      surrogate: `[exit, token]`.
      harm: `[exit, token]`, extra nats of leaving there.
      share: maps depths to the cost of each, as a share of the full pass.
      gate: cost of one gate, head: of one vocabulary head; shares of the full pass.
    """

    exits: tuple[int, ...]
    predicted: np.ndarray
    surrogate: np.ndarray
    harm: np.ndarray
    share: Callable[[Sequence[int]], np.ndarray]
    gate: float
    head: float

    def fit(self, name: str, first: int, budget: float) -> Thresholds | None:
        """Returns the thresholds of least harm whose shallowest exit is the `first`-th, or None.

        Tries each later exit as the deepest: nobody then pays for K/V beyond it.
        """
        learned, best = name == "learned", None
        for last in range(first + 2, len(self.exits) + 1):
            depths, costs = self.exits[first:last], self.share(self.exits[:last])[first:]
            boundaries = len(depths) - 1
            if learned:
                scores, gates = self.predicted[first : last - 1], self.gate
            else:  # One score, taken at the floor with a whole head, which leavers need anyway.
                scores = np.broadcast_to(self.surrogate[first], (boundaries, self.harm.shape[1]))
                gates, costs = 0.0, costs + self.head * (np.arange(len(depths)) > 0)
            if costs[0] + gates > budget:
                continue
            fit = fit_thresholds(
                scores,
                self.harm[first:last],
                depths=depths,
                cost_of_depth=costs,
                cost_of_gate=np.full(boundaries, gates),
                budget=budget,
            )
            if not learned and fit.depths[0] != depths[0]:
                fit = Thresholds(
                    depths=(depths[0], *fit.depths),
                    thresholds=(-1e30, *fit.thresholds),  # JSON has no infinity.
                    fractions=(0.0, *fit.fractions),
                )
            if len(fit.depths) > 1:
                harm = self._harm(fit, scores, depths)
                best = min(best, (harm, fit), key=lambda pair: pair[0]) if best else (harm, fit)
        return None if best is None else best[1]

    def _harm(self, fit: Thresholds, scores: np.ndarray, depths: tuple[int, ...]) -> float:
        """Returns the mean harm of stopping where `fit` says."""
        harm = self.harm[self.exits.index(fit.depths[-1])]
        for depth, threshold in reversed(list(zip(fit.depths, fit.thresholds, strict=False))):
            leaves = scores[depths.index(depth)] <= threshold
            harm = np.where(leaves, self.harm[self.exits.index(depth)], harm)
        return float(harm.mean())
