# SPDX-License-Identifier: Apache-2.0
"""What training runs: layer dropout, and layers that read keys and values made below."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import assert_close, live_params
from helpers.shared_kv import KINDS

from utio_jax.models.presets import TINY
from utio_jax.models.training.train import exit_states
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.reference import dense_states

pytestmark = pytest.mark.check


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_first_layer_always_runs_also_where_it_is_the_only_one(tiny: Any, layers: int) -> None:
    config = dataclasses.replace(tiny.decoder.config, num_layers=layers, exits=())
    decoder = Transformer(config)
    params, ids = live_params(decoder), tiny.tokens(4, 6)
    states = np.asarray(exit_states(decoder, params, ids, jax.random.key(0), 1.0))
    before = np.asarray(params["embedding"]["embedding"][ids])
    assert (states[0] != before).any(axis=(1, 2)).all(), "every row ran it"
    if layers > 1:
        np.testing.assert_array_equal(states[-1], states[-2], "the last one is dropped at 1.0")


@pytest.mark.parametrize("kind", ["heads of two layers", "made once"])
def test_training_runs_the_model_that_is_served(kind: str) -> None:
    decoder = Transformer(dataclasses.replace(TINY, **KINDS[kind]))
    params = live_params(decoder)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
    states = exit_states(decoder, params, ids, jax.random.key(0), 0.0)
    depths = (1, 2, 3, 4)
    wanted = dense_states(decoder, params, ids, jnp.asarray([16, 16]), depths=depths)
    for depth, each in zip(depths, wanted, strict=True):
        assert_close(states[depth - 1], each)
    # K/V projections of layers that make none are not there to be trained.
    assert params["layers"]["k_proj"]["kernel"].shape[0] == decoder.config.kv_layers < 5
    assert params["layers"]["q_proj"]["kernel"].shape[0] == 4


def test_sources_that_differ_between_upper_layers_are_not_trained() -> None:
    decoder = Transformer(dataclasses.replace(TINY, **KINDS["of the last of a kind"]))
    ids = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="one kv_source for all upper layers"):
        exit_states(decoder, live_params(decoder), ids, jax.random.key(0), 0.0)
