# SPDX-License-Identifier: Apache-2.0
"""Heat and surrogate of prompt tokens, written out query by query."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.marks import quick_where
from helpers.models import Model, live_model
from helpers.shared_kv import KINDS

from utio_jax.policies.base import Boundary
from utio_jax.staircase import MicroBatches, PromptImportance, staircase
from utio_jax.utio.signals import AttentionHeat, PromptSurrogate, TokenSurrogate

EXECUTOR = MicroBatches(min_bucket=4, block=16, query_block=8, key_step=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "windows, capped": {"windows": (0, 0, 5, 0), "attention_softcap": 3.0},
    "learned positions": {"positions": "learned"},
    **KINDS,
}


def scores_of(model: Model, signal: Any, ids: Any, lengths: list[int]) -> np.ndarray:
    """Returns a signal's scores at a stop of 2, of a pass over whole rows."""
    results: list[jax.Array] = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Noting(type(signal)):
        def __call__(self, index: int, boundary: Any, memory: None) -> tuple[jax.Array, None]:
            score, memory = super().__call__(index, boundary, memory)
            jax.debug.callback(results.append, score)
            return score, memory

    noting = Noting(queries=signal.queries)
    policy = PromptImportance(signal=noting, deep=jnp.asarray([0.3]), sinks=2, depths=(2, 4))
    ends = jnp.asarray(lengths)

    @jax.jit  # Decisions alone: what only later layers compute falls away.
    def run(params: Any) -> jax.Array:
        return staircase(model.decoder, params, ids, ends, policy, executor=EXECUTOR).depths

    jax.block_until_ready(run(model.params))
    jax.effects_barrier()
    return np.asarray(results[0])


@pytest.mark.check
@pytest.mark.parametrize(
    "name", quick_where(lambda name: name.startswith("windows"), VARIANTS, lambda _: False)
)
def test_heat_is_what_the_last_queries_look_at(name: str) -> None:
    """Against softmax attention written out, over all heads of the two layers behind the stop."""
    model = live_model(seed=4, **VARIANTS[name])
    decoder = model.decoder
    lengths, queries = [24, 10, 3], 4
    ids, config = model.tokens(3, 24), decoder.config
    (x,) = run_dense(decoder, model.params, ids, jnp.asarray(lengths), depths=(2,))
    places = decoder.encode_positions(jnp.arange(24))
    heat = np.zeros((3, 24))
    for number in (2, 3):
        layer, *below = (
            jax.tree.map(lambda leaf, n=n: leaf[min(n, len(leaf) - 1)], model.params["layers"])
            for n in (number, *config.kv_read(number))
        )
        for row, length in enumerate(lengths):
            asked = np.asarray(decoder.queries(layer, x[row], places), np.float64)
            made = [decoder.keys_values(source, x[row], places)[0] for source in below]
            keys = np.concatenate(made, axis=-2).astype(np.float64)
            window = (config.windows or (0,) * 4)[number] or 24
            for q in range(max(0, length - queries), length):
                seen = range(max(0, q - window + 1), q + 1)
                for head in range(config.num_heads):
                    key = keys[list(seen), head // (config.num_heads // keys.shape[-2])]
                    logit = key @ asked[q, head]
                    if config.attention_softcap is not None:
                        logit = config.attention_softcap * np.tanh(logit / config.attention_softcap)
                    weight = np.exp(logit - logit.max())
                    heat[row, list(seen)] += weight / weight.sum()
    result = scores_of(model, AttentionHeat(queries=queries), ids, lengths)
    real = np.arange(24) < np.asarray(lengths)[:, None]
    np.testing.assert_allclose(result[real], heat[real], atol=1e-4)


@pytest.mark.parametrize("kind", [AttentionHeat, PromptSurrogate])
@pytest.mark.parametrize("options", [{"queries": 0}, {"queries": -1}, {"layers": 0}])
def test_heat_of_no_query_is_refused(kind: Any, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Wanted at least 1 of queries and of layers"):
        kind(**options)


def test_tokens_beyond_a_table_have_no_score() -> None:
    signal = TokenSurrogate(table=jnp.asarray([0.5, 0.25]))
    ids = jnp.asarray([[0, 1, 2]])
    np.testing.assert_array_equal(signal.start(ids, ids), [[0.5, 0.25, np.nan]])


def test_the_mean_of_a_long_float16_prompt_is_a_number(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states' sum is above what float16 holds; the mean is not."""
    monkeypatch.setattr(AttentionHeat, "__call__", lambda *_: (jnp.zeros((1, 8)), None))
    x = 2e4 * jax.random.normal(jax.random.key(0), (1, 8, 32)) + 3e4

    def score(x: jax.Array) -> jax.Array:
        def map_logits(function: Any, *arrays: jax.Array) -> jax.Array:
            return function(jnp.zeros((8, 5)), *(array[0] for array in arrays))[None]

        boundary = Boundary(
            x=x,
            positions=jnp.arange(8)[None],
            live=jnp.ones((1, 8), bool),
            params=tiny.params,
            depth=2,
            decoder=tiny.decoder,
            map_live=map_logits,
            map_logits=map_logits,
        )
        return PromptSurrogate()(0, boundary, None)[0]

    half = jnp.clip(x, -6e4, 6e4).astype(jnp.float16)
    np.testing.assert_allclose(score(half), score(half.astype(jnp.float32)), rtol=1e-5)


@pytest.mark.check
def test_the_surrogate_adds_entropy_heat_and_outlier_of_a_prompt_alone(tiny: Model) -> None:
    """Against its three terms written out, per row; rows and padding beside it change nothing."""
    lengths, ids = [24, 10], tiny.tokens(2, 24)
    (x,) = run_dense(tiny.decoder, tiny.params, ids, jnp.asarray(lengths), depths=(2,))
    heat, result = (
        scores_of(tiny, signal(queries=4), ids, lengths)
        for signal in (AttentionHeat, PromptSurrogate)
    )
    for row, length in enumerate(lengths):
        states = np.asarray(x[row, :length], np.float64)
        logits = np.asarray(tiny.decoder.unembed(tiny.params, x[row, :length]), np.float64)
        chance = np.exp(logits - logits.max(-1, keepdims=True))
        chance /= chance.sum(-1, keepdims=True)
        entropy = -(chance * np.log(chance)).sum(-1)
        mean = states.mean(0)
        cosine = states @ mean / np.linalg.norm(states, axis=-1) / np.linalg.norm(mean)
        expected = 0.5 * entropy + 0.25 * heat[row, :length] + 0.25 * (1 - cosine)
        np.testing.assert_allclose(result[row, :length], expected, atol=1e-4)
