# SPDX-License-Identifier: Apache-2.0
"""Prompts that stop where all keys and values are made: the same tokens, for less work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from helpers.engine import CAPACITY
from helpers.generation import lively_model, run
from helpers.marks import checked, slow
from helpers.models import Model, assert_equal, with_random_lens
from helpers.shared_kv import KINDS

from utio_jax import Adaptive, Lossless, Plain, SamplingParams
from utio_jax.decoding import Prefill
from utio_jax.decoding.prefill import fastest_prefill
from utio_jax.engine import Engine, Shapes
from utio_jax.policies import random_depths
from utio_jax.prompts.budget import prompt_prefill

PROMPTS = [[0, *range(5, 20)], [0, 9, 3, 2, 8, 8, 1], [4], [0, *range(40, 63)]]
POLICY = random_depths([0.5, 0.2, 0.3], key=jax.random.key(1), depths=(1, 2, 4))
DRAWN = {"sampling": SamplingParams(temperature=0.9), "seeds": 3}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"mode": Adaptive(policy=POLICY), **DRAWN},
    "lossless": {"mode": Lossless(exit=2, max_draft=3)},
}


@pytest.fixture(
    scope="module",
    params=["heads of two layers", *checked("made once"), *slow("of the last of a kind")],
)
def model(request: Any) -> Model:
    return lively_model(**KINDS[request.param])


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("heads of two layers", "plain"),
        # Prompts of two layers' heads run more layers than those keys and values need: one.
        *checked(("made once", "plain")),
        # The oracle of tests/staircase/test_shared_kv.py holds these as well.
        *slow(
            ("of the last of a kind", "plain"),
            ("heads of two layers", "adaptive"),
            ("heads of two layers", "lossless"),
        ),
    ],
    indirect=["model"],
)
def test_tokens_after_exact_prompts_are_those_after_whole_ones(model: Model, way: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, **WAYS[way]}
    whole = run(model, PROMPTS, prefill=Prefill(), **options)
    exact = run(model, PROMPTS, **options)
    assert_equal(whole.token_ids, exact.token_ids)
    for one, other in zip(whole.log_probabilities, exact.log_probabilities, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_one_lower_layer_is_enough() -> None:
    """Keys and values are made of embeddings: prompts run that layer for nothing."""
    model = lively_model(kv_source=((0,),) * 4)
    assert model.decoder.config.kv_complete == 0
    whole, exact = (run(model, PROMPTS, prefill=how, max_new_tokens=8) for how in (Prefill(), None))
    assert_equal(whole.token_ids, exact.token_ids)
    for prompt, depths in zip(PROMPTS, exact.prompt_depths, strict=True):
        np.testing.assert_array_equal(depths, [1] * (len(prompt) - 1) + [4])


def test_all_tokens_but_the_last_stop_where_keys_and_values_are_complete(model: Model) -> None:
    config = model.decoder.config
    exact = run(model, PROMPTS, max_new_tokens=2)
    for prompt, depths in zip(PROMPTS, exact.prompt_depths, strict=True):
        expected = [config.kv_complete] * (len(prompt) - 1) + [4]
        np.testing.assert_array_equal(depths, expected)
    assert exact.num_layers == 4
    assert exact.prompt_work is not None
    # Eight slots of the last token's segment, in unit steps; four rows of 24 below.
    work = jax.tree.map(lambda leaf: np.asarray(leaf)[0], exact.prompt_work)
    assert work.queries[0] == 4 * 24 * config.kv_complete
    assert work.queries[1] == 4 * 8 * (4 - config.kv_complete)
    assert work.keys_values.sum() == 4 * 24 * config.kv_layers
    # The cache holds the layers that make keys and values, and no more.
    ends = np.asarray([len(prompt) + 1 for prompt in PROMPTS])
    np.testing.assert_array_equal(
        exact.kv_bytes_held, ends * exact.bytes_per_slot * config.kv_layers
    )


def test_a_model_without_shared_keys_and_values_has_no_exact_prefill(model: Model) -> None:
    plain = lively_model().decoder
    assert Prefill.exact(plain) is None
    result = fastest_prefill(model.decoder, 1, 24, kv="propagate")
    assert result is not None
    assert result.is_exact(model.decoder)
    assert not result.is_exact(plain)
    for width, static in ((4096, True), (4104, False)):  # Else all scores would be in memory.
        long = fastest_prefill(model.decoder, 1, width, kv="propagate", filled=1.0)
        assert long is not None
        assert (long.executor is not None) == static
    # Tokens are seen as deep as they ran there, so prompts run in full.
    assert fastest_prefill(model.decoder, 1, 24, kv="drop") is None


@pytest.mark.parametrize("model", ["heads of two layers"], indirect=True)
def test_exits_behind_a_lens_change_nothing(model: Model) -> None:
    exits = model.decoder.config.exits[-2:]  # Prompts may stop below the first, which has a map.
    config = dataclasses.replace(model.decoder.config, exits=exits)
    seen = with_random_lens(Model(type(model.decoder)(config), model.params))
    result, expected = (run(version, PROMPTS, max_new_tokens=8) for version in (seen, model))
    assert_equal(result.token_ids, expected.token_ids)


def test_a_budget_of_prompts_is_kept_exactly(model: Model) -> None:
    result = prompt_prefill(model.decoder, model.params, 0.8)
    assert result is not None
    assert result.policy is not None
    assert result.is_exact(model.decoder)
    assert result.policy.depths == (model.decoder.config.kv_complete, 4)
    with pytest.raises(ValueError, match="Wanted a prompt budget of at least 0"):
        prompt_prefill(model.decoder, model.params, 0.2)


@pytest.mark.parametrize(
    ("model", "chunk"),
    [*checked(("heads of two layers", None)), *slow(("of the last of a kind", 8))],
    indirect=["model"],
)
def test_an_engine_reads_them_so_too(model: Model, chunk: int | None) -> None:
    shapes = Shapes(key_step=CAPACITY, chunk=chunk)
    engine = Engine(
        model.decoder, model.params, slots=2, capacity=CAPACITY, mode=Plain(), shapes=shapes
    )
    few = slice(1, 3)  # Of one width.
    numbers = [engine.submit(prompt, max_new_tokens=12, eos_ids=()) for prompt in PROMPTS[few]]
    done = engine.drain()
    whole = run(model, PROMPTS, prefill=Prefill(), max_new_tokens=24)  # As in the first test.
    for number, expected in zip(numbers, whole.token_ids[few], strict=True):
        np.testing.assert_array_equal(done[number].token_ids, expected[:12])
