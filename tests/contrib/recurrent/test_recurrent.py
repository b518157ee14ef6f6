# SPDX-License-Identifier: Apache-2.0
"""Passes over recurrent layers equal their definition, and skip what stopped tokens would run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.counting import count, read_counts
from helpers.models import plain_nll
from helpers.recurrent import recurrent_model

from utio_jax import score, uniform
from utio_jax.contrib.recurrent import Mamba2
from utio_jax.policies import given_depths
from utio_jax.policies.signals import Chance
from utio_jax.utio import History, VerticalSlash

DEPTHS, EXECUTOR = (1, 2, 4), cases.SHAPES[1].executor

run_score = jax.jit(score, static_argnums=0, static_argnames="executor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [s for s in cases.SHAPES if (s.token, s.kv) in ((17, "drop"), (64, "propagate"))],
    ids=lambda s: f"{s.batch}x{s.token}-{s.kv}",
)
def test_a_pass_equals_its_reference(shape: cases.Shape, no_compiles: Any) -> None:
    model, seeds = recurrent_model(), range(16)
    next(cases.compare_cases(model, shape, seeds))  # compiles
    with no_compiles():
        assert max(error for _, error in cases.compare_cases(model, shape, seeds)) < 1e-4


class Counted(Mamba2):
    """The model, counting, while it runs, the slots that its methods compute."""

    def queries(self, layer: Any, x: jax.Array, places: Any) -> jax.Array:
        count("queries", x.shape[0])
        return super().queries(layer, x, places)

    def keys_values(self, layer: Any, x: jax.Array, places: Any) -> tuple[jax.Array, jax.Array]:
        count("keys_values", x.shape[0])
        return super().keys_values(layer, x, places)

    def mix(self, queries: Any, keys: Any, values: Any, visible: Any) -> jax.Array:
        count("pairs", queries.shape[0] * keys.shape[0])
        return super().mix(queries, keys, values, visible)

    def finish_layer(self, layer: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
        count("finish_layer", x.shape[0])
        return super().finish_layer(layer, x, attended)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["propagate", "drop"])
def test_stopped_tokens_cost_what_the_padding_rule_says(kv: str) -> None:
    model = recurrent_model(Counted)
    shape = dataclasses.replace(cases.SHAPES[1], kv=kv)
    ids, lengths, depths = cases.draw(shape, 64, 6)
    policy = given_depths(jnp.asarray(depths), depths=shape.depths)
    read_counts()
    result = cases.run_staircase(
        model.decoder, model.params, ids, lengths, policy, kv=kv, executor=shape.executor
    )
    counts = read_counts()
    real = np.arange(shape.token) < lengths[:, None]
    expected = np.sum(cases.expected_work(np.where(real, depths, 0), shape), axis=0)
    assert [counts[name] for name in ("queries", "keys_values", "pairs")] == expected.tolist()
    assert counts["finish_layer"] == counts["queries"]
    work = result.work
    charged = [np.sum(count) for count in (work.queries, work.keys_values, work.key_slots)]
    assert charged == expected.tolist()
    dense = 4 * shape.batch * shape.token
    assert counts["queries"] < dense, "the case must skip something"


@pytest.mark.slow
def test_calibration_takes_it_as_any_decoder(text: list[Any]) -> None:
    model = recurrent_model()
    fitted = cases.calibrated(model, text, ("state_similarity",), (0.8,))
    assert 0.8 in fitted.entries["state_similarity"]
    policy, batch = fitted.policy("state_similarity", 0.8), text[0]
    rows = model.decoder, model.params, batch.token_ids, batch.lengths
    result = run_score(*rows, policy, executor=EXECUTOR)
    x = cases.run_oracle(*rows, result.depths, kv="propagate")
    expected = plain_nll(model, batch.token_ids, x)
    predicted = np.asarray(result.predicted)[:, :-1]
    np.testing.assert_allclose(
        np.asarray(result.log_likelihood)[:, :-1][predicted], -expected[predicted], atol=1e-4
    )


def test_sparse_attention_is_refused_since_there_is_one_state_for_all() -> None:
    model = recurrent_model()
    attention = VerticalSlash(
        signal=Chance(key=jax.random.key(0)),
        thresholds=jnp.asarray([0.5]),
        history=History(recent=6, sinks=2),
    )
    with pytest.raises(ValueError, match="Got Mamba2, which mixes .* Leave the sparse attention"):
        score(
            model.decoder,
            model.params,
            model.tokens(1, 24),
            jnp.asarray([24]),
            uniform(4),
            attention=attention,
        )
