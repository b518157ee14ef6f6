# SPDX-License-Identifier: Apache-2.0
"""Layer dropout: none at the first layer, most at the last."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from helpers.models import live_params

from utio_jax.models.training.train import exit_states
from utio_jax.models.transformer import Transformer

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
