# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `chat` share: how deep each token runs, and how it is chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from utio_jax.cli.options import OfModel, calibration_of, policy_named, repeat_verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfDecoding(OfModel):
    """Which model decodes, in which mode.

    Attributes:
      enable_utio: decode with a depth per token; without it the plain model decodes.
      lossless: the plain model's own tokens, drafted at shallow exits. Implies --enable-utio.
      drafter: what drafts for --lossless: exit, or ngram (what followed the last tokens when the
        text had them before; needs no exit). By default an exit where the model was trained at its
        exits, else ngram.
      kv: what later tokens see of a shallow one: propagate, drop, or mapped with
        --prompt-maps. By default propagate.
      policy: who stops early: uniform, random, or one that the calibration holds. By default
        learned.
      budget: target flops_ratio of a fitted policy. By default 0.6, or the only one. Implies
        --enable-utio.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      throttle: tokens that score at most this read a compact history instead of all of it; inf for
        all. In the unit of the policy's scores, or of the learned gate's where it has none.
      sparse_prompt: prompt tokens that score at most this attend to the history alone, from the
        policy's first depth on; inf for all. In the unit of --throttle.
      route_prompt: prompt tokens, too, stop where the policy says.
      prompt: full: every token of a prompt runs all layers. By default those that need not do not,
        where upper layers read keys and values made below: the tokens are the same.
      prompt_budget: FLOPs of reading a prompt, over reading it in full: most of its tokens stop
        early. 1 is the plain program.
      prompt_maps: a file that `utio-jax fit-prompt` wrote: what a stock model needs for
        --prompt-budget.
      history: of throttled and sparse tokens: how many recent ones they see, and how many first
        ones. By default 98 4.
      temperature: 0 takes the most probable token, always; above it tokens are drawn.
      top_p: draws among the most probable tokens that reach this probability together.
      seed: of the draws.
    """

    enable_utio: bool = False
    lossless: bool = False
    drafter: str | None = None
    kv: str | None = None
    policy: str | None = None
    budget: float | None = None
    calibration: Path | None = None
    depth: int | None = None
    throttle: float | None = None
    sparse_prompt: float | None = None
    route_prompt: bool = False
    prompt: Literal["full"] | None = None
    prompt_budget: float | None = None
    prompt_maps: Path | None = None
    history: tuple[int, int] | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def load(self) -> Any:
        """Returns the `utio_jax.models.Model`, with KV maps where they are named.

        Raises:
          ValueError: it cannot be used.
        """
        model = super().load()
        return model if self.prompt_maps is None else model.with_kv_maps(self.prompt_maps)

    def named_policy(self, model: Any) -> Any:
        """Returns the policy, its budget, and the shares of its depths."""
        scored = self.throttle is not None or self.sparse_prompt is not None
        # Tokens may be scored by a calibration's gate where the policy itself has no use for one.
        ungated = scored and self.policy in ("full", "uniform")
        return policy_named(
            model,
            self.policy_name,
            budget=self.budget,
            depth=self.depth,
            calibration=None if ungated else self.calibration,
        )

    @property
    def policy_name(self) -> str:
        """The policy that was asked for, or is taken by default."""
        return "learned" if self.policy is None else self.policy

    def decoding_mode(self, model: Any) -> tuple[Any, Any, float | None]:
        """Returns the mode, how prompts are read, and the budget of the policy if it has one."""
        from utio_jax.decoding.prefill import Prefill
        from utio_jax.models.verbs import read_prompts_within

        mode, prefill, budget = self._mode(model)
        given = [prefill, self.prompt, self.prompt_budget]
        if sum(way is not None for way in given) > 1:
            raise ValueError(
                "Wanted one way of reading prompts. Got several of --prompt full, --prompt-budget, "
                "and --route-prompt or --sparse-prompt. Leave out all but one."
            )
        if self.prompt is not None:
            return mode, Prefill(), budget
        if self.prompt_budget is None:
            return mode, prefill, budget
        prefill = read_prompts_within(
            model, self.prompt_budget, lambda: calibration_of(model, self.calibration)
        )
        return mode, prefill, budget

    def _mode(self, model: Any) -> tuple[Any, Any, float | None]:
        """Returns the same without --prompt-budget."""
        from utio_jax.decoding.adaptive import Adaptive
        from utio_jax.decoding.base import Plain
        from utio_jax.decoding.lossless import lossless_for
        from utio_jax.decoding.prefill import Prefill
        from utio_jax.policies.depth import never_stops
        from utio_jax.staircase.reference import check_kv

        routing = {
            "--policy": self.policy,
            "--budget": self.budget,
            "--depth": self.depth,
            "--calibration": self.calibration,
            "--throttle": self.throttle,
            "--sparse-prompt": self.sparse_prompt,
            "--route-prompt": self.route_prompt or None,
            "--history": self.history,
        }
        given = [name for name, value in routing.items() if value is not None]
        if self.lossless:
            if given:
                raise ValueError(
                    "Wanted --lossless without a policy or a throttle: every token runs at full "
                    f"depth and over the whole history in the end. Got {', '.join(given)}. Leave "
                    "out one or the other."
                )
            if self.kv not in (None, "full"):
                raise ValueError(
                    "Wanted --kv full with --lossless, which drafts with the full model's layers "
                    f"and K/V. Got --kv {self.kv}. Leave it out, or use --enable-utio."
                )
            drafter: Any = self.drafter
            return lossless_for(model.decoder, drafter), None, None
        if self.drafter is not None:
            raise ValueError(
                f"Wanted --lossless with --drafter. Got --drafter {self.drafter} alone. "
                "Add --lossless."
            )
        if not self.enable_utio and self.budget is None:
            if given or self.kv is not None:
                named = [*given, *(["--kv"] if self.kv is not None else [])]
                raise ValueError(
                    f"Wanted --enable-utio with {', '.join(named)}: the plain model has no use "
                    "for it. Add --enable-utio."
                )
            return Plain(), None, None
        kv: Any = "propagate" if self.kv is None else self.kv
        check_kv(kv, ("propagate", "drop", "mapped"))
        policy, budget, _ = self.named_policy(model)
        repeat_verdict(model, self.policy_name, self.calibration)
        throttle = attention = None
        if self.throttle is not None or self.sparse_prompt is not None:
            policy, signal = self._scored(model, policy)
            throttle, attention = self._spared(policy, signal)
        elif self.history is not None:
            raise ValueError(
                "Wanted --throttle or --sparse-prompt with --history: who shall see no more than "
                "that? For example: --throttle 0.5, or --throttle inf for all."
            )
        mode = Adaptive(policy=policy, kv=kv, throttle=throttle)
        if attention is None and not self.route_prompt:
            return mode, None, budget
        if not self.route_prompt:
            policy = never_stops((*policy.depths[:-1], model.decoder.config.num_layers))
        return mode, Prefill(policy=policy, attention=attention), budget

    def _spared(self, policy: Any, signal: Any) -> tuple[Any, Any]:
        """Returns the throttle and the prompts' attention, None where not asked for."""
        import jax.numpy as jnp

        from utio_jax.attention.history import History
        from utio_jax.decoding.throttle import Throttle
        from utio_jax.staircase.sparse import SparseAttention

        recent, sinks = (98, 4) if self.history is None else self.history
        history = History(recent=recent, sinks=sinks)
        throttle = attention = None
        if self.throttle is not None:
            thresholds = jnp.full(len(policy.depths), self.throttle, jnp.float32)
            throttle = Throttle(history=history, signal=signal, thresholds=thresholds)
        if self.sparse_prompt is not None:
            thresholds = jnp.full(len(policy.depths) - 1, self.sparse_prompt, jnp.float32)
            attention = SparseAttention(history=history, signal=signal, thresholds=thresholds)
        return throttle, attention

    def _scored(self, model: Any, policy: Any) -> tuple[Any, Any]:
        """Returns the policy, with boundaries where tokens get scores, and what scores them."""
        from utio_jax.policies.depth import Thresholded, never_stops

        if isinstance(policy, Thresholded):
            return policy, policy.signal
        # The control, or no policy at all: scores are the learned gate's.
        fitted: Any = calibration_of(model, self.calibration).signals
        if "learned" not in fitted:
            raise ValueError(
                "Wanted a calibration with a learned gate, to score tokens by. "
                f"Got {[*fitted]}. Calibrate: utio-jax calibrate --policy learned."
            )
        signal = fitted["learned"]
        if len(policy.depths) == 1:
            last = policy.depths[0]
            early = tuple(depth for depth in signal.exits if depth < last)
            full = last == model.decoder.config.num_layers
            policy = never_stops((*early, last), name="full" if full else policy.name)
        return policy, signal

    def sampling(self) -> Any:
        """Returns how tokens are chosen. Raises ValueError for --top-p where none is drawn."""
        from utio_jax.decoding.sampling import Chain, Greedy, Temperature, TopP

        if self.temperature == 0:
            if self.top_p is not None:
                raise ValueError(
                    "Wanted --temperature above 0 with --top-p: nothing is drawn at 0. "
                    f"Got --top-p {self.top_p:g}. For example: --temperature 1."
                )
            return Greedy()
        methods = [Temperature(self.temperature)]
        return methods[0] if self.top_p is None else Chain((*methods, TopP(self.top_p)))
