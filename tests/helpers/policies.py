# SPDX-License-Identifier: Apache-2.0
"""One policy of each kind, fitted by hand to the tiny model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers import cases
from helpers.models import gated, random_gates
from utio_jax import Signal, Thresholded
from utio_jax.calibration.studies import ExitStudy, collect_scores
from utio_jax.core.documents import Batch
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies import (
    Entropy,
    Hazard,
    Learned,
    MaxProbability,
    Patience,
    PolicyBase,
    Position,
    PromptRouter,
    SoftmaxGap,
    StateSimilarity,
)
from utio_jax.policies.signals import SignalBase
from utio_jax.utio import TokenSurrogate, UtioSurrogate, surrogate_table


@pytree
class TableSignal(SignalBase):
    """Scores off a table, `[boundary, batch, position]`, each boundary at a price of its own.

    `price`: FLOPs of the first boundary's, each further one has one more; 0: all are free.
    """

    table: jax.Array = dataclasses.field(metadata={"row_axis": 1})
    name: str = static(default="table")
    price: float = static(default=1000.0)

    def start(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        at = jnp.broadcast_to(positions[None], (self.table.shape[0], *positions.shape))
        return jnp.take_along_axis(self.table, at, axis=2)

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        return memory[index], memory

    def flops(self, index: int, decoder: Any, params: Any) -> float:
        return self.price + index if self.price else 0.0


@pytree
class SurePasses(PolicyBase):
    """Tokens whose exit is sure of its prediction stop; looks at the logits at every boundary."""

    threshold: float
    depths: tuple[int, ...] = static(default=(1, 2, 4))
    name: str = static(default="sure")

    def go_deeper(self, index: int, boundary: Any, memory: None) -> tuple[jax.Array, None]:
        sure = boundary.map_logits(lambda logits: jax.nn.softmax(logits).max(-1))
        return sure < self.threshold, None

    def reads_logits(self, index: int) -> bool:
        return True


SHAPE = cases.SHAPES[1]  # 3 x 17 tokens, depths 1, 2, 4.
DEPTHS = SHAPE.depths
EXITS = DEPTHS[:-1]


def mean_states(model: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(12), (2, model.decoder.config.embed_dim))


def token_surrogate(model: Any) -> TokenSurrogate:
    mean = mean_states(model)[0]
    return TokenSurrogate(table=surrogate_table(model.decoder, model.params, mean))


SIGNALS: dict[str, Callable[[Any], Signal]] = {
    "position": lambda model: Position(),
    "utio_before": token_surrogate,
    "utio_surrogate": lambda model: UtioSurrogate(mean_states=mean_states(model), exits=EXITS),
    "softmax_gap": lambda model: SoftmaxGap(),
    "max_probability": lambda model: MaxProbability(),
    "entropy": lambda model: Entropy(),
    "state_similarity": lambda model: StateSimilarity(),
    "learned": lambda model: gated(model).signal,
    "classifier": lambda model: Learned(gates=random_gates(model), exits=EXITS, name="classifier"),
    "patience": lambda model: Patience(),
    "hazard": lambda model: Hazard(gates=random_gates(model), exits=EXITS),
    "prompt_router": lambda model: PromptRouter(gates=random_gates(model), exits=EXITS, prompt=3),
}


def study_of(model: Any, ids: Any, lengths: Any, exits: tuple[int, ...] = DEPTHS) -> ExitStudy:
    """Returns a study with states in full precision, for the model's exits."""
    states = cases.run_dense(model.decoder, model.params, ids, lengths, depths=exits)
    nothing = np.zeros(0)
    return ExitStudy(
        batch=Batch(
            token_ids=np.asarray(ids), lengths=np.asarray(lengths), window=np.arange(len(ids))
        ),
        predicted=np.arange(ids.shape[1]) < np.asarray(lengths)[:, None] - 1,
        states=np.stack(states[:-1]),
        kl=nothing,
        harm=nothing,
        differs=nothing,
    )


def scores_of(model: Any, signal: Signal, ids: Any, depths: tuple[int, ...] = DEPTHS) -> np.ndarray:
    lengths = np.full(len(ids), ids.shape[1], np.int32)
    study = study_of(model, ids, lengths)
    (result,) = collect_scores(model.decoder, model.params, signal, [study], depths=depths)
    return result


def thresholded(model: Any, signal: Signal) -> Thresholded:
    """Returns a policy under which about 30 % of the tokens stop at depth 1, 40 % at depth 2."""
    scores = scores_of(model, signal, tokens(model, seed=9))
    finite = [row[np.isfinite(row)] for row in scores]
    cuts = [
        np.quantile(row, q) if row.size else 0.0 for row, q in zip(finite, (0.3, 0.7), strict=True)
    ]
    if signal.name == "patience":  # No token has seen two exits at the first.
        cuts = [-0.5, -0.5]
    return Thresholded(signal=signal, thresholds=jnp.asarray(cuts, jnp.float32), depths=DEPTHS)


def surrogate(model: Any) -> Thresholded:
    return thresholded(model, SIGNALS["utio_surrogate"](model))


def tokens(model: Any, seed: int = 4) -> np.ndarray:
    return np.asarray(model.tokens(SHAPE.batch, SHAPE.token, seed=seed))
