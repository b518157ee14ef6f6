# SPDX-License-Identifier: Apache-2.0
"""Fits the layers that a row skips to its prompt: FiRST's routers, without training the model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.calibration.gates import fit_linear_gates
from utio_jax.calibration.studies import ExitStudy
from utio_jax.contrib.layer_skipping.policies import LayerSets, given_sets
from utio_jax.contrib.layer_skipping.scoring import run_sets
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.policies.learned import PromptRouter
from utio_jax.staircase.score import compare_states


def fit_prompt_sets(
    decoder: Decoder,
    params: Params,
    studies: Sequence[ExitStudy],
    *,
    layers: float,
    prompt: int = 32,
) -> LayerSets:
    """Returns the policy in which a row's first tokens choose the layers of later ones (FiRST).

    After Jain et al. 2024 (arXiv 2410.12513), without training the model. Every segment but the
    first has a linear gate at its start, which reads the mean state of a row's first `prompt`
    tokens. It predicts the harm to later tokens if they skip this segment only: the root of their
    mean KL to full depth, in nats ** 0.5. Under one threshold for all gates these tokens run
    `layers` on average. Segments end at the model's exits; studies are of a text, by `study_exits`.

    Raises:
      ValueError: fewer layers than the first segment has, or more than there are, or no row with
        tokens after its prompt.
    """
    depths = decoder.config.exits
    if not depths[0] <= layers <= depths[-1] or prompt < 1:
        raise ValueError(
            f"Wanted a prompt of at least 1 token, and from {depths[0]} layers, which all tokens "
            f"run, to {depths[-1]}. Got prompt={prompt} and layers={layers}."
        )
    batches = [study.batch for study in studies]
    harm = skipping_harm(decoder, params, batches, prompt=prompt)
    means = np.concatenate(
        [study.states[:, :, :prompt].astype(np.float32).mean(axis=2) for study in studies], axis=1
    )
    long = np.isfinite(harm).all(axis=0)
    if not long.any():
        raise ValueError(
            f"Wanted rows of more than {prompt + 1} tokens. Got none. Take a smaller prompt, or a "
            "longer text."
        )
    gates = fit_linear_gates(means[:, long], np.sqrt(harm[:, long]))
    scores = np.stack([gates.at(i)(jnp.asarray(mean)) for i, mean in enumerate(means[:, long])])
    threshold = _threshold(scores, np.diff(depths), target=layers - depths[0])
    return LayerSets(
        signal=PromptRouter(gates=gates, exits=depths[:-1], prompt=prompt, name="first"),
        thresholds=jnp.full(len(depths) - 1, threshold, jnp.float32),
        depths=depths,
    )


def skipping_harm(
    decoder: Decoder, params: Params, batches: Sequence[Batch], *, prompt: int
) -> np.ndarray:
    """Returns the mean KL to full depth, in nats, of skipping one segment after a prompt.

    `[boundary, row]`, over the rows of all batches; NaN for rows that predict nothing after their
    first `prompt` tokens. Segments end at the model's exits; the first is always run.
    """
    depths, compare = decoder.config.exits, jax.jit(compare_states, static_argnums=0)
    harms: list[np.ndarray] = []
    for batch in batches:
        rows, states = (decoder, params, batch.token_ids, batch.lengths), []
        for segment in range(len(depths)):
            runs = np.ones((len(depths), *batch.token_ids.shape), bool)
            runs[segment, :, prompt:] = False  # Of the first it is not read: that is full depth.
            sets = given_sets(jnp.asarray(runs), depths=depths)
            states.append(run_sets(*rows, sets).x)
        kl = np.stack([compare(*rows, x, states[0]).kl for x in states[1:]])
        behind = np.arange(kl.shape[2]) < batch.lengths[:, None] - 1
        behind[:, :prompt] = False
        total = np.where(behind, np.maximum(kl, 0), 0).sum(axis=2)
        count = behind.sum(axis=1)
        harms.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return np.concatenate(harms, axis=1)


def _threshold(scores: np.ndarray, layers: np.ndarray, *, target: float) -> float:
    """Returns the threshold at which rows run most layers on average, at most `target`.

    It lies midway between two scores `[boundary, row]`, so that rounding moves no row over it.
    Layers are those of each segment after the first, which is not counted.
    """
    if target >= layers.sum():
        return -np.inf
    candidates = np.unique(scores)
    means = [(layers[:, None] * (scores > cut)).sum(axis=0).mean() for cut in candidates]
    first = int(np.argmax(np.asarray(means) <= target))
    return float(np.mean(candidates[first : first + 2])) + (first + 1 == candidates.size)
