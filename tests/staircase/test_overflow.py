# SPDX-License-Identifier: Apache-2.0
"""States that overflow reach tokens that see them and no others: padding, later tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import EXECUTOR, run_dense, run_oracle, run_staircase
from helpers.generation import lively_model, run
from helpers.models import Model, with_random_maps

from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.policies import given_depths
from utio_jax.staircase import CapacityPrefix

HOT = 63
"""A token whose embedding overflows in float16."""


@pytest.fixture(scope="module")
def hot(tiny: Model) -> Model:
    embedding = tiny.params["embedding"]["embedding"].at[HOT].set(jnp.inf)
    params = {**tiny.params, "embedding": {"embedding": embedding}}
    model = with_random_maps(Model(tiny.decoder, params), (2,))
    return Model(model.decoder, jax.tree.map(lambda leaf: leaf.astype(jnp.float16), model.params))


def programs(ids: np.ndarray, lengths: np.ndarray, depths: np.ndarray) -> dict[str, Any]:
    """Returns each way to run tokens to their depths, by name: of a model, the states."""
    policy = given_depths(jnp.asarray(depths), depths=(2, 4))
    whole = CapacityPrefix(capacities=(12, 12), min_bucket=4)
    result: dict[str, Any] = {
        "dense": lambda m: run_dense(m.decoder, m.params, ids, lengths, depths=(4,))[0]
    }
    for kv in ("propagate", "drop", "mapped"):
        for name, executor in (("blocks", EXECUTOR), ("prefix", whole)):
            result[f"{name} {kv}"] = lambda m, kv=kv, executor=executor: (
                run_staircase(m.decoder, m.params, ids, lengths, policy, kv=kv, executor=executor).x
            )
    for kv in ("drop", "mapped"):
        result[f"oracle {kv}"] = lambda m, kv=kv: run_oracle(
            m.decoder, m.params, ids, lengths, depths, kv=kv
        )
    return result


NAMES = [*programs(np.zeros((1, 1)), np.zeros(1), np.zeros((1, 1), np.int32))]


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_later_tokens_that_overflow_leave_a_token_as_it_was(
    hot: Model, name: str
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, HOT, (3, 12)).astype(np.int32)
    lengths = np.asarray([12, 7, 12], np.int32)
    depths = rng.choice([2, 4], (3, 12)).astype(np.int32)
    expected = np.asarray(programs(ids, lengths, depths)[name](hot))
    ids[1, 7:] = HOT  # Padding.
    ids[2, 5] = HOT  # A token: those from it on see it. One before it reads more layers.
    assert depths[2, 5] == 2 < depths[2, :5].max()
    result = np.asarray(programs(ids, lengths, depths)[name](hot))
    same = np.arange(12) < np.asarray([12, 7, 5])[:, None]
    np.testing.assert_array_equal(result[same], expected[same])
    assert np.isfinite(result[same]).all()
    hidden = "drop" in name  # Beyond its depth, no token sees it.
    assert hidden or np.isnan(result[2, 6:]).any(axis=-1).all(), "tokens that see it are NaN"


@pytest.mark.parametrize("how", ["prefill", "lossless"])
def test_padding_of_prompts_that_overflows_changes_no_text(how: str) -> None:
    model = lively_model()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), model.params)
    embedding = params["embedding"]["embedding"]
    pads = params | {"embedding": {"embedding": embedding.at[0].set(jnp.inf)}}
    mode: Any = Lossless(exit=2, max_draft=3) if how == "lossless" else Plain()
    options: dict[str, Any] = {"prompts": [[5, 7, 3], [9, 3, 2, 8, 8, 1, 4]], "mode": mode}
    options["max_new_tokens"] = 16
    options["prefill"] = Prefill() if how == "prefill" else None
    expected, result = (
        run(Model(model.decoder, params_), **options) for params_ in ({**params}, {**pads})
    )
    kept = [min([*np.flatnonzero(row == 0), row.size]) for row in expected.token_ids]
    assert min(kept) > 4, "token 0 itself is drawn too soon to show it"
    for a, b, size in zip(expected.token_ids, result.token_ids, kept, strict=True):
        np.testing.assert_array_equal(a[:size], b[:size])
