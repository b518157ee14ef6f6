# SPDX-License-Identifier: Apache-2.0
"""UTIO's importance signals: predictive entropy, attention heat, embedding outlier, and their sum.

All are pure, take any leading axes, and accumulate in float32. A score is *not* a number of layers:
`utio_jax.staircase.buckets` turns scores into depths by thresholds in the score's own unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def predictive_entropy(logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead"]:
    """Returns the entropy of softmax(logits) in nats, between 0 and log(vocab).

    Exact where logits are -inf (probability zero) and for one-hot distributions (entropy zero).
    NaN where no entry is finite: bucketing sends NaN deepest.

    >>> predictive_entropy(jnp.array([0.0, 0.0, -jnp.inf])).round(4)
    Array(0.6931, dtype=float32)
    """
    _needs(logits, "logits", "[..., vocab]", 1)
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    # entropy = log(total) - E[shifted]; a weight of zero contributes nothing, not 0 * -inf.
    expected = jnp.sum(jnp.where(weights > 0, shifted, 0.0) * weights, axis=-1) / total
    return jnp.log(total) - expected


def attention_heat(
    attn_heat: Float[Array, "*lead_or_head token"], *, has_heads: bool = False
) -> Float[Array, "*lead token"]:
    """Returns the attention mass that each token receives, averaged over heads where there are any.

    For a *causal* use count only the queries that existed when the decision was taken; a token that
    was just produced has received nothing yet.
    """
    _needs(attn_heat, "attn_heat", "[..., token] or [..., head, token]", 2 if has_heads else 1)
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

    A state or mean of norm zero has no direction; its outlier is 1. NaN stays NaN.
    """
    _needs(embeddings, "embeddings", "[..., token, dim]", 2)
    states = embeddings.astype(jnp.float32)
    if batch_mean is None:
        mean = jnp.mean(states, axis=tuple(range(states.ndim - 1)))
    elif batch_mean.shape != states.shape[-1:]:
        raise ValueError(
            f"Wanted a batch_mean of shape {states.shape[-1:]}, the embeddings' last axis. "
            f"Got {batch_mean.shape}."
        )
    else:
        mean = batch_mean.astype(jnp.float32)
    norms = jnp.linalg.norm(states, axis=-1) * jnp.linalg.norm(mean)
    nowhere = norms == 0
    return 1.0 - jnp.where(nowhere, 0.0, states @ mean / jnp.where(nowhere, 1.0, norms))


def surrogate_importance(
    logits: Float[Array, "*lead token vocab"],
    attn_heat: Float[Array, "*lead token"] | Float[Array, "*lead head token"] | None,
    embeddings: Float[Array, "*lead token dim"],
    *,
    batch_mean: Float[Array, " dim"] | None = None,
    weights: tuple[float, float, float] = (0.5, 0.25, 0.25),
) -> Float[Array, "*lead token"]:
    """Returns UTIO's surrogate: weighted entropy (nats), attention heat and embedding outlier.

    Args:
      logits: predictions that exist at the time of the decision, e.g. of an exit at the floor.
      attn_heat: attention received, with or without a head axis before `token`; None where no
        causal estimate exists: its weight is then dropped and the other two are rescaled to the
        same sum.
      embeddings: states or embeddings.
      batch_mean: see `embedding_outlier`.
      weights: of entropy, heat and outlier.

    Raises:
      ValueError: ranks or token counts do not agree, or the weights cannot be used.
    """
    _needs(logits, "logits", "[..., token, vocab]", 2)
    _needs(embeddings, "embeddings", "[..., token, dim]", 2)
    lead = logits.shape[:-1]
    if embeddings.shape[:-1] != lead:
        raise ValueError(
            f"Wanted logits and embeddings of the same tokens. Got leading axes {lead} in logits "
            f"{logits.shape} and {embeddings.shape[:-1]} in embeddings {embeddings.shape}."
        )
    if len(weights) != 3 or any(weight < 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(
            "Wanted three weights of at least 0 (entropy, heat, outlier), one of them above 0. "
            f"Got weights={weights}."
        )
    entropy_weight, heat_weight, outlier_weight = weights
    if attn_heat is None:
        known_weight = entropy_weight + outlier_weight
        if known_weight <= 0:
            raise ValueError(
                f"Wanted attention heat, the only signal with a weight in weights={weights}. Got "
                "attn_heat=None. Pass heat, or weigh entropy or outlier."
            )
        scale = sum(weights) / known_weight
        entropy_weight, outlier_weight = entropy_weight * scale, outlier_weight * scale
    score = entropy_weight * predictive_entropy(logits)
    score += outlier_weight * embedding_outlier(embeddings, batch_mean=batch_mean)
    if attn_heat is None:
        return score
    has_heads = attn_heat.ndim == len(lead) + 1
    shape = (*attn_heat.shape[:-2], attn_heat.shape[-1]) if has_heads else attn_heat.shape
    if shape != lead:
        raise ValueError(
            f"Wanted attn_heat of shape {lead}, or with a head axis before the last. "
            f"Got {attn_heat.shape}."
        )
    return score + heat_weight * attention_heat(attn_heat, has_heads=has_heads)


def _needs(array: jax.Array, name: str, shape: str, rank: int) -> None:
    if jnp.ndim(array) < rank or not jnp.issubdtype(jnp.result_type(array), jnp.floating):
        raise ValueError(
            f"Wanted floating-point {name} of shape {shape}. "
            f"Got shape {jnp.shape(array)} and dtype {jnp.result_type(array)}."
        )
