# SPDX-License-Identifier: Apache-2.0
"""What a full pass shows at every exit, and the gates that are fitted to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.decoder import Decoder, Params
from utio_jax.documents import Batch
from utio_jax.forward import compare_states
from utio_jax.layers import dense_states
from utio_jax.policies import StateGate, UtioSurrogate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signals:
    """What a full pass shows of every predicted token at every exit.

    Attributes:
      states: `[exit, token, dim]`, float16 to save memory; all exits but the last.
      surrogate: `[exit, token]`, UTIO's surrogate at each exit, for the means in `mean_state`.
      kl: `[exit, token]`, KL(full || exit) in nats; 0 at the last exit.
      harm: `[exit, token]`, how much more the true next token costs there than at full depth, nats.
      mean_state: `[exit, dim]`.
    """

    states: np.ndarray
    surrogate: np.ndarray
    kl: np.ndarray
    harm: np.ndarray
    mean_state: np.ndarray


@partial(jax.jit, static_argnums=0)
def _exit_signals(decoder, params, ids, lengths):
    states = dense_states(decoder, params, ids, lengths, depths=decoder.config.exits)
    compare = partial(compare_states, decoder, params, ids, lengths, x_full=states[-1])
    found = [compare(x=x) for x in states]
    harm = jnp.stack([each.nll - each.nll_full for each in found])
    return jnp.stack(states[:-1]), jnp.stack([each.kl for each in found]), harm


def collect_signals(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    progress: Callable[[], None] | None = None,
) -> Signals:
    """Runs full depth over a text and returns each predicted token's signals at the model's exits.

    Raises:
      ValueError: the model has no exit before its last layer, or the text predicts nothing.
    """
    exits = decoder.config.exits
    if len(exits) < 2:
        raise ValueError(
            "Wanted a model with an exit before its last layer "
            f"{decoder.config.num_layers}. Got exits={exits}. Name exits in its "
            "config; stock models need exits fitted first."
        )
    states, divergences, harms = [], [], []
    for batch in batches:
        x, kl, harm = _exit_signals(
            decoder, params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        )
        predicted = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None] - 1
        states.append(np.asarray(x.astype(jnp.float16))[:, predicted])
        divergences.append(np.asarray(kl)[:, predicted])
        harms.append(np.asarray(harm)[:, predicted])
        if progress is not None:
            progress()
    if not sum(kl.shape[1] for kl in divergences):
        raise ValueError("Wanted a text with predicted tokens. Got none.")
    merged = np.concatenate(states, axis=1)
    means = merged.astype(np.float32).mean(axis=1)
    return Signals(
        states=merged,
        surrogate=np.stack(
            [_surrogate(decoder, params, merged[i], means[i], exits) for i in range(len(exits) - 1)]
        ),
        kl=np.maximum(np.concatenate(divergences, axis=1), 0.0),
        harm=np.concatenate(harms, axis=1),
        mean_state=means,
    )


def _surrogate(
    decoder: Decoder, params: Params, states: np.ndarray, mean: np.ndarray, exits: tuple[int, ...]
) -> np.ndarray:
    policy = UtioSurrogate(
        thresholds=jnp.zeros(len(exits) - 1), mean_state=jnp.asarray(mean), depths=exits
    )

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return policy.score(decoder.unembed(params, x).astype(jnp.float32), x)

    size = 4096
    padded = np.pad(states, ((0, -len(states) % size), (0, 0)))
    parts = [np.asarray(run(padded[i : i + size])) for i in range(0, len(padded), size)]
    return np.concatenate(parts)[: len(states)]


def fit_gates(
    states: np.ndarray,
    kl: np.ndarray,
    *,
    hidden: int = 64,
    steps: int = 3000,
    batch: int = 2048,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> tuple[StateGate, ...]:
    """Returns one gate per exit, fitted to sqrt(KL) by least squares, all at once.

    Args:
      states: `[exit, token, dim]`.
      kl: `[exit, token]` in nats.
      hidden: width of the gates.
      steps: of Adam, with a linearly falling rate.
      batch: tokens per step.
      learning_rate: at the first step.
      seed: of initialisation and sampling.
    """
    import optax

    exits, tokens, dim = states.shape
    keys = jax.random.split(jax.random.key(seed), exits)

    # Optax's types know no dataclasses: to it, gates are Any.
    def start(key: jax.Array) -> Any:
        return StateGate(
            hidden=jax.random.normal(key, (dim, hidden)) * dim**-0.5,
            hidden_bias=jnp.zeros(hidden),
            output=jax.random.normal(jax.random.fold_in(key, 1), (hidden,)) * hidden**-0.5,
            output_bias=jnp.zeros(()),
        )

    gates = jax.vmap(start)(keys)
    optimizer = optax.adam(optax.linear_schedule(learning_rate, 0.0, steps))

    def loss(gates: StateGate, x: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.sum(
            jnp.mean((jax.vmap(lambda gate, x: gate(x))(gates, x) - target) ** 2, axis=1)
        )

    @jax.jit
    def update(gates: Any, state: Any, x: jax.Array, target: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(gates, x, target), state)
        return optax.apply_updates(gates, updates), state

    state, rng, root = (
        optimizer.init(gates),
        np.random.default_rng(seed),
        np.sqrt(kl).astype(np.float32),
    )
    for _ in range(steps):
        chosen = rng.integers(tokens, size=batch)
        gates, state = update(gates, state, states[:, chosen].astype(np.float32), root[:, chosen])
    return tuple(jax.tree.map(itemgetter(index), gates) for index in range(exits))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns Spearman's rank correlation; ties get arbitrary ranks."""
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
