# SPDX-License-Identifier: Apache-2.0
"""Fits the weights of signals: gates on states, mean states, tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from utio_jax.calibration.studies import ExitStudy, check_varied, predicted_tokens
from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import Decoder, Params
from utio_jax.policies.base import Signal, check_signal
from utio_jax.policies.learned import Hazard, Learned, PromptRouter, StateGate
from utio_jax.policies.signals import (
    Entropy,
    MaxProbability,
    Patience,
    Position,
    SoftmaxGap,
    StateSimilarity,
)
from utio_jax.policies.store import CONTROLS, check_storable
from utio_jax.utio.signals import TokenSurrogate, UtioSurrogate, surrogate_table

Loss = Literal["squared", "logistic"]
"""What a gate's value is compared with: a number, or the logit of a probability."""


class SignalFitter:
    """Fits signals to one text by name; shared parts are fitted once.

    `SIGNALS` lists the names.
    """

    def __init__(
        self, decoder: Decoder, params: Params, studies: Sequence[ExitStudy], *, seed: int = 0
    ):
        """Stores the model and the text to fit to.

        Raises:
          ValueError: states do not vary from token to token.
        """
        self.decoder, self.params, self.studies, self.seed = decoder, params, studies, seed
        self.exits = decoder.config.exits[:-1]
        self._gates: dict[str, StateGate] = {}
        check_varied(self._of_tokens("states"))

    def fit(self, fit: str | Fit) -> Signal:
        """Returns a signal with weights for every exit but the last.

        Raises:
          TypeError: a function returned something else than a signal.
        """
        signal = (SIGNALS[fit] if isinstance(fit, str) else fit)(self)
        check_signal(signal)
        return signal

    def surrogate(self) -> UtioSurrogate:
        """Returns UTIO's surrogate with the mean state at every exit."""
        states = self._of_tokens("states")
        means = np.stack([x.astype(np.float32).mean(axis=0) for x in states])
        return UtioSurrogate(mean_states=jnp.asarray(means), exits=self.exits)

    def before(self) -> TokenSurrogate:
        """Returns UTIO's surrogate before the pass, against the text's mean embedding."""
        config = self.decoder.config
        ids = [study.batch.token_ids[study.predicted] for study in self.studies]
        share = np.bincount(np.concatenate(ids), minlength=config.vocab_size)
        every = jnp.arange(config.vocab_size)
        embeddings = self.decoder.embed(self.params, every, jnp.zeros_like(every))
        mean = jnp.asarray(share / share.sum(), jnp.float32) @ embeddings.astype(jnp.float32)
        return TokenSurrogate(table=surrogate_table(self.decoder, self.params, mean))

    def regressor(self, inputs: Sequence[np.ndarray] | None = None) -> StateGate:
        """Returns gates that predict sqrt(KL to full depth).

        `inputs`, an array `[exit, row, token, feature]` for each study, take the place of states.
        """
        target = np.sqrt(self._of_tokens("kl")[:-1])
        if inputs is None:
            return self._fitted("learned", target, loss="squared")
        features = predicted_tokens(self.studies, inputs)
        return fit_gates(features, target, loss="squared", seed=self.seed)

    def classifier(self) -> StateGate:
        """Returns gates with the logit of a prediction that differs from full depth's."""
        return self._fitted("classifier", self._of_tokens("differs")[:-1])

    def router(self) -> PromptRouter:
        """Returns gates on a row's first mean state that predict the mean sqrt(KL) after it."""
        prompt = min(32, max(1, self.studies[0].predicted.shape[1] // 8))
        means, targets = [], []
        for study in self.studies:
            after = study.predicted.copy()
            after[:, :prompt] = False
            rows = after.any(axis=1)
            means.append(study.states[:, rows, :prompt].astype(np.float32).mean(axis=2))
            root = np.where(after, np.sqrt(study.kl[:-1]), 0.0)[:, rows]
            targets.append(root.sum(axis=2) / after[rows].sum(axis=1))
        if not sum(mean.shape[1] for mean in means):
            raise ValueError(
                f"Wanted rows of more than {prompt + 1} tokens, whose first {prompt} say "
                "something of the rest. Got none. Give a longer text, or leave prompt_router out."
            )
        gates = fit_linear_gates(np.concatenate(means, axis=1), np.concatenate(targets, axis=1))
        return PromptRouter(gates=gates, exits=self.exits, prompt=prompt)

    def _fitted(self, name: str, target: np.ndarray, *, loss: Loss = "logistic") -> StateGate:
        if name not in self._gates:
            states = self._of_tokens("states")
            self._gates[name] = fit_gates(states, target, loss=loss, seed=self.seed)
        return self._gates[name]

    def _of_tokens(self, field: str) -> np.ndarray:
        return predicted_tokens(self.studies, [getattr(study, field) for study in self.studies])


Fit = Callable[[SignalFitter], Signal]
"""Makes a signal of a text: takes the fitter, whose `studies` have states, KL and harm by exit."""

SIGNALS: dict[str, Fit] = {
    "learned": lambda fit: Learned(gates=fit.regressor(), exits=fit.exits),
    "utio_surrogate": lambda fit: fit.surrogate(),
    "utio_before": lambda fit: fit.before(),
    "position": lambda fit: Position(),
    "prompt_router": lambda fit: fit.router(),
    "softmax_gap": lambda fit: SoftmaxGap(),
    "max_probability": lambda fit: MaxProbability(),
    "entropy": lambda fit: Entropy(),
    "state_similarity": lambda fit: StateSimilarity(),
    "classifier": lambda fit: Learned(gates=fit.classifier(), exits=fit.exits, name="classifier"),
    "patience": lambda fit: Patience(),
    "hazard": lambda fit: Hazard(gates=fit.classifier(), exits=fit.exits),
}
"""How each signal gets its weights from a text."""


def fits_of(policies: Sequence[str] | Mapping[str, Fit]) -> dict[str, Fit]:
    """Returns the fitters of policies: those of `SIGNALS` by name, others as given.

    Raises:
      ValueError: none, an unknown name, that of a control, or something that is no function.
    """
    given = isinstance(policies, Mapping)
    if isinstance(policies, str):
        raise ValueError(f"Wanted a list of policies. Got {policies!r}. For example: ('learned',).")
    unknown = [name for name in policies if not given and name not in SIGNALS]
    if unknown or not policies:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(
            f"Wanted policies of {', '.join(SIGNALS)}. Got {got}. A signal of your own has a "
            "function that fits it: policies={'mine': fit}."
        )
    fits = dict(policies) if isinstance(policies, Mapping) else {n: SIGNALS[n] for n in policies}
    for name, fit in fits.items():
        if name in CONTROLS or isinstance(fit, Signal) or not callable(fit):
            raise ValueError(
                "Wanted policies as functions of the fitter, by names other than those of "
                f"controls, {', '.join(CONTROLS)}. Got {name!r}: {fit!r:.60}."
            )
    return fits


def storable(fit: Fit) -> Fit:
    """Returns the fitter; that raises ValueError for a signal that a file cannot hold."""
    return lambda fitter: check_storable(fit(fitter))


def fit_gates(
    states: Float[np.ndarray, "exit token dim"],
    target: Float[np.ndarray, "exit token"] | Bool[np.ndarray, "exit token"],
    *,
    loss: Loss = "squared",
    hidden: int = 64,
    steps: int = 2500,
    batch: int = 2048,
    seed: int = 0,
) -> StateGate:
    """Returns one gate per exit, all leaves with a leading exit axis, fitted together.

    Gates learn from whitened states, on which Adam sees every direction at one scale; the whitening
    is a part of the first matrix afterwards, and costs nothing. Targets are numbers for the squared
    loss, booleans for the logistic one. There are `steps` of AdamW on `batch` tokens each, with a
    linearly falling rate.
    """
    import optax

    exits, tokens, _ = states.shape
    rng = np.random.default_rng(seed)
    some = rng.permutation(tokens)[:_WHITENED]
    whitenings = [_whitening(np.asarray(normalise(jnp.asarray(x[some])))) for x in states]
    mean, matrix = (jnp.asarray(np.stack(parts)) for parts in zip(*whitenings, strict=True))
    dim = matrix.shape[-1]

    # Optax's types know no dataclasses: to it, gates are Any.
    def start(key: jax.Array) -> Any:
        return StateGate(
            hidden=jax.random.normal(key, (dim, hidden)) * dim**-0.5,
            hidden_bias=jnp.zeros(hidden),
            output=jax.random.normal(jax.random.fold_in(key, 1), (hidden,)) * hidden**-0.5,
            output_bias=jnp.zeros(()),
        )

    def error(gates: StateGate, x: jax.Array, target: jax.Array) -> jax.Array:
        x = (x - jnp.broadcast_to(mean[:, None], x.shape)) @ matrix
        predicted = jax.vmap(StateGate.read)(gates, x)
        if loss == "squared":
            errors = (predicted - target) ** 2
        else:
            errors = optax.sigmoid_binary_cross_entropy(predicted, target)
        return jnp.sum(jnp.mean(errors, axis=1))

    rate = optax.linear_schedule(3e-3, 0.0, steps)
    optimizer = optax.adamw(rate, weight_decay=0.5)

    @jax.jit
    def update(gates: Any, state: Any, seen: Any, target: jax.Array) -> tuple[Any, Any]:
        slope = jax.grad(error)(gates, normalise(seen), target)
        updates, state = optimizer.update(slope, state, gates)
        return optax.apply_updates(gates, updates), state

    gates: Any = jax.vmap(start)(jax.random.split(jax.random.key(seed), exits))
    state, target = optimizer.init(gates), target.astype(np.float32)
    for _ in range(steps):
        chosen = rng.integers(tokens, size=batch)
        gates, state = update(gates, state, states[:, chosen], target[:, chosen])
    folded = matrix @ gates.hidden
    bias = gates.hidden_bias - jnp.einsum("ed,edh->eh", mean, folded)
    return dataclasses.replace(gates, hidden=folded, hidden_bias=bias)


def fit_linear_gates(
    states: Float[np.ndarray, "exit row dim"], target: Float[np.ndarray, "exit row"]
) -> StateGate:
    """Returns gates that are linear in normalised states, by ridge regression.

    A text has few rows, and each is one example. The penalty minimises the squared leave-one-out
    error, which the singular values give in closed form (Allen 1974). At the largest penalty, gates
    are constants.
    """
    weights, biases = [], []
    for one, exit_target in zip(states, target, strict=True):
        x = np.asarray(normalise(jnp.asarray(one)), np.float64)
        centre, level, rows = x.mean(axis=0), exit_target.mean(), len(x)
        left, sizes, right = np.linalg.svd(x - centre, full_matrices=False)
        along = left.T @ (exit_target - level)
        best, chosen = np.inf, np.zeros_like(sizes)
        for penalty in np.geomspace(1e-6, 1e6, 25) * max(float(sizes[0]) ** 2, 1e-12):
            shrunk = sizes**2 / (sizes**2 + penalty)
            leverage = 1 / rows + (left**2 * shrunk).sum(axis=1)
            error = exit_target - level - left @ (shrunk * along)
            left_out = float(np.square(error / np.maximum(1 - leverage, 1e-6)).sum())
            if left_out <= best:
                best, chosen = left_out, sizes / (sizes**2 + penalty) * along
        weights.append(right.T @ chosen)
        biases.append(level - centre @ weights[-1])
    weight = np.stack(weights)
    # A gate has a hidden layer of rectified units; a number is what it is above 0 less what below.
    return StateGate(
        hidden=jnp.asarray(np.stack([weight, -weight], axis=-1), jnp.float32),
        hidden_bias=jnp.zeros((len(weight), 2)),
        output=jnp.broadcast_to(jnp.asarray([1.0, -1.0]), (len(weight), 2)),
        output_bias=jnp.asarray(np.stack(biases), jnp.float32),
    )


_WHITENED = 100_000  # Tokens from which the covariance is taken.


def _whitening(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean `[dim]` and matrix: `(x - mean) @ matrix` has about unit covariance."""
    x = x.astype(np.float64)
    values, vectors = np.linalg.eigh(np.cov(x.T))
    matrix = vectors / np.sqrt(values + 1e-3 * values.mean())
    return x.mean(axis=0).astype(np.float32), matrix.astype(np.float32)
