# SPDX-License-Identifier: Apache-2.0
"""FLOPs of decisions, and the guardrail: can a depth per token save FLOPs at a shape?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.core.platform import here
from utio_jax.core.work import Work
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import check_shares
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.pattern import DENSE, AttentionPattern


def gate_flops(
    decoder: Decoder,
    params: Params,
    policy: Policy,
    work: Work,
    *,
    attention: AttentionPattern = DENSE,
) -> float:
    """Returns the FLOPs of a pass's decisions and choices, without the LM heads that they read."""
    per_slot = [policy.flops(index, decoder, params) for index in range(len(policy.depths) - 1)]
    decisions = np.atleast_2d(work.decisions).sum(axis=0)  # Of all devices.
    choices = attention.flops(decoder, params, work, segments=len(policy.depths))
    return choices + float(sum(f * float(n) for f, n in zip(per_slot, decisions, strict=False)))


def check_worthwhile(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    policy: Policy,
    *,
    batch: int,
    width: int,
    executor: Executor | Literal["auto"] = "auto",
    attention: AttentionPattern = DENSE,
    fractions: Sequence[float] | None = None,
    min_tokens: int = 0,
) -> str | None:
    """Returns the reason why a policy cannot save FLOPs at a shape, or None if it can.

    Args:
      decoder: the model.
      params: its parameters.
      policy: the policy in question.
      batch: rows.
      width: tokens per row.
      executor: how it would run. `"auto"`: as `score` chooses, and not at all on accelerators where
        a state has fewer than `Platform.least_routed` features: these wait more than they multiply.
      attention: which keys each token sees. What another pattern than dense attention spares is
        known only after the pass: its FLOPs are no reason.
      fractions: expected share of tokens at each of the policy's depths; by default the best case,
        in which all tokens stop at the first.
      min_tokens: smallest pass that is routed at all. FLOPs say nothing of what short passes
        wait for.
    """
    if fractions is not None:
        check_shares(fractions, policy.depths)
    if len(policy.depths) == 1:
        return None  # Truncated or full: nothing is routed.
    if batch * width < min_tokens:
        return f"{batch} x {width} tokens are fewer than the minimum of {min_tokens}"
    if executor == "auto" and decoder.config.embed_dim < here().least_routed:
        return (
            f"states of {decoder.config.embed_dim} features are narrower than "
            f"{here().least_routed}: on this platform routing them is predicted to be no faster; "
            "name an executor to do it"
        )
    if attention != DENSE:
        return None
    executor = choose_executor(executor, policy, width)
    cost = token_cost(decoder, params)
    shares = fractions if fractions is not None else [1.0] + [0.0] * (len(policy.depths) - 1)
    layers = decoder.config.num_layers
    expected = partial(expected_flops, cost, batch=batch, width=width, min_bucket=executor.unit)
    full = expected(depths=(layers,), fractions=(1.0,))
    boundaries = range(len(policy.depths) - 1)
    routed = expected(
        depths=policy.depths,
        fractions=shares,
        gates=[policy.flops(index, decoder, params) for index in boundaries],
        reads=[policy.reads_logits(index) for index in boundaries],
    )
    at = f"at {batch} x {width} tokens in buckets of {executor.unit} routing would"
    if routed >= full:
        return f"{at} cost {routed / full:.2f} of the full pass' FLOPs"
    return None
