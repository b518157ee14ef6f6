# SPDX-License-Identifier: Apache-2.0
"""Which exits a signal should use at a budget, and up to which scores tokens leave there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.cost import depth_flops, pass_flops, token_cost
from utio_jax.decoder import Decoder, Params
from utio_jax.evaluate import gate_flops
from utio_jax.executors import Executor
from utio_jax.exits import ExitStudy, collect, collect_scores, predicted_tokens
from utio_jax.forward import full_depth, score
from utio_jax.plan import Policy, Signal
from utio_jax.policies import GivenDepths, Thresholded
from utio_jax.thresholds import Thresholds, fit_thresholds, leave_at

_FIT_BATCHES = 8  # 65,000 tokens of the shipped model: plenty for a handful of thresholds.
_PASS_BATCHES = 4  # Each real pass over these tries one set of thresholds.
_COARSE = 16_000  # Tokens from which the sets of exits are chosen, before the thresholds.
_FLOORS = 3  # Depth floors that real passes try.


class ThresholdSearch:
    """Fits thresholds for any signal to one model and text.

    Attributes:
      exits: of the model.
      studies: the part of the text that thresholds are fitted to.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        studies: Sequence[ExitStudy],
        *,
        executor: Executor,
    ):
        self.decoder, self.params, self.executor = decoder, params, executor
        self.exits = decoder.config.exits
        # Longest first: a stride meets every length.
        self.studies = list(studies[:: -(-len(studies) // _FIT_BATCHES)])
        self._tried = range(0, len(self.studies), -(-len(self.studies) // _PASS_BATCHES))
        self._harm = predicted_tokens(self.studies, [study.harm for study in self.studies])
        self._cost = token_cost(decoder, params)
        self._width = studies[0].predicted.shape[1]
        self._full = float(self._flops(self.exits)[-1])
        self._full_pass = self._pass_flops(full_depth(decoder))
        self._cache: dict[tuple[str, tuple[int, ...]], list[np.ndarray]] = {}

    def scores(self, signal: Signal, depths: tuple[int, ...]) -> np.ndarray:
        """Returns `[boundary, token]`, of predicted tokens, where every token runs on."""
        return predicted_tokens(self.studies, self._collected(signal, depths))

    def cheapest(self, signal: Signal) -> float:
        """Returns the smallest budget that the signal can reach, padding apart."""
        return min(
            float(costs[0] + gates[0])
            for first in range(len(self.exits) - 1)
            for costs, gates in [self._costs(signal, self.exits[first : first + 2])]
        )

    def forget(self) -> None:
        """Drops the programs of the signals so far: Linux allows a process 65,530 memory maps."""
        _score.clear_cache()
        collect.clear_cache()
        self._cache.clear()

    def fit(self, signal: Signal, budget: float) -> Thresholds | None:
        """Returns the exits and thresholds of least harm at a budget, or None if it is too low.

        The cost model and the scores propose one choice for each depth floor; real passes at the
        depths so decided choose among them, and two more correct what the model says of its cost.
        """
        proposed = [
            self._propose(signal, first, budget)
            for first in range(min(_FLOORS, len(self.exits) - 1))
        ]
        by_depths = {fit.depths: fit for fit in proposed if fit is not None}
        if not by_depths:
            return None
        chosen = min(by_depths.values(), key=lambda fit: self._loss(signal, fit))
        target = budget
        for _ in range(2):
            target += budget - self._ratio(signal, chosen)
            again = self._fit(signal, chosen.depths, target)
            if again is None:
                break
            chosen = again.over(chosen.depths)
        return chosen

    def _propose(self, signal: Signal, first: int, budget: float) -> Thresholds | None:
        """Returns the thresholds of least harm whose floor is the `first`-th exit, or deeper.

        Tries each later exit as the deepest: nobody then pays for K/V beyond it.
        """
        best: tuple[float, tuple[int, ...]] | None = None
        for last in range(len(self.exits), first + 1, -1):
            depths = self.exits[first:last]
            coarse = self._fit(signal, depths, budget, _COARSE)
            if coarse is not None and len(coarse.depths) > 1:
                harm = self._mean_harm(signal, coarse.over(depths))
                best = min(best, (harm, coarse.depths)) if best else (harm, coarse.depths)
        if best is None:
            return None
        depths = best[1]
        fit = self._fit(signal, depths, budget)
        # Where scores remember the boundaries before, fewer boundaries are other scores.
        while fit is not None and 1 < len(fit.depths) < len(depths):
            depths = fit.depths
            fit = self._fit(signal, depths, budget)
        return fit if fit is not None and len(fit.depths) > 1 else None

    def _fit(
        self, signal: Signal, depths: tuple[int, ...], budget: float, tokens: int | None = None
    ) -> Thresholds | None:
        costs, gates = self._costs(signal, depths)
        if costs[0] + gates[0] > budget:
            return None
        step = -(-self._harm.shape[1] // tokens) if tokens else 1
        rows = [self.exits.index(depth) for depth in depths]
        return fit_thresholds(
            self.scores(signal, depths)[:, ::step],
            self._harm[rows, ::step],
            depths=depths,
            cost_of_depth=costs,
            cost_of_gate=gates,
            budget=budget,
        )

    def _costs(self, signal: Signal, depths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what each depth and each decision costs, as shares of the full pass.

        A look at logits is a head, which tokens that stop there have need of anyway.
        """
        boundaries = range(len(depths) - 1)
        looks = self._cost.head * np.asarray([signal.reads_logits(index) for index in boundaries])
        gates = [signal.flops(index, self.decoder, self.params) for index in boundaries]
        costs = self._flops(depths)
        costs[:-1] -= looks
        return costs / self._full, (looks + gates) / self._full

    def _flops(self, depths: tuple[int, ...]) -> np.ndarray:
        key_widths = self.executor.key_widths(self._width)
        return depth_flops(self._cost, depths, width=self._width, key_widths=key_widths)

    def _mean_harm(self, signal: Signal, fit: Thresholds) -> float:
        left = leave_at(self.scores(signal, fit.depths), np.asarray(fit.thresholds, np.float32))
        rows = np.asarray([self.exits.index(depth) for depth in fit.depths])
        return float(self._harm[rows[left], np.arange(left.size)].mean())

    def _loss(self, signal: Signal, fit: Thresholds) -> float:
        """Returns the loss of a real pass, frozen K/V and all, at the depths that `fit` decides.

        Depths are an input of the pass: one program tries every signal and every set of exits.
        """
        collected, total = self._collected(signal, fit.depths), 0.0
        for number in self._tried:
            left = leave_at(collected[number], np.asarray(fit.thresholds, np.float32))
            given = GivenDepths(
                depth_of_token=jnp.asarray(np.asarray(fit.depths, np.int32)[left]),
                depths=self.exits,
            )
            total -= float(self._score(given, number).log_likelihood.sum())
        return total

    def _ratio(self, signal: Signal, fit: Thresholds) -> float:
        """Returns the `flops_ratio` of real passes."""
        thresholds = jnp.asarray(fit.thresholds, jnp.float32)
        policy = Thresholded(signal=signal, thresholds=thresholds, depths=fit.depths)
        return self._pass_flops(policy) / self._full_pass

    def _pass_flops(self, policy: Policy) -> float:
        total = 0.0
        for number in self._tried:
            work = self._score(policy, number).work
            gates = gate_flops(self.decoder, self.params, policy, work)
            total += pass_flops(self._cost, work, gates=gates)
        return total

    def _score(self, policy: Policy, number: int) -> Any:
        batch = self.studies[number].batch
        ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        run = _try if isinstance(policy, GivenDepths) else _score
        return run(self.decoder, self.params, ids, lengths, policy, executor=self.executor)

    def _collected(self, signal: Signal, depths: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the scores `[boundary, batch, token]` of every study."""
        if not signal.remembers:
            every = self._kept(signal, self.exits)
            rows = [self.exits.index(depth) for depth in depths[:-1]]
            return [scores[rows] for scores in every]
        count = len(depths) - 1  # Later boundaries change no earlier scores.
        for name, known in self._cache:
            if name == signal.name and known[:count] == depths[:-1] and len(known) > count:
                return [scores[:count] for scores in self._cache[name, known]]
        return self._kept(signal, depths)

    def _kept(self, signal: Signal, depths: tuple[int, ...]) -> list[np.ndarray]:
        key = (signal.name, depths)
        if key not in self._cache:
            self._cache[key] = [
                collect_scores(self.decoder, self.params, signal, study, depths=depths)
                for study in self.studies
            ]
        return self._cache[key]


# Two, so that `forget` keeps the program that serves all signals.
_try = jax.jit(
    lambda *args, executor: score(*args, executor=executor),
    static_argnums=0,
    static_argnames="executor",
)
_score = jax.jit(score, static_argnums=0, static_argnames="executor")
