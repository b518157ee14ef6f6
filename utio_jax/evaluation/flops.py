# SPDX-License-Identifier: Apache-2.0
"""FLOPs of decisions: gates, and the choice of attention."""

from __future__ import annotations

import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.work import Work
from utio_jax.policies.base import Policy
from utio_jax.staircase.sparse import SparseAttention


def gate_flops(decoder: Decoder, params: Params, policy: Policy, work: Work) -> float:
    """Returns the FLOPs of a pass's decisions, without the heads that they looked at."""
    per_slot = [policy.flops(index, decoder, params) for index in range(len(policy.depths) - 1)]
    decisions = np.atleast_2d(work.decisions).sum(axis=0)  # Of all devices.
    return float(sum(f * float(n) for f, n in zip(per_slot, decisions, strict=False)))


def attention_flops(
    attention: SparseAttention, decoder: Decoder, params: Params, work: Work, *, segments: int
) -> float:
    """Returns the FLOPs of choosing a pass's attention, without the heads that it looked at.

    Args:
      attention: the choice.
      decoder: the model.
      params: its parameters.
      work: of the pass.
      segments: of the pass, one per depth.
    """
    choices = np.atleast_2d(work.choices).sum(axis=0)  # Of all devices.
    asked = choices[segments - attention.thresholds.shape[0] : segments]
    per_slot = [attention.signal.flops(index, decoder, params) for index in range(len(asked))]
    return float(sum(f * float(n) for f, n in zip(per_slot, asked, strict=True)))
