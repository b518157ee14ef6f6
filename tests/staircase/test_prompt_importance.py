# SPDX-License-Identifier: Apache-2.0
"""Which prompt tokens go deep: ranks, shares, signals, and prompts too short to save anything."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.marks import quick_where
from helpers.models import Model, live_params, with_random_maps
from helpers.shared_kv import KINDS

from utio_jax import score, uniform
from utio_jax.models import TINY, Transformer
from utio_jax.policies.signals import ScoreTable
from utio_jax.staircase import MicroBatches, staircase
from utio_jax.staircase.heat import AttentionHeat, PromptSurrogate
from utio_jax.staircase.prompts import SIGNALS, PromptChoice, PromptImportance, Recency, rank_of

EXECUTOR = MicroBatches(min_bucket=4, block=16, query_block=8, key_step=16)


@partial(jax.jit, static_argnums=0)
def run_depths(decoder: Any, params: Any, ids: Any, lengths: Any, policy: Any) -> jax.Array:
    """Decisions alone: what only later layers compute falls away."""
    return staircase(decoder, params, ids, lengths, policy, executor=EXECUTOR).depths


def depths_of(model: Model, policy: Any, lengths: list[int], width: int = 24) -> np.ndarray:
    ids = model.tokens(len(lengths), width)
    return np.asarray(run_depths(model.decoder, model.params, ids, jnp.asarray(lengths), policy))


def importance(signal: Any, deep: float, **options: Any) -> PromptImportance:
    options = {"at_least": 0, "sinks": 2, "depths": (2, 4)} | options
    return PromptImportance(signal=signal, deep=jnp.asarray([deep]), **options)


def test_ranks_begin_with_the_highest_score_and_the_later_of_equals() -> None:
    scores = np.random.default_rng(0).integers(0, 5, (20, 33)).astype(np.float32)
    order = np.lexsort((-np.arange(33) * np.ones((20, 1)), -scores))
    expected = np.zeros_like(order)
    np.put_along_axis(expected, order, np.arange(33) * np.ones((20, 1), int), axis=1)
    np.testing.assert_array_equal(rank_of(jnp.asarray(scores)), expected)


def test_a_share_of_each_prompt_goes_deep(tiny: Model) -> None:
    """The most important ones; the first two and the last count among them, whatever they score."""
    scores = np.random.default_rng(1).normal(size=(4, 24)).astype(np.float32)
    lengths = [24, 11, 3, 1]
    depths = depths_of(tiny, importance(ScoreTable(scores=jnp.asarray(scores)), 0.5), lengths)
    for row, length in enumerate(lengths):
        count = int(np.ceil(0.5 * length))
        always = {0, 1, length - 1} & set(range(length))
        ranked = sorted(set(range(length)) - always, key=lambda i: -scores[row, i])
        expected = always | set(ranked[: max(0, count - len(always))])
        assert set(np.flatnonzero(depths[row] == 4)) == expected
        assert (depths[row, :length] >= 2).all()
        assert not depths[row, length:].any()


def test_short_prompts_run_in_full(tiny: Model) -> None:
    depths = depths_of(tiny, importance(Recency(), 0.1, at_least=7), [24, 8, 7, 1])
    assert [int((row == 4).sum()) for row in depths] == [7, 7, 7, 1]
    assert [int((row == 2).sum()) for row in depths] == [17, 1, 0, 0]
    # Two sinks, and the five latest.
    assert np.flatnonzero(depths[0] == 4).tolist() == [0, 1, 19, 20, 21, 22, 23]


def test_scores_that_are_not_numbers_go_deep(tiny: Model) -> None:
    scores = jnp.zeros((1, 24)).at[0, 9].set(jnp.nan)
    depths = depths_of(tiny, importance(ScoreTable(scores=scores), 4 / 24), [24])
    assert np.flatnonzero(depths[0] == 4).tolist() == [0, 1, 9, 23]


def test_what_follows_a_prompt_runs_in_full(tiny: Model) -> None:
    policy = importance(Recency(), 0.0, prompt_tokens=10, sinks=0)
    depths = depths_of(tiny, policy, [24, 10, 6])
    assert np.flatnonzero(depths[0] == 4).tolist() == [*range(9, 24)]
    assert np.flatnonzero(depths[1] == 4).tolist() == [9]
    assert np.flatnonzero(depths[2] == 4).tolist() == [5]


def test_two_boundaries_thin_a_prompt_twice(tiny: Model) -> None:
    policy = PromptImportance(
        signal=Recency(), deep=jnp.asarray([0.5, 0.25]), at_least=0, sinks=1, depths=(1, 2, 4)
    )
    depths = depths_of(tiny, policy, [24, 12])
    assert [int((row > 1).sum()) for row in depths] == [12, 6]
    assert [int((row > 2).sum()) for row in depths] == [6, 3]
    assert depths[0, 0] == depths[0, 23] == 4
    with pytest.raises(ValueError, match="a share of deeper tokens for each of depths"):
        depths_of(tiny, dataclasses.replace(policy, deep=jnp.asarray([0.5])), [24, 12])


def test_all_of_a_prompt_is_the_plain_program_bit_by_bit(tiny: Model, count_compiles: Any) -> None:
    model = with_random_maps(tiny, (2,))
    ids, lengths = tiny.tokens(3, 24), jnp.asarray([24, 9, 1])
    run = jax.jit(score, static_argnums=0, static_argnames=("kv", "executor"))
    plain = run(tiny.decoder, tiny.params, ids, lengths, uniform(4), executor=EXECUTOR)
    policy = PromptChoice(stop=2, deep=1.0).policy(model.decoder)
    same = run(model.decoder, model.params, ids, lengths, policy, kv="mapped", executor=EXECUTOR)
    np.testing.assert_array_equal(same.log_likelihood, plain.log_likelihood)
    np.testing.assert_array_equal(same.depths, plain.depths)
    work = jax.tree.map(lambda leaf: np.asarray(np.asarray(leaf).sum()), same.work)
    assert work.kv_maps == 0
    assert work.queries == np.asarray(plain.work.queries).sum()
    with count_compiles() as compiles:  # Another share is another number.
        policy = PromptChoice(stop=2, deep=0.3).policy(model.decoder)
        result = run(
            model.decoder, model.params, ids, lengths, policy, kv="mapped", executor=EXECUTOR
        )
    assert compiles.count == 0
    assert np.asarray(result.work.kv_maps).sum() > 0


@pytest.mark.parametrize("by", SIGNALS)
def test_every_choice_spends_its_share(tiny: Model, by: str) -> None:
    choice = PromptChoice(stop=2, deep=0.5, by=by, kv="propagate")
    model = with_random_maps(tiny, (2,))
    depths = depths_of(model, choice.policy(model.decoder), [64, 40], width=64)
    expected = [1, 1] if by == "none" else [32, 20]
    assert [int((row == 4).sum()) for row in depths] == expected
    assert depths[0, 63] == depths[1, 39] == 4
    if by != "none":
        assert (depths[:, :4] == 4).all()


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

    policy = importance(Noting(queries=signal.queries), 0.3)
    run = jax.jit(partial(staircase, executor=EXECUTOR), static_argnums=0)
    run(model.decoder, model.params, ids, jnp.asarray(lengths), policy)
    jax.effects_barrier()
    return np.asarray(results[0])


@pytest.mark.parametrize(
    "name", quick_where(lambda name: name.startswith("windows"), VARIANTS, lambda _: False)
)
def test_heat_is_what_the_last_queries_look_at(name: str) -> None:
    """Against softmax attention written out, over all heads of the two layers behind the stop."""
    decoder = Transformer(dataclasses.replace(TINY, **VARIANTS[name]))
    model = Model(decoder, live_params(decoder, seed=4))
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
