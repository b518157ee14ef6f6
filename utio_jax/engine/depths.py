# SPDX-License-Identifier: Apache-2.0
"""Depth policies of single requests, as thresholds at the depths of the engine's mode.

Thresholds are arrays with a row for each slot, so a request's budget compiles nothing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float

from utio_jax.core.decoder import Decoder
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode
from utio_jax.decoding.loop import canonical
from utio_jax.policies.depth import Thresholded, same_signal, spread_thresholds
from utio_jax.staircase.loop import check_policy

RequestPolicy = Thresholded | Literal["full"] | None
"""Depth of a request's tokens: an own policy, `"full"`, or None for the mode's policy."""


def own_thresholds(mode: Mode) -> Float[np.ndarray, " boundary"] | None:
    """Returns the thresholds of a mode's own policy; None if it has none to change."""
    if not isinstance(mode, Adaptive) or not isinstance(mode.policy, Thresholded):
        return None
    return np.asarray(mode.policy.thresholds, np.float32)


def thresholds_of(
    policy: RequestPolicy, mode: Mode, decoder: Decoder
) -> Float[np.ndarray, " boundary"] | None:
    """Returns a request's thresholds at the boundaries of the mode; None if the mode has none.

    Raises:
      ValueError: the mode has no policy of thresholds, or another signal. Or it lacks depths of the
        request's policy; a mode that decides more than depth needs equal depths. Or thresholds of
        the policy are NaN, or not one for each of its depths but the last.
    """
    own, served = own_thresholds(mode), getattr(mode, "policy", None)
    if policy is None or (policy == "full" and mode.exact):
        return own
    if own is None or not isinstance(served, Thresholded):
        raise ValueError(
            "Wanted an engine with mode=Adaptive(policy=...) and thresholds in it, for a request "
            f"with a policy of its own. Got mode {mode.name!r}. Leave the policy out."
        )
    depths = served.depths
    if policy == "full":
        if depths[-1] != decoder.config.num_layers:
            raise ValueError(
                f"Wanted a mode that ends at all {decoder.config.num_layers} layers, for a request "
                f"at full depth. Got depths={depths}. Make the engine's mode with "
                "Calibration.policy(name, budget, exits=...) over further ones."
            )
        return np.full_like(own, -np.inf)
    # The mode's numbers are arrays: those of the policy become arrays, too.
    if not isinstance(policy, Thresholded) or not same_signal(
        canonical(policy.signal), served.signal
    ):
        got = f"{policy!r:.80}"
        if isinstance(policy, Thresholded):
            got = f"one of {policy.signal.name!r}, or of other weights"
        raise ValueError(
            'Wanted "full" or None, or a policy of thresholds and the mode\'s own signal, '
            f"{served.signal.name!r}, as of Calibration.policy(name, budget). Got {got}. Serve "
            "another signal from an engine of its own."
        )
    check_policy(policy, decoder, kv=mode.prompt_kv)
    if (shape := np.shape(policy.thresholds)) != (len(policy.depths) - 1,):
        raise ValueError(
            f"Wanted a threshold for each of depths={policy.depths} but the last. Got thresholds "
            f"of shape {shape}."
        )
    if type(mode) is not Adaptive and policy.depths != depths:
        raise ValueError(
            f"Wanted depths={depths}, at which the mode decides more than depth. Got "
            f"{policy.depths}. Take Calibration.policy(name, budget, exits=depths), or an engine "
            "in mode Adaptive."
        )
    return spread_thresholds(policy, depths)
