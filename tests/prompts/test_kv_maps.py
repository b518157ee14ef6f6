# SPDX-License-Identifier: Apache-2.0
"""KV maps as files: written whole, tied to one model's weights, refused where they do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import random_maps

from utio_jax.core.files import save_owned
from utio_jax.models import TINY, load, save
from utio_jax.prompts.budget import prompt_choice
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.maps import KVMap, kv_maps_file, load_kv_maps, save_kv_maps, with_kv_maps

SHA = "a" * 64


def maps_of(stops: tuple[int, ...], *, dim: int = 32, layers: int = 4) -> dict[int, KVMap]:
    return random_maps(dataclasses.replace(TINY, embed_dim=dim, num_layers=layers, exits=()), stops)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "maps.json"
    save_kv_maps(file, maps_of((1, 3)), info={"model_sha256": SHA, "seed": 7})
    return file


def test_what_is_saved_comes_back(saved: Path, tiny: Any) -> None:
    result, info = load_kv_maps(saved, model_sha256=SHA)
    assert info["seed"] == 7
    assert sorted(result) == [1, 3]
    for stop, expected in maps_of((1, 3)).items():
        np.testing.assert_array_equal(result[stop].kernel, expected.kernel)
        np.testing.assert_array_equal(result[stop].bias, expected.bias)
    decoder, _ = with_kv_maps(tiny.decoder, tiny.params, result)
    assert decoder.stops == (1, 3)
    # By the name of the tensors, too.
    again, _ = load_kv_maps(saved.with_suffix(".safetensors"), model_sha256=SHA)
    assert sorted(again) == [1, 3]
    assert sorted(path.name for path in saved.parent.iterdir()) == ["maps.json", "maps.safetensors"]


def test_a_model_takes_prefills_within_the_limit_of_their_fit(tiny: Any, tmp_path: Path) -> None:
    save(tmp_path, tiny.decoder, tiny.params)
    model = load(tmp_path)
    ways = [
        PromptChoice(stop=stop, deep=0.1, flops_ratio=ratio, nll_increase_pct=lost)
        for stop, ratio, lost in ((1, 0.5, 5.0), (3, 0.75, 0.4))
    ]
    info = {"model_sha256": model.sha256, "choices": [way.to_json() for way in ways]}
    for limit, stops in ((6.0, [1, 3]), (0.1, [1, 3]), (1.0, [3])):
        info["max_nll_increase_pct"] = limit
        save_kv_maps(tmp_path / "maps.json", maps_of((1, 3)), info=info)
        mapped = model.with_kv_maps(tmp_path / "maps.json")
        assert [way.stop for way in mapped.prompt_choices] == stops
    with pytest.raises(ValueError, match=r"at least 0.750.*larger --max-nll-increase-pct"):
        prompt_choice(mapped.decoder, mapped.params, 0.6, choices=mapped.prompt_choices)


def test_a_folder_means_its_prompt_json(tmp_path: Path) -> None:
    assert kv_maps_file(tmp_path) == tmp_path / "prompt.json"
    model = tmp_path / "model.gguf"
    model.touch()
    assert kv_maps_file(model) == tmp_path / "model.prompt.json"


def test_another_models_maps_are_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"KV maps of the model with SHA-256 bbbb.*fit-prompt"):
        load_kv_maps(saved, model_sha256="b" * 64)


@pytest.mark.usefixtures("unchecked_shapes")
def test_maps_that_do_not_fit_a_model_are_refused(tiny: Any) -> None:
    for wrong in (maps_of((1,), layers=5), maps_of((1,), dim=16)):
        with pytest.raises(ValueError, match=r"from depth 1 of shape \(32, 3, 2, 2, 8\)"):
            with_kv_maps(tiny.decoder, tiny.params, wrong)
    for stop in (0, 4, 5):
        with pytest.raises(ValueError, match=rf"from depths between 1 and 3.*depth {stop} of"):
            with_kv_maps(tiny.decoder, tiny.params, maps_of((stop,), layers=6))


def test_maps_never_replace_a_calibration(tmp_path: Path) -> None:
    save_owned(tmp_path / "mine.json", {"entries": {}}, {})
    maps = {2: KVMap(kernel=jnp.zeros((4, 1, 2, 1, 2)), bias=jnp.zeros((1, 2, 1, 2)))}
    with pytest.raises(ValueError, match="holds something else"):
        save_kv_maps(tmp_path / "mine.json", maps, info={"model_sha256": "x"})
    assert "entries" in (tmp_path / "mine.json").read_text()
