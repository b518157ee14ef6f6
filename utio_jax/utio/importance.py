# SPDX-License-Identifier: Apache-2.0
"""UTIO's surrogate importance: predictive entropy, attention heat, embedding outlier, their sum.

    x, logits, heat = floor_states(decoder, params, token_ids, lengths, depth=8)
    scores = surrogate_importance(logits, heat, x)      # [batch, token]

Pure functions of arrays; all accumulate in float32. A score adds nats of entropy and two numbers
without a unit. It is *not* a number of layers: `bucket_tokens` turns scores into depths, by
thresholds in the score's own unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from utio_jax.policies.signals import check_floats, predictive_entropy

Weights = Sequence[Any] | Float[Array, "3"]
"""Weights of entropy, heat and outlier: at least 0, and not all 0. May be traced."""


def attention_heat(
    attn_heat: Float[Array, "*lead_or_head token"], *, has_heads: bool = False
) -> Float[Array, "*lead token"]:
    """Returns the attention mass that each token receives, averaged over heads where there are any.

    For a *causal* use count only the queries that existed when the decision was taken; a token that
    was just produced has received nothing yet.
    """
    check_floats(
        attn_heat, "attn_heat", "[..., token] or [..., head, token]", 2 if has_heads else 1
    )
    heat = attn_heat.astype(jnp.float32)
    return jnp.mean(heat, axis=-2) if has_heads else heat


def embedding_outlier(
    embeddings: Float[Array, "*lead token dim"], *, batch_mean: Float[Array, " dim"] | None = None
) -> Float[Array, "*lead token"]:
    """Returns one minus the cosine similarity to the mean embedding, in [0, 2].

    Args:
      embeddings: states or embeddings of any layer.
      batch_mean: the mean `[dim]` to compare with: a constant, calibrated beforehand. None takes
        the mean over all leading axes, so that later tokens and other rows enter the score; fine
        for analysis, not for causal routing.

    A state or mean of norm zero has no direction; its outlier is 1, its gradient 0. NaN stays NaN.
    """
    check_floats(embeddings, "embeddings", "[..., token, dim]", 2)
    states = embeddings.astype(jnp.float32)
    if batch_mean is None:
        mean = jnp.mean(states, axis=tuple(range(states.ndim - 1)))
    else:
        mean = jnp.asarray(batch_mean, jnp.float32)
    if mean.shape != states.shape[-1:]:
        raise ValueError(
            f"Wanted a mean (batch_mean, mean_state) of shape {states.shape[-1:]}, the embeddings' "
            f"last axis. Got {mean.shape}."
        )
    # Roots of 1 where there is no direction: the slope of a root at 0 would make gradients NaN.
    squares = [jnp.sum(vector * vector, axis=-1) for vector in (states, mean)]
    of_state, of_mean = (jnp.sqrt(jnp.where(square == 0, 1.0, square)) for square in squares)
    norms = of_state * of_mean
    nowhere = (squares[0] == 0) | (squares[1] == 0) | (norms == 0)
    return 1.0 - jnp.where(nowhere, 0.0, states @ mean / jnp.where(nowhere, 1.0, norms))


def surrogate_importance(
    logits: Float[Array, "*lead token vocab"],
    attn_heat: Float[Array, "*lead token"] | Float[Array, "*lead head token"] | None,
    embeddings: Float[Array, "*lead token dim"],
    *,
    batch_mean: Float[Array, " dim"] | None = None,
    weights: Weights = (0.5, 0.25, 0.25),
) -> Float[Array, "*lead token"]:
    """Returns UTIO's surrogate: weighted entropy (nats), attention heat and embedding outlier.

    Args:
      logits: predictions that exist at the time of the decision, e.g. of an exit at the floor.
      attn_heat: attention received, with or without a head axis before `token`, such as
        `floor_states` returns; None: see `weigh`.
      embeddings: states or embeddings.
      batch_mean: see `embedding_outlier`.
      weights: weights of entropy, heat and outlier.

    Raises:
      ValueError: ranks or token counts do not agree, or the weights cannot be used.
    """
    check_floats(logits, "logits", "[..., token, vocab]", 2)
    check_floats(embeddings, "embeddings", "[..., token, dim]", 2)
    lead = logits.shape[:-1]
    if embeddings.shape[:-1] != lead:
        raise ValueError(
            f"Wanted logits and embeddings of the same tokens. Got leading axes {lead} in logits "
            f"{logits.shape} and {embeddings.shape[:-1]} in embeddings {embeddings.shape}."
        )
    heat = None
    if attn_heat is not None:
        has_heads = attn_heat.ndim == len(lead) + 1
        shape = (*attn_heat.shape[:-2], attn_heat.shape[-1]) if has_heads else attn_heat.shape
        if shape != lead:
            raise ValueError(
                f"Wanted attn_heat of shape {lead}, or with a head axis before the last. "
                f"Got {attn_heat.shape}."
            )
        heat = attention_heat(attn_heat, has_heads=has_heads)
    outlier = embedding_outlier(embeddings, batch_mean=batch_mean)
    return weigh(predictive_entropy(logits), heat, outlier, weights=weights)


def weigh(
    entropy: Float[Array, "*lead"],
    heat: Float[Array, "*lead"] | None,
    outlier: Float[Array, "*lead"],
    *,
    weights: Weights,
) -> Float[Array, "*lead"]:
    """Returns the weighted sum of the three signals.

    Without heat, where no causal estimate exists, its weight goes to the other two: they are
    rescaled to the same sum.

    Raises:
      ValueError: weights that are not three finite numbers of at least 0, or none above 0 that
        counts.
    """
    check_weights(weights, heat=heat is not None)
    of_entropy, of_heat, of_outlier = weights
    if heat is not None:
        return of_entropy * entropy + of_outlier * outlier + of_heat * heat
    scale = (of_entropy + of_heat + of_outlier) / (of_entropy + of_outlier)
    return scale * of_entropy * entropy + scale * of_outlier * outlier


def check_weights(weights: Weights, *, heat: bool) -> None:
    """Raises the errors of `weigh`, with or without `heat`; traced weights are not known."""
    known = [weight for weight in weights if not isinstance(weight, Tracer)]
    traced = isinstance(weights, Tracer) or len(known) < len(weights)
    usable = traced or (
        all(0 <= weight < math.inf for weight in known) and 0 < sum(known) < math.inf
    )
    if len(weights) != 3 or not usable:
        raise ValueError(
            "Wanted three finite weights of at least 0 (entropy, heat, outlier), one of them above "
            f"0. Got weights={weights}."
        )
    if not heat and not traced and weights[0] + weights[2] <= 0:
        raise ValueError(
            f"Wanted attention heat, the only signal with a weight in weights={weights}. Got "
            "none. Pass heat (a plan: heat=True), or weigh entropy or outlier."
        )
