# SPDX-License-Identifier: Apache-2.0
"""Each signal's value, computed again by hand in NumPy from the model's plain states."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.models import random_gates
from helpers.policies import DEPTHS, EXITS, SIGNALS, mean_states, scores_of

from utio_jax import Policy, Thresholded, score
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies import (
    Entropy,
    Hazard,
    Learned,
    Patience,
    PolicyBase,
    PromptRouter,
    SignalBase,
    StateGate,
    StateSimilarity,
)
from utio_jax.policies.base import Boundary
from utio_jax.policies.signals import MaxProbability
from utio_jax.policies.store import STORED, _type_name, _type_of
from utio_jax.staircase import CapacityPrefix, MicroBatches
from utio_jax.utio import UtioSurrogate

IDS = np.random.default_rng(3).integers(0, 64, (3, 17)).astype(np.int32)


@pytest.fixture(scope="module")
def states(tiny: Any) -> list[np.ndarray]:
    """The embedding, and the states at both exits."""
    lengths = np.full(3, 17, np.int32)
    result = cases.run_dense(tiny.decoder, tiny.params, IDS, lengths, depths=EXITS)
    embedded = tiny.decoder.embed(tiny.params, jnp.asarray(IDS), jnp.asarray(IDS) * 0)
    return [np.asarray(x, np.float64) for x in (embedded, *result)]


@pytest.fixture(scope="module")
def probabilities(tiny: Any, states: list[np.ndarray]) -> list[np.ndarray]:
    """What both exits predict, `[batch, token, vocab]`."""
    return [predicted(tiny, x) for x in states[1:]]


def predicted(model: Any, x: np.ndarray) -> np.ndarray:
    logits = model.decoder.unembed(model.params, jnp.asarray(x, jnp.float32))
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


def check(model: Any, signal: Any, expected: Any, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(scores_of(model, signal, IDS), np.stack(expected), atol=atol)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(axis=-1)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / norms


def gate_value(gates: StateGate, index: int, x: np.ndarray) -> np.ndarray:
    w, b, v, c = (
        np.asarray(leaf[index], np.float64)
        for leaf in (gates.hidden, gates.hidden_bias, gates.output, gates.output_bias)
    )
    unit = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    return np.maximum(unit @ w + b, 0) @ v + c


def test_position(tiny: Any) -> None:
    check(tiny, SIGNALS["position"](tiny), [np.broadcast_to(-np.arange(17.0), (3, 17))] * 2)


def test_the_surrogate_before_the_pass_is_of_the_bare_embedding(
    tiny: Any, states: list[np.ndarray]
) -> None:
    outlier = 1 - cosine(states[0], np.asarray(mean_states(tiny)[0]))
    expected = 2 / 3 * entropy(predicted(tiny, states[0])) + 1 / 3 * outlier
    check(tiny, SIGNALS["utio_before"](tiny), [expected, expected])


def test_the_surrogate_is_entropy_and_outlier_at_the_floor(
    tiny: Any, states: list[np.ndarray], probabilities: list[np.ndarray]
) -> None:
    signal = UtioSurrogate(mean_states=mean_states(tiny), exits=EXITS)
    for floor in (0, 1):
        mean = np.asarray(mean_states(tiny)[floor])
        outlier = 1 - cosine(states[floor + 1], mean)
        expected = 2 / 3 * entropy(probabilities[floor]) + 1 / 3 * outlier
        for result in scores_of(tiny, signal, IDS, depths=DEPTHS[floor:]):
            np.testing.assert_allclose(result, expected, atol=2e-5)


def test_confidences(tiny: Any, probabilities: list[np.ndarray]) -> None:
    ordered = [np.sort(p, axis=-1) for p in probabilities]
    check(tiny, SIGNALS["softmax_gap"](tiny), [1 - (p[..., -1] - p[..., -2]) for p in ordered])
    check(tiny, SIGNALS["max_probability"](tiny), [1 - p[..., -1] for p in ordered])
    check(tiny, SIGNALS["entropy"](tiny), [entropy(p) for p in probabilities])


def test_similarity_is_between_neighbouring_boundaries_of_one_token(
    tiny: Any, states: list[np.ndarray]
) -> None:
    embedded, first, second = states
    check(tiny, StateSimilarity(), [1 - cosine(embedded, first), 1 - cosine(first, second)])
    result = scores_of(tiny, StateSimilarity(), IDS, depths=(2, 4))
    np.testing.assert_allclose(result[0], 1 - cosine(embedded, second), atol=2e-5)


def test_gates(tiny: Any, states: list[np.ndarray]) -> None:
    gates = random_gates(tiny)
    values = [gate_value(gates, index, x) for index, x in enumerate(states[1:])]
    check(tiny, Learned(gates=gates, exits=EXITS), values, atol=1e-4)
    passes = [1 / (1 + np.exp(-value)) for value in values]
    check(tiny, Hazard(gates=gates, exits=EXITS), [passes[0], passes[0] * passes[1]], atol=1e-4)


def test_patience_counts_consecutive_agreement(tiny: Any) -> None:
    """Four exits that predict 5 5 7 7 for one token, 5 6 6 6 for another, then not a number."""
    best = np.asarray([[5, 5], [5, 6], [7, 6], [7, 6], [-1, -1]])
    signal, memory, results = Patience(), None, []
    for index, row in enumerate(best):
        logits = jnp.where(row[:, None] < 0, jnp.nan, jnp.eye(8)[row])
        boundary = Boundary(
            x=jnp.zeros((1, 2, 4)),
            positions=jnp.arange(2, dtype=jnp.int32)[None],
            live=jnp.ones((1, 2), bool),
            params=None,
            depth=index + 1,
            decoder=tiny.decoder,
            map_live=lambda function, *arrays: pytest.fail("needs nothing but logits"),
            map_logits=lambda function, logits=logits: function(logits)[None],
        )
        score, memory = signal(index, boundary, memory)
        results.append(np.asarray(score)[0])
    expected = [[0, 0], [-1, 0], [0, -1], [-1, -2], [np.nan, np.nan]]
    np.testing.assert_array_equal(results, expected)


def test_the_prompt_decides_for_the_rest_of_its_row(tiny: Any, states: list[np.ndarray]) -> None:
    gates = random_gates(tiny)
    result = scores_of(tiny, PromptRouter(gates=gates, exits=EXITS, prompt=5), IDS)
    for index, x in enumerate(states[1:]):
        assert np.isposinf(result[index][:, :5]).all()
        expected = gate_value(gates, index, x[:, :5].mean(axis=1))
        np.testing.assert_allclose(
            result[index][:, 5:], expected[:, None] + np.zeros(12), atol=1e-4
        )


class First:
    """Scores tokens by the first entry of their state."""

    def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
        return boundary.x[..., 0], memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bare(First, SignalBase):
    """No pytree."""

    name: str = "bare"


@pytree
class Renamed(First, SignalBase):
    """With a name that is a leaf."""

    name: str = "renamed"


@pytree
class Flagged(First, SignalBase):
    """With a field where a method should be."""

    name: str = static(default="flagged")
    reads_logits: Any = static(default=True)


@pytree
class Half(First):
    """No signal."""

    name: str = static(default="half")


@pytree
class Remembering(First, SignalBase):
    """With a method where a property should be."""

    name: str = static(default="remembering")

    def remembers(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


@pytree
class Undecided(PolicyBase):
    """A policy without a decision."""


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("signal", "message"),
    [
        (Bare(), "signal that is a pytree. Got Bare.*@utio_jax.core.pytree above class Bare"),
        (Renamed(), r"Make it static: name: str = utio_jax.core.static\(default='renamed'\)"),
        (Half(), "Got Half without causal, remembers, start, flops, reads_logits. Derive it"),
        (
            Flagged(),
            "of Flagged as methods, .*Got reads_logits=True. For example: def reads_logits",
        ),
        (Remembering(), "causal, remembers as properties. Got remembers=<bound method"),
        (Entropy, r"Got the class Entropy. Make one: Entropy\(...\)"),
        (lambda *_: 0, "signal that is a pytree. Got <function"),
    ],
)
def test_what_is_no_signal_is_named_with_the_remedy(signal: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Thresholded(signal=signal, thresholds=jnp.zeros(1), depths=(1, 4))


@pytest.mark.check
def test_policies_of_ones_own_have_defaults(tiny: Any) -> None:
    """All that is left to write is the decision."""

    @pytree
    class Every(PolicyBase):
        name: str = static(default="every")
        other: int = static(default=2)

        def go_deeper(self, index: int, boundary: Any, memory: Any) -> Any:
            return boundary.positions % self.other == 0, memory

    ids, lengths = tiny.tokens(2, 8), jnp.full(2, 8)
    run = partial(score, tiny.decoder, tiny.params, ids, lengths)
    result = jax.jit(run)(Every(depths=(1, 4)))
    np.testing.assert_array_equal(result.depths, [[4, 1] * 4] * 2)
    assert isinstance(Every(depths=(1, 4)), Policy)
    with pytest.raises(NotImplementedError):
        run(Undecided(name="none", depths=(1, 4)))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Plain(Every):
        pass

    with pytest.raises(TypeError, match="policy that is a pytree.*above class Plain"):
        run(Plain(depths=(1, 4)))

    @pytree
    class Reader(Every):
        reads_logits: Any = static(default=True)

    with pytest.raises(TypeError, match="of Reader as methods.*Got reads_logits=True"):
        run(Reader(depths=(1, 4)))


def test_a_look_at_logits_may_return_a_tuple(tiny: Any) -> None:
    """While a signal is calibrated, and where an executor keeps logits, as decoding does."""

    @pytree
    class Doubt(SignalBase):
        name: str = static(default="doubt")

        def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
            best = lambda logits: (logits.argmax(-1), 1 - jax.nn.softmax(logits).max(-1))  # noqa: E731
            (_, doubt), (same,) = (
                boundary.map_logits(best),
                boundary.map_live(lambda x: (x[:, 0],), boundary.x),
            )
            return doubt + 0 * same, memory

        def reads_logits(self, index: int) -> bool:
            return True

    class Keeps(CapacityPrefix):
        keeps_logits = True

    ids = tiny.tokens(2, 8)
    expected = scores_of(tiny, MaxProbability(), ids)
    np.testing.assert_allclose(scores_of(tiny, Doubt(), ids), expected, atol=1e-6)
    policy = Thresholded(signal=Doubt(), thresholds=jnp.full(2, 0.9), depths=DEPTHS)
    keeps: Any = Keeps(capacities=(64, 64, 64))
    run = partial(score, tiny.decoder, executor=keeps)
    jax.make_jaxpr(run)(tiny.params, ids, jnp.full(2, 8), policy)


@pytest.mark.parametrize("executor", [MicroBatches(), CapacityPrefix(capacities=(64, 64))])
def test_decisions_are_booleans_of_tokens_rows_or_all(tiny: Any, executor: Any) -> None:
    @pytree
    class Own(PolicyBase):
        decision: Any = static(default=None)

        def go_deeper(self, index: int, boundary: Any, memory: Any) -> Any:
            return self.decision(boundary.positions), memory

    def run(decision: Any) -> Any:
        policy = Own(name="own", depths=(1, 4), decision=decision)
        given = tiny.params, tiny.tokens(2, 8), jnp.full(2, 8), policy
        return jax.make_jaxpr(partial(score, tiny.decoder, executor=executor))(*given)

    run(lambda positions: True)
    run(lambda positions: positions[:, :1] > 2)
    run(lambda positions: positions[0] > 2)
    with pytest.raises(ValueError, match=r"booleans \[2, 8\] of Own.go_deeper. Got int32 \[2, 8\]"):
        run(lambda positions: positions % 2)
    with pytest.raises(ValueError, match=r"Got bool \[4\]"):
        run(lambda positions: positions[0, :4] > 2)


def test_a_file_names_classes_that_need_an_import_by_their_modules() -> None:
    assert _type_name(StateGate) == "StateGate"
    name, fields = "utio_jax.contrib.here.Outside", {"__module__": "utio_jax.contrib.here"}
    outside = type("Outside", (SignalBase,), fields)
    assert _type_name(outside) == name
    assert _type_of(name) is _type_of("Outside") is outside


def test_a_class_of_another_name_is_found_by_the_name_it_was_added_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="'Former' is not known here"):
        _type_of("Former")
    monkeypatch.setitem(STORED, "Former", StateGate)
    assert _type_of("Former") is StateGate
