# SPDX-License-Identifier: Apache-2.0
"""Does attention say which token deserves depth? Rank correlations with sqrt(KL to full depth).

    python benchmarks/attention_signals.py

At each exit of the shipped model, from the attention that its next layer would pay: how much goes
beyond recent tokens, how spread it is, and how hot what it attends to is, by the attention that
earlier queries paid to it (its heat, which is causal; a token's own heat comes from later ones).
Last, a least-squares fit of the learned gate's score alone, and with all of these and their
products: fitted on the calibrate split, correlated on the test split. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sparse_attention import long_windows

from utio_jax import models
from utio_jax.calibration.studies import (
    collect_scores,
    predicted_tokens,
    rank_correlation,
    study_exits,
)
from utio_jax.core.arrays import layer_at

RECENT, SINKS = 66, 4
NAMES = ("reach", "entropy", "largest weight", "heat of what it attends to")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study; see `--help`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calibrate", type=int, default=48, help="windows of 512 tokens")
    parser.add_argument("--test", type=int, default=32)
    arguments = parser.parse_args(argv)
    model = models.load()
    fitted = read(model, "calibrate", arguments.calibrate)
    rows = []
    for depth, (features, scores, labels) in read(model, "test", arguments.test).items():
        row = {"exit": depth, "learned gate": rank_correlation(scores, labels)}
        for name, feature in zip(NAMES, features.T, strict=True):
            row[name] = rank_correlation(feature, labels)
        known_features, known_scores, known_labels = fitted[depth]
        for name, more in (("gate, refitted", False), ("gate and all of these", True)):
            known = columns(known_features, known_scores, more=more)
            weights = np.linalg.lstsq(known, known_labels, rcond=None)[0]
            row[name] = rank_correlation(columns(features, scores, more=more) @ weights, labels)
        rows.append({name: round(float(value), 4) for name, value in row.items()})
    print(json.dumps({"command": "benchmarks/attention_signals.py", "rows": rows}))


@partial(jax.jit, static_argnums=(0, 2))
def attention_features(decoder: Any, params: Any, depth: int, x: jax.Array) -> jax.Array:
    """Returns `[batch, token, feature]` from the attention that layer `depth` pays."""
    batch, width, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    places, layer = decoder.encode_positions(positions), layer_at(decoder, params, depth)
    queries = decoder.queries(layer, x, places)
    keys, _ = decoder.keys_values(layer, x, places)
    ages = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    beyond = (ages >= RECENT) & (jnp.arange(width)[None, :] >= SINKS)

    def row(tensors: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, keys = tensors
        keys = jnp.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
        scores = jnp.einsum("qhd,khd->hqk", queries, keys)
        weights = jax.nn.softmax(jnp.where(ages[None] >= 0, scores, -1e30))
        spread = -jnp.sum(weights * jnp.log(weights + 1e-9), axis=-1)
        mean = jnp.mean(weights, axis=0)
        heat = jnp.pad(jnp.cumsum(mean, axis=0)[:-1], ((1, 0), (0, 0)))  # Before each query.
        return jnp.stack(
            [
                jnp.sum(mean * beyond, axis=-1),
                jnp.mean(spread, axis=0),
                jnp.mean(jnp.max(weights, axis=-1), axis=0),
                jnp.sum(mean * heat, axis=-1),
            ],
            axis=-1,
        )

    return jax.lax.map(row, (queries, keys))


def read(model: Any, split: Any, windows: int) -> dict[int, tuple[np.ndarray, ...]]:
    """Returns features, the learned gate's scores and sqrt(KL) of predicted tokens, by exit."""
    decoder, params = model.decoder, model.params
    gate, last = model.calibration.signals["learned"], decoder.config.num_layers
    studies, found = study_exits(decoder, params, long_windows(model, split, windows)), {}
    for index, depth in enumerate(decoder.config.exits[:-1]):
        scores = collect_scores(decoder, params, gate, studies, depths=(depth, last))
        features = [
            np.asarray(
                attention_features(
                    decoder, params, depth, jnp.asarray(each.states[index], jnp.float32)
                )
            )[None]
            for each in studies
        ]
        labels = [np.sqrt(each.kl[index])[None] for each in studies]
        found[depth] = tuple(
            predicted_tokens(studies, arrays)[0] for arrays in (features, scores, labels)
        )
    return found


def columns(features: np.ndarray, scores: np.ndarray, *, more: bool) -> np.ndarray:
    """Returns what is fitted: powers of the score; with `more`, ranks of the features as well."""
    powers = [np.ones_like(scores), scores, scores**2, scores**3]
    if more:
        ranks = np.argsort(np.argsort(features, axis=0), axis=0).T / len(features)
        powers += [*ranks, *ranks**2, *(ranks * scores)]
    return np.stack(powers, axis=1)


if __name__ == "__main__":
    main()
