# SPDX-License-Identifier: Apache-2.0
"""Hindsight as a control: depths from what stopping at each exit really does to each token.

They look at full depth, so they are no policies to use: `causal` is False.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from utio_jax.calibration.studies import ExitStudy, predicted_tokens
from utio_jax.calibration.thresholds import fit_thresholds, leave_at
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import depth_flops, token_cost
from utio_jax.policies.depth import Thresholded, given_depths
from utio_jax.policies.store import Thresholds
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches


def hindsight_policies(
    decoder: Decoder,
    params: Params,
    studies: Sequence[ExitStudy],
    budget: float,
    *,
    executor: Executor = MicroBatches(),
) -> list[Thresholded]:
    """Returns `oracle_kl`, one policy per batch of the very text to be read.

    Thresholds are fitted as for any signal, on KL to full depth itself as the score. Strong, yet
    no bound: what frozen K/V do to other tokens is not in it.

    Args:
      decoder: the model.
      params: its parameters.
      studies: what a full pass over the text shows, from `study_exits`; batches of one width.
      budget: target `flops_ratio`, without padding. Below the first exit's there are no policies.
      executor: how passes will run.
    """
    harm = predicted_tokens(studies, [study.kl for study in studies])
    cost, exits = token_cost(decoder, params), decoder.config.exits
    width = studies[0].predicted.shape[1]
    key_widths = executor.key_widths(width)
    full = depth_flops(cost, exits, width=width, key_widths=key_widths)[-1]
    fits: list[tuple[float, Thresholds]] = []
    for last in range(2, len(exits) + 1):  # No token pays for K/V beyond the deepest exit in use.
        depths = exits[:last]
        shares = depth_flops(cost, depths, width=width, key_widths=key_widths) / full
        if budget < shares[0]:
            continue
        fit = fit_thresholds(
            harm[: last - 1],
            harm[:last],
            depths=depths,
            cost_of_depth=shares,
            cost_of_gate=np.zeros(last - 1),
            budget=budget,
        ).over(depths)
        left = leave_at(harm[: last - 1], np.asarray(fit.thresholds, np.float32))
        fits.append((float(harm[left, np.arange(left.size)].mean()), fit))
    if not fits:
        return []
    best = min(fits, key=lambda pair: pair[0])[1]
    boundaries = len(best.depths) - 1
    return [
        given_depths(
            depth_of_token=jnp.asarray(
                np.asarray(best.depths, np.int32)[
                    leave_at(study.kl[:boundaries], np.asarray(best.thresholds, np.float32))
                ]
            ),
            depths=exits,
            name="oracle_kl",
        )
        for study in studies
    ]
