# SPDX-License-Identifier: Apache-2.0
"""Search for a signal's exits and thresholds at a budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.calibration.studies import ExitStudy, collect, collect_scores, predicted_tokens
from utio_jax.calibration.thresholds import fit_thresholds, leave_at
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import depth_flops, token_cost
from utio_jax.core.rows import place
from utio_jax.evaluation.evaluate import run_passes
from utio_jax.evaluation.ledger import convex_hull
from utio_jax.evaluation.quality import Quality
from utio_jax.policies.base import Policy, Signal
from utio_jax.policies.depth import given_depths
from utio_jax.policies.store import Thresholds
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import fit_row_shares
from utio_jax.staircase.pattern import DENSE
from utio_jax.staircase.score import full_depth, run_score

_FIT_BATCHES = 8  # 65,000 tokens of the shipped model: plenty for a handful of thresholds.
_PASS_BATCHES = 4  # Each real pass over these, at most, tries one set of thresholds.
_PASS_FLOPS = 2e12  # At full depth: some 20 seconds of two CPU cores; four batches of small models.
_COARSE = 16_000  # Tokens from which the sets of exits are chosen, before the thresholds.
_FLOORS = 3  # Depth floors that real passes try.


class ThresholdSearch:
    """Fits thresholds for any signal to one model and text.

    Attributes:
      exits: of the model.
      studies: the part of the text that thresholds are fitted to.
      full: cost and loss of full depth.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        studies: Sequence[ExitStudy],
        *,
        executor: Executor,
        mesh: Mesh | None = None,
    ):
        self.decoder, self.executor, self.mesh = decoder, executor, mesh
        self.params = place(params, mesh)
        self.exits = decoder.config.exits
        # Longest first: a stride meets every length.
        self.studies = list(studies[:: -(-len(studies) // _FIT_BATCHES)])
        self._cost = token_cost(decoder, params)
        self._width = studies[0].predicted.shape[1]
        self._full = float(self._flops(self.exits)[-1])
        batch_flops = self._full * studies[0].predicted.size
        passes = int(np.clip(_PASS_FLOPS // batch_flops, 1, _PASS_BATCHES))
        self._tried = range(0, len(self.studies), -(-len(self.studies) // passes))
        self._harm = predicted_tokens(self.studies, [study.harm for study in self.studies])
        self.full = self._run(full_depth(decoder))
        self._cache: dict[tuple[str, tuple[int, ...]], list[np.ndarray]] = {}

    def scores(self, signal: Signal, depths: tuple[int, ...]) -> np.ndarray:
        """Returns scores `[boundary, token]` of predicted tokens when no token exits."""
        return predicted_tokens(self.studies, self._collected(signal, depths))

    def cheapest(self, signal: Signal) -> float:
        """Returns the smallest budget that the signal can reach, padding apart."""
        return min(
            float(costs[0] + gates[0])
            for first in range(len(self.exits) - 1)
            for costs, gates in [self._costs(signal, self.exits[first : first + 2])]
        )

    def ratio(self, spent: Quality) -> float:
        """Returns the `flops_ratio`."""
        return spent.flops / self.full.flops

    def nll_increase_pct(self, spent: Quality) -> float:
        """Returns the increase of the loss over full depth's, in %."""
        return 100 * (spent.nll / self.full.nll - 1)

    def exit_nll_increase_pct(self) -> dict[str, float]:
        """Returns the increase of each exit's loss over full depth's, in %, by depth."""
        tried = [self.studies[number] for number in self._tried]
        harm = predicted_tokens(tried, [study.harm for study in tried]).sum(axis=1)
        return {
            str(depth): round(100 * float(lost) / self.full.nll, 3)
            for depth, lost in zip(self.exits[:-1], harm, strict=False)
        }

    def exit_agreement(self) -> dict[str, float]:
        """Returns each exit's top-1 agreement with full depth, by depth."""
        differs = predicted_tokens(self.studies, [study.differs for study in self.studies])
        return {
            str(depth): round(1 - float(share), 4)
            for depth, share in zip(self.exits[:-1], differs.mean(axis=1), strict=False)
        }

    def with_row_shares(self, signal: Signal, fit: Thresholds) -> Thresholds:
        """Returns the thresholds with the shares of rows that a static program needs.

        Unchanged for a model with branches, whose segments are not nested.
        """
        if self.decoder.config.branches:
            return fit
        cuts, depths = np.asarray(fit.thresholds, np.float32), np.asarray(fit.depths)
        real = [np.arange(self._width) < study.batch.lengths[:, None] for study in self.studies]
        decided = [
            np.where(mask, depths[leave_at(scores, cuts)], 0)
            for mask, scores in zip(real, self._collected(signal, fit.depths), strict=True)
        ]
        shares = fit_row_shares(np.concatenate(decided), depths=fit.depths)
        return dataclasses.replace(fit, row_shares=shares)

    def forget(self) -> None:
        """Drops compiled programs and cached scores."""
        forget_programs()
        self._cache.clear()

    def fit(self, signal: Signal, budget: float) -> Thresholds | None:
        """Returns the exits and thresholds of least harm at a budget, or None if it is too low.

        The cost model and the scores propose one choice for each depth floor; real passes choose
        the one furthest below the hull of uniform exits, and two more correct its cost.
        """
        proposed = (
            self._propose(signal, first, budget)
            for first in range(min(_FLOORS, len(self.exits) - 1))
        )
        tried = [(fit, self.run(signal, fit)) for fit in proposed if fit is not None]
        if not tried:
            return None
        fit, spent = max(tried, key=lambda pair: self._margin(pair[1]))
        target, by_cost = budget, {self.ratio(spent): fit}
        for _ in range(2):
            target += budget - self.ratio(spent)
            again = self._fit(signal, fit.depths, target)
            if again is None or len(again.used().depths) < 2:  # No token would exit.
                break
            spent = self.run(signal, again)
            by_cost[self.ratio(spent)] = again
        # The nearest, but none that costs noticeably more than was asked for if one does not.
        best = by_cost[min(by_cost, key=lambda cost: (cost > budget + 0.01, abs(cost - budget)))]
        return best if signal.remembers else best.used()

    def run(self, signal: Signal, fit: Thresholds) -> Quality:
        """Returns cost and loss of real passes at these thresholds."""
        return self._run(fit.policy(signal, exits=self.exits))

    def _propose(self, signal: Signal, first: int, budget: float) -> Thresholds | None:
        """Returns the thresholds of least harm whose floor is the `first`-th exit, or deeper.

        Tries each later exit as the deepest: no token then pays for K/V beyond it.
        """
        best: tuple[float, tuple[int, ...]] | None = None
        for last in range(len(self.exits), first + 1, -1):
            depths = self.exits[first:last]
            coarse = self._fit(signal, depths, budget, _COARSE)
            if coarse is not None and len(coarse.used().depths) > 1:
                harm = self._mean_harm(signal, coarse)
                used = depths if signal.remembers else coarse.used().depths
                best = min(best, (harm, used)) if best else (harm, used)
        if best is None:
            return None
        fit = self._fit(signal, best[1], budget)
        return fit if fit is not None and len(fit.used().depths) > 1 else None

    def _fit(
        self, signal: Signal, depths: tuple[int, ...], budget: float, tokens: int | None = None
    ) -> Thresholds | None:
        costs, gates = self._costs(signal, depths)
        step = -(-self._harm.shape[1] // tokens) if tokens else 1
        rows = [self.exits.index(depth) for depth in depths]
        try:
            return fit_thresholds(
                self.scores(signal, depths)[:, ::step],
                self._harm[rows, ::step],
                depths=depths,
                cost_of_depth=costs,
                cost_of_gate=gates,
                budget=budget,
            )
        except ValueError:  # Out of reach.
            return None

    def _costs(self, signal: Signal, depths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cost of each depth and of each decision, as shares of the full pass.

        A look at logits is a head, which tokens that stop there have need of anyway.
        """
        boundaries = range(len(depths) - 1)
        reads = np.asarray([signal.reads_logits(index) for index in boundaries], np.float64)
        looks = self._cost.read(np.asarray(depths[:-1])) * reads
        gates = [signal.flops(index, self.decoder, self.params) for index in boundaries]
        costs = self._flops(depths)
        costs[:-1] -= looks
        asking = looks + gates
        if signal.remembers:  # Every boundary asks, whatever its threshold.
            costs += np.cumsum([*asking, 0.0])
            asking = np.zeros(len(asking))
        return costs / self._full, asking / self._full

    def _flops(self, depths: tuple[int, ...]) -> np.ndarray:
        key_widths = self.executor.key_widths(self._width)
        return depth_flops(self._cost, depths, width=self._width, key_widths=key_widths)

    def _mean_harm(self, signal: Signal, fit: Thresholds) -> float:
        cuts = np.asarray(fit.thresholds, np.float32)
        left = leave_at(self.scores(signal, fit.depths), cuts)
        rows = np.asarray([self.exits.index(depth) for depth in fit.depths], np.int64)
        return float(self._harm[rows[left], np.arange(left.size)].mean())

    @functools.cached_property
    def _hull(self) -> Callable[[float], float | None]:
        """The loss of uniform exits, mixed at random, by `flops_ratio`."""
        shape, depths = self.studies[0].batch.token_ids.shape, self.exits
        uniform = [
            self._run(given_depths(jnp.full(shape, depth), depths=depths)) for depth in depths
        ]
        return convex_hull([(self.ratio(point), point.nll) for point in uniform])

    def _margin(self, spent: Quality) -> float:
        """Returns the margin of a policy below the uniform-exit frontier; more is better."""
        at_hull = self._hull(self.ratio(spent))
        return (np.inf if at_hull is None else at_hull) - spent.nll

    def _run(self, policy: Policy) -> Quality:
        passes = run_passes(
            self.decoder,
            self.params,
            [self.studies[number].batch for number in self._tried],
            {"": (policy, DENSE)},
            compare=False,
            kv="propagate",
            executor=self.executor,
            mesh=self.mesh,
        )
        return sum((quality for _, _, quality, _ in passes), start=Quality())

    def _collected(self, signal: Signal, depths: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the scores `[boundary, batch, token]` of every study, computed once."""
        every = self.exits[self.exits.index(depths[0]) if signal.remembers else 0 :]
        key = (signal.name, every)
        if key not in self._cache:
            self._cache[key] = collect_scores(
                self.decoder, self.params, signal, self.studies, depths=every, mesh=self.mesh
            )
        rows = [every.index(depth) for depth in depths[:-1]]
        return [scores[rows] for scores in self._cache[key]]


def forget_programs() -> None:
    """Drops compiled passes: Linux limits a process to 65,530 memory maps."""
    programs: tuple[Any, ...] = (run_score, collect)
    for program in programs:
        program.clear_cache()
