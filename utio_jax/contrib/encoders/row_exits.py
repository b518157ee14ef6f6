# SPDX-License-Identifier: Apache-2.0
"""Thresholds for row-level early exit, with a guarantee: most rows keep full depth's class.

    fitted = fit_row_exits(encoder, params, Entropy(), inputs, lengths, depths=(2, 4, 6, 8))
    found = encode_rows(encoder, params, inputs, lengths, fitted.chosen)

One threshold for all exits, as DeeBERT and PABEE have it. One pass over all exits shows what any
threshold does. Half of the rows make a ladder of thresholds, the other half tests it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_ladder, halves
from utio_jax.contrib.encoders.rows import Classifier, read_exits, score_exits
from utio_jax.core.decoder import Inputs, Params, check_depths
from utio_jax.policies.base import Signal
from utio_jax.policies.depth import Thresholded


def fit_row_exits(  # noqa: PLR0913 (options, each named)
    encoder: Classifier,
    params: Params,
    signal: Signal,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    *,
    depths: tuple[int, ...],
    max_disagreement: float = 0.02,
    confidence: float = 0.95,
    seed: int = 0,
) -> Fitted:
    """Returns the policy of the cheapest threshold at which rows have full depth's class.

    At most `max_disagreement` of all rows come out in another class, at a `confidence`. Nothing
    else may have been fitted on these rows, each drawn on its own; `seed` draws the halves. A
    rung's cost is the mean of layers that rows of the testing half run.

    Raises:
      ValueError: fewer rows than the guarantee takes, empty ones, no classifier, or depths that do
        not end at the model's.
    """
    depths = check_depths(depths, num_layers=encoder.config.num_layers)
    shortest = int(np.asarray(lengths).min(initial=1))
    if shortest < 1:
        raise ValueError(
            f"Wanted rows, none empty. Got the shortest of {shortest} tokens. Leave it out."
        )
    if not isinstance(encoder, Classifier):
        raise ValueError(f"Wanted a Classifier, whose classes stay. Got {type(encoder).__name__}.")
    fits = halves(
        np.arange(len(lengths)),
        units="rows, none empty,",
        max_risk=max_disagreement,
        confidence=confidence,
        seed=seed,
    )
    exits = _read(encoder, params, jnp.asarray(inputs), jnp.asarray(lengths), depths=depths)
    scores = np.asarray(score_exits(encoder, params, exits, signal, depths=depths))
    classes = np.asarray(exits.logits).argmax(axis=-1)
    differs = classes != classes[-1]
    tried = thresholds_of(scores[:, fits]).tolist()
    ladder = [row_policy(signal, each, depths=depths) for each in tried]
    left = [leave(scores[:, ~fits], float(each.thresholds[0])) for each in ladder]
    lost = np.stack([np.take_along_axis(differs[:, ~fits], at[None], 0)[0] for at in left])
    layers = [float(np.asarray(depths)[at].mean()) for at in left]
    return fit_ladder(ladder, layers, lost, max_risk=max_disagreement, confidence=confidence)


def row_policy(signal: Signal, threshold: float, *, depths: tuple[int, ...]) -> Thresholded:
    """Returns the policy of one threshold at all exits."""
    thresholds = jnp.full(len(depths) - 1, threshold, jnp.float32)
    return Thresholded(signal=signal, thresholds=thresholds, depths=depths)


def thresholds_of(
    scores: Float[np.ndarray, "boundary row"], *, rungs: int = 24
) -> Float[np.ndarray, " rung"]:
    """Returns thresholds at which more and more rows leave, by quantiles of their scores."""
    finite = scores[np.isfinite(scores)]
    if not finite.size:
        return np.asarray([-np.inf], np.float32)
    found = np.quantile(finite, np.linspace(0, 1, rungs + 1)[1:], method="lower")
    return np.unique(found.astype(np.float32))


def leave(scores: Float[np.ndarray, "boundary row"], threshold: float) -> Int[np.ndarray, " row"]:
    """Returns the boundary at which each row leaves: the first whose score is not above."""
    stops = np.concatenate([scores <= threshold, np.ones((1, scores.shape[1]), np.bool_)])
    return stops.argmax(axis=0)


_read = jax.jit(read_exits, static_argnums=0, static_argnames="depths")
