# SPDX-License-Identifier: Apache-2.0
"""Loss of what follows a prompt, against the reference, and what reading the prompt costs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_oracle
from helpers.models import Model, plain_nll, with_random_maps

from utio_jax.core.flops import token_cost
from utio_jax.prompts.evaluate import continuations, prompt_flops_ratio, prompt_rows
from utio_jax.staircase import MicroBatches
from utio_jax.staircase.prompts import PromptChoice

pytestmark = pytest.mark.check

EXECUTOR = MicroBatches(min_bucket=4, block=16, query_block=8, key_step=64)
PROMPT = 40


@pytest.fixture(scope="module")
def model(tiny: Model) -> Model:
    return with_random_maps(tiny, (2,))


@pytest.fixture(scope="module")
def documents(tiny: Model) -> list[np.ndarray]:
    ids = np.asarray(tiny.tokens(3, 48))
    return [ids[0], ids[1, :45], ids[2, :41]]


@pytest.mark.parametrize(
    "kv", ["mapped", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("propagate", "drop"))]
)
def test_losses_are_the_references(model: Model, documents: list[np.ndarray], kv: Any) -> None:
    """At the depths that a choice of the latest gives: ten of forty, the first four among them."""
    rows = prompt_rows(documents, prompt_tokens=PROMPT, batch=2, decoder=model.decoder)
    assert rows.rows == 3
    assert rows.tokens == 8 + 5 + 1
    choice = PromptChoice(stop=2, deep=0.5, kv=kv)
    result = continuations(model.decoder, model.params, rows, choice, executor=EXECUTOR).losses
    depths = np.full((1, 48), 4, np.int32)
    depths[0, 4 : PROMPT - 16] = 2
    for document, actual in zip(documents, result, strict=True):
        ids = np.zeros((1, 48), np.int32)
        ids[0, : document.size] = document
        ends = np.asarray([document.size])
        x = run_oracle(model.decoder, model.params, ids, ends, jnp.asarray(depths), kv=kv)
        expected = plain_nll(model, ids, x)[0, PROMPT - 1 : document.size - 1].sum()
        assert actual == pytest.approx(expected, abs=1e-3)
    full = continuations(model.decoder, model.params, rows, None, executor=EXECUTOR).losses
    assert not np.allclose(full, result, atol=1e-2)
    everything = PromptChoice(stop=2, deep=1.0, kv=kv)
    same = continuations(model.decoder, model.params, rows, everything, executor=EXECUTOR).losses
    np.testing.assert_allclose(same, full, atol=1e-4)


def test_what_a_prompt_costs(model: Model, documents: list[np.ndarray]) -> None:
    """Layers, K/V or maps, and attention, as the padding rule says; no head in either."""
    rows = prompt_rows(documents, prompt_tokens=PROMPT, batch=3, decoder=model.decoder)
    cost = token_cost(model.decoder, model.params)

    def ratio(choice: Any, **options: Any) -> float:
        options["executor"] = EXECUTOR
        return prompt_flops_ratio(model.decoder, model.params, rows, choice, **options)

    assert ratio(None) == 1
    # 3 x 40 tokens in two layers, 3 x 20 in two more; every query sees 40 slots.
    query = cost.query + 40 * cost.attention_per_key
    full = 4 * 120 * (query + cost.keys_values)
    shallow = 2 * 120 * query + 2 * 60 * query
    mapped = shallow + (2 * 120 + 2 * 60) * cost.keys_values + 2 * 60 * cost.kv_map
    copied = shallow + 4 * 120 * cost.keys_values
    hidden = shallow + (2 * 120 + 2 * 60) * cost.keys_values
    for kv, expected in (("mapped", mapped), ("propagate", copied), ("drop", hidden)):
        choice = PromptChoice(stop=2, deep=0.5, kv=kv)  # type: ignore[arg-type]
        assert ratio(choice) == pytest.approx(expected / full, rel=1e-6)
    assert ratio(PromptChoice(stop=2, deep=1.0)) == 1
