# SPDX-License-Identifier: Apache-2.0
"""FLOPs of decisions: gates, and the choice of attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.attention.heavy_hitters import heavy_hitters
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.work import Work
from utio_jax.policies.base import Policy
from utio_jax.staircase.sparse import SparseAttention


def gate_flops(decoder: Decoder, params: Params, policy: Policy, work: Work) -> float:
    """Returns the FLOPs of a pass's decisions, without the heads that they looked at."""
    per_slot = [policy.flops(index, decoder, params) for index in range(len(policy.depths) - 1)]
    decisions = np.atleast_2d(work.decisions).sum(axis=0)  # Of all devices.
    return float(sum(f * float(n) for f, n in zip(per_slot, decisions, strict=False)))


def attention_flops(
    attention: SparseAttention,
    decoder: Decoder,
    params: Params,
    work: Work,
    *,
    segments: int,
    batch: int,
    width: int,
) -> float:
    """Returns the FLOPs of choosing a pass's attention: decisions and heat, without heads.

    Args:
      attention: the choice.
      decoder: the model.
      params: its parameters.
      work: of the pass.
      segments: of the pass, one per depth.
      batch: rows of a device.
      width: tokens per row.
    """
    if work.sparse is None:
        raise ValueError("Wanted the work of a pass with `attention`. Got one without.")
    # Of all devices, where there are several.
    decisions, heats = (
        np.atleast_2d(leaf).sum(axis=0) for leaf in (work.sparse.decisions, work.sparse.heats)
    )
    asked = decisions[segments - attention.thresholds.shape[0] : segments]
    total = sum(
        attention.signal.flops(index, decoder, params) * float(slots)
        for index, slots in enumerate(asked)
    )
    if heats.any():
        total += float(heats.sum()) * _heat_flops(attention, decoder, params, batch, width)
    return float(total)


def _heat_flops(
    attention: SparseAttention, decoder: Decoder, params: Params, batch: int, width: int
) -> float:
    shape = jax.ShapeDtypeStruct((batch, width), jnp.int32)
    x = jax.eval_shape(decoder.embed, params, shape, shape)
    places = jax.eval_shape(decoder.encode_positions, shape)
    measure = partial(
        heavy_hitters,
        decoder,
        layer=0,
        history=attention.history,
        chunk=attention.chunk,
        sample=attention.sample,
    )
    return count_matmul_flops(
        lambda params, x, places, shown: measure(params, x=x, places=places, shown=shown),
        params,
        x,
        places,
        jax.ShapeDtypeStruct((batch, width), jnp.bool_),
    )
