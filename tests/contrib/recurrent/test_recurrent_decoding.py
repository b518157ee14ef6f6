# SPDX-License-Identifier: Apache-2.0
"""New tokens of a decoder with recurrent layers, against the oracle at the decided depths."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import PROMPTS, DepthAt, assert_greedy, depth_table, run
from helpers.models import Model, assert_equal
from helpers.recurrent import recurrent_model

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.lossless import Lossless
from utio_jax.policies.signals import Position
from utio_jax.utio import History, Throttled, VerticalSlash

DEPTHS = (1, 2, 4)
TABLE = depth_table(DEPTHS, shape=(3, 64))


@functools.cache
def model() -> Model:
    """Returns the model with a head that does not ask for the last token again and again."""
    result = recurrent_model()
    table = result.params["embedding"]["embedding"]
    turn = jax.random.orthogonal(jax.random.key(5), table.shape[1])
    norm = result.params["norm"] | {"scale": result.params["norm"]["scale"] * 3}
    layers = result.params["layers"]
    out = layers["out_proj"]["kernel"] @ turn
    layers = layers | {"out_proj": {"kernel": 2 * out}}
    return Model(result.decoder, result.params | {"layers": layers, "norm": norm})


@pytest.mark.slow
def test_plain_decoding_is_the_full_model() -> None:
    result = run(model(), max_new_tokens=20)
    assert len(set(itertools.chain(*(row.tolist() for row in result.token_ids)))) > 8
    assert_greedy(model(), result, kv="full")


@pytest.mark.parametrize("kv", ["propagate", pytest.param("drop", marks=pytest.mark.slow)])
def test_adaptive_decoding_is_the_oracle_at_the_decided_depths(kv: Any) -> None:
    mode = Adaptive(policy=DepthAt(table=TABLE, depths=DEPTHS), kv=kv)
    result = run(model(), mode=mode, max_new_tokens=20)
    for row, prompt in enumerate(PROMPTS):
        used = np.asarray(TABLE)[row, len(prompt) : len(prompt) + 19]
        np.testing.assert_array_equal(result.decided[row], [4, *used])
    assert_greedy(model(), result, kv=kv)
    for other in {"propagate", "drop", "full"} - {kv}:
        with pytest.raises(AssertionError):
            assert_greedy(model(), result, kv=other)


@pytest.mark.slow
def test_lossless_decoding_is_the_full_model() -> None:
    result = run(model(), mode=Lossless(exit=2, max_draft=3), max_new_tokens=20)
    assert_greedy(model(), result, kv="full")
    plain = run(model(), max_new_tokens=20)
    assert_equal(result.token_ids, plain.token_ids)


def test_a_throttle_is_refused_since_its_ring_has_no_order() -> None:
    throttle = VerticalSlash(
        signal=Position(), thresholds=jnp.full(3, jnp.inf), history=History(recent=4)
    )
    mode = Throttled(policy=DepthAt(table=TABLE, depths=DEPTHS), attention=throttle)
    with pytest.raises(ValueError, match="Got Mamba2, .* Leave the sparse attention out"):
        run(model(), mode=mode, max_new_tokens=4)
