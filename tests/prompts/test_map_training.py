# SPDX-License-Identifier: Apache-2.0
"""KV maps that are trained: closer to full depth than the closed form, and only the maps change."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from helpers.models import Model, live_params

from utio_jax.models import TINY, Transformer
from utio_jax.prompts.fit import fit_kv_maps, fit_rows
from utio_jax.prompts.train import MapTraining, train_kv_maps

CONFIG = MapTraining(steps=6, rows=2, width=32, continuation=12, rate=3e-3, warmup=2, held_out=4)


@pytest.fixture(scope="module")
def model() -> Model:
    decoder = Transformer(dataclasses.replace(TINY, windows=(0, 9, 0, 0), attention_softcap=5.0))
    return Model(decoder, live_params(decoder))


@pytest.fixture(scope="module")
def text(model: Model) -> list[np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, model.decoder.config.vocab_size, (6, 400))
    return list(drawn)


@pytest.fixture(scope="module")
def maps(model: Model, text: list[np.ndarray]) -> Any:
    rows = fit_rows(text, width=64, tokens=2000, batch=4, decoder=model.decoder)
    return fit_kv_maps(model.decoder, model.params, rows, stops=(1, 2))


def run(model: Model, maps: Any, text: Any, **changes: Any) -> Any:
    config = dataclasses.replace(CONFIG, **changes)
    return train_kv_maps(model.decoder, model.params, maps, text, config)


def test_training_comes_closer_than_the_closed_form(model: Model, maps: Any, text: Any) -> None:
    before = jax.tree.map(np.array, model.params)
    found = run(model, maps, text)
    jax.tree.map(np.testing.assert_array_equal, before, model.params)
    assert found.steps == 6
    for stop in (1, 2):
        assert 0 < found.kl_after[stop] < 0.98 * found.kl_before[stop]
        assert found.maps[stop].kernel.shape == maps[stop].kernel.shape
        assert not np.array_equal(found.maps[stop].kernel, maps[stop].kernel)
    assert set(found.to_json()) == {"steps", "seconds", "kl_before", "kl_after"}


def test_maps_that_training_spoils_are_not_taken(model: Model, maps: Any, text: Any) -> None:
    found = run(model, maps, text, rate=3.0, warmup=1)
    for stop in (1, 2):
        assert found.kl_after[stop] > found.kl_before[stop]
        np.testing.assert_array_equal(found.maps[stop].kernel, maps[stop].kernel)


def test_a_run_ends_when_its_time_is_up(model: Model, maps: Any, text: Any) -> None:
    assert run(model, maps, text, minutes=1e-9).steps == 1


def test_what_cannot_be_trained_is_named(model: Model, maps: Any, text: Any) -> None:
    with pytest.raises(ValueError, match="Wanted at least 6 windows of 32 tokens"):
        run(model, maps, [text[0][:100]])
    with pytest.raises(ValueError, match="Wanted at least 1 step"):
        MapTraining(rows=0)
